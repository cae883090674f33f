"""Pools: whose they are, and what is refused while a step runs on their memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import devgraph as dg
from devgraph.testing.conformance.support import Kit, same


def _squashed(x: torch.Tensor) -> torch.Tensor:
    for _ in range(4):
        x = torch.tanh(x) + 1
    return x


USES: dict[str, Callable[[Kit, dg.Captured, dg.Captured, dg.DeviceGraph, torch.Tensor], Any]] = {
    "replay of another capture": lambda kit, own, other, graph, x: other.replay(),
    "replay of itself": lambda kit, own, other, graph, x: own.replay(),
    "replay of a graph": lambda kit, own, other, graph, x: graph.replay(),
    "update of a graph": lambda kit, own, other, graph, x: graph.update(),
    "reset of a graph": lambda kit, own, other, graph, x: graph.reset(),
    "close of a graph": lambda kit, own, other, graph, x: graph.close(),
    "close of itself": lambda kit, own, other, graph, x: own.close(),
    "capture": lambda kit, own, other, graph, x: kit.capture(_squashed, x, pool=own.pool),
    "capture context": lambda kit, own, other, graph, x: kit.record(lambda: x + 1, pool=own.pool),
}


@pytest.mark.parametrize("use", USES)
def test_pool_of_a_step_is_refused_inside_its_eager_bodies(
    kit: Kit, pool: dg.Pool, use: str
) -> None:
    """FAULTS 38."""
    nested: list[Callable[[], object]] = []
    refused: list[dg.StateError] = []

    @dg.no_graph
    def body(x: torch.Tensor) -> torch.Tensor:
        for call in nested:
            with pytest.raises(dg.StateError, match="inside an eager body") as caught:
                call()
            refused.append(caught.value)
        return x * 2

    def step(x: torch.Tensor) -> torch.Tensor:
        a = x + 1
        b = a * 3
        return body(a) + a + b

    x, z = kit.tensor(64), kit.tensor(64, seed=1)
    other = kit.capture(_squashed, z, pool=pool)
    graph, _ = kit.record(lambda: _squashed(z), pool=pool)
    captured = kit.capture(step, x, policy="breakable", pool=pool)
    nested.append(lambda: USES[use](kit, captured, other, graph, z))
    for seed in (5, 6):
        kit.refill(x, seed)
        out = captured.replay().clone()
        same(out, (x + 1) * 2 + (x + 1) + (x + 1) * 3)
    assert len(refused) == 2
    nested.clear()
    graph.replay()
    kit.check(other, _squashed, z)
    kit.check(captured, step, x)


def test_pool_of_a_step_is_refused_inside_the_eager_bodies_of_its_capture(
    kit: Kit, pool: dg.Pool
) -> None:
    """FAULTS 38."""
    z = kit.tensor(64, seed=1)
    other = kit.capture(_squashed, z, pool=pool)
    elsewhere = kit.capture(_squashed, z)
    refused: list[dg.StateError] = []

    @dg.no_graph
    def body(x: torch.Tensor) -> torch.Tensor:
        with pytest.raises(dg.StateError, match="inside an eager body") as caught:
            other.replay()
        refused.append(caught.value)
        elsewhere.replay()  # other memory: a pool of its own is what the error asks for
        return x * 2

    def step(x: torch.Tensor) -> torch.Tensor:
        return body(x + 1) + x

    x = kit.tensor(64)
    captured = kit.capture(step, x, policy="breakable", pool=pool, warmup=0)
    same(captured.replay(), (x + 1) * 2 + x)
    assert len(refused) == 2
    same(elsewhere.outputs, _squashed(z))


def test_pool_belongs_to_one_backend(kit: Kit, pool: dg.Pool) -> None:
    class Other:
        name = "other"

    with pytest.raises(dg.StateError, match="make_pool"):
        pool.check(Other())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("memory", "kind"),
    [
        (-1, dg.InputError),
        (float("nan"), dg.InputError),
        (float("inf"), dg.InputError),
        ("1", dg.InputTypeError),
        (True, dg.InputTypeError),
    ],
)
def test_budget_that_is_no_amount_of_memory_is_refused(memory: Any, kind: type[Exception]) -> None:
    pool = dg.get_backend("cpu").make_pool()
    with pytest.raises(kind, match="memory"):
        pool.limit(memory)
    assert pool.recordings.budget_bytes is None


# Executables of graphs.
