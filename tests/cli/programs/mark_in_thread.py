"""A mark in a thread of the step, which runs in a copy of its context."""

import contextvars
from concurrent.futures import ThreadPoolExecutor

import torch

import devgraph as dg


def inputs():
    return (torch.ones(3),)


@dg.no_graph
def log(x):
    return None


def call(x):
    log(x)  # finds: refused


def step(x):
    with ThreadPoolExecutor(1) as pool:
        pool.submit(contextvars.copy_context().run, call, x)
    return x * 2
