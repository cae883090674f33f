"""A checkpoint that saves and restores the random state."""

import torch
from torch.utils.checkpoint import checkpoint


def inputs():
    return (torch.ones(3),)


def block(x):
    return torch.nn.functional.dropout(x * 2)  # finds: seeding, rng


@torch.enable_grad()
def step(x):
    x = x.detach().requires_grad_()
    y = checkpoint(block, x, use_reentrant=False)
    (grad,) = torch.autograd.grad(y.sum(), x)
    return grad
