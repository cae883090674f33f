"""Which policy captures which phase, with which buckets: the mode configuration.

A configuration can be written as JSON text, as a section of a JSON or YAML file, as command line
flags (including the older flags of existing engines) or in Python; see docs/modes.md. It says what
somebody *chose* apart from what is merely the default, because ``resolve`` may change a default
where the engine cannot use it, but never a choice.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from devgraph.api.config.document import parse_mode, read_mode
from devgraph.api.config.flags import sources_of
from devgraph.api.config.merge import Source, merge
from devgraph.api.config.phase import (
    DEFAULT_POLICY,
    KEYS,
    PHASES,
    DeviceGraphWarning,
    PhaseConfig,
    check_names,
    phase_config,
    plain,
)
from devgraph.api.errors import ConfigError, ConfigTypeError, did_you_mean
from devgraph.api.registry import BUILT_IN, OTHER_NAMES, names


def _decode(config: PhaseConfig | str | Mapping[str, Any] | None) -> PhaseConfig:
    return config if isinstance(config, PhaseConfig) else phase_config(config, "decode")


def _prefill(config: PhaseConfig | str | Mapping[str, Any] | None) -> PhaseConfig:
    return config if isinstance(config, PhaseConfig) else phase_config(config, "prefill")


Overlays = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""Values by backend, phase and key, each in the form that ``PhaseConfig`` stores."""


def _overlays(given: Mapping[str, Mapping[str, Any]] | Source) -> Overlays:
    """Return what ``given`` says of single backends, checked, in the order of their names."""
    source = given if isinstance(given, Source) else parse_mode({"backends": given}, "overlays")
    settings = source.settings
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for name in sorted({backend for backend, _, _ in settings if backend is not None}):
        for phase in PHASES:
            places = {key: (name, phase, key) for key in KEYS if (name, phase, key) in settings}
            if places:
                values = {key: settings[place] for key, place in places.items()}
                found.setdefault(name, {})[phase] = values
    return found


@attrs.frozen(kw_only=True)
class DeviceGraphConfig:
    """The mode configuration of one deployment; the same value is valid on every node of it.

    >>> config = DeviceGraphConfig.from_json('{"decode": "full", "backends": {"cpu": {"prefill": '
    ...                                      '"full"}}}')
    >>> config.prefill.policy, config.for_backend("cpu").prefill.policy
    ('breakable', 'full')

    Two configurations are equal when they have the same values; whether a value was chosen does
    not count. ``DeviceGraphConfig.from_json(config.to_json()) == config`` always holds,
    and the text keeps apart what was chosen and what is default.
    """

    decode: PhaseConfig = attrs.field(default=None, converter=_decode)
    prefill: PhaseConfig = attrs.field(default=None, converter=_prefill)
    overlays: Overlays = attrs.field(factory=dict, converter=_overlays, hash=False)
    """The parts for single backends, in the form of ``backends`` in the JSON text; apply them with
    ``for_backend``."""

    def __attrs_post_init__(self) -> None:
        for phase in PHASES:
            value = getattr(self, phase)
            if value.policy != DEFAULT_POLICY[phase] and "policy" not in value.explicit:
                chosen = value.with_checked({}, value.explicit | {"policy"})
                object.__setattr__(self, phase, chosen)
        for backend in self.overlays:  # a contradiction there must show on every node
            self._under(backend)

    @classmethod
    def from_json(cls, text: str, *, source: str = "mode configuration") -> DeviceGraphConfig:
        """Read the JSON text of ``--device-graph-mode``.

        A part for a backend that is not registered here is kept and warned about. ``source`` names
        the text in messages. Raises ``ConfigError`` with the position in broken text or the JSON
        path of what does not exist, and the nearest name.
        """
        return cls._from_sources([parse_mode(read_mode(text, source), source)])

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> DeviceGraphConfig:
        """Like ``from_json``, for text that is parsed already."""
        return cls._from_sources([parse_mode(document, "mode configuration")])

    @classmethod
    def from_args(
        cls,
        namespace: argparse.Namespace,
        *,
        parser: argparse.ArgumentParser | None = None,
    ) -> DeviceGraphConfig:
        """Read parsed command line arguments, of ``add_cli_args`` or of an engine's own parser.

        From the strongest to the weakest: ``--device-graph-mode``, the flags per phase, older
        flags, ``--device-graph-config``, the defaults; merged per key. Each older flag is warned
        about once with its new spelling, each override with both names. With ``parser``, a value
        that equals the parser's own default counts as not given.
        """
        return cls._from_sources(sources_of(namespace, parser))

    @classmethod
    def _from_sources(cls, sources: Iterable[Source]) -> DeviceGraphConfig:
        merged = merge(sources)
        phases: dict[str, Any] = {}
        for phase in PHASES:
            places = {key: (None, phase, key) for key in KEYS}
            chosen = {k: merged.settings[at] for k, at in places.items() if at in merged.settings}
            phases[phase] = phase_config(None, phase).with_checked(chosen, frozenset(chosen))
        config = cls(**phases, overlays=merged)
        unknown = set(config.backends).difference(BUILT_IN)
        known = names() if unknown else ()  # installed packages may have more, and take long to ask
        messages = [
            f"no backend {name!r} is registered on this node, so its part of the "
            f"configuration is not used here. {did_you_mean(name, known, OTHER_NAMES)}"
            for name in sorted(unknown.difference(known))
        ]
        for message in (*merged.notes, *messages):
            warnings.warn(message, DeviceGraphWarning, stacklevel=3)
        return config

    @property
    def backends(self) -> tuple[str, ...]:
        """The names of the backends that have a part of their own."""
        return tuple(self.overlays)

    def phase(self, name: str) -> PhaseConfig:
        """Return the configuration of ``"decode"`` or ``"prefill"``."""
        check_names("phase", [name], PHASES, what="phase")
        return self.decode if name == "decode" else self.prefill

    def for_backend(self, name: str) -> DeviceGraphConfig:
        """Return what holds on one backend: its own part laid over the general part, per key."""
        if not isinstance(name, str):
            raise ConfigTypeError(f"a backend is named by a string, got {name!r}")
        return DeviceGraphConfig(**self._under(name))

    def _under(self, backend: str) -> dict[str, Any]:
        """Return each phase with the backend's part, if there is one, laid over it."""
        phases: dict[str, Any] = {phase: self.phase(phase) for phase in PHASES}
        for phase, changes in self.overlays.get(backend, {}).items():
            explicit = phases[phase].explicit | set(changes)
            try:
                phases[phase] = phases[phase].with_checked(changes, explicit)
            except ConfigError as error:
                raise ConfigError(f"backends.{backend}.{phase}: {error}") from error
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
                backend: {
                    phase: _short({key: plain(value) for key, value in values.items()})
                    for phase, values in part.items()
                }
                for backend, part in self.overlays.items()
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
