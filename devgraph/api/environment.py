"""The environment variables of devgraph, which docs/environment.md describes."""

from __future__ import annotations

import functools
import os

from devgraph.api.errors import ConfigError, did_you_mean
from devgraph.api.marks.source import warn

DEBUG_VARIABLE = "DEVGRAPH_DEBUG"
DEMO_VARIABLE = "DEVGRAPH_DEMO_MODEL"
EMULATE_VARIABLE = "DEVGRAPH_EMULATE"
MODE_VARIABLE = "DEVGRAPH_MODE"
SGLANG_VARIABLE = "DEVGRAPH_SGLANG"
STATS_VARIABLE = "DEVGRAPH_STATS_FILE"
TIMEOUT_VARIABLE = "DEVGRAPH_GATE_TIMEOUT"
VERIFY_VARIABLE = "DEVGRAPH_VERIFY"
VLLM_VARIABLE = "DEVGRAPH_VLLM"
VARIABLES = frozenset(value for name, value in vars().items() if name.endswith("_VARIABLE"))

AUTOLOAD_WAS_ON = "DEVGRAPH_AUTOLOAD_WAS_ON"
"""Environment variable that the command line sets if it turned autoload off for its own process."""

_PREFIX = "DEVGRAPH_"
_OTHERS = (AUTOLOAD_WAS_ON, f"{_PREFIX}TEST_")
"""Prefixes of the variables that the command line and tests set."""

SWITCHES = {
    DEBUG_VARIABLE: (),
    EMULATE_VARIABLE: (),
    SGLANG_VARIABLE: ("strict",),
    VLLM_VARIABLE: ("strict",),
}
"""Boolean variables, each with the other words that it accepts."""

_WORDS = {"1": True, "true": True, "on": True, "yes": True}
_WORDS |= {"": False, "0": False, "false": False, "off": False, "no": False}


def boolean(text: str) -> bool | None:
    """Return the boolean that ``text`` denotes, or None if it denotes no boolean."""
    return _WORDS.get(text.strip().lower())


def switch(variable: str) -> bool | str:
    """Return the value of a variable in ``SWITCHES``: a boolean, or one of its other words.

    Raises:
        ConfigError: the variable has any other value.
    """
    text = os.environ.get(variable, "")
    value: bool | str | None = boolean(text)
    if value is None:
        value = text.strip().lower()
        if value not in SWITCHES[variable]:
            known = ", ".join(("1, true, on or yes; 0, false, off or no", *SWITCHES[variable]))
            raise ConfigError(f"{variable}={text!r} is invalid. Valid values: {known}.")
    return value


def applied_by_runners() -> list[str]:
    """Return the names of the variables that runners apply to their mode, unless they are off."""
    names = (EMULATE_VARIABLE, VERIFY_VARIABLE)
    return [name for name in names if boolean(os.environ.get(name, "")) is not False]


def warn_unknown() -> None:
    """Warn about each unknown environment variable with devgraph's prefix."""
    for name in os.environ:
        if name.startswith(_PREFIX) and name not in VARIABLES and not name.startswith(_OTHERS):
            _warn(name)


@functools.cache
def _warn(name: str) -> None:
    hint = did_you_mean(name, VARIABLES)
    warn(f"the unknown environment variable {name} is ignored. {hint}")
