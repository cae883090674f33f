"""KeyboardInterrupt at the instructions of captures, replays, updates and runs."""

from __future__ import annotations

import itertools
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator

import pytest
import torch

import devgraph as dg
from tests.support.interrupts import OPERATIONS, Bench, interrupted


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    yield Bench()


@pytest.fixture(scope="module")
def bench_with_budget() -> Iterator[Bench]:
    yield Bench(budget_bytes=0)


def interrupt_everywhere(
    bench: Bench, operation: Callable[[Bench, int], object], stride: int
) -> None:
    for place in itertools.count(1, stride):
        n = place % 9 + 1
        if not interrupted(lambda n=n: operation(bench, n), place):  # type: ignore[misc]
            break
        bench.check(n)
    assert place > stride


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", OPERATIONS)
def test_interrupt_anywhere_leaves_the_next_operation_right(bench: Bench, name: str) -> None:
    """FAULTS 40."""
    interrupt_everywhere(bench, *OPERATIONS[name])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", ["replay in segments", "replay of a graph", "run"])
def test_interrupt_in_a_step_that_makes_its_executables_anew_leaves_the_next_right(
    bench_with_budget: Bench, name: str
) -> None:
    """FAULTS 40."""
    interrupt_everywhere(bench_with_budget, OPERATIONS[name][0], 5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_signals_at_any_moment_leave_the_next_operation_right(bench: Bench) -> None:
    """FAULTS 40. For twenty seconds."""
    rng, hits, end = random.Random(0), 0, time.monotonic() + 20
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        while time.monotonic() < end:
            operation, n = rng.choice(list(OPERATIONS.values()))[0], rng.randint(1, 9)
            try:
                signal.setitimer(signal.ITIMER_REAL, 10 ** rng.uniform(-5, -1.7))
                operation(bench, n)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                hits += 1
            bench.check(n)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert hits > 20


def test_captures_set_no_profile_function() -> None:
    """It would run between ``__enter__`` of a lock and the block, where an interrupt leaks it."""
    seen = []

    def step(x: torch.Tensor, *, n: int) -> torch.Tensor:
        seen.append(sys.getprofile())
        return x * 2

    dg.capture(step, torch.ones(3), backend="cpu", policy="full", host_args={"n": 3})
    assert seen and set(seen) == {None}
