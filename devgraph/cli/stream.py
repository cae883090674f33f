"""Printing the text of several requests while they run side by side."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TextIO

__all__ = ["OrderedText"]


class OrderedText:
    """Prints texts one after the other, each as it comes.

    Requests run at once, and a terminal has one cursor: the first unfinished text is printed live,
    the others wait in memory, and the next one catches up when it is its turn.

    Args:
        headings: printed before each text, without a line break in between.
        out: where to; standard output if None.
    """

    def __init__(self, headings: Sequence[str], out: TextIO | None = None) -> None:
        self._out = sys.stdout if out is None else out
        self._headings = list(headings)
        self._waiting = [""] * len(headings)
        self._finished = [False] * len(headings)
        self._current = -1

    def add(self, index: int, piece: str, *, last: bool = False) -> None:
        """Add a piece to text ``index``; ``last`` says that nothing more will come."""
        if self._current < 0:
            self._next()
        self._waiting[index] += piece
        self._finished[index] = self._finished[index] or last
        while self._current < len(self._headings):
            self._out.write(self._waiting[self._current])
            self._waiting[self._current] = ""
            if not self._finished[self._current]:
                break
            self._out.write("\n\n")
            self._next()
        self._out.flush()

    def _next(self) -> None:
        self._current += 1
        if self._current < len(self._headings):
            self._out.write(self._headings[self._current])
