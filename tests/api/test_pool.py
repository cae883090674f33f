"""The recordings of a pool, and what is refused while a step runs on its memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import devgraph as dg
from devgraph.api.pool import Recordings
from devgraph.testing.conformance.support import Kit, same


class _Owner:
    key: object = None


class _Item:
    def __init__(self, size: int) -> None:
        self.bytes = size
        self.closed = False

    def close(self) -> None:
        self.closed = True


class _Thick(_Item):
    def shrink(self) -> None:
        self.bytes = 1


def test_recordings_shrink_before_they_go() -> None:
    owner: Any = _Owner()
    kept = Recordings(10)
    thick = [_Thick(5) for _ in range(3)]
    for key, item in enumerate(thick):
        kept.put(owner, key, item)
    assert [item.bytes for item in thick] == [1, 1, 5]
    assert kept.bytes == 7
    assert kept.evictions == 0
    last = _Item(9)
    kept.put(owner, 3, last)
    assert kept.bytes <= 10
    assert not last.closed
    assert [item.closed for item in thick].count(True) == kept.evictions > 0


def test_recordings_keep_what_the_next_launch_uses_and_the_newest() -> None:
    owner: Any = _Owner()
    kept = Recordings(1)
    used, other, newest = _Item(4), _Item(4), _Item(4)
    owner.key = "used"
    kept.put(owner, "used", used)
    kept.put(owner, "other", other)
    kept.put(owner, "newest", newest)
    assert (used.closed, other.closed, newest.closed) == (False, True, False)


def test_recordings_of_a_dropped_owner_can_go() -> None:
    owner: Any = _Owner()
    owner.key = 0
    kept = Recordings(1)
    first = _Item(4)
    kept.put(owner, 0, first)
    del owner
    other: Any = _Owner()
    kept.put(other, 1, _Item(4))
    assert first.closed


def test_recharge_counts_what_a_recording_takes_now() -> None:
    owner: Any = _Owner()
    kept = Recordings(10)
    grown, old = _Thick(1), _Thick(8)
    kept.put(owner, "old", old)
    kept.put(owner, "grown", grown)
    assert kept.get(owner, "grown") is grown
    grown.bytes = 9
    kept.recharge(grown)
    assert (old.bytes, grown.bytes) == (1, 9)
    assert kept.bytes == 10
    assert kept.room == 0


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


def _squashed(x: torch.Tensor) -> torch.Tensor:
    for _ in range(4):
        x = torch.tanh(x) + 1
    return x


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
