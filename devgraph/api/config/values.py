"""The words of the mode configuration: phases, policies, keys, and what each key accepts.

Everything that can be chosen is one ``Setting`` (which backend, which phase, which key), and every
value passes through ``check`` exactly once, so that the JSON text, the command line, files and
Python code accept and refuse the same things in the same words.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from devgraph.api.errors import ConfigError, ConfigTypeError, did_you_mean

__all__ = [
    "CAPTURING_POLICIES",
    "COMPILERS",
    "DEFAULT_POLICY",
    "KEYS",
    "OLDER_POLICIES",
    "PHASES",
    "POLICIES",
    "Setting",
    "check",
    "unknown_name",
]

PHASES = ("decode", "prefill")
CAPTURING_POLICIES = ("full", "breakable", "piecewise")
POLICIES = (*CAPTURING_POLICIES, "disabled")
DEFAULT_POLICY: Mapping[str, str] = {"decode": "full", "prefill": "breakable"}

OLDER_POLICIES: Mapping[str, str] = {
    "tc_piecewise": "piecewise",
    "tcpiecewise": "piecewise",
    "tcpcg": "piecewise",
}
"""Names that engines gave to a policy before; accepted with a warning."""

COMPILERS = ("eager", "inductor")
_CAPTURES = ("eager", "lazy", "background")

# What people write for a key out of habit; nearest-name matching would not find these.
_HABITS: Mapping[str, str] = {
    "backend": "policy",
    "mode": "policy",
    "bs": "buckets",
    "sizes": "buckets",
    "batch_sizes": "buckets",
    "max_batch_size": "max_bs",
    "tc_compiler": "compiler",
    "warmups": "warmup",
    "default": "decode",
}


class Setting(NamedTuple):
    """Where one value lives: ``backend`` is None for the part that holds on every backend."""

    backend: str | None
    phase: str
    key: str

    def __str__(self) -> str:
        prefix = "" if self.backend is None else f"backends.{self.backend}."
        return f"{prefix}{self.phase}.{self.key}"


def unknown_name(path: str, name: object, known: Iterable[str], *, what: str) -> ConfigError:
    """Return the error for a name that does not exist: where, what exists, what is nearest."""
    names = tuple(known)
    if not isinstance(name, str):
        return ConfigTypeError(
            f"{path}: a {what} is a string, got {_shown(name)}. {did_you_mean('', names)}"
        )
    text = f"{path}: there is no {what} {name!r}. {did_you_mean(name, names)}"
    if "Did you mean" not in text:
        folded = difflib.get_close_matches(name.lower(), names, n=1)
        habit = _HABITS.get(name.lower())
        near = habit if habit in names else folded[0] if folded else None
        text += f" Did you mean {near!r}?" if near else ""
    return ConfigError(text)


def check(key: str, value: object, path: str) -> Any:
    """Return ``value`` in the form that ``PhaseConfig`` stores for ``key``.

    Raises ``ConfigError``, or ``ConfigTypeError`` for a value of the wrong kind; the message
    starts with ``path``.
    """
    return KEYS[key](value, path)


def _shown(value: object) -> str:
    kinds = {bool: "a boolean", type(None): "null", str: "a string", dict: "an object"}
    return f"{value!r} ({kinds.get(type(value), type(value).__name__)})"


def _choice(what: str, known: tuple[str, ...]) -> Callable[[object, str], str]:
    def checked(value: object, path: str) -> str:
        if isinstance(value, str) and value in known:
            return value
        raise unknown_name(path, value, known, what=what)

    return checked


def _policy(value: object, path: str) -> str:
    if isinstance(value, str) and value in OLDER_POLICIES:
        return OLDER_POLICIES[value]
    if value is False or value is None:
        raise ConfigTypeError(
            f"{path}: a policy is a string, got {_shown(value)}; write 'disabled' (in quotes) to "
            f"switch graphs off. {did_you_mean('', POLICIES)}"
        )
    return _choice("policy", POLICIES)(value, path)


def _integer(least: int, *, optional: bool = False) -> Callable[[object, str], int | None]:
    def checked(value: object, path: str) -> int | None:
        if value is None and optional:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigTypeError(f"{path}: expected an integer, got {_shown(value)}")
        if value < least:
            raise ConfigError(f"{path}: expected at least {least}, got {value}")
        return value

    return checked


def _number(
    least: float, *, open_end: bool = False, optional: bool = False
) -> Callable[[object, str], float | None]:
    def checked(value: object, path: str) -> float | None:
        if value is None and optional:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ConfigTypeError(f"{path}: expected a number, got {_shown(value)}")
        if not math.isfinite(value) or value < least or (open_end and value == least):
            wanted = f"more than {least:g}" if open_end else f"at least {least:g}"
            raise ConfigError(f"{path}: expected a finite number of {wanted}, got {value!r}")
        return float(value)

    return checked


def _flag(value: object, path: str) -> bool:
    if isinstance(value, bool):
        return value
    raise ConfigTypeError(f"{path}: expected true or false, got {_shown(value)}")


def _buckets(value: object, path: str) -> tuple[int, ...] | None:
    if value is None:
        return None
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise ConfigTypeError(
            f"{path}: expected a list of integers such as [1, 2, 8], got {_shown(value)}"
        )
    one = _integer(1)
    sizes = [one(size, f"{path}[{index}]") for index, size in enumerate(value)]
    if not sizes:
        raise ConfigError(
            f"{path}: the list is empty. Name at least one size, leave the key out for the "
            f"defaults, or switch graphs off with the policy 'disabled'"
        )
    return tuple(sorted({size for size in sizes if size is not None}))


KEYS: Mapping[str, Callable[[object, str], Any]] = {
    "policy": _policy,
    "buckets": _buckets,
    "max_bs": _integer(1, optional=True),
    "align": _integer(1),
    "max_requests": _integer(1, optional=True),
    "max_seq_len": _integer(1, optional=True),
    "max_padding": _number(1.0),
    "compiler": _choice("compiler", COMPILERS),
    "capture": _choice("capture mode", _CAPTURES),
    "lazy_hits": _integer(1),
    "warmup": _integer(0),
    "strict": _flag,
    "memory_budget_bytes": _integer(1, optional=True),
    "time_budget_s": _number(0.0, open_end=True, optional=True),
    "miss_budget": _integer(0, optional=True),
}
"""What each key of a phase accepts, in the order in which keys are shown."""
