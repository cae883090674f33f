"""Policy full with host arguments, on the reference: recordings, copies and the broken form."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

import devgraph as dg
from devgraph.api.policy.full import _MissBudget
from devgraph.api.policy.job import UpdateBudget

WIDTH = 16


@dg.region(host_args=("n",))
def head(x: torch.Tensor, *, n: int) -> torch.Tensor:
    """The same operations for every ``n``."""
    return x[:, :n].sum(1, keepdim=True) * 2


def step(x: torch.Tensor, *, n: int) -> torch.Tensor:
    h = x * 0.5
    return h + head(x + 1, n=n)


@dg.region(host_args=("n",))
def uneven(x: torch.Tensor, *, n: int) -> torch.Tensor:
    """One more operation for every four in ``n``."""
    h = x[:, :n].sum(1, keepdim=True)
    for _ in range(n // 4):
        h = h * 1.5
    return h


def uneven_step(x: torch.Tensor, *, n: int) -> dict[str, torch.Tensor]:
    h = x * 2
    y = uneven(h, n=n) + h
    return {"y": y, "same": x, "sum": y.sum()}


def check(cap: dg.Captured, fn: Any, x: torch.Tensor, n: int, outputs: Any = None) -> None:
    x.copy_(torch.randn(x.shape))
    want = fn(x.clone(), n=n)
    got = cap.replay(n=n)
    if isinstance(want, dict):
        for name, value in want.items():
            assert torch.equal(got[name], value), (name, n)
    else:
        assert torch.equal(got, want), n
    if outputs is not None:
        assert addresses(got) == outputs


def addresses(tree: Any) -> list[int]:
    return [leaf.data_ptr() for leaf in torch.utils._pytree.tree_leaves(tree)]


def captured(fn: Any, n: int, **budget: Any) -> tuple[dg.Captured, torch.Tensor]:
    x = torch.randn(4, WIDTH)
    cap = dg.capture(fn, x, backend="cpu", host_args={"n": n}, budget=UpdateBudget(**budget))
    return cap, x


def test_recorded_keys_are_counted_as_hits_and_repeats() -> None:
    cap, x = captured(step, 2)
    for n in (2, 2, 3, 3, 2, 3):
        check(cap, step, x, n)
    counts = cap.stats()
    assert (counts["repeats"], counts["misses"], counts["hits"]) == (3, 1, 2)
    assert counts["broken_over_miss_budget"] == 0


def test_keys_of_another_topology_share_one_copy() -> None:
    """FAULTS 21."""
    cap, x = captured(uneven_step, 2)
    held = addresses(cap.outputs)
    for n in (5, 6, 7, 2, 3, 5, 6):
        check(cap, uneven_step, x, n, held)
    counts = cap.stats()
    assert counts["copies"] == 1
    assert counts["copy_seconds"] > 0
    assert counts["broken_over_copy_budget"] == 0
    assert "copies: 1" in cap.explain()


@pytest.mark.parametrize("host_args", [{"n": 2}, {}])
def test_closed_capture_lets_go_of_its_arguments(host_args: dict[str, int]) -> None:
    x = torch.randn(4, WIDTH)
    cap = dg.capture(step if host_args else torch.relu, x, backend="cpu", host_args=host_args)
    cap.close()
    gone = weakref.ref(x)
    del x
    gc.collect()
    assert gone() is None and cap.segments


def test_close_that_failed_is_called_again(monkeypatch: pytest.MonkeyPatch) -> None:
    cap = dg.capture(torch.relu, torch.randn(4, WIDTH), backend="cpu")
    [graph] = cap.segments

    def failing() -> None:
        raise RuntimeError("the device is busy")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="busy"):
        patch.setattr(graph, "close", failing)
        cap.close()
    cap.close()
    assert graph.state == "closed"


def test_ambient_context_is_read_once_per_replay_on_every_way() -> None:
    reads: list[int] = []
    now = [1]

    def snapshot() -> int:
        reads.append(now[0])
        return now[0]

    @dg.region(context=snapshot)
    def scaled(x: torch.Tensor, *, context: int) -> torch.Tensor:
        h = x * context
        for _ in range(context // 4):
            h = h + 1
        return h

    def ambient(x: torch.Tensor) -> torch.Tensor:
        return scaled(x + 1) * 2

    x = torch.randn(3, 4)
    cap = dg.capture(ambient, x, backend="cpu", budget=UpdateBudget(misses=2, copies=1))
    for value in (1, 2, 5, 9, 3, 10, 11):
        now[0] = value
        reads.clear()
        got = cap.replay()
        assert reads == [value]
        assert torch.equal(got, ambient(x)), value
    assert cap.stats()["broken_over_miss_budget"] > 0


def test_output_whose_layout_depends_on_a_host_argument_is_refused() -> None:
    @dg.region(host_args=("n",))
    def grown(x: torch.Tensor, *, n: int) -> torch.Tensor:
        h = x[:, : 2 + n // 4].clone()
        return h * 2 if n < 4 else h * 2 + 1

    def growing(x: torch.Tensor, *, n: int) -> torch.Tensor:
        return grown(x, n=n)

    cap, x = captured(growing, 2)
    check(cap, growing, x, 3)
    with pytest.raises(dg.RegionError, match="grown|step returned"):
        cap.replay(n=5)
    check(cap, growing, x, 3)


def test_error_in_the_broken_form_is_the_users_and_the_next_step_is_right() -> None:
    @dg.region(host_args=("n",))
    def picky(x: torch.Tensor, *, n: int) -> torch.Tensor:
        if n == 6:
            raise RuntimeError("n is 6")
        return x[:, :n].sum(1, keepdim=True)

    def picking(x: torch.Tensor, *, n: int) -> torch.Tensor:
        return picky(x * 2, n=n) + 1

    cap, x = captured(picking, 2, misses=0)
    for bad_first in (6, 6):
        with pytest.raises(RuntimeError, match="n is 6"):
            cap.replay(n=bad_first)
        check(cap, picking, x, 5)
        check(cap, picking, x, 2)
    assert not dg.is_capturing()


def test_stub_does_not_stand_in_where_the_capture_of_the_broken_form_is_a_step() -> None:
    @dg.region(host_args="n", capture_stub=lambda x, *, n: torch.zeros_like(x))
    def scaled(x: torch.Tensor, *, n: int) -> torch.Tensor:
        return x * n

    def step(x: torch.Tensor, n: int) -> torch.Tensor:
        return scaled(x + 1, n=n) + 1

    cap, x = captured(step, 2, misses=0)
    for n in (3, 4):
        assert torch.equal(cap.replay(n=n), step(x, n))
    assert cap.stats()["broken_over_miss_budget"] == 2
    cap.close()


def test_closing_closes_copies_and_the_broken_form() -> None:
    cap, x = captured(uneven_step, 2, misses=1)
    for n in (5, 6, 7, 9):
        check(cap, uneven_step, x, n)
    pool = cap.pool
    cap.close()
    assert len(pool.recordings) == 0
    with pytest.raises(dg.StateError, match="closed"):
        cap.replay(n=2)


def test_graph_that_was_updated_by_hand_runs_the_key_of_the_next_replay() -> None:
    x = torch.randn(2, WIDTH)
    with dg.capture(step, x, backend="cpu", host_args={"n": 3}) as captured:
        captured.replay(n=3)
        captured.segments[0].update(n=7)
        assert torch.equal(captured.replay(n=3), step(x, n=3))
        captured.segments[0].update(n=7)
        assert torch.equal(captured.replay(n=7), step(x, n=7))


def test_value_among_the_outputs_that_another_key_changes_is_refused() -> None:
    @dg.region(host_args=("n",), mutates=("out",))
    def filled(out: torch.Tensor, *, n: int) -> int:
        out.fill_(n)
        return n

    def counted(x: torch.Tensor, *, n: int) -> tuple[torch.Tensor, int]:
        out = torch.empty_like(x)
        return out, filled(out, n=n)

    given = {"backend": "cpu", "host_args": {"n": 2}, "budget": UpdateBudget(misses=0)}
    with dg.capture(counted, torch.ones(3), **given) as captured:
        with pytest.raises(dg.RegionError, match="the step returned 3 for these"):
            captured.replay(n=3)
        assert captured.replay(n=2)[1] == 2


def test_output_without_elements_shares_no_memory() -> None:
    def split(x: torch.Tensor, *, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        out = uneven(x, n=n) + 1
        return out[:0], out

    x = torch.randn(2, WIDTH)
    budget = UpdateBudget(misses=0, copies=0)
    with dg.capture(split, x, backend="cpu", host_args={"n": 1}, budget=budget) as cap:
        for n in (9, 1, 12):
            assert torch.equal(cap.replay(n=n)[1], split(x, n=n)[1])


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


def test_miss_budget_earns_back_no_more_than_it_started_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("devgraph.api.policy.full._RECENT", 2)
    budget = _MissBudget(1)
    assert budget.spend("a")
    assert not budget.spend("b")
    budget.earn()
    budget.earn()
    assert budget.spend("c")
    assert not budget.spend("d")
    assert budget.spend("b")  # seen before
    for key in "efg":
        assert not budget.spend(key)
    assert not budget.spend("d")  # seen too long ago
    assert budget.spend("g")


def test_proofs_do_not_spend_the_miss_budget() -> None:
    cap, x = captured(step, 1, misses=1)
    assert cap.prove(1, host_args=[{"n": n} for n in (2, 3, 4)]).ok
    check(cap, step, x, 9)
    assert cap.stats()["broken_over_miss_budget"] == 0
    check(cap, step, x, 10)
    assert cap.stats()["broken_over_miss_budget"] == 1
