"""A hook of a backward pass that calls a function marked no_graph."""

import torch

import devgraph as dg


def inputs():
    return (torch.ones(3),)


@dg.no_graph
def log(grad):
    print(grad)


@torch.enable_grad()
def step(x):
    x = x.detach().requires_grad_()
    h = x * 2
    h.register_hook(lambda grad: log(grad))  # finds: refused
    (grad,) = torch.autograd.grad(h.sum(), x)
    return grad
