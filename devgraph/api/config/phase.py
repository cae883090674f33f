"""The configuration of one phase.

Each field of ``PhaseConfig`` declares one key: its type, default, meaning and reader. The reader
checks values from JSON text, flags, files and Python. The flags per phase, the table in
docs/modes.md and error messages are generated from these declarations.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import attrs

from devgraph.api.environment import EMULATE_VARIABLE, VERIFY_VARIABLE, boolean, switch
from devgraph.api.errors import ConfigError, ConfigTypeError, brief, did_you_mean
from devgraph.api.errors import DeviceGraphWarning as DeviceGraphWarning
from devgraph.api.policy import COMPILERS, policies
from devgraph.api.registry import OTHER_NAMES

PHASES = ("decode", "prefill")
DEFAULT_POLICY: Mapping[str, str] = {"decode": "full", "prefill": "breakable"}
RUNNER_POLICY: Mapping[str, str] = {**DEFAULT_POLICY, "encoder": "full"}
"""Default policy of each kind of runner. A mode does not configure encoders: the engine passes a
``PhaseConfig`` to an encoder's runner."""

OLDER_POLICIES: Mapping[str, str] = {
    "tc_piecewise": "piecewise",
    "tcpiecewise": "piecewise",
    "tcpcg": "piecewise",
}
"""Older names of policies, accepted with a warning."""


@attrs.frozen(kw_only=True)
class Verify:
    """The schedule on which a runner compares its graphs with eager runs."""

    start: bool = True
    """Whether to compare after the first capture."""
    every: int | None = None
    """Number of steps of the phase between two checks; None checks at start only."""


Setting = tuple[str | None, str, str]
"""The position of a value in a mode: backend (None for the general part), phase and key."""


def path_of(setting: Setting) -> str:
    """Return the path of a setting in the JSON text, such as ``backends.acme.decode.policy``."""
    backend, phase, key = setting
    return f"{phase}.{key}" if backend is None else f"backends.{backend}.{phase}.{key}"


REMOVED_KEYS: Mapping[str, str] = {
    "memory": "use executable_budget",
    "memory_budget_bytes": "use graph_budget_bytes",
    "min_speedup": "use dg.graphed(step, min_speedup=...), which measures the speedup",
    "learned": "leave it out; background captures go from the largest bucket to the smallest",
    "max_seq_len": "leave it out; graphs serve sequences of any length that the engine admits",
}
"""Keys of earlier versions, each with its replacement."""


def unknown_name(path: str, name: object, known: Iterable[str], *, what: str) -> ConfigError:
    """Return the error for an unknown name. It lists the known names and suggests the nearest."""
    names = tuple(known)
    if not isinstance(name, str):
        return ConfigTypeError(
            f"{path}: a {what} is a string, got {shown(name)}. {did_you_mean('', names)}"
        )
    if what == "key" and name in REMOVED_KEYS:
        return ConfigError(f"{path}: the key {name!r} was removed: {REMOVED_KEYS[name]}")
    if what == "phase" and name in KEYS:
        return ConfigError(f"{path}: {name!r} is a key of a phase; move it into decode or prefill")
    hint = did_you_mean(name, names, OTHER_NAMES)
    return ConfigError(f"{path}: there is no {what} {name!r}. {hint}")


def check_names(path: str, names: Iterable[object], known: Collection[str], *, what: str) -> None:
    """Raise ConfigError for the first name that is not in ``known``; ``what`` names the kind."""
    for name in names:
        if name not in known:
            raise unknown_name(path, name, known, what=what)


def choices() -> tuple[str, ...]:
    """Return the values of the key ``policy``: every policy, and ``disabled``."""
    return (*policies(), "disabled")


def over_maximum(buckets: tuple[int, ...] | None, max_bs: int | None) -> str | None:
    """Return an error message if a bucket exceeds ``max_bs``, or None."""
    if not buckets or max_bs is None or buckets[-1] <= max_bs:
        return None
    return f"the bucket {buckets[-1]} exceeds max_bs={max_bs}; remove the bucket or raise max_bs"


def shown(value: object) -> str:
    """Return ``value`` and its JSON type as text."""
    kinds = {bool: "a boolean", str: "a string", list: "a list", dict: "an object"}
    if value is None or value == "":
        return "an empty value (null)" if value is None else "an empty string"
    return f"{brief(value)} ({kinds.get(type(value), type(value).__name__)})"


def as_object(value: object, where: str, what: str = "an object") -> Mapping[Any, Any]:
    """Return ``value`` if it is a JSON object; ``what`` describes the object in errors."""
    if isinstance(value, (dict, Mapping)):  # checking dict first is faster
        return value
    raise ConfigTypeError(f"{where}: expected {what}, got {shown(value)}")


def plain(value: Any) -> Any:
    """Return the value of a key as a JSON value."""
    if isinstance(value, Verify):
        return "start" if value.every is None else {"start": value.start, "every": value.every}
    return list(value) if isinstance(value, tuple) else value


@attrs.frozen(kw_only=True)
class Key:
    """One key of a phase."""

    name: str
    default: Any
    """``attrs.NOTHING`` if the default depends on the phase."""
    read: Callable[[object, str], Any]
    """A function that takes a value and its path for errors, and returns the value of the field.

    It raises ``ConfigError`` for a wrong value and ``ConfigTypeError`` for a wrong type."""
    kind: str
    """Description of the accepted values, if there is no list of ``names``."""
    optional: bool
    """Whether the key accepts null."""
    names: Callable[[], tuple[str, ...]] | None
    """A callable that returns the accepted names, or None."""
    shape: str
    """Type of the flag's value: ``text``, ``integer`` or ``integers``."""
    meaning: str
    flag: str | None
    """Suffix of the key's flags (``--decode-device-graph-<flag>``), or None if it has no flag."""

    @property
    def accepts(self) -> str:
        """Description of the accepted values other than null."""
        if self.names is None:
            return self.kind
        *others, last = (f"`{name}`" for name in self.names())
        return f"{', '.join(others)} or {last}"


# Declarations that several keys share.


def choice(noun: str, names: Callable[[], tuple[str, ...]]) -> dict[str, Any]:
    """Declare a value among ``names``; errors call the value a ``noun``."""

    def read(value: object, path: str) -> str:
        known = names()
        if isinstance(value, str) and value in known:
            return value
        raise unknown_name(path, value, known, what=noun)

    return {"names": names, "read": read}


def _policy(value: object, path: str) -> Any:
    name = OLDER_POLICIES.get(value, value) if isinstance(value, str) else value
    return _POLICY_NAME(name, path)


def number(kind: type[int] | type[float], least: int, *, above: bool = False) -> dict[str, Any]:
    """Declare a number of at least ``least``, or greater than ``least`` with ``above``."""
    what = "an integer" if kind is int else "a number"
    of, wanted = ("", f"greater than {least}") if above else ("of ", f"at least {least}")
    largest = math.inf if kind is int else sys.float_info.max

    def read(value: object, path: str) -> int | float:
        if isinstance(value, bool) or not isinstance(value, (int, kind)):
            raise ConfigTypeError(f"{path}: expected {what}, got {shown(value)}")
        if not least <= value <= largest or (above and value == least):
            finite = "" if kind is int else f"a finite number {of}"
            raise ConfigError(f"{path}: expected {finite}{wanted}, got {brief(value)}")
        return kind(value)

    return {"kind": f"{what} {of}{wanted}", "shape": "integer", "read": read}


def _read_budget(value: object, path: str) -> float:
    budget = number(float, 0)["read"](value, path)
    if budget == 1 or (budget > 1 and budget != int(budget)):
        raise ConfigError(
            f"{path}: {value!r} is neither a number of bytes nor a share below 1; null means no "
            f"limit"
        )
    return float(budget)


def optional(declared: dict[str, Any]) -> dict[str, Any]:
    """Return the declaration of a key that accepts null as well."""
    read = declared["read"]
    return {
        **declared,
        "optional": True,
        "read": lambda value, path: None if value is None else read(value, path),
    }


def text(description: str) -> dict[str, Any]:
    """Declare a non-empty string."""

    def read(value: object, path: str) -> str:
        if isinstance(value, str) and value:
            return value
        raise ConfigTypeError(f"{path}: expected {description}, got {shown(value)}")

    return {"kind": description, "read": read}


def _flag(value: object, path: str) -> bool:
    if isinstance(value, bool):
        return value
    raise ConfigTypeError(f"{path}: expected true or false, got {shown(value)}")


FLAG: Mapping[str, Any] = {"kind": "`true` or `false`", "read": _flag}


def _buckets(value: object, path: str) -> tuple[int, ...]:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise ConfigTypeError(
            f"{path}: expected a list of integers such as [1, 2, 8], got {shown(value)}"
        )
    sizes = {
        size if type(size) is int and size > 0 else count(size, f"{path}[{index}]")
        for index, size in enumerate(value)
    }
    if not sizes:
        raise ConfigError(
            f"{path}: the list is empty. Name at least one size, omit the key to use the "
            f"defaults, or disable graphs with the policy 'disabled'"
        )
    return tuple(sorted(sizes))


def read_verify(value: object, path: str) -> Verify | None:
    """Return the checked value of the key ``verify``; ``path`` is its name in errors."""
    if value is None or isinstance(value, Verify):
        return value
    if value == "start":
        return Verify()
    if not isinstance(value, Mapping):
        raise ConfigTypeError(
            f'{path}: expected null, "start" or an object such as {{"start": true, "every": '
            f"1000}}, got {shown(value)}"
        )
    check_names(path, value, ("start", "every"), what="entry")
    start = _flag(value.get("start", True), f"{path}.start")
    every = value.get("every")
    if every is None:
        return Verify() if start else None
    return Verify(start=start, every=count(every, f"{path}.every"))


def verify_from_environment() -> Verify | None:
    """Return the value of DEVGRAPH_VERIFY: a switch, ``start``, or the JSON text of an object."""
    text = os.environ.get(VERIFY_VARIABLE, "")
    enabled = boolean(text)
    if enabled is not None:
        return Verify() if enabled else None
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    return read_verify(value, VERIFY_VARIABLE)


def in_environment(config: PhaseConfig) -> PhaseConfig:
    """Return ``config`` under DEVGRAPH_EMULATE and, unless it has ``verify``, DEVGRAPH_VERIFY."""
    if switch(EMULATE_VARIABLE):
        config = attrs.evolve(config, emulate=True)
    return attrs.evolve(config, verify=config.verify or verify_from_environment())


_COUNT = number(int, 1)
count: Callable[[object, str], int] = _COUNT["read"]
_POLICY_NAME = choice("policy", choices)["read"]


def _key(accepts: Mapping[str, Any], meaning: str, default: Any, flag: str | None = None) -> Any:
    metadata = {**accepts, "meaning": meaning, "flag": flag}
    return attrs.field(default=default, metadata=metadata)


@attrs.frozen(kw_only=True)
class PhaseConfig:
    """The configuration of the captures and replays of one phase.

    The constructor checks and normalizes all values; a ``ConfigError`` names the key.
    """

    policy: str = _key(
        {"names": choices, "read": _policy},
        "The policy that captures the steps. With `disabled`, steps run eagerly.",
        default=attrs.NOTHING,
        flag="mode",
    )
    buckets: tuple[int, ...] | None = _key(
        optional({"kind": "integers of at least 1", "shape": "integers", "read": _buckets}),
        "The exact sizes to capture: requests for decode, tokens for prefill. Order and duplicates "
        "have no effect. If null, default sizes are captured.",
        default=None,
        flag="bs",
    )
    max_bs: int | None = _key(
        optional(_COUNT),
        "The largest default size, which is always a bucket. If null, it is the capacity of the "
        "runner.",
        default=None,
        flag="max-bs",
    )
    align: int = _key(_COUNT, "Every bucket is a multiple of this number.", default=1)
    max_requests: int | None = _key(
        optional(_COUNT),
        "Number of request slots of a full prefill graph. Batches with more requests run eagerly. "
        "If null, it is the capacity of the runner.",
        default=None,
    )
    max_padding: float = _key(
        number(float, 1),
        "Maximum ratio of the padded size to the size of a batch. Batches that need more padding "
        "run eagerly.",
        default=2.0,
    )
    compiler: str = _key(
        choice("compiler", lambda: COMPILERS),
        "The compiler that `piecewise` uses for its pieces: `eager` (no compilation) or "
        "`inductor`.",
        default="eager",
    )
    capture: str = _key(
        choice("capture mode", lambda: ("eager", "lazy", "background")),
        "When to capture: `eager` captures all buckets at startup, `lazy` captures a bucket "
        "after `lazy_hits` batches that need it, and `background` captures one bucket per call "
        "of `idle()` while serving.",
        default="eager",
    )
    lazy_hits: int = _key(
        _COUNT, "Number of batches that need a bucket before `lazy` captures it.", default=2
    )
    warmup: int = _key(
        number(int, 0),
        "Number of eager runs before each capture. A capture that fails after fewer than two runs "
        "is retried once after two runs. Use 0 only if the first run of a size caches nothing.",
        default=1,
    )
    strict: bool = _key(
        FLAG,
        "Raise an error with the reason instead of running a batch eagerly, or at startup instead "
        "of dropping a bucket.",
        default=False,
    )
    emulate: bool = _key(
        FLAG,
        "Run every step eagerly, but with the padded static buffers, `prepare`, tail and outputs "
        "that a graph would use. Errors that remain are not caused by graphs.",
        default=False,
    )
    verify: Verify | None = _key(  # noqa: RUF009 - declares a field
        optional({"kind": '`"start"` or `{"start": true, "every": 1000}`', "read": read_verify}),
        "When to compare graphs with eager runs: after capture (`start`), and again in the first "
        "call of `idle()` after every `every` steps of the phase. If null, they are not compared.",
        default=None,
    )
    executable_budget: float | None = _key(
        optional({**number(float, 0), "read": _read_budget}),
        "Maximum size of the executables and recordings of the pool in bytes, or, below 1, as a "
        "share of the device's memory. The least recently used items are evicted, and executables "
        "are rebuilt at their next launch. If several phases share a pool, the lowest budget "
        "applies. If null, there is no limit.",
        default=None,
    )
    releasable: bool = _key(
        FLAG,
        'Allow `suspend(release="memory")` to return the memory of the pool of this phase to '
        "the device.",
        default=False,
    )
    graph_budget_bytes: int | None = _key(
        optional(_COUNT),
        "Maximum device memory of the captures and the request state of this phase. Buckets that "
        "exceed it are dropped. If null, there is no limit.",
        default=None,
    )
    time_budget_s: float | None = _key(
        optional(number(float, 0, above=True)),
        "Maximum duration of all captures in seconds. Buckets that exceed it are dropped. If "
        "null, there is no limit.",
        default=None,
    )
    miss_budget: int | None = _key(
        optional(number(int, 0)),
        "Budget of new host-argument keys under `full`. A key that is recorded at its first step "
        "takes 1 from the budget, and each step with a recorded key adds 1, up to this value. "
        "While the budget is empty, the first step with a new key runs as under `breakable`, and "
        "its second step records the key. If null, the budget is 8, or unlimited on a backend "
        "with asynchronous updates.",
        default=None,
    )
    explicit: frozenset[str] = attrs.field(default=frozenset({"policy"}), eq=False)
    """The explicitly chosen keys, which rules may not change. A key whose value is not the default
    is always explicit. Comparisons ignore this field."""
    kept: frozenset[str] = attrs.field(default=frozenset(), eq=False, repr=False)
    """The preference rules about which ``resolve`` has already warned."""
    overlays: Mapping[str, Mapping[str, Any]] = attrs.field(factory=dict, eq=False, repr=False)
    """The backend-specific parts of the mode, which runners apply with ``for_backend``."""

    def __attrs_post_init__(self) -> None:
        for name, key in KEYS.items():
            value = getattr(self, name)
            if value is not key.default:
                object.__setattr__(self, name, key.read(value, name))
        check_names("explicit", sorted(self.explicit, key=str), KEYS, what="key")
        self._settle()

    def with_checked(self, values: Mapping[str, Any], explicit: frozenset[str]) -> PhaseConfig:
        """Return a copy with new values, which the readers of their keys have checked."""
        config = object.__new__(PhaseConfig)
        for name in KEYS:
            value = values[name] if name in values else getattr(self, name)
            object.__setattr__(config, name, value)
        object.__setattr__(config, "explicit", explicit)
        object.__setattr__(config, "kept", self.kept)
        object.__setattr__(config, "overlays", {})
        config._settle()
        return config

    def for_backend(self, name: str) -> PhaseConfig:
        """Return the configuration with the part for one backend merged into the general part."""
        changes = self.overlays.get(name, {})
        return self.with_checked(changes, self.explicit.union(changes)) if self.overlays else self

    def _settle(self) -> None:
        """Refuse contradictions, and mark each key with a non-default value as explicit."""
        problem = over_maximum(self.buckets, self.max_bs)
        if problem:
            raise ConfigError(problem)
        object.__setattr__(self, "explicit", self.explicit | self.changed)

    @property
    def changed(self) -> frozenset[str]:
        """Names of the keys, apart from ``policy``, whose values differ from their defaults."""
        fixed = (key for key in KEYS.values() if key.default is not attrs.NOTHING)
        return frozenset(key.name for key in fixed if getattr(self, key.name) != key.default)

    def to_dict(self, *, everything: bool = False) -> dict[str, Any]:
        """Return the explicit keys (with ``everything``, all keys) and their JSON values."""
        names = [name for name in KEYS if everything or name in self.explicit]
        return {name: plain(getattr(self, name)) for name in names}


KEYS: Mapping[str, Key] = {
    field.name: Key(
        name=field.name,
        default=field.default,
        **{"kind": "", "optional": False, "names": None, "shape": "text", **field.metadata},
    )
    for field in attrs.fields(PhaseConfig)
    if field.metadata
}
"""All keys by name, in the order of the documentation."""


_DEFAULTS = {
    phase: PhaseConfig(policy=policy, explicit=frozenset())
    for phase, policy in RUNNER_POLICY.items()
}


def phase_config(config: PhaseConfig | str | Mapping[str, Any] | None, phase: str) -> PhaseConfig:
    """Return the configuration of a phase from a policy name, a mapping, or None (defaults)."""
    if isinstance(config, PhaseConfig):
        return config
    if config is None:
        return _DEFAULTS[phase]
    if isinstance(config, str) and "{" not in config:  # a name, not JSON text
        return PhaseConfig(policy=config)
    if isinstance(config, Mapping) and phase not in config:  # one phase, not a whole mode
        check_names(phase, config, KEYS, what="key")
        chosen = {"policy": RUNNER_POLICY[phase], **config}
        return PhaseConfig(**chosen, explicit=frozenset(config))
    raise ConfigTypeError(
        f"the configuration of {phase} must be one phase such as "
        f"DeviceGraphConfig.from_json(text).decode, a policy name or a mapping of keys such as "
        f"{{'buckets': [1, 2]}}, got {brief(config)}"
    )
