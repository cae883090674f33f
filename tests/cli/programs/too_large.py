"""A tensor that no memory holds."""

import torch


def inputs():
    return (torch.ones(3),)


def step(x):
    return torch.zeros(2**52) + x[0]  # finds: refused
