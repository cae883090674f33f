"""Concurrent replays, captures and other work, on threads and on streams."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

import pytest
import torch

import devgraph as dg
from devgraph.api.backend import poison
from devgraph.testing.conformance.support import POLICIES, Kit, declares, same

PATIENCE = 60.0
"""Time in seconds after which an unfinished thread counts as stuck."""

UNDECLARED_PATIENCE = 5.0
"""``PATIENCE`` for threads during a capture if ``concurrent_threads`` is not declared."""


def _together(*works: Callable[[], Any], patience: float = PATIENCE) -> list[Any]:
    """Run each function in its own thread and return the results.

    The test fails if a thread is stuck for ``patience`` seconds. Such a thread is not joined,
    because it may wait for a capture that the caller keeps open.
    """
    results: list[Future[Any]] = [Future() for _ in works]

    def run(work: Callable[[], Any], result: Future[Any]) -> None:
        try:
            result.set_result(work())
        except BaseException as error:  # result() re-raises the error in the caller.
            result.set_exception(error)

    for work, result in zip(works, results, strict=True):
        threading.Thread(target=run, args=(work, result), daemon=True).start()
    stuck = wait(results, patience).not_done
    if stuck:
        pytest.fail(f"{len(stuck)} of {len(works)} threads did not finish in {patience:g} s")
    return [result.result() for result in results]


def _beside_a_capture(kit: Kit, work: Callable[[], Any]) -> Any:
    """Run ``work`` in a thread during a capture, check the graph, and return the result."""
    x = kit.tensor(64)
    known = kit.backend.capabilities.concurrent_threads
    graph = kit.backend.make_graph()
    with kit.backend.capture_context(graph, capture_error_mode="thread_local"):
        y = x + 1
        (result,) = _together(work, patience=PATIENCE if known else UNDECLARED_PATIENCE)
        z = y * 2
    nodes = graph.info().nodes
    assert nodes is None or nodes == 2, "work of another thread is in the graph"
    kit.refill(x, 5)
    graph.replay()
    kit.same(z, (x + 1) * 2)
    return result


@pytest.mark.parametrize("policy", POLICIES)
def test_threads_may_replay_graphs_of_one_pool(kit: Kit, pool: dg.Pool, policy: str) -> None:
    """FAULTS 18."""

    @dg.region()
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * 1.5

    def step(x: torch.Tensor, out: torch.Tensor) -> None:
        for k in range(4):
            x = scaled(x * 0.5 + k) + 1
        out.copy_(x)  # Replays of other graphs overwrite results in the pool.

    works = []
    for index in range(3):
        x, out, want = (kit.tensor(1024, seed=index) for _ in range(3))
        captured = kit.capture(step, x, out, policy=policy, pool=pool)
        step(x, want)

        def work(
            captured: dg.Captured = captured, out: torch.Tensor = out, want: torch.Tensor = want
        ) -> None:
            for _ in range(25):
                poison(out)
                captured.replay()
                kit.same(out, want)

        works.append(work)
    kit.backend.synchronize()
    _together(*works)


@declares("concurrent_threads")
def test_another_thread_works_while_one_captures(kit: Kit) -> None:
    """FAULTS 16."""
    other = kit.tensor(64, seed=1)

    def work() -> torch.Tensor:
        result: torch.Tensor = other
        for _ in range(20):
            result = torch.tanh(result * 2) + 1
        return result.cpu()

    want = work()
    same(_beside_a_capture(kit, work), want, "the work of the other thread")


@declares("concurrent_threads")
def test_another_thread_replays_while_one_captures(kit: Kit) -> None:
    """FAULTS 16."""
    other = kit.tensor(64, seed=1)
    captured = kit.capture(lambda x: x * 3, other)
    same(_beside_a_capture(kit, lambda: captured.replay().cpu()), (other * 3).cpu())


def test_graph_may_be_captured_in_one_thread_and_closed_in_another(kit: Kit) -> None:
    """FAULTS 27."""
    x = kit.tensor(64)
    (captured,) = _together(lambda: kit.capture(lambda x: x + 1, x))
    kit.check(captured, lambda x: x + 1, x)
    _together(captured.close)
    with pytest.raises(dg.StateError, match="closed"):
        captured.replay()


def _forked(kit: Kit, x: torch.Tensor, side: Any, *, join: bool = True) -> torch.Tensor:
    """Run half of the work on ``side``, and join it at the end if ``join`` is set."""
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


@declares("streams")
def test_work_forked_to_a_side_stream_and_joined_is_captured(kit: Kit) -> None:
    side = kit.side_stream()
    x = kit.tensor(256)
    captured = kit.capture(lambda x: _forked(kit, x, side), x)
    for seed in (1, 2):
        kit.refill(x, seed)
        kit.same(captured.replay(), (x * 2 + 1) * (x * 2 - 1))


@declares("streams")
@pytest.mark.parametrize("raised", ["wait_stream", "from the body"])
def test_side_stream_that_is_not_joined_is_refused(kit: Kit, pool: dg.Pool, raised: str) -> None:
    """FAULTS 15. An exception from the body takes precedence over the stream's error."""
    side = kit.side_stream()
    x = kit.tensor(64)
    _forked(kit, x, side)
    graph = kit.backend.make_graph(pool)
    kind = ValueError if raised == "from the body" else dg.UnjoinedStreamError
    with pytest.raises(kind, match=raised), kit.backend.capture_context(graph):
        _forked(kit, x, side, join=False)
        if kind is ValueError:
            raise ValueError(raised)
    assert graph.state == "empty"
    kit.works(pool)


@declares("streams")
def test_side_stream_that_is_not_joined_before_a_break_is_refused(kit: Kit, pool: dg.Pool) -> None:
    """FAULTS 15."""
    side, body = kit.side_stream(), dg.no_graph(lambda x: x + 1)

    def step(x: torch.Tensor) -> Any:
        return body(_forked(kit, x, side, join=not dg.is_capturing()))

    with pytest.raises(dg.UnjoinedStreamError, match="wait_stream"):
        kit.capture(step, kit.tensor(64), policy="breakable", pool=pool)
    kit.works(pool)


@declares("streams")
@pytest.mark.parametrize("given", ["none", "default", "own"])
def test_capture_from_the_default_stream_uses_another_stream(kit: Kit, given: str) -> None:
    """FAULTS 14."""
    default = kit.streams.default_stream()
    stream = {"none": None, "default": default, "own": kit.side_stream()}[given]
    x = kit.tensor(64)
    x.add_(1)  # The capture must wait for this work.
    graph = kit.backend.make_graph()
    with kit.backend.capture_context(graph, stream=stream):
        seen = kit.streams.current_stream()
        y = x * 2
    assert seen != default
    assert given != "own" or seen == stream
    assert kit.streams.current_stream() == default
    graph.replay()
    kit.same(y, x * 2)


@declares("streams")
def test_replays_on_other_streams_are_ordered(kit: Kit, pool: dg.Pool) -> None:
    """FAULTS 18."""
    x = kit.tensor(1 << 16)

    def step(x: torch.Tensor) -> torch.Tensor:
        return x.add_(1)

    captured = kit.capture(step, x, pool=pool)
    want = x.clone()
    streams = [kit.side_stream() for _ in range(3)]
    kit.backend.synchronize()
    for index in range(30):
        with kit.streams.stream(streams[index % 3]):
            captured.replay()
    kit.backend.synchronize()
    for _ in range(30):
        want = want + 1
    same(x, want)
