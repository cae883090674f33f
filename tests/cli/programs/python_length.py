"""A step that advances a number of Python."""

import types

import torch

state = types.SimpleNamespace(length=0)


def inputs():
    return (torch.ones(3),)


def step(x):  # finds: python_state
    state.length += 1
    return x * 2
