"""The tape: what a CPU graph replays, one flat list of calls with everything bound beforehand."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence

import attrs
import torch

from devgraph.api.errors import UpdateTopologyError
from devgraph.api.source import SourceLine
from devgraph.cpu.memory import BlockPool

__all__ = ["Entry", "Op", "Span", "Tape", "check_topology"]

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


class Span:
    """The part of a tape that one region recorded; its entries can be replaced."""

    __slots__ = ("entries", "label")

    def __init__(self, label: str) -> None:
        self.label = label
        self.entries: tuple[Entry, ...] = ()

    def __repr__(self) -> str:
        return f"<span {self.label!r} of {len(self.entries)} entries>"


class Tape:
    """A recorded piece of work, replayed as often as wanted.

    Args:
        parts: entries, and spans between them, in order.
        pools: the pools whose blocks the entries write; their memory is kept until ``close``.
    """

    def __init__(self, parts: Sequence[Entry | Span], pools: Sequence[BlockPool]) -> None:
        self._parts = tuple(parts)
        self._pools = tuple(pools)
        for pool in self._pools:
            pool.retain()
        self._closed = False
        self._entries: tuple[Entry, ...] = ()
        self._calls: list[Callable[[], object]] = []
        self._flatten({})

    @property
    def ops(self) -> list[Op]:
        """The operations of one replay, in order."""
        return [entry.op for entry in self._entries]

    @property
    def spans(self) -> list[Span]:
        """The spans in order."""
        return [part for part in self._parts if isinstance(part, Span)]

    def __len__(self) -> int:
        return len(self._entries)

    def replay(self) -> None:
        """Run every entry once, in order, in the memory of the capture.

        Modes of the calling thread (autocast, gradient recording, dispatch modes) play no part.
        An operation that raises, for example for an index out of range, stops the replay.
        """
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
                self._name_operation(error, len(self._calls) - operator.length_hint(calls) - 1)
                raise

    def replace(self, changes: Mapping[Span, Sequence[Entry]]) -> None:
        """Exchange the entries of several spans at once: all of them, or none on an error."""
        unknown = [span for span in changes if span not in self._parts]
        if unknown:
            raise KeyError(f"{unknown[0]!r} is not a span of this tape")
        new = {span: tuple(entries) for span, entries in changes.items()}
        self._flatten(new)
        for span, entries in new.items():
            span.entries = entries

    def close(self) -> None:
        """Drop the entries and let go of the pools. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._parts, self._entries, self._calls = (), (), []
        for pool in self._pools:
            pool.release()

    def _flatten(self, changes: Mapping[Span, tuple[Entry, ...]]) -> None:
        entries: list[Entry] = []
        for part in self._parts:
            if isinstance(part, Span):
                entries.extend(changes.get(part, part.entries))
            else:
                entries.append(part)
        self._entries = tuple(entries)
        self._calls = [entry.run for entry in entries]

    def _name_operation(self, error: Exception, index: int) -> None:
        if hasattr(error, "add_note"):  # Python 3.11 and newer
            error.add_note(f"raised in the replay of {self._entries[index].op}")


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
