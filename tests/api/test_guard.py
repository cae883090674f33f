"""Guards: what they tell, when they look closer, and what a term costs."""

from __future__ import annotations

import pytest

from devgraph.api.buffers import term_of
from devgraph.api.errors import StateError
from devgraph.api.guard import LATE, Guard, all_of, by_turns
from devgraph.api.reach import Entry


class Number:
    """Watched state: a number in a list, which may be replaced by an equal one."""

    def __init__(self, number: int) -> None:
        self.held, self.looked = [number], 0
        self.terms = [("{}[0] is {}", (self.held, number))]

    def check(self) -> None:
        self.looked += 1
        number = self.held[0]
        if number != 1000:
            raise StateError("another number")
        self.terms = [("{}[0] is {}", (self.held, number))]


def test_all_terms_must_be_true() -> None:
    held = {"a": 1, "b": 2}
    same = all_of([("{}[{}] == {}", (held, "a", 1)), ("len({}) == {}", (held, 2))])
    assert same()
    held["c"] = 3
    assert not same()
    del held["c"]
    held["a"] = 4
    assert not same()
    assert all_of([])()


def test_term_that_fails_is_not_true() -> None:
    held = {"a": 1}
    same = all_of([("{}[{}] == {}", (held, "a", 1))])
    held.clear()
    assert not same()


def test_interrupt_in_a_term_is_not_swallowed() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        all_of([("{}()", (interrupted,))])()


def test_equal_texts_share_no_values() -> None:
    one, other = (all_of([("{} == {}", pair)]) for pair in ((1, 1), (1, 2)))
    assert one()
    assert not other()


def test_settling_looks_at_all_parts_and_accepts_equal_objects() -> None:
    parts = [Number(int("1000")), Number(int("1000"))]
    guard = Guard(parts)
    assert not guard.same()  # until the first look
    guard.settle()
    assert guard.same()
    parts[1].held[0] = int("1000")  # an equal object
    assert not guard.same()
    guard.settle()
    assert guard.same()
    parts[0].held[0] = 5
    assert not guard.same()
    with pytest.raises(StateError):
        guard.settle()
    assert not guard.same()
    assert [part.looked for part in parts] == [3, 2]


def test_guard_of_nothing_is_settled_once() -> None:
    guard = Guard([])
    assert not guard.same()
    guard.settle()
    assert guard.same()


def test_terms_of_the_owner_are_compared_too() -> None:
    closed: list[int] = []
    guard = Guard([Number(1000)], [("not {}", (closed,))])
    guard.settle()
    assert guard.same()
    closed.append(1)
    assert not guard.same()


@pytest.mark.parametrize("place", range(7))
def test_terms_that_take_turns_are_all_compared(place: int) -> None:
    held = [*range(7)]
    terms = [("{}[{}] == {}", (held, index, index)) for index in range(7)]
    same = all_of(by_turns(terms, first=2, each=2))
    assert all(same() for _ in range(6))
    held[place] = -1
    answers = [same() for _ in range(6)]
    assert answers.count(False) == (6 if place < 2 else 2)


def test_change_that_only_turns_find_may_be_late() -> None:
    number = Number(1000)
    guard = Guard([number])
    guard.settle()
    number.terms = [*by_turns([("{}[0] == 1000", (number.held,))] * 3, first=0, each=1)]
    number.held[0] = 1001
    with pytest.raises(StateError, match=LATE):
        guard.settle()


def test_few_terms_take_no_turns() -> None:
    terms = [("{}", (True,))]
    assert [*by_turns(terms, first=2, each=2)] == terms


def test_attribute_of_an_object_is_compared_without_a_call_into_python() -> None:
    """A search of the kind of its holder took 0.8 us for each attribute in each replay."""

    class Config:
        def __init__(self) -> None:
            self.scale = 2.5

    config = Config()
    text, values = term_of(Entry("config.scale", config, "scale", config.scale))
    assert text.count("getattr({}, {})") == 2
    same = all_of([(text, values)])
    assert same()
    config.scale = float("2.5")
    assert same()
    config.scale = 3.0
    assert not same()
    del config.scale
    assert not same()
