"""Policies: strategies that split a Python callable into segments.

A policy does not depend on a vendor. It is a module with a ``POLICY``, registered with its
*promises* at the end of this file. Every compatibility rule (devgraph/api/config/rules.py) applies
to a policy unless the policy's promises exempt it.

This module does not import torch, so that configurations can be read without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

import attrs

from devgraph.api.errors import InputError, did_you_mean

if TYPE_CHECKING:
    from devgraph.api.policy.job import Policy

BREAKS = "breaks"
"""Promise: marked functions run eagerly between graphs, so they may read the host."""
WHOLE = "whole"
"""Promise: a step is one graph without eager code inside."""
UNTRACED = "untraced"
"""Promise: the step's own code is captured as it runs, without tracing or compilation."""

COMPILERS = ("eager", "inductor")
"""Compilers of policies that do not promise ``UNTRACED``."""


@attrs.frozen
class Registration:
    """The registration of a policy: the module of its ``POLICY`` and its promises."""

    module: str
    promises: frozenset[str]


_registered: dict[str, Registration] = {}


def register_policy(name: str, module: str, *promises: str) -> None:
    """Register the ``POLICY`` of ``module`` as ``name``. The module is imported at first use.

    Each promise is ``BREAKS``, ``WHOLE`` or ``UNTRACED``.

    Raises:
        InputError: the name is taken, or a promise is unknown.
    """
    if name in _registered or name == "disabled":
        raise InputError(f"there is a policy {name!r} already; choose another name")
    for promise in promises:
        if promise not in (BREAKS, WHOLE, UNTRACED):
            known = did_you_mean(promise, (BREAKS, WHOLE, UNTRACED))
            raise InputError(f"a policy cannot promise {promise!r}. {known}")
    _registered[name] = Registration(module, frozenset(promises))


def policies() -> tuple[str, ...]:
    """Return the names of all policies in registration order."""
    return tuple(_registered)


def registration(name: str) -> Registration:
    if not isinstance(name, str) or name not in _registered:
        raise InputError(f"no policy {name!r}. {did_you_mean(str(name), _registered)}")
    return _registered[name]


def breaks(name: str) -> bool:
    """Whether marked functions run eagerly under the policy ``name``; True for ``disabled``."""
    return name == "disabled" or BREAKS in registration(name).promises


def compiles(name: str) -> bool:
    """Whether the policy ``name`` may use a compiler."""
    return name != "disabled" and UNTRACED not in registration(name).promises


def get_policy(name: str) -> Policy:
    policy: Policy = importlib.import_module(registration(name).module).POLICY
    return policy


register_policy("full", f"{__name__}.full", WHOLE, UNTRACED)
register_policy("breakable", f"{__name__}.breakable", BREAKS, UNTRACED)
register_policy("piecewise", f"{__name__}.piecewise", BREAKS)
