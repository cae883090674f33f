"""What policy full may spend on keys that it has not seen."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import devgraph as dg
from devgraph.api.policy.budget import MissBudget, UpdateBudget
from tests.policy.test_full import (
    WIDTH,
    addresses,
    captured,
    check,
    step,
    uneven_step,
)


def test_copies_past_their_budget_break_and_are_counted() -> None:
    """FAULTS 21, 43."""
    cap, x = captured(uneven_step, 2, copies=1, misses=100)
    held = addresses(cap.outputs)
    for n in (5, 9, 13, 5, 9, 2, 13):
        check(cap, uneven_step, x, n, held)
    counts = cap.stats()
    assert counts["copies"] == 1
    assert counts["broken_over_copy_budget"] == 4


def test_copies_past_their_time_break() -> None:
    cap, x = captured(uneven_step, 2, copy_seconds=0.0, misses=100)
    for n in (5, 2, 9):
        check(cap, uneven_step, x, n)
    counts = cap.stats()
    assert (counts["copies"], counts["broken_over_copy_budget"]) == (0, 2)


def test_new_keys_past_the_miss_budget_break_until_they_come_back() -> None:
    cap, x = captured(step, 1, misses=2)
    held = addresses(cap.outputs)
    for n in range(2, 10):
        check(cap, step, x, n, held)
    counts = cap.stats()
    assert (counts["misses"], counts["broken_over_miss_budget"]) == (2, 6)
    check(cap, step, x, 7, held)  # seen before: recorded now
    check(cap, step, x, 7, held)
    assert cap.stats()["misses"] == 3
    assert cap.stats()["repeats"] == 1
    check(cap, step, x, 2, held)  # recorded at first sight
    assert cap.stats()["hits"] == 1


def test_broken_step_repeated_with_the_same_key_is_recorded_at_the_second() -> None:
    cap, x = captured(step, 1, misses=0)
    check(cap, step, x, 5)
    check(cap, step, x, 5)
    counts = cap.stats()
    assert (counts["broken_over_miss_budget"], counts["misses"]) == (1, 1)


def test_no_capture_in_a_replay_while_it_is_not_allowed() -> None:
    allowed = [False]
    cap, x = captured(uneven_step, 2, misses=0, may_capture=lambda: allowed[0])
    check(cap, uneven_step, x, 3)  # over the budget, but recording needs no leave
    assert cap.stats()["misses"] == 1
    with pytest.raises(dg.UpdateTopologyError, match="uneven"):
        cap.replay(n=5)
    check(cap, uneven_step, x, 3)
    allowed[0] = True
    check(cap, uneven_step, x, 5)
    assert cap.stats()["broken_over_miss_budget"] + cap.stats()["copies"] == 1


def test_ranks_that_meet_before_breaks_never_capture_alone() -> None:
    x = torch.randn(4, WIDTH)
    cap = dg.capture(
        uneven_step,
        x,
        backend="cpu",
        host_args={"n": 2},
        before_break=lambda: pytest.fail("a rank waits for others in a replay"),
        budget=UpdateBudget(misses=0),
    )
    check(cap, uneven_step, x, 3)
    with pytest.raises(dg.UpdateTopologyError):
        cap.replay(n=9)


def test_budget_of_another_kind_is_refused() -> None:
    with pytest.raises(dg.InputError, match="UpdateBudget"):
        dg.capture(torch.relu, torch.ones(4), backend="cpu", budget=5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("limits", "kind"),
    [
        ({"misses": -1}, dg.InputError),
        ({"misses": 1.5}, dg.InputTypeError),
        ({"recent": 0}, dg.InputError),
        ({"copies": "4"}, dg.InputTypeError),
        ({"copy_seconds": float("nan")}, dg.InputError),
        ({"copy_seconds": "2"}, dg.InputTypeError),
        ({"may_capture": False}, dg.InputTypeError),
    ],
)
def test_limit_that_is_none_is_refused_and_named(limits: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind, match=next(iter(limits))):
        UpdateBudget(**limits)


def test_copies_may_take_as_long_as_they_want() -> None:
    assert UpdateBudget(copy_seconds=float("inf")).copy_seconds == float("inf")


def test_miss_budget_earns_back_no_more_than_it_started_with() -> None:
    budget = MissBudget(UpdateBudget(misses=1, recent=2))
    assert budget.allows("a")
    assert not budget.allows("b")
    budget.earn()
    budget.earn()
    assert budget.allows("c")
    assert not budget.allows("d")
    assert budget.allows("b")  # seen before
    for key in "efg":
        assert not budget.allows(key)
    assert not budget.allows("d")  # seen too long ago
    assert budget.allows("g")
