"""One phase of a mode: every key is declared here, once.

A field of ``PhaseConfig`` declares a key: its type, its default, what it means and the reader that
its value passes through, whether it comes from JSON text, a flag, a file or Python. The flags per
phase, the table in docs/modes.md and the texts of errors are made from these declarations.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import attrs

from devgraph.api.errors import ConfigError, ConfigTypeError, brief, did_you_mean
from devgraph.api.errors import DeviceGraphWarning as DeviceGraphWarning
from devgraph.api.policy import COMPILERS, policies
from devgraph.api.registry import OTHER_NAMES

PHASES = ("decode", "prefill")
DEFAULT_POLICY: Mapping[str, str] = {"decode": "full", "prefill": "breakable"}
RUNNER_POLICY: Mapping[str, str] = {**DEFAULT_POLICY, "encoder": "full"}
"""The default of each kind of runner. An encoder is no phase of a mode: the engine gives its runner
a ``PhaseConfig`` of its own."""

OLDER_POLICIES: Mapping[str, str] = {
    "tc_piecewise": "piecewise",
    "tcpiecewise": "piecewise",
    "tcpcg": "piecewise",
}
"""Names that engines gave to a policy before; accepted with a warning."""

VERIFY_VARIABLE = "DEVGRAPH_VERIFY"
"""Environment variable with a value of the key ``verify`` for phases where nobody chose one."""


@attrs.frozen(kw_only=True)
class Verify:
    """The times at which a runner replays its graphs against eager."""

    start: bool = True
    """After the first capture."""
    every: int | None = None
    """Number of steps of the phase between two checks; None checks at start only."""


Setting = tuple[str | None, str, str]
"""Where one value lives: backend (None for the part that holds on every backend), phase, key."""


def path_of(setting: Setting) -> str:
    """Return the path of a setting in the JSON text, such as ``backends.acme.decode.policy``."""
    backend, phase, key = setting
    return f"{phase}.{key}" if backend is None else f"backends.{backend}.{phase}.{key}"


REMOVED_KEYS: Mapping[str, str] = {
    "memory": "use executable_budget",
    "memory_budget_bytes": "use graph_budget_bytes",
    "min_speedup": "use dg.graphed(step, min_speedup=...), which compares a graph with eager",
    "learned": "leave it out; background captures go from the largest bucket to the smallest",
}
"""Keys of earlier versions, each with its replacement."""


def unknown_name(path: str, name: object, known: Iterable[str], *, what: str) -> ConfigError:
    """Return the error for a name that does not exist: where, what exists, what is nearest."""
    names = tuple(known)
    if not isinstance(name, str):
        return ConfigTypeError(
            f"{path}: a {what} is a string, got {shown(name)}. {did_you_mean('', names)}"
        )
    if what == "key" and name in REMOVED_KEYS:
        return ConfigError(f"{path}: the key {name!r} was removed: {REMOVED_KEYS[name]}")
    hint = did_you_mean(name, names, OTHER_NAMES)
    return ConfigError(f"{path}: there is no {what} {name!r}. {hint}")


def check_names(path: str, names: Iterable[object], known: Collection[str], *, what: str) -> None:
    """Raise ``unknown_name`` for the first of ``names`` that is not ``known``."""
    for name in names:
        if name not in known:
            raise unknown_name(path, name, known, what=what)


def choices() -> tuple[str, ...]:
    """Return what a phase may choose: every policy, and ``disabled``."""
    return (*policies(), "disabled")


def over_maximum(buckets: tuple[int, ...] | None, max_bs: int | None) -> str | None:
    """Return what is wrong with these two keys of one place together, if anything is."""
    if not buckets or max_bs is None or buckets[-1] <= max_bs:
        return None
    return f"the bucket {buckets[-1]} is over max_bs={max_bs}; remove the bucket or raise max_bs"


def shown(value: object) -> str:
    """Return ``value`` and its kind in the words of JSON."""
    kinds = {bool: "a boolean", type(None): "null", str: "a string", dict: "an object"}
    return f"{brief(value)} ({kinds.get(type(value), type(value).__name__)})"


def as_object(value: object, where: str, what: str = "an object") -> Mapping[Any, Any]:
    """Return ``value`` if it is an object of JSON; ``what`` is expected, for errors."""
    if isinstance(value, (dict, Mapping)):  # the first is the usual one, and cheaper to ask
        return value
    raise ConfigTypeError(f"{where}: expected {what}, got {shown(value)}")


def plain(value: Any) -> Any:
    """Return the value of a key as a JSON value."""
    if isinstance(value, Verify):
        return "start" if value.every is None else {"start": value.start, "every": value.every}
    return list(value) if isinstance(value, tuple) else value


@attrs.frozen(kw_only=True)
class Key:
    """One key of a phase; ``PhaseConfig`` declares it."""

    name: str
    default: Any
    """``attrs.NOTHING`` where it depends on the phase."""
    read: Callable[[object, str], Any]
    """Takes a value and the path that an error begins with; returns what ``PhaseConfig`` holds, or
    raises ``ConfigError``, for a value of the wrong kind ``ConfigTypeError``."""
    kind: str
    """What it accepts, in words, unless ``names`` says it."""
    optional: bool
    """Whether it accepts null too, for no value."""
    names: Callable[[], tuple[str, ...]] | None
    shape: str
    """Of a flag that sets it: ``text``, ``integer`` or ``integers``."""
    meaning: str
    flag: str | None
    """The end of the flag per phase that sets it."""

    @property
    def accepts(self) -> str:
        """What it accepts besides null, in words."""
        if self.names is None:
            return self.kind
        *others, last = (f"`{name}`" for name in self.names())
        return f"{', '.join(others)} or {last}"


# What keys accept: the part of a declaration that several keys share.


def choice(what: str, names: Callable[[], tuple[str, ...]]) -> dict[str, Any]:
    """One of ``names``; ``what`` they are, for errors."""

    def read(value: object, path: str) -> str:
        known = names()
        if isinstance(value, str) and value in known:
            return value
        raise unknown_name(path, value, known, what=what)

    return {"names": names, "read": read}


def _policy(value: object, path: str) -> Any:
    name = OLDER_POLICIES.get(value, value) if isinstance(value, str) else value
    return _POLICY_NAME(name, path)


def number(kind: type[int] | type[float], least: int, *, above: bool = False) -> dict[str, Any]:
    """A number of at least ``least``, or ``above`` it."""
    what = "an integer" if kind is int else "a number"
    wanted = f"more than {least}" if above else f"at least {least}"
    largest = math.inf if kind is int else sys.float_info.max

    def read(value: object, path: str) -> int | float:
        if isinstance(value, bool) or not isinstance(value, (int, kind)):
            raise ConfigTypeError(f"{path}: expected {what}, got {shown(value)}")
        if not least <= value <= largest or (above and value == least):
            finite = "" if kind is int else "a finite number of "
            raise ConfigError(f"{path}: expected {finite}{wanted}, got {brief(value)}")
        return kind(value)

    return {"kind": f"{what} of {wanted}", "shape": "integer", "read": read}


def _read_memory(value: object, path: str) -> float:
    found = number(float, 0)["read"](value, path)
    if found == 1 or (found > 1 and found != int(found)):
        raise ConfigError(
            f"{path}: {value!r} is neither a number of bytes nor a share, which is below 1; null "
            f"is no limit"
        )
    return float(found)


def optional(declared: dict[str, Any]) -> dict[str, Any]:
    """What ``declared`` takes, or null."""
    read = declared["read"]
    return {
        **declared,
        "optional": True,
        "read": lambda value, path: None if value is None else read(value, path),
    }


def text(what: str) -> dict[str, Any]:
    """A text that is not empty; ``what`` it is."""

    def read(value: object, path: str) -> str:
        if isinstance(value, str) and value:
            return value
        raise ConfigTypeError(f"{path}: expected {what}, got {shown(value)}")

    return {"kind": what, "read": read}


def _flag(value: object, path: str) -> bool:
    if isinstance(value, bool):
        return value
    raise ConfigTypeError(f"{path}: expected true or false, got {shown(value)}")


FLAG: Mapping[str, Any] = {"kind": "`true` or `false`", "read": _flag}
"""What is on or off."""


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
            f"{path}: the list is empty. Name at least one size, leave the key out for the "
            f"defaults, or switch graphs off with the policy 'disabled'"
        )
    return tuple(sorted(sizes))


def read_verify(value: object, path: str) -> Verify | None:
    """Return the value of the key ``verify``; ``path`` begins the message of a ``ConfigError``."""
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
    """Return the value of DEVGRAPH_VERIFY: ``start``, or the JSON text of an object.

    Raises:
        ConfigError: the text is not a value of the key ``verify``.
    """
    text = os.environ.get(VERIFY_VARIABLE, "")
    if text.lower() in ("", "0", "false", "no", "null"):
        return None
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    return read_verify(value, VERIFY_VARIABLE)


_COUNT = number(int, 1)
count: Callable[[object, str], int] = _COUNT["read"]
"""Reads an integer of at least 1."""
_POLICY_NAME = choice("policy", choices)["read"]


def _key(accepts: Mapping[str, Any], meaning: str, default: Any, flag: str | None = None) -> Any:
    metadata = {**accepts, "meaning": meaning, "flag": flag}
    return attrs.field(default=default, metadata=metadata)


@attrs.frozen(kw_only=True)
class PhaseConfig:
    """How one phase is captured and replayed.

    Values are checked and normalised on construction; ``ConfigError`` names the key.
    """

    policy: str = _key(
        {"names": choices, "read": _policy},
        "How steps are captured; under `disabled` they run eagerly.",
        default=attrs.NOTHING,
        flag="mode",
    )
    buckets: tuple[int, ...] | None = _key(
        optional({"kind": "integers of at least 1", "shape": "integers", "read": _buckets}),
        "Sizes to capture, exactly these: requests for decode, tokens for prefill. None: the "
        "defaults.",
        default=None,
        flag="bs",
    )
    max_bs: int | None = _key(
        optional(_COUNT),
        "The largest of the default sizes, which is always a bucket. None: the runner's capacity.",
        default=None,
        flag="max-bs",
    )
    align: int = _key(_COUNT, "Every bucket is a multiple of this.", default=1)
    max_requests: int | None = _key(
        optional(_COUNT),
        "Request slots of a full prefill graph; a batch of more requests runs eagerly. None: the "
        "runner's capacity.",
        default=None,
    )
    max_seq_len: int | None = _key(
        optional(_COUNT),
        "A batch whose longest sequence is longer than this runs eagerly. None: no limit.",
        default=None,
    )
    max_padding: float = _key(
        number(float, 1),
        "A batch that would be padded to more than this many times its rows runs eagerly.",
        default=2.0,
    )
    compiler: str = _key(
        choice("compiler", lambda: COMPILERS),
        "Compiles the pieces of the policy `piecewise`: `eager` (no compilation) or `inductor`.",
        default="eager",
    )
    capture: str = _key(
        choice("capture mode", lambda: ("eager", "lazy", "background")),
        "When buckets are captured: `eager` all at start, `lazy` after `lazy_hits` batches that "
        "wanted one, `background` one per idle call while serving.",
        default="eager",
    )
    lazy_hits: int = _key(
        _COUNT, "Batches that want a bucket before `lazy` captures it.", default=2
    )
    warmup: int = _key(
        number(int, 0),
        "Eager runs before each capture. A capture that fails after fewer than two is retried once "
        "after two. Use 0 only if the step keeps nothing from its first run of a size.",
        default=1,
    )
    strict: bool = _key(
        FLAG,
        "Raise where a batch would otherwise run eagerly, with the reason.",
        default=False,
    )
    emulate: bool = _key(
        FLAG,
        "Run the steps of graphs eagerly, with everything else as it is: padded static buffers, "
        "`prepare`, tail and outputs. What still differs is not the graph's fault.",
        default=False,
    )
    verify: Verify | None = _key(  # noqa: RUF009 - it declares a field
        optional({"kind": '`"start"` or `{"start": true, "every": 1000}`', "read": read_verify}),
        "When graphs are replayed against eager: after capture, and again after every so many "
        "steps of the phase. None: never.",
        default=None,
    )
    executable_budget: float | None = _key(
        optional({**number(float, 0), "read": _read_memory}),
        "Bytes that executables and recordings of the pool may take, or below 1 a share of the "
        "device's memory; the least recently used go, and are made again at their next launch. Of "
        "phases that share a pool the lowest holds. None: executables stay.",
        default=None,
    )
    releasable: bool = _key(
        FLAG,
        "The pool that is made for this phase can give its memory back to the device: "
        '`suspend(release="memory")`.',
        default=False,
    )
    graph_budget_bytes: int | None = _key(
        optional(_COUNT),
        "Device memory that captures of this phase may take. Buckets beyond it are dropped. None: "
        "no limit.",
        default=None,
    )
    time_budget_s: float | None = _key(
        optional(number(float, 0, above=True)),
        "Seconds to spend on capture; buckets beyond it are dropped. None: no limit.",
        default=None,
    )
    miss_budget: int | None = _key(
        optional(number(int, 0)),
        "New host-argument keys that `full` records when they are first seen; a step with a known "
        "key earns one back. Past it a new key runs breakable until it comes again. None: 8, and "
        "no limit on a backend that runs the regions' host code for known keys as well.",
        default=None,
    )
    explicit: frozenset[str] = attrs.field(default=frozenset({"policy"}), eq=False)
    """The keys that somebody chose, which rules may not change. Any value other than the default
    is added to them. Does not count for equality."""

    def __attrs_post_init__(self) -> None:
        for name, key in KEYS.items():
            value = getattr(self, name)
            if value is not key.default:
                object.__setattr__(self, name, key.read(value, name))
        check_names("explicit", sorted(self.explicit, key=str), KEYS, what="key")
        self._settle()

    def with_checked(self, values: Mapping[str, Any], explicit: frozenset[str]) -> PhaseConfig:
        """Return this phase with ``values`` that were checked before, chosen as ``explicit`` says.

        Raises ``ConfigError`` if they contradict each other.
        """
        made = object.__new__(PhaseConfig)
        for name in KEYS:
            object.__setattr__(made, name, values[name] if name in values else getattr(self, name))
        object.__setattr__(made, "explicit", explicit)
        made._settle()
        return made

    def _settle(self) -> None:
        """Compare the keys with each other, and count what is no default as chosen."""
        problem = over_maximum(self.buckets, self.max_bs)
        if problem:
            raise ConfigError(problem)
        chosen = set(self.explicit)
        for name, key in KEYS.items():
            if key.default is not attrs.NOTHING and getattr(self, name) != key.default:
                chosen.add(name)
        object.__setattr__(self, "explicit", frozenset(chosen))

    def to_dict(self, *, everything: bool = False) -> dict[str, Any]:
        """Return the chosen keys with their values as JSON has them, or all keys."""
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
"""Every key by name, in the order in which keys are shown."""


_DEFAULTS = {
    phase: PhaseConfig(policy=policy, explicit=frozenset())
    for phase, policy in RUNNER_POLICY.items()
}


def phase_config(config: PhaseConfig | str | Mapping[str, Any] | None, phase: str) -> PhaseConfig:
    """Return the configuration of a phase: given, by policy name, as a mapping, or the default."""
    if isinstance(config, PhaseConfig):
        return config
    if config is None:
        return _DEFAULTS[phase]
    if isinstance(config, str):
        return PhaseConfig(policy=config)
    if isinstance(config, Mapping):
        check_names(phase, config, KEYS, what="key")
        chosen = {"policy": RUNNER_POLICY[phase], **config}
        return PhaseConfig(**chosen, explicit=frozenset(config))
    raise ConfigTypeError(
        f"config of {phase} is one phase, such as DeviceGraphConfig().decode, a policy name or a "
        f"mapping; got {type(config).__name__}"
    )
