"""Side streams inside captures, and replays on other streams (capability ``streams``)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import devgraph as dg
from devgraph.testing.conformance.support import Kit, declares, same

pytestmark = declares("streams")


def _forked(kit: Kit, x: torch.Tensor, side: Any, *, join: bool = True) -> torch.Tensor:
    """Half of the work on ``side``, which is joined at the end or not."""
    main = kit.streams.current_stream()
    h = x * 2
    side.wait_stream(main)
    with kit.streams.stream(side):
        y = h + 1
    z = h - 1
    if join:
        main.wait_stream(side)
        return y * z
    return z


def test_work_forked_to_a_side_stream_and_joined_is_captured(kit: Kit) -> None:
    side = kit.side_stream()
    x = kit.tensor(256)
    captured = kit.capture(lambda x: _forked(kit, x, side), x)
    for seed in (1, 2):
        kit.refill(x, seed)
        kit.same(captured.replay(), (x * 2 + 1) * (x * 2 - 1))


def test_side_stream_that_is_not_joined_is_refused(kit: Kit, pool: dg.Pool) -> None:
    """FAULTS 15."""
    side = kit.side_stream()
    x = kit.tensor(64)
    _forked(kit, x, side)
    graph = kit.backend.make_graph(pool)
    with (
        pytest.raises(dg.UnjoinedStreamError, match="wait_stream"),
        kit.backend.capture_context(graph),
    ):
        _forked(kit, x, side, join=False)
    assert graph.state == "empty"
    kit.works(pool)


def test_side_stream_that_is_not_joined_before_a_break_is_refused(kit: Kit, pool: dg.Pool) -> None:
    """FAULTS 15."""
    side = kit.side_stream()

    @dg.no_graph
    def body(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    x = kit.tensor(64)
    with pytest.raises(dg.UnjoinedStreamError, match="wait_stream"):
        kit.capture(
            lambda x: body(_forked(kit, x, side, join=not dg.is_capturing())),
            x,
            policy="breakable",
            pool=pool,
        )
    kit.works(pool)


def test_exception_stays_when_a_side_stream_is_not_joined_either(kit: Kit, pool: dg.Pool) -> None:
    """FAULTS 15."""
    side = kit.side_stream()
    x = kit.tensor(64)
    _forked(kit, x, side)
    with (
        pytest.raises(ValueError, match="from the body"),
        kit.backend.capture_context(kit.backend.make_graph(pool)),
    ):
        _forked(kit, x, side, join=False)
        raise ValueError("from the body")
    kit.works(pool)


@pytest.mark.parametrize("given", ["none", "default", "own"])
def test_capture_from_the_default_stream_runs_on_another_and_is_joined(
    kit: Kit, given: str
) -> None:
    """FAULTS 14."""
    stream = {
        "none": None,
        "default": kit.streams.default_stream(),
        "own": kit.side_stream(),
    }[given]
    x = kit.tensor(64)
    x.add_(1)  # in flight on the current stream
    seen = []
    graph = kit.backend.make_graph()
    with kit.backend.capture_context(graph, stream=stream):
        seen.append(kit.streams.current_stream())
        y = x * 2
    default = kit.streams.default_stream()
    assert seen[0] != default
    assert given != "own" or seen[0] == stream
    assert kit.streams.current_stream() == default
    graph.replay()
    kit.same(y, x * 2)


def test_replays_on_other_streams_are_ordered(kit: Kit, pool: dg.Pool) -> None:
    """FAULTS 18."""
    x = kit.tensor(1 << 16)

    def step(x: torch.Tensor) -> torch.Tensor:
        return x.add_(1)

    captured = kit.capture(step, x, pool=pool)
    start = x.clone()
    streams = [kit.side_stream() for _ in range(3)]
    kit.backend.synchronize()
    for index in range(30):
        with kit.streams.stream(streams[index % 3]):
            captured.replay()
    kit.backend.synchronize()
    want = start
    for _ in range(30):
        want = want + 1
    same(x, want)
