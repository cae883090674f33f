"""Which policy captures which phase, with which buckets: the mode configuration.

A configuration can be written as JSON text, as a section of a JSON or YAML file, as command line
flags (including the older flags of existing engines) or in Python; see docs/modes.md. It says what
somebody *chose* apart from what is merely the default, because ``resolve`` may change a default
where the engine cannot use it, but never a choice.
"""

from __future__ import annotations

import argparse
import json
import os
import warnings
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import attrs

from devgraph.api.config.document import parse_mode, read_mode, read_section
from devgraph.api.config.flags import sources_of
from devgraph.api.config.merge import Level, Source, merge
from devgraph.api.config.phase import (
    DEFAULT_POLICY,
    KEYS,
    PHASES,
    DeviceGraphWarning,
    PhaseConfig,
    Setting,
    check,
    path_of,
    phase_config,
    plain,
    unknown_name,
)
from devgraph.api.errors import ConfigError, ConfigTypeError, did_you_mean
from devgraph.api.registry import OTHER_NAMES


def _decode(config: PhaseConfig | str | Mapping[str, Any] | None) -> PhaseConfig:
    return config if isinstance(config, PhaseConfig) else phase_config(config, "decode")


def _prefill(config: PhaseConfig | str | Mapping[str, Any] | None) -> PhaseConfig:
    return config if isinstance(config, PhaseConfig) else phase_config(config, "prefill")


class _Checked(dict[str, Any]):
    """Values of keys that were checked when they were read."""


def _pairs(values: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> tuple[tuple[str, Any], ...]:
    found = dict(values)
    if not isinstance(values, _Checked):
        for key in found:
            if key not in KEYS:
                raise unknown_name("overlay", key, KEYS, what="key")
            found[key] = check(key, found[key], key)
    return tuple((key, found[key]) for key in KEYS if key in found)


@attrs.frozen(kw_only=True)
class Overlay:
    """What holds on one backend only: the keys of each phase that differ there."""

    backend: str
    decode: tuple[tuple[str, Any], ...] = attrs.field(default=(), converter=_pairs)
    prefill: tuple[tuple[str, Any], ...] = attrs.field(default=(), converter=_pairs)

    def of(self, phase: str) -> dict[str, Any]:
        """Return the keys and values for one phase."""
        return dict(self.decode if phase == "decode" else self.prefill)


def _sorted(overlays: Iterable[Overlay]) -> tuple[Overlay, ...]:
    by_name: dict[str, Overlay] = {}
    for one in overlays if isinstance(overlays, (tuple, Iterable)) else (overlays,):
        if not isinstance(one, Overlay):
            raise ConfigTypeError(f"overlays are Overlay objects, got {one!r}")
        if one.backend in by_name:
            raise ConfigError(f"backends.{one.backend}: two overlays for one backend; merge them")
        by_name[one.backend] = one
    return tuple(
        [by_name[name] for name in sorted(by_name) if by_name[name].decode or by_name[name].prefill]
    )


@attrs.frozen(kw_only=True)
class DeviceGraphConfig:
    """The mode configuration of one deployment; the same value is valid on every node of it.

    >>> config = DeviceGraphConfig.from_json('{"decode": "full", "backends": {"cpu": {"prefill": '
    ...                                      '"full"}}}')
    >>> config.prefill.policy, config.for_backend("cpu").prefill.policy
    ('breakable', 'full')

    Two configurations are equal when they have the same values; whether a value was chosen, and
    where, does not count. ``DeviceGraphConfig.from_json(config.to_json()) == config`` always holds,
    and the text keeps apart what was chosen and what is default.
    """

    decode: PhaseConfig = attrs.field(default=None, converter=_decode)
    prefill: PhaseConfig = attrs.field(default=None, converter=_prefill)
    overlays: tuple[Overlay, ...] = attrs.field(default=(), converter=_sorted)
    """The parts for single backends, by name; apply them with ``for_backend``."""

    origins: Mapping[Setting, str] = attrs.field(factory=dict, eq=False, repr=False)
    """Which flag or file each choice came from, where that is known."""

    def __attrs_post_init__(self) -> None:
        for phase in PHASES:
            value = getattr(self, phase)
            if value.policy != DEFAULT_POLICY[phase] and "policy" not in value.explicit:
                chosen = value.with_checked({}, value.explicit | {"policy"})
                object.__setattr__(self, phase, chosen)
        for overlay in self.overlays:  # a contradiction there must show on every node
            self._under(overlay)

    @classmethod
    def from_json(
        cls,
        text: str,
        *,
        backends: Collection[str] | None = None,
        source: str = "mode configuration",
    ) -> DeviceGraphConfig:
        """Read the JSON text of ``--device-graph-mode``.

        ``backends`` are the names registered on this node: a part for another name is kept and
        warned about. ``source`` names the text in messages. Raises ``ConfigError`` with the
        position in broken text or the JSON path of what does not exist, and the nearest name.
        """
        return cls._from_sources([parse_mode(read_mode(text, source), source)], backends)

    @classmethod
    def from_dict(
        cls,
        document: Mapping[str, Any],
        *,
        backends: Collection[str] | None = None,
        source: str = "mode configuration",
    ) -> DeviceGraphConfig:
        """Like ``from_json``, for text that is parsed already."""
        return cls._from_sources([parse_mode(document, source)], backends)

    @classmethod
    def from_file(
        cls, path: str | os.PathLike[str], *, backends: Collection[str] | None = None
    ) -> DeviceGraphConfig:
        """Read the ``device_graph`` section of a JSON or YAML file (YAML needs PyYAML)."""
        read = parse_mode(read_section(path), os.fspath(path), Level.FILE)
        return cls._from_sources([read], backends)

    @classmethod
    def from_args(
        cls,
        namespace: argparse.Namespace,
        *,
        backends: Collection[str] | None = None,
        parser: argparse.ArgumentParser | None = None,
    ) -> DeviceGraphConfig:
        """Read parsed command line arguments, of ``add_cli_args`` or of an engine's own parser.

        From the strongest to the weakest: ``--device-graph-mode``, the flags per phase, older
        flags, ``--device-graph-config``, the defaults; merged per key. Each older flag is warned
        about once with its new spelling, each override with both names. With ``parser``, a value
        that equals the parser's own default counts as not given.
        """
        return cls._from_sources(sources_of(namespace, parser), backends)

    @classmethod
    def _from_sources(
        cls, sources: Iterable[Source], backends: Collection[str] | None
    ) -> DeviceGraphConfig:
        merged = merge(sources)
        values: dict[tuple[str | None, str], dict[str, Any]] = {}
        written: dict[str, str] = {}
        for (backend, phase, key), value in merged.settings.items():
            values.setdefault((backend, phase), {})[key] = value
            if backend is not None:
                written.setdefault(backend, merged.origins[backend, phase, key])
        phases: dict[str, Any] = {}
        for phase in PHASES:
            chosen = values.get((None, phase), {})
            phases[phase] = phase_config(None, phase).with_checked(chosen, frozenset(chosen))
        overlays = [
            Overlay(
                backend=name,
                **{phase: _Checked(values.get((name, phase), {})) for phase in PHASES},
            )
            for name in written
        ]
        config = cls(**phases, overlays=overlays, origins=merged.origins)
        unknown = [] if backends is None else sorted(written.keys() - set(backends))
        messages = [
            f"{written[name]}: no backend {name!r} is registered on this node, so its part of the "
            f"configuration is not used here. {did_you_mean(name, backends or (), OTHER_NAMES)}"
            for name in unknown
        ]
        for message in (*merged.notes, *messages):
            warnings.warn(message, DeviceGraphWarning, stacklevel=3)
        return config

    @property
    def backends(self) -> tuple[str, ...]:
        """The names of the backends that have a part of their own."""
        return tuple(one.backend for one in self.overlays)

    def phase(self, name: str) -> PhaseConfig:
        """Return the configuration of ``"decode"`` or ``"prefill"``."""
        if name not in PHASES:
            raise unknown_name("phase", name, PHASES, what="phase")
        return self.decode if name == "decode" else self.prefill

    def for_backend(self, name: str) -> DeviceGraphConfig:
        """Return what holds on one backend: its own part laid over the general part, per key."""
        if not isinstance(name, str):
            raise ConfigTypeError(f"a backend is named by a string, got {name!r}")
        phases = {phase: getattr(self, phase) for phase in PHASES}
        origins = {one: origin for one, origin in self.origins.items() if one[0] is None}
        for overlay in self.overlays:
            if overlay.backend == name:
                phases = self._under(overlay)
                for phase in PHASES:
                    for key in overlay.of(phase):
                        source = self.origins.get((name, phase, key), "")
                        place = path_of((name, phase, key))
                        origins[None, phase, key] = f"{source} {place}".strip()
        return DeviceGraphConfig(**phases, origins=origins)

    def _under(self, overlay: Overlay) -> dict[str, Any]:
        """Return each phase with the overlay's part laid over it."""
        phases: dict[str, Any] = {}
        for phase in PHASES:
            base, changes = self.phase(phase), overlay.of(phase)
            try:
                phases[phase] = base.with_checked(changes, base.explicit | set(changes))
            except ConfigError as error:
                raise ConfigError(f"backends.{overlay.backend}.{phase}: {error}") from error
        return phases

    def to_dict(self, *, everything: bool = False) -> dict[str, Any]:
        """Return the choices in the form of the JSON text; with ``everything``, all keys."""
        found: dict[str, Any] = {}
        for phase in PHASES:
            values = self.phase(phase).to_dict(everything=everything)
            if values:
                found[phase] = _short(values)
        if self.overlays:
            found["backends"] = {
                one.backend: {
                    phase: _short({key: plain(value) for key, value in one.of(phase).items()})
                    for phase in PHASES
                    if one.of(phase)
                }
                for one in self.overlays
            }
        return found

    def to_json(self, *, everything: bool = False) -> str:
        """Return the text for ``--device-graph-mode`` that makes the same choices.

        Defaults that nobody chose are left out, so that they stay defaults where the text is
        read; ``everything`` writes them too, for people and digests.
        """
        return json.dumps(self.to_dict(everything=everything))


def _short(values: dict[str, Any]) -> Any:
    return values["policy"] if list(values) == ["policy"] else values
