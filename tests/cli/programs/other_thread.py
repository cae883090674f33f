"""A step that lets another thread compute a product."""

from concurrent.futures import ThreadPoolExecutor

import torch

pool = ThreadPoolExecutor(1)
weight = torch.ones(3, 3)


def inputs():
    return (torch.ones(3),)


def step(x):
    y = pool.submit(lambda: x @ weight).result()
    return x + y  # finds: thread
