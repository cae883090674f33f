"""A step that keeps its results in a list."""

import torch

kept = []


def inputs():
    return (torch.ones(3),)


def step(x):
    kept.append(x * 2)  # finds: escaping_allocation
    return x + 1
