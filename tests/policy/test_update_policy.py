"""Policy full with host arguments, on the reference: copies, the broken form, and their budgets."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import devgraph as dg
from devgraph.api.policy.budget import MissBudget, UpdateBudget
from devgraph.api.pool import Recordings

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


@dg.region(host_args=("scales",), reduce={"scales": tuple})
def by_kind(x: torch.Tensor, *, scales: tuple[Any, ...]) -> torch.Tensor:
    """A multiplication whose factor depends on the kind of the value, not on its size alone."""
    factor = {bool: 3.0, int: 5.0}.get(type(scales[0]), 1.0)
    return x * factor / scales[0]


def by_kind_step(x: torch.Tensor, *, scales: Any) -> torch.Tensor:
    return by_kind(x + 1, scales=scales) * 2


def test_values_that_python_calls_equal_are_keys_of_their_own() -> None:
    x = torch.randn(4, WIDTH)
    cap = dg.capture(by_kind_step, x, backend="cpu", host_args={"scales": [1]})
    for scales in ([1], [True], [1.0], [1], [-1.0], [True, 1], [True, True], [1, True]):
        x.copy_(torch.randn(x.shape))
        assert torch.equal(cap.replay(scales=scales), by_kind_step(x, scales=scales)), scales
    assert cap.stats()["misses"] == 6  # [1] came back


def captured_ambient(state: dict[str, Any], context: Any) -> tuple[dg.Captured, Any]:
    @dg.region(context=context, mutates=("out",))
    def read(x: torch.Tensor, out: torch.Tensor, *, context: Any) -> None:
        out.copy_(x + state["table"])

    def step(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        read(x * 2, out)
        return out * 3

    x = torch.randn(4)
    return dg.capture(step, x, torch.zeros(4), backend="cpu"), x


def test_recording_that_touches_a_tensor_the_capture_did_not_is_refused() -> None:
    first, state = torch.randn(4), {"step": 0}
    state["table"] = first
    cap, x = captured_ambient(state, lambda: state["step"])
    state["step"] = 1
    assert torch.equal(cap.replay(), (x * 2 + first) * 3)
    state.update(step=2, table=torch.randn(4))
    with pytest.raises(
        dg.RegionError, match=r"touched a tensor that the capture did not.*x \+ stat"
    ):
        cap.replay()
    state["table"] = first
    assert torch.equal(cap.replay(), (x * 2 + first) * 3)


def test_recording_may_touch_a_tensor_whose_address_is_in_the_key() -> None:
    tables = [torch.randn(9), torch.randn(9)[5:], torch.randn(4)]
    tables[0] = tables[0][1:5]
    state = {"table": tables[0]}
    cap, x = captured_ambient(state, lambda: (7, state["table"].data_ptr()))
    for index in (0, 1, 2, 1, 0):
        state["table"] = tables[index]
        x.copy_(torch.randn(4))
        assert torch.equal(cap.replay(), (x * 2 + tables[index]) * 3)


def test_recording_may_touch_what_is_bound_though_the_capture_did_not() -> None:
    @dg.region(host_args=("n",))
    def pick(x: torch.Tensor, *, n: int) -> torch.Tensor:
        return x + pages[n]

    x, pages = torch.randn(4), [torch.randn(4), torch.randn(4)]
    step = lambda x, pages, *, n: pick(x, n=n) * 2  # noqa: E731
    cap = dg.capture(step, x, pages, backend="cpu", host_args={"n": 0})
    assert torch.equal(cap.replay(n=1), (x + pages[1]) * 2)
    slot = dg.InputSlot("x", ("requests", 4), torch.float32, pad=dg.Pad.zero())
    with dg.DecodeRunner(
        lambda batch: pick(batch.x, n=batch.host.n) * 2,
        [slot],
        host_args={"n": 0},
        bound={"first": pages[0], "second": pages[1]},
        max_requests=1,
        backend="cpu",
        strict=True,
    ) as runner:
        runner.capture()
        got = runner.run({"x": x[None]}, host_args={"n": 1})
        assert torch.equal(got, (x[None] + pages[1]) * 2)


def test_tensor_as_a_host_value_is_refused() -> None:
    state = {"table": torch.randn(4)}
    with pytest.raises(dg.HostArgumentError, match="context of .*read is a Tensor.*ordinary arg"):
        captured_ambient(state, lambda: state["table"])
    with pytest.raises(
        dg.HostArgumentError, match="context of .*read is a tuple.*data can change unnoticed"
    ):
        captured_ambient(state, lambda: ("x", state["table"]))


def test_signed_zeros_are_keys_of_their_own() -> None:
    @dg.region(host_args=("scale",))
    def scaled(x: torch.Tensor, *, scale: float) -> torch.Tensor:
        return x * scale

    x = torch.ones(4)
    cap = dg.capture(
        lambda x, *, scale: scaled(x, scale=scale) + -0.0,
        x,
        backend="cpu",
        host_args={"scale": 0.0},
    )
    signs = [bool(torch.signbit(cap.replay(scale=scale))[0]) for scale in (-0.0, 0.0, -0.0)]
    assert signs == [True, False, True]


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


def test_closing_closes_copies_and_the_broken_form() -> None:
    cap, x = captured(uneven_step, 2, misses=1)
    for n in (5, 6, 7, 9):
        check(cap, uneven_step, x, n)
    pool = cap.pool
    cap.close()
    assert len(pool.recordings) == 0
    with pytest.raises(dg.StateError, match="closed"):
        cap.replay(n=2)


def test_budget_of_another_kind_is_refused() -> None:
    with pytest.raises(dg.InputError, match="UpdateBudget"):
        dg.capture(step, torch.ones(4, WIDTH), backend="cpu", host_args={"n": 1}, budget=5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="misses"):
        UpdateBudget(misses=-1)


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
    kept.recharge(owner, "grown")
    assert (old.bytes, grown.bytes) == (1, 9)
    assert kept.bytes == 10
    assert kept.room == 0
