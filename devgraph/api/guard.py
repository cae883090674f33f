"""Guards: all comparisons of one replay, compiled into one function."""

from __future__ import annotations

import builtins
import functools
import itertools
import operator
import re
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from devgraph.api.errors import StateError

Term = tuple[str, tuple[Any, ...]]
"""A Python expression with a ``{}`` for each value, and the values."""


class Watched(Protocol):
    """State that each replay compares with the state at capture."""

    @property
    def terms(self) -> Sequence[Term]:
        """Terms that are all true only if ``check`` succeeds; a new object after each change."""

    def check(self) -> None:
        """Raise StateError if the state differs from the capture; accept equal plain values."""


LATE = "Earlier replays may have used the old state, because each replay compares only part of it."
"""End of the error message for a change that a partial comparison found."""

_TURNS = "{}()()"


def change_in(error: Exception) -> str:
    """Return the part of a message that names the change, without its effect and the remedy."""
    return re.split(r", (?:but|and) the graph |\. ", str(error))[0]


class Guard:
    """A comparison of all watched state in one call.

    The argument ``terms`` is tested by ``same`` only, not by ``settle``.
    """

    def __init__(self, parts: Iterable[Watched], terms: Iterable[Term] = ()) -> None:
        self._parts, self._terms = [*parts], [*terms]
        self._seen: list[Sequence[Term]] | None = None
        self.same: Callable[[], bool] = lambda: False
        """Return whether all terms are true. If not, call ``settle``."""

    def settle(self) -> None:
        """Update ``same``, or raise StateError if the state differs from the capture."""
        try:
            for part in self._parts:
                part.check()
        except StateError as error:
            if self._seen is None or not all_of(t for t in self._now() if t[0] != _TURNS)():
                raise
            raise StateError(f"{error} {LATE}") from None
        now = [part.terms for part in self._parts]
        if self._seen is None or not all(map(operator.is_, now, self._seen)):
            self._seen = now
            self.same = all_of([*self._terms, *self._now()])

    def _now(self) -> Iterator[Term]:
        return itertools.chain.from_iterable(part.terms for part in self._parts)

    def difference(self) -> str:
        """Return the first difference from the capture as text, or ""."""
        try:
            self.settle()
        except StateError as error:
            return change_in(error)
        return ""


def all_of(terms: Iterable[Term]) -> Callable[[], bool]:
    """Return a function that reports whether all terms are true. A term that raises is false.

    A term takes about 30 ns in this function, and 150 ns in a loop over terms.
    """
    values: dict[str, Any] = {"__builtins__": builtins}
    texts = []
    for text, held in terms:
        names = [f"v{len(values) + index}" for index in range(len(held))]
        texts.append(text.format(*names))
        values.update(zip(names, held, strict=True))
    return types.FunctionType(_code(" and ".join(texts) or "True"), values)


def by_turns(terms: Sequence[Term], first: int, each: int) -> Iterator[Term]:
    """Yield the ``first`` terms, and a term that checks the others in rotation, ``each`` per call.

    If there are no more than ``first + each`` terms, yield all.
    """
    first = len(terms) if len(terms) <= first + each else first
    yield from terms[:first]
    if parts := [all_of(terms[at : at + each]) for at in range(first, len(terms), each)]:
        yield _TURNS, (itertools.cycle(parts).__next__,)


@functools.lru_cache(maxsize=256)
def _code(expression: str) -> types.CodeType:
    source = f"def same():\n try:\n  return {expression}\n except Exception:\n  return False"
    module = compile(source, "<guard>", "exec")
    return next(code for code in module.co_consts if isinstance(code, types.CodeType))
