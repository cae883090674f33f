"""A step that draws from the generator of Python."""

import random

import torch


def inputs():
    return (torch.ones(3),)


def step(x):  # finds: python_state
    return x * random.random()
