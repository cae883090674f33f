"""A module that replaces its buffer."""

import torch


class Counter(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("n", torch.zeros(3))

    def forward(self, x):
        self.n = self.n + 1  # finds: rebinding
        return x * self.n


step = Counter()


def inputs():
    return (torch.ones(3),)
