"""A step that transposes its argument in place."""

import torch


def inputs():
    return (torch.ones(2, 3),)


def step(x):
    x.t_()  # finds: refused
    return x * 2
