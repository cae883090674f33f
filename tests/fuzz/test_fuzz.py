"""The fuzzers with fixed seeds; ``make fuzz MINUTES=10`` goes on with others."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

import devgraph as dg
from tests.fuzz import driver as fuzz
from tests.fuzz.driver import (
    ASCEND_FAULTS,
    ascend_case,
    ascend_steps,
    every_fault,
    graphed_case,
    hip_case,
    run,
)
from tests.sim.hip import unavailable_reason

pytest_plugins = ["tests.sim.ascend.plugin"]


def total(kind: str, seeds: range) -> Counter[str]:
    return sum((run(kind, seed) for seed in seeds), Counter[str]())


@pytest.mark.parametrize("first", range(0, 48, 24))
def test_random_steps_equal_eager_under_every_policy(first: int) -> None:
    counts = Counter[str]()
    for seed in range(first, first + 24):
        counts += run("steps" if seed % 8 else "piecewise", seed)
    # A RegionError refuses a result that a region also stores, which random regions often do.
    stored = sum(number for what, number in counts.items() if what.endswith("RegionError"))
    refused = sum(number for what, number in counts.items() if what.startswith("refused"))
    assert counts["replays"] > 72
    assert stored < counts["captured"] / 2, counts
    refused -= stored
    assert refused < counts["captured"] / 4, counts


@pytest.mark.skipif(
    unavailable_reason() is not None, reason=f"no fake library: {unavailable_reason()}"
)
def test_random_steps_equal_eager_over_hip() -> None:
    counts = total("hip steps", range(30))
    assert counts["replays"] > 75, counts


def test_random_steps_equal_eager_over_ascend(driver: Any) -> None:
    backend = dg.get_backend("npu")
    counts = sum((ascend_steps(seed, backend, driver) for seed in range(30)), Counter[str]())
    assert counts["replays"] > 75, counts


def test_random_runners_equal_their_steps() -> None:
    counts = total("runners", range(12))
    eager = sum(number for what, number in counts.items() if what.startswith("eager"))
    assert counts["runs"] > 80
    assert eager < counts["runs"], counts


def test_random_calls_of_graphed_modules_equal_eager(devgraph_backend: Any) -> None:
    if devgraph_backend.name == "npu":
        pytest.skip("the simulated driver has no batch norm in training, which loses the device")
    cases = (graphed_case(seed, devgraph_backend.device) for seed in range(8))
    counts = sum(cases, Counter[str]())
    assert counts["replays"] > 40, counts


def test_state_that_changes_between_replays_is_followed_or_refused() -> None:
    counts = total("state", range(48))
    refused = sum(number for what, number in counts.items() if what.startswith("refused after"))
    assert counts["calls"] > 200, counts
    assert refused > 5, counts
    assert refused + counts["captured again"] > 18, counts


def test_interrupts_at_random_places_leave_the_next_operation_right() -> None:
    assert sum(total("interrupts", range(60)).values()) > 20


def test_objects_of_the_long_mode_do_not_grow_with_the_number_of_interrupts() -> None:
    counted = []
    for seeds in (range(10), range(40)):
        fuzz._bench.clear()
        total("interrupts", seeds)
        counted.append(fuzz._alive())
    few, many = counted
    assert few["BreakablePlan"] == many["BreakablePlan"], "the benches were not complete"
    assert (many - few).total() < 40, many - few


@pytest.mark.skipif(
    unavailable_reason() is not None, reason=f"no fake library: {unavailable_reason()}"
)
@pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 16))]
)
def test_fault_at_any_call_of_hip_leaves_the_rest_right_or_refused(part: int) -> None:
    """Every sixteenth call here, and all of them with the slow tests."""
    counts = every_fault(lambda at: hip_case(16 * (at - 1) + part))
    assert counts["faults"] > 10
    assert counts["refused"] + counts["refused by torch"] > 10


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 4))]
)
@pytest.mark.parametrize("name", ASCEND_FAULTS)
def test_refusal_at_any_call_of_ascend_leaves_the_rest_right_or_refused(
    driver: Any, name: str, part: int
) -> None:
    """The first call and every fourth after it here, and all of them with the slow tests."""
    backend = dg.get_backend("npu")
    counts = every_fault(lambda at: ascend_case(name, 4 * (at - 1) + 1 + part, backend, driver))
    assert part or counts["faults"]
