"""Forked children, and the garbage collector during captures."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import warnings
from collections.abc import Callable

import pytest
import torch

import devgraph as dg
from devgraph.api.process import collector
from devgraph.testing.conformance.support import WIDTH, Kit, runner_of


def _in_child(work: Callable[[], object]) -> str:
    """Run ``work`` in a forked child and return the name of what it raised, and its text."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        # Forking with threads is what is tested; the child only calls Python code.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        signal.alarm(60)  # ends a child that waits for what no thread of it will do
        told = "nothing was raised"
        try:
            work()
        except BaseException as error:
            told = f"{type(error).__name__}: {error}"
        os.write(writer, told.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answers:
        told = answers.read()
    os.waitpid(child, 0)
    return told


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.parametrize("call", ["replay", "update", "reset"])
def test_forked_child_is_refused_and_the_parent_goes_on(kit: Kit, call: str) -> None:
    """FAULTS 29."""
    x = kit.tensor(4)
    graph, y = kit.record(lambda: x + 1)
    assert _in_child(getattr(graph, call)).startswith("StateError: ")
    kit.refill(x, 5)
    graph.replay()
    kit.same(y, x + 1)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_forked_child_cannot_replay_a_captured_step(kit: Kit) -> None:
    """FAULTS 29."""
    captured = kit.capture(lambda x: x + 1, kit.tensor(4))
    assert _in_child(captured.replay).startswith("StateError: ")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.parametrize("busy", ["replay", "capture"])
def test_forked_child_waits_for_no_lock_of_another_thread(
    kit: Kit, pool: dg.Pool, busy: str
) -> None:
    """FAULTS 39."""
    working, forked = threading.Event(), threading.Event()
    held = [False]

    @dg.no_graph
    def body(x: torch.Tensor) -> torch.Tensor:
        if held[0]:
            working.set()
            forked.wait(60)
        return x * 2

    def step(x: torch.Tensor) -> torch.Tensor:
        return body(x + 1) + 1

    x = kit.tensor(WIDTH)
    row = x[None]  # a device may refuse even this in a child
    captured = kit.capture(step, x, policy="breakable", pool=pool)
    graphs = [kit.record(lambda: x + 1, pool=pool)[0]]
    runner = runner_of(
        kit, lambda batch: step(batch.x), pool=pool, max_requests=1, config="breakable"
    )
    held[0] = True
    work = {
        "replay": captured.replay,
        "capture": lambda: kit.capture(step, x, policy="breakable", pool=pool, warmup=0),
    }
    thread = threading.Thread(target=work[busy])
    thread.start()
    try:
        assert working.wait(60)
        uses: list[Callable[[], object]] = [
            captured.replay,
            captured.close,
            graphs[0].replay,
            graphs[0].close,
            lambda: runner.run({"x": row}),
            runner.capture,
            runner.close,
            lambda: kit.capture(step, x, pool=pool),
            lambda: kit.backend.make_graph(pool),
        ]
        for use in uses:
            assert _in_child(use).startswith("StateError: "), use
        assert _in_child(graphs.clear) == "nothing was raised"
    finally:
        forked.set()
        thread.join(60)
    held[0] = False
    kit.check(captured, step, x)


@pytest.mark.parametrize("first_ends_first", [True, False])
def test_collector_is_paused_until_the_last_thread_resumes_it(first_ends_first: bool) -> None:
    began, end, ended = threading.Event(), threading.Event(), threading.Event()

    def capture_elsewhere() -> None:
        with collector.paused():
            began.set()
            end.wait(10)
        ended.set()

    thread = threading.Thread(target=capture_elsewhere)
    with contextlib.ExitStack() as here:
        here.enter_context(collector.paused())
        thread.start()
        assert began.wait(10)
        if first_ends_first:
            here.close()
        else:
            end.set()
            assert ended.wait(10)
        assert not gc.isenabled()
    end.set()
    thread.join(10)
    assert gc.isenabled()


def test_switched_off_collector_stays_off() -> None:
    gc.disable()
    try:
        with collector.paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_collector_is_on_in_a_child_that_was_forked_while_another_thread_resumed_it() -> None:
    """FAULTS 40."""
    child = type(collector)()
    with child.paused():
        child._pauses.clear()  # the other thread's, and now comes the fork
        child.after_fork()
        assert gc.isenabled()
