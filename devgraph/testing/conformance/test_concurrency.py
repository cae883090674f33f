"""Threads: replays, captures and other work at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

import pytest
import torch

import devgraph as dg
from devgraph.testing.conformance.support import POLICIES, Kit, declares, same

PATIENCE = 60.0
"""Seconds after which a thread that should have finished counts as stuck."""

UNDECLARED_PATIENCE = 5.0
"""The same for threads beside a capture where the backend does not claim that they may work."""


def _together(*works: Callable[[], Any], patience: float = PATIENCE) -> list[Any]:
    """Run every function in a thread of its own and return their results.

    A thread that is stuck for ``patience`` seconds fails the test and is left behind: it may wait
    for a capture that the caller holds open, which ends only if nobody waits for that thread.
    """
    results: list[Future[Any]] = [Future() for _ in works]

    def run(work: Callable[[], Any], result: Future[Any]) -> None:
        try:
            result.set_result(work())
        except BaseException as error:  # the caller raises it
            result.set_exception(error)

    for work, result in zip(works, results, strict=True):
        threading.Thread(target=run, args=(work, result), daemon=True).start()
    stuck = wait(results, patience).not_done
    if stuck:
        pytest.fail(f"{len(stuck)} of {len(works)} threads did not finish in {patience:g} s")
    return [result.result() for result in results]


def _beside_a_capture(kit: Kit, work: Callable[[], Any]) -> Any:
    """Return what ``work`` returns in a thread beside an open capture, which must be right then."""
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
def test_threads_that_replay_graphs_of_one_pool_do_not_mix(
    kit: Kit, pool: dg.Pool, policy: str
) -> None:
    """FAULTS 18."""

    @dg.region()
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * 1.5

    def step(x: torch.Tensor, out: torch.Tensor) -> None:
        for k in range(4):
            x = scaled(x * 0.5 + k) + 1
        out.copy_(x)  # memory of the pool would be another graph's as soon as that one replays

    works = []
    for index in range(3):
        x, out, want = (kit.tensor(1024, seed=index) for _ in range(3))
        captured = kit.capture(step, x, out, policy=policy, pool=pool)
        step(x, want)

        def work(
            captured: dg.Captured = captured, out: torch.Tensor = out, want: torch.Tensor = want
        ) -> None:
            for _ in range(25):
                kit.backend.poison(out)
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
