"""What a graph launches, how it is swapped, and the budget that all of a pool share."""

from __future__ import annotations

import random
import sys
import weakref
from typing import Any

import pytest
import torch

import devgraph as dg
from devgraph.api.errors import ExecutableError
from devgraph.api.executable import EXHAUSTED, Call, Recordings
from devgraph.api.policy.job import UpdateBudget
from devgraph.api.session import session
from devgraph.cpu.tape import Tape
from devgraph.testing.conformance.support import Kit, same


@pytest.fixture
def kit(cpu_kit: Kit) -> Kit:
    """The CPU reference, whose internals these tests replace."""
    return cpu_kit


@pytest.fixture
def graph() -> dg.DeviceGraph:
    backend = dg.get_backend("cpu")
    x, graph = torch.ones(4), backend.make_graph()
    with backend.capture_context(graph):
        x + 1
    return graph


def test_replay_launches_what_was_put_to_use_last(graph: dg.DeviceGraph) -> None:
    launched: list[str] = []
    replay = graph.replay
    for name in ("first", "second"):
        graph.use(Call(lambda name=name: launched.append(name)))
        replay()
        graph.bound()()
    assert launched == ["first", "first", "second", "second"]


@pytest.mark.parametrize("leave", ["expire", "reset", "close"])
def test_graph_that_is_not_ready_launches_nothing(graph: dg.DeviceGraph, leave: str) -> None:
    launched: list[int] = []
    graph.use(Call(lambda: launched.append(1)))
    epoch = graph.pool.epoch
    getattr(graph, leave)()
    with pytest.raises(dg.StateError):
        graph.replay()
    assert not launched
    assert graph.pool.epoch > epoch


def test_graph_without_work_replays_nothing() -> None:
    graph = dg.get_backend("cpu").make_graph()
    with session(graph.pool) as recording:
        recording.begin(graph)
        recording.end(allow_empty=True)
    graph.replay()
    graph.bound()()


class _Owner:
    key: object = None


class _Item:
    def __init__(self, size: int) -> None:
        self.bytes = size
        self.closed = False

    def shrink(self) -> None:
        pass

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


def test_recordings_of_an_owner_that_is_gone_are_no_other_owners() -> None:
    """An interrupt may end the drop of what a graph had, and another graph may have its place."""
    owner: Any = _Owner()
    kept = Recordings(None)
    kept.put(owner, 0, _Item(4))
    kept._items[id(owner), 0] = kept._items[id(owner), 0]._replace(owner=weakref.ref(_Owner()))
    assert kept.get(owner, 0) is None
    assert not kept.holds(owner, 0)


def test_trim_counts_what_a_recording_takes_now() -> None:
    owner: Any = _Owner()
    kept = Recordings(10)
    grown, old = _Thick(1), _Thick(8)
    kept.put(owner, "old", old)
    kept.put(owner, "grown", grown)
    assert kept.get(owner, "grown") is grown
    grown.bytes = 9
    kept.trim()
    assert (old.bytes, grown.bytes) == (1, 9)
    assert kept.bytes == 10
    assert kept.room == 0


@pytest.mark.parametrize("when", ["shrunk", "closed"])
def test_a_graph_may_end_while_another_gives_up_its_memory(when: str) -> None:
    """What is freed may hold the last reference to it, and so may what a collection finds."""
    first: Any = _Owner()
    second: Any = _Owner()
    kept = Recordings(10)
    thick, item = _Thick(6), _Item(4)

    def end() -> None:
        setattr(thick, "shrink" if when == "shrunk" else "close", lambda: None)  # idempotent
        kept.drop(second)
        kept.drop(first)
        thick.bytes = 1

    setattr(thick, "shrink" if when == "shrunk" else "close", end)
    kept.put(first, "thick", thick)
    kept.put(second, "item", item)
    kept.put(second, "more", _Item(1))
    kept.put(first, "last", _Item(20))
    assert item.closed
    assert kept.count(second) == 0
    assert kept.bytes == 20 * len(kept)


def _captured(kit: Kit, pool: dg.Pool, count: int, **options: Any) -> list[Any]:
    """Captures of one step, each with an input of its own, and what they have to return."""
    inputs = [torch.full((4,), float(index)) for index in range(count)]
    return [
        (dg.capture(lambda x: x * 2 + 1, x, backend=kit.backend, pool=pool, **options), x)
        for x in inputs
    ]


def _check(found: tuple[Any, torch.Tensor]) -> None:
    captured, x = found
    x += 1
    same(captured.replay(), x * 2 + 1)


def _bytes(*steps: tuple[Any, torch.Tensor]) -> int:
    return sum(captured.info().bytes for captured, _ in steps)


def test_executables_are_made_at_the_first_launch_and_stay_without_a_budget(kit: Kit) -> None:
    pool = kit.backend.make_pool()
    steps = _captured(kit, pool, 3)
    assert pool.recordings.residency().made == 0
    for _ in range(2):
        for step in steps:
            _check(step)
    found = pool.recordings.residency()
    assert (found.made, found.evicted, found.budget_bytes) == (3, 0, None)
    assert found.bytes == _bytes(*steps)
    assert found.seconds > 0


def test_executables_without_a_budget_are_not_counted_again_for_each(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round of captures makes hundreds of them."""
    steps = _captured(kit, kit.backend.make_pool(), 3)
    monkeypatch.setattr(Recordings, "_excess", property(lambda _: pytest.fail("counted")))
    for step in steps:
        _check(step)


def test_the_least_recently_used_executable_goes(kit: Kit) -> None:
    pool = kit.backend.make_pool()
    steps = _captured(kit, pool, 3)
    pool.recordings.limit(_bytes(*steps) - 1)
    for index in (0, 1, 0, 2, 0):  # 1 is the one to go
        _check(steps[index])
    assert pool.recordings.residency().made == 3
    _check(steps[1])
    found = pool.recordings.residency()
    assert (found.made, found.evicted) == (4, 2)
    assert found.bytes == _bytes(steps[0], steps[1])


def test_a_launch_that_repeats_the_last_costs_under_a_budget_what_it_costs_without(
    kit: Kit,
) -> None:
    def functions(budget: int | None) -> list[str]:
        pool = kit.backend.make_pool()
        if budget is not None:
            pool.limit(budget)
        captured, _ = _captured(kit, pool, 2)[1]
        graph, entered = captured.segments[0], []
        for _ in range(3):
            graph.replay()
        sys.setprofile(lambda frame, event, _: event == "call" and entered.append(frame.f_code))
        try:
            graph.replay()
        finally:
            sys.setprofile(None)
        return [code.co_name for code in entered]

    assert functions(100_000) == functions(None)


@pytest.mark.parametrize("seed", range(3))
def test_the_least_recently_used_goes_whichever_way_graphs_are_launched(
    kit: Kit, seed: int
) -> None:
    pool, chosen = kit.backend.make_pool(), random.Random(seed)
    steps = _captured(kit, pool, 5)[1:]  # of one size
    _check(steps[0])
    pool.recordings.limit(_bytes(*steps[:2]))
    ways = [
        (captured.replay, captured.segments[0].replay, captured.segments[0].bound())
        for captured, _ in steps
    ]
    made, kept = 1, [0]
    for _ in range(60):
        index, way = chosen.randrange(4), chosen.randrange(3)
        for _ in range(chosen.randrange(1, 4)):
            ways[index][way]()
        made += index not in kept
        kept = [*(other for other in kept if other != index), index][-2:]
        assert pool.recordings.residency().made == made
    for step in steps:
        _check(step)


def test_a_budget_that_comes_late_sees_the_launches_that_were_direct(kit: Kit) -> None:
    pool = kit.backend.make_pool()
    steps = _captured(kit, pool, 3)
    for step in steps * 2:
        _check(step)
    pool.recordings.limit(_bytes(*steps) - 1)
    for index in (0, 2, 1, 2):  # of 0 and 2, which 1 makes room for itself with, 0 is older
        _check(steps[index])
    found = pool.recordings.residency()
    assert (found.made, found.evicted) == (5, 3)
    assert found.bytes == _bytes(steps[1], steps[2])


def test_a_budget_of_zero_makes_every_launch_make_its_executable(kit: Kit) -> None:
    pool = kit.backend.make_pool()
    pool.limit(0)
    (step,) = _captured(kit, pool, 1)
    for count in range(1, 4):
        _check(step)
        assert pool.recordings.residency().made == count
        assert pool.recordings.bytes == 0


def test_a_pinned_executable_stays(kit: Kit) -> None:
    pool = kit.backend.make_pool()
    pool.limit(0)
    pinned, other = _captured(kit, pool, 2)
    pinned[0].pin()
    for _ in range(3):
        _check(pinned)
        _check(other)
    assert pool.recordings.residency().made == 4
    pinned[0].pin(False)
    _check(other)
    _check(pinned)
    assert pool.recordings.residency().made == 6


@pytest.mark.parametrize("launched", [0, 2])
def test_a_step_whose_own_segments_are_over_the_budget_is_right(kit: Kit, launched: int) -> None:
    """FAULTS 43: what was bound stays valid while executables of the same step go."""

    def step(x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = x * 2
            dg.graph_break()
        return x + 1

    pool = kit.backend.make_pool()
    x = torch.ones(4)
    captured = dg.capture(step, x, policy="breakable", backend=kit.backend, pool=pool)
    for _ in range(launched):
        captured.replay()
    pool.recordings.limit(captured.info().bytes - 1)
    for value in (1.0, 2.0, 3.0):
        x.fill_(value)
        same(captured.replay(), torch.full((4,), value * 8 + 1))
    assert pool.recordings.residency().evicted > 3
    epoch = pool.epoch
    captured.replay()
    assert pool.epoch == epoch, "what was bound is not bound anew for that"


def test_an_executable_and_recordings_share_the_budget(kit: Kit) -> None:
    @dg.region(host_args=("n",), mutates=("out",))
    def scale(x: torch.Tensor, out: torch.Tensor, *, n: int) -> None:
        out.copy_(x * n)

    def step(x: torch.Tensor, *, n: int) -> torch.Tensor:
        out = torch.empty_like(x)
        scale(x, out, n=n)
        return out + 1

    pool, x = kit.backend.make_pool(), torch.ones(4)
    pool.limit(1)
    captured = dg.capture(step, x, backend=kit.backend, pool=pool, host_args={"n": 2})
    for n in (3, 2, 3, 4, 4):
        same(captured.replay(n=n), x * n + 1)
    found = pool.recordings.residency()
    assert found.made == 5 and found.evicted >= 5


def test_a_lower_budget_holds_at_once_and_a_higher_one_changes_nothing(kit: Kit) -> None:
    pool = kit.backend.make_pool()
    steps = _captured(kit, pool, 3)
    for step in steps:
        _check(step)
    last = _bytes(steps[2])
    pool.recordings.limit(last)
    assert pool.recordings.bytes == last
    pool.recordings.limit(10 * last)
    assert pool.recordings.budget_bytes == last
    for step in steps:
        _check(step)


@pytest.mark.parametrize("kind", EXHAUSTED)
def test_an_executable_that_cannot_be_made_again_is_a_typed_error_and_nothing_is_lost(
    kit: Kit, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    """FAULTS 44."""
    pool = kit.backend.make_pool()
    steps = _captured(kit, pool, 3)
    pool.recordings.limit(_bytes(*steps) - 1)
    for step in steps:
        _check(step)
    tries: list[int] = []
    make = Tape.make

    def exhausted(tape: Tape) -> None:
        tries.append(pool.recordings.bytes)
        if len(tries) < 3:
            raise kind("no memory")
        make(tape)

    monkeypatch.setattr(Tape, "make", exhausted)
    captured = steps[0][0]
    with pytest.raises(dg.ResourceError, match="launch it again when there is memory") as found:
        captured.replay()
    assert isinstance(found.value, ExecutableError) and not found.value.partly
    assert tries[0] > 0 == tries[1], "the others gave up theirs for the second try"
    for step in (steps[0], *steps):
        _check(step)


def test_a_broken_form_says_how_far_it_came_while_it_was_captured(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever runs the step anew, as runners do, would write its state twice."""

    @dg.region(host_args=("n",), mutates=("out",))
    def scale(x: torch.Tensor, out: torch.Tensor, *, n: int) -> None:
        out.copy_(x * n)

    def step(x: torch.Tensor, *, n: int) -> torch.Tensor:
        state.add_(x)
        out = torch.empty_like(x)
        scale(x, out, n=n)
        return out + state

    state, x, tries, made = torch.zeros(4), torch.ones(4), list[int](), Recordings.make
    pool, budget = kit.backend.make_pool(), UpdateBudget(misses=0)
    pool.limit(0)
    captured = dg.capture(
        step, x, backend=kit.backend, pool=pool, host_args={"n": 2}, budget=budget
    )

    def exhausted(recordings: Recordings, make: Any) -> Any:
        tries.append(1)
        if len(tries) >= fails:
            raise ExecutableError("no memory")
        return made(recordings, make)

    monkeypatch.setattr(Recordings, "make", exhausted)
    for fails, partly in ((1, False), (2, True)):  # a key that comes again is recorded
        state.zero_()
        tries.clear()
        with pytest.raises(ExecutableError) as found:
            captured.replay(n=2 + fails)
        assert found.value.partly is bool(state[0]) is partly
    monkeypatch.undo()
    state.zero_()
    same(captured.replay(n=5), x * 5 + 1)


def test_a_dropped_executable_launches_nothing_by_itself(kit: Kit) -> None:
    """The reference is strict: a call that kept an executable past its budget would be told."""
    pool = kit.backend.make_pool()
    pool.limit(0)
    (step,) = _captured(kit, pool, 1)
    _check(step)
    tape = step[0].segments[0]._tape
    with pytest.raises(dg.StateError, match="was dropped"):
        tape.replay()


def test_closing_a_graph_frees_its_executable(kit: Kit) -> None:
    pool = kit.backend.make_pool()
    steps = _captured(kit, pool, 2)
    for step in steps:
        _check(step)
    steps[0][0].close()
    assert pool.recordings.bytes == _bytes(steps[1])
    _check(steps[1])
    steps[1][0].close()
    assert pool.recordings.bytes == 0
