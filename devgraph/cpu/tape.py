"""The tape of a CPU graph: a flat list of pre-bound calls."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence

import attrs
import torch

from devgraph.api.errors import StateError, UpdateTopologyError, note
from devgraph.api.marks.source import SourceLine
from devgraph.cpu.memory import Hold

# Autocast must be off in a replay, because recorded operations include its casts.
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


@attrs.frozen(kw_only=True)
class Op:
    """The name of a recorded operation and the user's line that called it."""

    name: str
    line: SourceLine

    def __str__(self) -> str:
        return f"{self.name} at {self.line}"


@attrs.frozen
class Entry:
    """A pre-bound call of a tape, and the operation that it runs."""

    run: Callable[[], object]
    op: Op
    body: Tape | None = None
    """The repeated tape, if the call is a loop."""


@attrs.define(eq=False)
class Span:
    """The part of a tape that belongs to a region; its entries can be replaced."""

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
    """Recorded work, with claims on the memory that the work uses."""

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
        """Bind the calls of ``replay``. Idempotent."""
        for body in self._bodies:
            body.make()
        self._calls = [entry.run for entry in self._entries]

    def drop(self) -> None:
        """Drop the calls of ``replay`` until ``make``, but keep the entries."""
        for body in self._bodies:
            body.drop()
        self._calls = None

    def replay(self) -> None:
        """Run every entry once, in order. Modes of the calling thread have no effect."""
        if self._calls is None:
            raise StateError("the launch target of this tape was dropped")
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
        """Replace the entries of all given spans, or of none if there is an error."""
        new = {span: tuple(entries) for span, entries in changes.items()}
        flat = tuple(_flat(self._parts, new))
        calls = None if self._calls is None else [entry.run for entry in flat]
        for span, entries in new.items():
            span.entries = entries
        self._entries, self._calls = flat, calls  # Assign last, because the lines above may raise.

    def close(self) -> None:
        """Drop the entries and the claims on the pools. Idempotent."""
        self._parts, self._entries, self._calls = (), (), []
        for hold in self._holds:
            hold.release()


def check_topology(span: Span, entries: Sequence[Entry]) -> None:
    """Raise UpdateTopologyError unless ``entries`` run the same operations as ``span``, in order.

    Arguments may differ. Devices have this restriction too, because they cannot replace nodes.
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
        f"{span.label} recorded {len(old)} operations, but now needs {len(new)}: operation {at} "
        f"was {was} and is now {now}. Make the region run the same operations for every value, or "
        f"capture another graph for this value."
    )
