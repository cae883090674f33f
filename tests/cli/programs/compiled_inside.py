"""A function compiled to machine code inside the step."""

import torch


def inputs():
    return (torch.ones(3),)


@torch.compile(fullgraph=True)
def compiled(x):
    return torch.sin(x) * 2


def step(x):
    return compiled(x) + 1  # finds: refused
