"""Putting together what several sources say about the same settings.

Sources are applied from the weakest to the strongest and merged per key. Whatever loses is named
in a note together with what beat it, so that nothing which somebody wrote disappears in silence.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from devgraph.api.config.values import DEFAULT_POLICY, PHASES, Setting

__all__ = ["Level", "Merged", "Source", "merge"]


class Level(enum.IntEnum):
    """How strong a source is; between equals the later one wins."""

    FILE = 0
    OLDER = 1
    SHORTHAND = 2
    JSON = 3


@attrs.frozen(kw_only=True)
class Source:
    """What one place (one flag, one file) says."""

    level: Level
    name: str
    settings: Mapping[Setting, Any]


@attrs.frozen(kw_only=True)
class Merged:
    """The settings that hold, the name of the source of each, and what was overridden."""

    settings: dict[Setting, Any]
    origins: dict[Setting, str]
    notes: tuple[str, ...]


@attrs.frozen
class _Entry:
    value: Any
    level: Level
    name: str

    def __str__(self) -> str:
        return f"{_shown(self.value)} from {self.name}"


def merge(sources: Iterable[Source]) -> Merged:
    """Merge sources, which must come in ascending order of strength.

    A part for one backend beats the general part of the same source and of weaker ones; a general
    part beats the parts for single backends of weaker sources. ``buckets`` and ``max_bs`` that
    contradict each other across sources are reconciled in favour of the stronger source.
    """
    state: dict[Setting, _Entry] = {}
    said: list[tuple[Setting, _Entry]] = []
    for source in sources:
        for setting, value in source.settings.items():
            entry = _Entry(value, source.level, source.name)
            said.append((setting, entry))
            _apply(setting, entry, state)
    notes = _overrides(said, state)
    scopes = [None, *sorted({one.backend for one in state if one.backend is not None})]
    for scope in scopes:
        for phase in PHASES:
            _reconcile(scope, phase, state, notes)
    for phase in PHASES:
        _report_unused(phase, state, notes)
    return Merged(
        settings={setting: entry.value for setting, entry in state.items()},
        origins={setting: entry.name for setting, entry in state.items()},
        notes=tuple(notes),
    )


def _apply(setting: Setting, entry: _Entry, state: dict[Setting, _Entry]) -> None:
    if setting.backend is None:
        for other in [one for one in state if _refines(one, setting)]:
            if state[other].level < entry.level:
                del state[other]
    state[setting] = entry


def _overrides(
    said: Iterable[tuple[Setting, _Entry]], state: Mapping[Setting, _Entry]
) -> list[str]:
    """Name every value that does not hold where it was written for, with what holds instead."""
    notes: list[str] = []
    for setting, entry in said:
        winner = _effective(setting, state)
        if winner and winner.value != entry.value:
            notes.append(f"{setting}: {winner} overrides {entry}")
    for setting, entry in state.items():
        general = state.get(setting._replace(backend=None))
        if setting.backend is None or general is None or general.name == entry.name:
            continue  # within one source, the part for a backend is meant to refine the rest
        if general.value != entry.value:
            notes.append(f"{setting}: on this backend {entry} overrides {general}")
    return notes


def _refines(one: Setting, general: Setting) -> bool:
    return one.backend is not None and one._replace(backend=None) == general


def _reconcile(
    backend: str | None, phase: str, state: dict[Setting, _Entry], notes: list[str]
) -> None:
    """Let ``buckets`` and ``max_bs`` of different places agree: the stronger source is right, and
    in one source the part for the backend."""

    def own(key: str) -> bool:
        return backend is not None and Setting(backend, phase, key) in state

    sizes = _effective(Setting(backend, phase, "buckets"), state)
    largest = _effective(Setting(backend, phase, "max_bs"), state)
    if not sizes or not largest or not sizes.value or largest.value is None:
        return
    over = [size for size in sizes.value if size > largest.value]
    if not over:
        return
    if (sizes.level, own("buckets")) > (largest.level, own("max_bs")):
        place = Setting(backend, phase, "max_bs")
        notes.append(f"{place}: the bucket {over[-1]} from {sizes.name} overrides {largest}")
        state[place] = attrs.evolve(sizes, value=over[-1])
        return
    kept = tuple(size for size in sizes.value if size <= largest.value) or (largest.value,)
    place = Setting(backend, phase, "buckets")
    notes.append(
        f"{place}: {', '.join(map(str, over))} from {sizes.name} left out, because max_bs is "
        f"{largest}"
    )
    state[place] = attrs.evolve(sizes, value=kept)


def _effective(setting: Setting, state: Mapping[Setting, _Entry]) -> _Entry | None:
    return state.get(setting) or state.get(setting._replace(backend=None))


def _report_unused(phase: str, state: Mapping[Setting, _Entry], notes: list[str]) -> None:
    """Say so when values were given for a phase that is switched off, or for another policy."""
    if any(one.backend is not None and one.phase == phase for one in state):
        return  # a backend's own part may well use them
    others = {one.key: entry for one, entry in state.items() if one.phase == phase}
    policy = others.pop("policy", None)
    value = policy.value if policy else DEFAULT_POLICY[phase]
    if value == "disabled" and others:
        unused = ", ".join(f"{key}={entry}" for key, entry in others.items())
        notes.append(f"{phase}: {unused} has no effect, because the policy is {policy}")
        return
    compiler = others.get("compiler")
    # Older flags set one compiler for both phases, whatever their policy.
    if compiler and value != "piecewise" and compiler.level != Level.OLDER:
        notes.append(f"{phase}.compiler: {compiler} is used by 'piecewise' only, not by {value!r}")


def _shown(value: Any) -> str:
    return repr(list(value)) if isinstance(value, tuple) else repr(value)
