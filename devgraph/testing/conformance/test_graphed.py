"""Graphed callables: keys, state and gradients."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

import devgraph as dg
from devgraph.testing.conformance.support import Kit, same


class Scaled(nn.Module):
    """A module whose gradients are products and sums."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale * x + self.shift


def pair(kit: Kit) -> tuple[Any, Any]:
    """Return a graphed module and a copy of it that runs eagerly."""
    torch.manual_seed(0)
    plain = nn.Sequential(Scaled(), Scaled()).to(kit.device)
    graphed: Any = copy.deepcopy(plain)
    dg.graphed(graphed, backend=kit.backend)
    return graphed, plain


def test_graphed_module_equals_eager_for_every_shape(kit: Kit) -> None:
    graphed, plain = pair(kit)
    with torch.no_grad():
        for seed in range(9):
            x = kit.tensor(1 + seed % 3, 4, seed=seed)
            same(graphed(x), plain(x))
    stats = graphed.forward.stats()
    assert (stats["graphs"], stats["eager"]) == (3, {"first_call": 3})


def test_graphed_module_uses_weights_that_were_replaced_or_written(kit: Kit) -> None:
    graphed, plain = pair(kit)
    x = kit.tensor(3, 4)
    with torch.no_grad():
        for seed in range(6):
            for net in (graphed, plain):
                if seed % 2:
                    net[0].scale = nn.Parameter(kit.tensor(4, seed=seed))
                else:
                    net[1].shift.copy_(kit.tensor(4, seed=seed))
            same(graphed(x), plain(x))


def test_graphed_function_writes_its_arguments_and_returns_copies(kit: Kit) -> None:
    step = dg.graphed(lambda x, cache: cache.add_(x) * 2, backend=kit.backend)
    cache, total, results = kit.tensor(4), kit.tensor(4), []
    for seed in range(5):
        x = kit.tensor(4, seed=seed)
        results.append((step(x, cache), total.add_(x) * 2))
        same(cache, total)
    for got, want in results:
        same(got, want)


def test_graphed_gradients_equal_eager_and_accumulate(kit: Kit) -> None:
    graphed, plain = pair(kit)
    for seed in range(8):
        x = kit.tensor(3, 4, seed=seed)
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        for net, data in zip((graphed, plain), inputs, strict=True):
            if seed % 3 == 0:
                net.zero_grad()
            out = net(data)
            (out * out).sum().backward()
        same(inputs[0].grad, inputs[1].grad)
        for ours, theirs in zip(graphed.parameters(), plain.parameters(), strict=True):
            same(ours.grad, theirs.grad)
    assert graphed.forward.stats()["graphs"] == 1
