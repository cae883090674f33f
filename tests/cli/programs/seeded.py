"""A step that seeds the default generator."""

import torch


def inputs():
    return (torch.ones(3),)


def step(x):
    torch.manual_seed(7)
    return x + torch.rand(3)  # finds: seeding, rng
