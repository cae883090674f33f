"""A step that replaces a global tensor."""

import torch

h = torch.zeros(3)


def inputs():
    return (torch.ones(3),)


def step(x):
    global h
    h = h + x  # finds: rebinding
    return h * 1
