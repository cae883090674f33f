"""Slots, budgets, chunks and moves of the scheduler."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers", reason="the transformers integration")

from devgraph.api.errors import DeviceGraphError
from devgraph.integrations.transformers.scheduler import (
    FinishReason,
    Request,
    Scheduler,
)


def request(number: int, length: int, **options: object) -> Request:
    values = {"max_new_tokens": 3, "eos": frozenset({99}), "stop": frozenset({98})} | options
    return Request(number, list(range(length)), sampler=None, stream=None, **values)


def advance(scheduler: Scheduler) -> list[tuple[int, int, int]]:
    """Run one step without a model; returns (request, slot, tokens) of each chunk."""
    scheduler.admit()
    scheduler.compact()
    chunks = scheduler.plan()
    seen = [(c.request.id, c.slot, c.count) for c in chunks]
    for chunk in chunks:
        completes = chunk.completes
        chunk.request.cached += chunk.count
        if completes:
            chunk.request.accept(7)
    return seen


def test_long_prompt_runs_in_chunks_of_the_budget() -> None:
    scheduler = Scheduler(2, max_step_tokens=8)
    scheduler.add(request(0, 19))
    assert [advance(scheduler) for _ in range(4)] == [
        [(0, 0, 8)],
        [(0, 0, 8)],
        [(0, 0, 3)],
        [(0, 0, 1)],
    ]


def test_decoding_requests_keep_running_beside_a_long_prompt() -> None:
    scheduler = Scheduler(2, max_step_tokens=4)
    scheduler.add(request(0, 2))
    advance(scheduler)
    scheduler.add(request(1, 5))
    assert advance(scheduler) == [(0, 0, 1), (1, 1, 3)]
    assert advance(scheduler) == [(0, 0, 1), (1, 1, 2)]


def test_budget_is_never_exceeded_and_first_come_is_first_served() -> None:
    scheduler = Scheduler(4, max_step_tokens=6)
    for number in range(4):
        scheduler.add(request(number, 5))
    assert advance(scheduler) == [(0, 0, 5), (1, 1, 1)]
    assert advance(scheduler) == [(0, 0, 1), (1, 1, 4), (2, 2, 1)]
    assert sum(count for *_, count in advance(scheduler)) == 6


def test_request_waits_until_a_slot_is_free() -> None:
    scheduler = Scheduler(1, max_step_tokens=8)
    scheduler.add(request(0, 2))
    scheduler.add(request(1, 2))
    advance(scheduler)
    assert len(scheduler.waiting) == 1
    assert scheduler.release(scheduler.find(0)) == 0
    assert advance(scheduler) == [(1, 0, 2)]


def test_hole_goes_to_a_waiting_request_before_anything_is_moved() -> None:
    scheduler = Scheduler(3, max_step_tokens=16)
    for number in range(4):
        scheduler.add(request(number, 2))
    advance(scheduler)
    scheduler.release(scheduler.find(0))
    scheduler.admit()
    assert scheduler.compact() == []
    assert scheduler.find(3).slot == 0


def test_last_request_is_moved_into_a_hole_that_stays() -> None:
    scheduler = Scheduler(4, max_step_tokens=16)
    for number in range(4):
        scheduler.add(request(number, number + 2))
    advance(scheduler)
    scheduler.release(scheduler.find(0))
    scheduler.release(scheduler.find(2))
    assert scheduler.compact() == [(3, 0, 5)]
    assert [r.id for r in scheduler.running] == [3, 1]
    assert [r.slot for r in scheduler.running] == [0, 1]
    assert scheduler.compact() == []


def test_prompt_of_one_token_is_a_decode_step_at_once() -> None:
    scheduler = Scheduler(2, max_step_tokens=8)
    scheduler.add(request(0, 1))
    scheduler.admit()
    assert all(c.completes and c.count == 1 for c in scheduler.plan())


def test_packed_step_has_one_request_where_each_runs_alone() -> None:
    scheduler = Scheduler(3, max_step_tokens=8, alone=True)
    for number, length in enumerate((1, 5, 12)):
        scheduler.add(request(number, length))
    scheduler.admit()
    for wanted in ([(1, 5)], [(2, 7)], [(2, 5)], [(0, 1)]):
        chunks = scheduler.plan()
        assert [(c.request.id, c.count) for c in chunks] == wanted
        for chunk in chunks:
            chunk.request.cached += chunk.count


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [([1, 99], FinishReason.EOS), ([98], FinishReason.STOP), ([1, 2, 3], FinishReason.LENGTH)],
)
def test_request_ends_for_the_right_reason(tokens: list[int], reason: FinishReason) -> None:
    one = request(0, 2)
    for token in tokens:
        assert one.finish_reason is None
        one.accept(token)
    assert one.finish_reason is reason
    assert one.generated == tokens


def test_waiting_request_can_be_released() -> None:
    scheduler = Scheduler(1, max_step_tokens=8)
    scheduler.add(request(0, 2))
    assert scheduler.release(scheduler.find(0)) is None
    assert not scheduler


def test_budget_below_one_token_a_slot_is_refused() -> None:
    with pytest.raises(DeviceGraphError, match="at least 8"):
        Scheduler(8, max_step_tokens=7)


def test_unknown_request_is_named_with_those_that_exist() -> None:
    scheduler = Scheduler(1, max_step_tokens=8)
    scheduler.add(request(12, 2))
    with pytest.raises(DeviceGraphError, match="no request 3 .*Known: 12"):
        scheduler.find(3)
