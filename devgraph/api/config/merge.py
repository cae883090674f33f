"""Putting together what several sources say about the same settings.

Sources are applied from the weakest to the strongest and merged per key. Whatever loses is named
in a note together with what beat it, so that nothing which somebody wrote disappears in silence.
"""

from __future__ import annotations

import enum
from collections.abc import Container, Iterable, Mapping
from typing import Any, NamedTuple

import attrs

from devgraph.api.config.phase import KEYS, PHASES, Setting, path_of, phase_config, plain
from devgraph.api.config.unused import unused


class Level(enum.IntEnum):
    """How strong a source is; between equals the later one wins."""

    FILE = 0
    OLDER = 1
    SHORTHAND = 2
    JSON = 3


@attrs.frozen(kw_only=True)
class Source:
    """What one place (one flag, one file) says, checked, and what there is to say about it."""

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
    """Merge sources, which must come in ascending order of strength, into one.

    A part for one backend beats the general part of the same source and of weaker ones; a general
    part beats the parts for single backends of weaker sources. ``buckets`` and ``max_bs`` that
    contradict each other across sources are reconciled in favour of the stronger source.
    """
    state: _State = {}
    said: list[tuple[Setting, _Entry]] = []
    notes: list[str] = []
    backends: dict[str, None] = {}
    for source in sources:
        notes += source.notes
        for setting, value in source.settings.items():
            entry = _Entry(value, source.level, source.name)
            said.append((setting, entry))
            state[setting] = entry
            backend, phase, key = setting
            if backend is not None:
                backends[backend] = None
                continue
            for name in backends:
                refining = state.get((name, phase, key))
                if refining is not None and refining.level < entry.level:
                    del state[name, phase, key]
    notes += _overrides(said, state)
    scopes = (None, *sorted(backends))
    spent = {_reconcile(scope, phase, state, notes) for scope in scopes for phase in PHASES}
    for phase in PHASES:
        _report_unused(phase, state, spent, notes)
    return Source(
        level=Level.JSON,
        name="",
        settings={setting: entry.value for setting, entry in state.items()},
        notes=tuple(notes),
    )


def _overrides(said: Iterable[tuple[Setting, _Entry]], state: _State) -> list[str]:
    """Name every value that does not hold where it was written for, with what holds instead."""
    notes: list[str] = []
    for setting, entry in said:
        winner = state.get(setting) or state.get((None, *setting[1:]))
        if winner and winner.value != entry.value:
            notes.append(f"{path_of(setting)}: {winner} overrides {entry}")
    for setting, entry in state.items():
        general = state.get((None, *setting[1:]))
        # Within one source, the part for a backend is meant to refine the rest.
        if general and general.name != entry.name and general.value != entry.value:
            notes.append(f"{path_of(setting)}: on this backend {entry} overrides {general}")
    return notes


def _reconcile(backend: str | None, phase: str, state: _State, notes: list[str]) -> Setting | None:
    """Let ``buckets`` and ``max_bs`` of different places agree: the stronger source is right, and
    in one source the part for the backend. Return the maximum that left buckets out."""
    own_sizes, own_largest = (backend, phase, "buckets"), (backend, phase, "max_bs")
    sizes = state.get(own_sizes) or state.get((None, phase, "buckets"))
    largest = state.get(own_largest) or state.get((None, phase, "max_bs"))
    if not sizes or not largest or not sizes.value or largest.value is None:
        return None
    over = [size for size in sizes.value if size > largest.value]
    if not over:
        return None
    refines = backend is not None
    if (sizes.level, refines and own_sizes in state) > (
        largest.level,
        refines and own_largest in state,
    ):
        notes.append(
            f"{path_of(own_largest)}: the bucket {over[-1]} from {sizes.name} overrides {largest}"
        )
        state[own_largest] = sizes._replace(value=over[-1])
        return None
    notes.append(
        f"{path_of(own_sizes)}: {', '.join(map(str, over))} from {sizes.name} left out, because "
        f"max_bs is {largest}"
    )
    kept = tuple(size for size in sizes.value if size <= largest.value)
    state[own_sizes] = sizes._replace(value=kept or (largest.value,))
    return own_largest if own_largest in state else (None, phase, "max_bs")


def _report_unused(
    phase: str, state: _State, spent: Container[Setting | None], notes: list[str]
) -> None:
    """Say so when a value has no effect on any backend that it holds for; ``spent`` had one."""
    backends = [None, *sorted({one for one, where, _ in state if one and where == phase})]
    idle: dict[Setting, str] = {}
    read: set[Setting] = set()
    for backend in backends:
        places: dict[str, Setting] = {
            key: (one, phase, key)
            for one in (None, backend)
            for key in KEYS
            if (one, phase, key) in state
        }
        values = {key: state[place].value for key, place in places.items()}
        told = unused(phase, phase_config(None, phase).with_checked(values, frozenset(values)))
        for key, place in places.items():
            if key in told:
                idle.setdefault(place, told[key])
            else:
                read.add(place)
    for place, because in idle.items():
        # Older flags set one compiler for both phases, whatever their policy.
        both = (place[2], state[place].level) == ("compiler", Level.OLDER)
        if place not in read and place not in spent and not both:
            notes.append(f"{path_of(place)}: {state[place]} has no effect: {because}")
