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
from devgraph.api.config.merge import Level, Merged, Source, merge
from devgraph.api.config.values import DEFAULT_POLICY, KEYS, PHASES, Setting, check, unknown_name
from devgraph.api.errors import ConfigError, ConfigTypeError, did_you_mean

__all__ = ["DeviceGraphConfig", "DeviceGraphWarning", "Overlay", "PhaseConfig", "phase_config"]


class DeviceGraphWarning(UserWarning):
    """Something in a configuration was overridden, is spelled in an older way, or has no effect."""


def _buckets(value: Iterable[int] | None) -> tuple[int, ...] | None:
    sizes: tuple[int, ...] | None = check("buckets", value, "buckets")
    return sizes


def _names(names: Iterable[str]) -> frozenset[str]:
    return frozenset(names)


@attrs.frozen(kw_only=True)
class PhaseConfig:
    """How one phase is captured and replayed.

    Values are checked and normalised on construction; ``ConfigError`` names the key.
    """

    policy: str
    """``full``, ``breakable``, ``piecewise`` or ``disabled``."""

    buckets: tuple[int, ...] | None = attrs.field(default=None, converter=_buckets)
    """Sizes to capture, ascending: requests for decode, tokens for prefill. None: the defaults."""

    max_bs: int | None = None
    """The largest size that is captured, which is always a bucket. None: the runner's capacity."""

    align: int = 1
    """Every bucket is a multiple of this."""

    max_requests: int | None = None
    """Request slots of a full prefill graph; a batch of more requests runs eagerly. None: the
    runner's capacity."""

    max_seq_len: int | None = None
    """A batch whose longest sequence is longer than this runs eagerly. None: no limit."""

    max_padding: float = 2.0
    """A batch that would be padded to more than this many times its rows runs eagerly."""

    compiler: str = "eager"
    """Compiles the pieces of the policy ``piecewise``: ``eager`` (no compilation) or
    ``inductor``."""

    capture: str = "eager"
    """When buckets are captured: ``eager`` all at start, ``lazy`` after ``lazy_hits`` batches that
    wanted one, ``background`` one per idle call while serving."""

    lazy_hits: int = 2
    """Batches that want a bucket before ``lazy`` captures it."""

    warmup: int = 2
    """Eager runs before each capture."""

    strict: bool = False
    """Raise where a batch would otherwise run eagerly, with the reason."""

    memory_budget_bytes: int | None = None
    """Device memory for the graphs of this phase; buckets beyond it are dropped. None: no limit."""

    time_budget_s: float | None = None
    """Seconds to spend on capture; buckets beyond it are dropped. None: no limit."""

    miss_budget: int | None = None
    """New host-argument keys that ``full`` records when they are first seen; a step with a known
    key earns one back. Past it a new key runs breakable until it comes again. None: 8, and no
    limit on a backend that runs the regions' host code for known keys as well."""

    explicit: frozenset[str] = attrs.field(
        default=frozenset({"policy"}), converter=_names, eq=False
    )
    """The keys that somebody chose, which rules may not change. Any value other than the default
    is added to them. Does not count for equality."""

    def __attrs_post_init__(self) -> None:
        for key in KEYS:
            object.__setattr__(self, key, check(key, getattr(self, key), key))
        for key in sorted(self.explicit - set(KEYS)):
            raise unknown_name("explicit", key, KEYS, what="key")
        if self.buckets and self.max_bs is not None and self.buckets[-1] > self.max_bs:
            raise ConfigError(
                f"the bucket {self.buckets[-1]} is over max_bs={self.max_bs}; remove the bucket "
                f"or raise max_bs"
            )
        other = {key for key, default in _DEFAULTS.items() if getattr(self, key) != default}
        object.__setattr__(self, "explicit", self.explicit | other)

    def to_dict(self, *, everything: bool = False) -> dict[str, Any]:
        """Return the chosen keys with their values as JSON has them, or all keys."""
        return {
            key: _plain(getattr(self, key)) for key in KEYS if everything or key in self.explicit
        }


_DEFAULTS: Mapping[str, Any] = {
    field.name: field.default
    for field in attrs.fields(PhaseConfig)
    if field.default is not attrs.NOTHING and field.name != "explicit"
}


def phase_config(config: PhaseConfig | str | Mapping[str, Any] | None, phase: str) -> PhaseConfig:
    """Return the configuration of a phase: given, by policy name, as a mapping, or the default."""
    if isinstance(config, PhaseConfig):
        return config
    if config is None:
        return PhaseConfig(policy=DEFAULT_POLICY[phase], explicit=frozenset())
    if isinstance(config, str):
        return PhaseConfig(policy=config)
    if isinstance(config, Mapping):
        for key in config:
            if key not in KEYS:
                raise unknown_name(phase, key, KEYS, what="key")
        chosen = {"policy": DEFAULT_POLICY[phase], **config}
        return PhaseConfig(**chosen, explicit=frozenset(config))
    raise ConfigTypeError(
        f"config of {phase} is one phase, such as DeviceGraphConfig().{phase}, a policy name or a "
        f"mapping; got {type(config).__name__}"
    )


def _decode(config: PhaseConfig | str | Mapping[str, Any] | None) -> PhaseConfig:
    return phase_config(config, "decode")


def _prefill(config: PhaseConfig | str | Mapping[str, Any] | None) -> PhaseConfig:
    return phase_config(config, "prefill")


def _pairs(values: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> tuple[tuple[str, Any], ...]:
    found = dict(values)
    for key in found:
        if key not in KEYS:
            raise unknown_name("overlay", key, KEYS, what="key")
    return tuple((key, check(key, found[key], key)) for key in KEYS if key in found)


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
    overlays = tuple(overlays) if isinstance(overlays, Iterable) else (overlays,)
    for one in overlays:
        if not isinstance(one, Overlay):
            raise ConfigTypeError(f"overlays are Overlay objects, got {one!r}")
    found = sorted(overlays, key=lambda one: one.backend)
    names = [one.backend for one in found]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"backends.{name}: two overlays for one backend; merge them")
    return tuple(one for one in found if one.decode or one.prefill)


@attrs.frozen(kw_only=True)
class DeviceGraphConfig:
    """The mode configuration of one deployment; the same value is valid on every node of it.

    >>> config = DeviceGraphConfig.from_json('{"decode": "full", "backends": {"npu": {"prefill": '
    ...                                      '"full"}}}')
    >>> config.prefill.policy, config.for_backend("npu").prefill.policy
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
            value = self.phase(phase)
            if value.policy != DEFAULT_POLICY[phase] and "policy" not in value.explicit:
                chosen = attrs.evolve(value, explicit=value.explicit | {"policy"})
                object.__setattr__(self, phase, chosen)
        for overlay in self.overlays:  # a contradiction there must show on every node
            self.for_backend(overlay.backend)

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
        return cls._from_document(read_mode(text, source), Level.JSON, source, backends)

    @classmethod
    def from_dict(
        cls,
        document: Mapping[str, Any],
        *,
        backends: Collection[str] | None = None,
        source: str = "mode configuration",
    ) -> DeviceGraphConfig:
        """Like ``from_json``, for text that is parsed already."""
        return cls._from_document(document, Level.JSON, source, backends)

    @classmethod
    def from_file(
        cls, path: str | os.PathLike[str], *, backends: Collection[str] | None = None
    ) -> DeviceGraphConfig:
        """Read the ``device_graph`` section of a JSON or YAML file (YAML needs PyYAML)."""
        return cls._from_document(read_section(path), Level.FILE, os.fspath(path), backends)

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
        sources, notes = sources_of(namespace, parser)
        return cls._from_merged(merge(sources), notes, backends, stacklevel=3)

    @classmethod
    def _from_document(
        cls, document: object, level: Level, source: str, backends: Collection[str] | None
    ) -> DeviceGraphConfig:
        parsed = parse_mode(document, source)
        merged = merge([Source(level=level, name=source, settings=parsed.settings)])
        return cls._from_merged(merged, parsed.notes, backends, stacklevel=4)

    @classmethod
    def _from_merged(
        cls,
        merged: Merged,
        notes: Iterable[str],
        backends: Collection[str] | None,
        *,
        stacklevel: int,
    ) -> DeviceGraphConfig:
        values: dict[tuple[str | None, str], dict[str, Any]] = {}
        for setting, value in merged.settings.items():
            values.setdefault((setting.backend, setting.phase), {})[setting.key] = value
        names = {setting.backend for setting in merged.settings if setting.backend is not None}
        phases = {
            phase: PhaseConfig(
                **{"policy": DEFAULT_POLICY[phase], **values.get((None, phase), {})},
                explicit=frozenset(values.get((None, phase), ())),
            )
            for phase in PHASES
        }
        overlays = [
            Overlay(
                backend=name,
                decode=values.get((name, "decode"), {}),
                prefill=values.get((name, "prefill"), {}),
            )
            for name in names
        ]
        config = cls(
            decode=phases["decode"],
            prefill=phases["prefill"],
            overlays=overlays,
            origins=merged.origins,
        )
        unknown = sorted(names - set(backends)) if backends is not None else []
        messages = [
            f"{_origin(merged, name)}: no backend {name!r} is registered on this node, so "
            f"its part of the configuration is not used here. {did_you_mean(name, backends or ())}"
            for name in unknown
        ]
        for message in (*notes, *merged.notes, *messages):
            warnings.warn(message, DeviceGraphWarning, stacklevel=stacklevel)
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
        overlay = next((one for one in self.overlays if one.backend == name), Overlay(backend=name))
        phases: dict[str, PhaseConfig] = {}
        origins = {one: origin for one, origin in self.origins.items() if one.backend is None}
        for phase in PHASES:
            base, changes = self.phase(phase), overlay.of(phase)
            try:
                phases[phase] = attrs.evolve(
                    base, **changes, explicit=base.explicit | frozenset(changes)
                )
            except ConfigError as error:
                raise ConfigError(f"backends.{name}.{phase}: {error}") from error
            for key in changes:
                place = Setting(name, phase, key)
                source = self.origins.get(place, "")
                origins[place._replace(backend=None)] = f"{source} {place}".strip()
        return DeviceGraphConfig(
            decode=phases["decode"], prefill=phases["prefill"], origins=origins
        )

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
                    phase: _short({key: _plain(value) for key, value in one.of(phase).items()})
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


def _origin(merged: Merged, backend: str) -> str:
    """Return where the part for ``backend`` was written."""
    return next(name for one, name in merged.origins.items() if one.backend == backend)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _short(values: dict[str, Any]) -> Any:
    return values["policy"] if list(values) == ["policy"] else values
