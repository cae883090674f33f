"""Merge the settings of several sources per key, and note every overridden value."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import attrs

from devgraph.api.config.phase import PHASES, Setting, path_of, plain


class Level(enum.IntEnum):
    """The precedence of a source. Within a level, later sources take precedence."""

    PYPROJECT = 0
    ENVIRONMENT = 1
    FILE = 2
    OLDER = 3
    SHORTHAND = 4
    JSON = 5


@attrs.frozen(kw_only=True)
class Source:
    """The checked settings of one flag, file or other source, and notes for the user."""

    level: Level
    name: str
    settings: Mapping[Setting, Any]
    notes: tuple[str, ...] = ()


class _Entry(NamedTuple):
    value: Any
    level: Level
    name: str

    def __str__(self) -> str:
        return f"{plain(self.value)!r} from {self.name}"


_State = dict[Setting, _Entry]


def merge(sources: Iterable[Source]) -> Source:
    """Merge sources, given in ascending precedence, into a single source.

    The part for one backend overrides the general part of the same source and of weaker sources.
    The general part overrides the backend-specific parts of weaker sources. If ``buckets`` and
    ``max_bs`` contradict each other, the stronger source decides. Within one source, ``max_bs``
    removes larger buckets, unless the buckets are in the part for a backend.
    """
    state: _State = {}
    entries: list[tuple[Setting, _Entry]] = []
    notes: list[str] = []
    backends: dict[str, None] = {}
    for source in sources:
        notes += source.notes
        for setting, value in source.settings.items():
            entry = _Entry(value, source.level, source.name)
            entries.append((setting, entry))
            state[setting] = entry
            backend, phase, key = setting
            if backend is not None:
                backends[backend] = None
                continue
            for name in backends:
                refining = state.get((name, phase, key))
                if refining is not None and refining.level < entry.level:
                    del state[name, phase, key]
    notes += _overrides(entries, state)
    for scope in (None, *sorted(backends)):
        for phase in PHASES:
            _reconcile(scope, phase, state, notes)
    return Source(
        level=Level.JSON,
        name="",
        settings={setting: entry.value for setting, entry in state.items()},
        notes=tuple(notes),
    )


def _overrides(entries: Iterable[tuple[Setting, _Entry]], state: _State) -> list[str]:
    """Return a note for every overridden value, with the value that replaces it."""
    notes: list[str] = []
    for setting, entry in entries:
        winner = state.get(setting) or state.get((None, *setting[1:]))
        if winner and winner.value != entry.value:
            notes.append(f"{path_of(setting)}: {winner} overrides {entry}")
    for setting, entry in state.items():
        general = state.get((None, *setting[1:]))
        # Within one source, the part for a backend refines the general part on purpose.
        if general and general.name != entry.name and general.value != entry.value:
            notes.append(f"{path_of(setting)}: on this backend {entry} overrides {general}")
    return notes


def _reconcile(backend: str | None, phase: str, state: _State, notes: list[str]) -> None:
    """Adapt ``buckets`` or ``max_bs`` if a bucket exceeds ``max_bs``.

    The stronger source takes precedence; within one source, the part for the backend does.
    """
    own_sizes, own_largest = (backend, phase, "buckets"), (backend, phase, "max_bs")
    sizes = state.get(own_sizes) or state.get((None, phase, "buckets"))
    largest = state.get(own_largest) or state.get((None, phase, "max_bs"))
    if not sizes or not largest or not sizes.value or largest.value is None:
        return
    over = [size for size in sizes.value if size > largest.value]
    if not over:
        return
    refines = backend is not None
    strength_of_largest = (largest.level, refines and own_largest in state)
    if (sizes.level, refines and own_sizes in state) > strength_of_largest:
        notes.append(
            f"{path_of(own_largest)}: the bucket {over[-1]} from {sizes.name} overrides {largest}"
        )
        state[own_largest] = sizes._replace(value=over[-1])
        return
    notes.append(
        f"{path_of(own_sizes)}: omitted {', '.join(map(str, over))} from {sizes.name}, because "
        f"max_bs is {largest}"
    )
    kept = tuple(size for size in sizes.value if size <= largest.value)
    state[own_sizes] = sizes._replace(value=kept or (largest.value,))
