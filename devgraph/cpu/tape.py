"""The tape: what a CPU graph replays, one flat list of calls with everything bound beforehand."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence

import attrs
import torch

from devgraph.api.errors import StateError, UpdateTopologyError, note
from devgraph.api.marks.source import SourceLine
from devgraph.cpu.memory import Hold

# Autocast has done its work when an operation is recorded, and must not do it twice.
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


@attrs.frozen(kw_only=True)
class Op:
    """One recorded operation: its name and the user's line that called it."""

    name: str
    line: SourceLine

    def __str__(self) -> str:
        return f"{self.name} at {self.line}"


@attrs.frozen
class Entry:
    """One step of a tape: a call with all arguments bound, and what it is."""

    run: Callable[[], object]
    op: Op
    body: Tape | None = None
    """What it repeats, where it is a loop."""


@attrs.define(eq=False)
class Span:
    """The part of a tape that one region recorded; its entries can be replaced."""

    label: str
    entries: tuple[Entry, ...] = ()


def _flat(
    parts: Sequence[Entry | Span], changes: Mapping[Span, tuple[Entry, ...]]
) -> Iterator[Entry]:
    for part in parts:
        if isinstance(part, Span):
            yield from changes.get(part, part.entries)
        else:
            yield part


class Tape:
    """A recorded piece of work, replayed as often as wanted, and the holds on the pools whose
    blocks its entries write."""

    def __init__(self, parts: Sequence[Entry | Span], holds: Sequence[Hold]) -> None:
        self._parts = tuple(parts)
        self._holds = tuple(holds)
        self._entries = tuple(_flat(self._parts, {}))
        self._calls: list[Callable[[], object]] | None = None
        self.make()

    @property
    def ops(self) -> list[Op]:
        """The operations of one replay, in order."""
        return [entry.op for entry in self._entries]

    def __len__(self) -> int:
        return len(self._entries) + sum(map(len, self._bodies))

    @property
    def _bodies(self) -> list[Tape]:
        return [entry.body for entry in self._entries if entry.body is not None]

    def make(self) -> None:
        """Make what ``replay`` runs. Idempotent."""
        for body in self._bodies:
            body.make()
        self._calls = [entry.run for entry in self._entries]

    def drop(self) -> None:
        """Drop what ``replay`` runs, until ``make``; the entries stay."""
        for body in self._bodies:
            body.drop()
        self._calls = None

    def replay(self) -> None:
        """Run every entry once, in order, in the memory of the capture.

        Modes of the calling thread (autocast, gradient recording, dispatch modes) play no part.
        An operation that raises, for example for an index out of range, stops the replay.
        """
        if self._calls is None:
            raise StateError("what this tape replays was dropped")
        calls = iter(self._calls)
        with (
            torch._C._InferenceMode(True),
            torch._C._DisableTorchDispatch(),
            torch._C.DisableTorchFunction(),
            torch._C._ExcludeDispatchKeyGuard(_AUTOCAST),
        ):
            try:
                for call in calls:
                    call()
            except Exception as error:
                at = len(self._entries) - operator.length_hint(calls) - 1
                note(error, f"raised in the replay of {self._entries[at].op}")
                raise

    def replace(self, changes: Mapping[Span, Sequence[Entry]]) -> None:
        """Exchange the entries of several spans at once: all of them, or none on an error."""
        new = {span: tuple(entries) for span, entries in changes.items()}
        flat = tuple(_flat(self._parts, new))
        calls = None if self._calls is None else [entry.run for entry in flat]
        for span, entries in new.items():
            span.entries = entries
        self._entries, self._calls = flat, calls  # Last and at once, whenever an interrupt comes.

    def close(self) -> None:
        """Drop the entries and let go of the pools. Idempotent."""
        self._parts, self._entries, self._calls = (), (), []
        for hold in self._holds:
            hold.release()


def check_topology(span: Span, entries: Sequence[Entry]) -> None:
    """Raise UpdateTopologyError unless ``entries`` are the same operations as those of ``span``.

    A device cannot exchange a region's nodes for others either; arguments may differ at will.
    """
    old = [entry.op.name for entry in span.entries]
    new = [entry.op.name for entry in entries]
    if old == new:
        return
    at = next(
        (i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b),
        min(len(old), len(new)),
    )
    was = span.entries[at].op if at < len(old) else "nothing"
    now = entries[at].op if at < len(new) else "nothing"
    raise UpdateTopologyError(
        f"{span.label} recorded {len(old)} operations and now needs {len(new)}: operation {at} was "
        f"{was} and is {now}. Make the region run the same operations for every value, or capture "
        f"another graph for this one."
    )
