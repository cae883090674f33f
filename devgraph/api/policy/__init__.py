"""Policies: how a Python callable becomes a list of segments. A policy never sees a vendor.

A policy is one file with a ``POLICY`` and one line at the end of this one. That line says what the
policy promises about the steps that it captures. Every compatibility rule (devgraph/api/config)
holds for every policy that is registered, unless the policy promises what spares it from the rule:
one that promises nothing is trusted with nothing.

Nothing here imports torch: configurations are read where there is none.
"""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING

import attrs

from devgraph.api.errors import InputError, did_you_mean

if TYPE_CHECKING:
    from devgraph.api.policy.job import Policy

BREAKS = "breaks"
"""Marked functions run eagerly, between graphs: they may read the host, and need no capture."""
WHOLE = "whole"
"""A step is one graph: no eager code runs in its middle, and nothing is handed over there."""
UNTRACED = "untraced"
"""The step's own code is captured as it runs; nothing traces, compiles or replaces it."""

COMPILERS = ("eager", "inductor")
"""What may compile the pieces of a policy that does not promise ``UNTRACED``."""


@attrs.frozen
class Registration:
    """One policy: the module that holds its ``POLICY``, and what it promises."""

    module: str
    promises: frozenset[str]


_registered: dict[str, Registration] = {}


def register_policy(name: str, module: str, *promises: str) -> None:
    """Make the ``POLICY`` of ``module``, imported when it is first used, known as ``name``.

    ``promises`` are of ``BREAKS``, ``WHOLE`` and ``UNTRACED``.

    Raises:
        InputError: there is a policy of that name, or no such promise.
    """
    if name in _registered or name == "disabled":
        raise InputError(f"there is a policy {name!r} already; give the new one another name")
    for promise in promises:
        if promise not in (BREAKS, WHOLE, UNTRACED):
            known = did_you_mean(promise, (BREAKS, WHOLE, UNTRACED))
            raise InputError(f"a policy cannot promise {promise!r}. {known}")
    _registered[name] = Registration(module, frozenset(promises))


def policies() -> tuple[str, ...]:
    """Return the names of all policies, in the order of their registration."""
    return tuple(_registered)


def registration(name: str) -> Registration:
    """Return what a policy registered.

    Raises:
        InputError: there is no such policy (a ValueError).
    """
    if not isinstance(name, str) or name not in _registered:
        raise InputError(f"no policy {name!r}. {did_you_mean(str(name), _registered)}")
    return _registered[name]


def breaks(name: str) -> bool:
    """Whether marked functions run eagerly under the policy of that name, or under ``disabled``."""
    return name == "disabled" or BREAKS in registration(name).promises


def compiles(name: str) -> bool:
    """Whether the policy of that name may use a compiler."""
    return name != "disabled" and UNTRACED not in registration(name).promises


def get_policy(name: str) -> Policy:
    """Return the policy of that name; see ``registration``."""
    return _loaded(registration(name).module)


@functools.cache
def _loaded(module: str) -> Policy:
    policy: Policy = importlib.import_module(module).POLICY
    return policy


register_policy("full", f"{__name__}.full", WHOLE, UNTRACED)
register_policy("breakable", f"{__name__}.breakable", BREAKS, UNTRACED)
register_policy("piecewise", f"{__name__}.piecewise", BREAKS)
