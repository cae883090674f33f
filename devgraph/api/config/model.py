"""The mode configuration: the policy and the buckets of each phase.

A configuration is JSON text, a section of a JSON or YAML file, command line flags (including the
older flags of existing engines) or a Python value; see docs/modes.md. It distinguishes explicit
choices from defaults, because ``resolve`` may change a default that the engine cannot use, but
never an explicit choice.
"""

from __future__ import annotations

import argparse
import json
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
    PhaseConfig,
    check_names,
    phase_config,
    plain,
)
from devgraph.api.config.phase import DeviceGraphWarning as DeviceGraphWarning
from devgraph.api.errors import ConfigError, ConfigTypeError, did_you_mean
from devgraph.api.marks.source import warn
from devgraph.api.registry import BUILT_IN, OTHER_NAMES, names


def _decode(config: PhaseConfig | str | Mapping[str, Any] | None) -> PhaseConfig:
    return phase_config(config, "decode")


def _prefill(config: PhaseConfig | str | Mapping[str, Any] | None) -> PhaseConfig:
    return phase_config(config, "prefill")


Overlays = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""Values by backend, phase and key, each in the form that ``PhaseConfig`` stores."""


def _overlays(given: Mapping[str, Mapping[str, Any]] | Source) -> Overlays:
    """Check the backend-specific parts, and return them in alphabetical order of backends."""
    source = given if isinstance(given, Source) else parse_mode({"backends": given}, "overlays")
    settings = source.settings
    overlays: dict[str, dict[str, dict[str, Any]]] = {}
    for name in sorted({backend for backend, _, _ in settings if backend is not None}):
        for phase in PHASES:
            places = {key: (name, phase, key) for key in KEYS if (name, phase, key) in settings}
            if places:
                values = {key: settings[place] for key, place in places.items()}
                overlays.setdefault(name, {})[phase] = values
    return overlays


@attrs.frozen(kw_only=True)
class DeviceGraphConfig:
    """The mode configuration of one deployment, valid on every node.

    >>> config = DeviceGraphConfig.from_json('{"decode": "full", "backends": {"cpu": {"prefill": '
    ...                                      '"full"}}}')
    >>> config.prefill.policy, config.for_backend("cpu").prefill.policy
    ('breakable', 'full')

    Two configurations are equal if their values are equal, whether chosen or default.
    ``DeviceGraphConfig.from_json(config.to_json())`` equals ``config`` and has the same explicit
    choices.
    """

    decode: PhaseConfig = attrs.field(default=None, converter=_decode)
    prefill: PhaseConfig = attrs.field(default=None, converter=_prefill)
    overlays: Overlays = attrs.field(factory=dict, converter=_overlays, hash=False)
    """The backend-specific parts, in the form of ``backends`` in the JSON text.

    ``for_backend`` applies them."""

    def __attrs_post_init__(self) -> None:
        for phase in PHASES:
            value = getattr(self, phase)
            if value.policy != DEFAULT_POLICY[phase] and "policy" not in value.explicit:
                chosen = value.with_checked({}, value.explicit | {"policy"})
                object.__setattr__(self, phase, value := chosen)
            parts = {name: part[phase] for name, part in self.overlays.items() if phase in part}
            if parts != value.overlays:
                object.__setattr__(self, phase, attrs.evolve(value, overlays=parts))
        for backend in self.overlays:  # Every node must report a contradiction.
            self._under(backend)

    @classmethod
    def from_json(cls, text: str, *, source: str = "mode configuration") -> DeviceGraphConfig:
        """Read the JSON text of ``--device-graph-mode``.

        The part for a backend that is not registered here is kept, with a warning.

        Args:
            text: the JSON text.
            source: the name of the text in messages.

        Raises:
            ConfigError: the text is invalid. The message names the position of a syntax error, or
                the JSON path of an unknown name and the nearest existing name.
        """
        return cls._from_sources([parse_mode(read_mode(text, source), source)])

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> DeviceGraphConfig:
        """Read a mode from parsed JSON; see ``from_json``."""
        return cls._from_sources([parse_mode(document, "mode configuration")])

    @classmethod
    def from_args(
        cls, namespace: argparse.Namespace, *, parser: argparse.ArgumentParser | None = None
    ) -> DeviceGraphConfig:
        """Read the arguments that a parser returned; see ``add_cli_args``.

        Sources are merged per key. In descending precedence they are ``--device-graph-mode``, the
        flags per phase, older flags, ``--device-graph-config``, the environment variable
        ``DEVGRAPH_MODE``, ``[tool.devgraph]`` in the nearest ``pyproject.toml``, and the defaults.
        A warning names the new spelling of each older flag, and both sources of each override.

        Args:
            namespace: the parsed arguments.
            parser: the parser. If passed, arguments that equal its defaults are ignored, and a
                wrong value ends the program with a usage message.

        Raises:
            ConfigError: a value is wrong, and ``parser`` is None.
        """
        try:
            return cls._from_sources(sources_of(namespace, parser))
        except ConfigError as error:
            if parser is None:
                raise
            parser.error(str(error))

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
        known = names() if unknown else ()  # entry points are slow to read
        messages = [
            f"no backend {name!r} is registered on this node, so its part of the "
            f"configuration has no effect here. {did_you_mean(name, known, OTHER_NAMES)}"
            for name in sorted(unknown.difference(known))
        ]
        for message in (*merged.notes, *messages):
            warn(message)
        return config

    @property
    def backends(self) -> tuple[str, ...]:
        """Names of the backends with a backend-specific part."""
        return tuple(self.overlays)

    def phase(self, name: str) -> PhaseConfig:
        """Return the configuration of ``"decode"`` or ``"prefill"``."""
        check_names("phase", [name], PHASES, what="phase")
        return self.decode if name == "decode" else self.prefill

    def for_backend(self, name: str) -> DeviceGraphConfig:
        """Return the configuration with the part for one backend merged into the general part."""
        if not isinstance(name, str):
            raise ConfigTypeError(f"the name of a backend must be a string, got {name!r}")
        return DeviceGraphConfig(**self._under(name))

    def _under(self, backend: str) -> dict[str, Any]:
        """Return both phases as configured for ``backend``."""
        phases: dict[str, Any] = {}
        for phase in PHASES:
            try:
                phases[phase] = self.phase(phase).for_backend(backend)
            except ConfigError as error:
                raise ConfigError(f"backends.{backend}.{phase}: {error}") from error
        return phases

    def to_dict(self, *, everything: bool = False) -> dict[str, Any]:
        """Return the explicit choices, or all keys, as JSON values."""
        document: dict[str, Any] = {}
        for phase in PHASES:
            values = self.phase(phase).to_dict(everything=everything)
            if values:
                document[phase] = _short(values)
        if self.overlays:
            document["backends"] = {
                backend: {
                    phase: _short({key: plain(value) for key, value in values.items()})
                    for phase, values in part.items()
                }
                for backend, part in self.overlays.items()
            }
        return document

    def to_json(self, *, everything: bool = False) -> str:
        """Return the text for ``--device-graph-mode`` with the same choices.

        Defaults are omitted, so that a reader of the text does not take them for choices.
        ``everything`` includes them, so that the text overrides all weaker sources.
        """
        return json.dumps(self.to_dict(everything=everything))


def _short(values: dict[str, Any]) -> Any:
    return values["policy"] if list(values) == ["policy"] else values
