"""The contract: what backends implement, what policies and runners build on.

The public names that live here are names of this package too, bound on first use; ``capture`` is
not: the module of that name has its place.
"""

from __future__ import annotations

import importlib
from typing import Any

from devgraph.api.errors import __all__ as _errors

__version__ = "0.1.0"

HOMES = {
    "devgraph.api.backend": ("Backend",),
    "devgraph.api.buffers": ("StaticBuffers",),
    "devgraph.api.capabilities": ("Capabilities",),
    "devgraph.api.capture": ("Captured", "capture"),
    "devgraph.api.config.flags": ("add_cli_args",),
    "devgraph.api.config.model": ("DeviceGraphConfig",),
    "devgraph.api.config.phase": ("DeviceGraphWarning", "PhaseConfig"),
    "devgraph.api.errors": tuple(_errors),
    "devgraph.api.graph": ("DeviceGraph", "GraphInfo", "GraphState"),
    "devgraph.api.marks.marks": ("graph_break", "is_capturing", "no_graph", "region"),
    "devgraph.api.policy.budget": ("UpdateBudget",),
    "devgraph.api.pool": ("Pool",),
    "devgraph.api.prove": ("Report",),
    "devgraph.api.registry": ("BackendInfo", "backends", "get_backend", "register"),
}
"""Module to the public names that it defines."""

_HOME_OF = {name: module for module, names in HOMES.items() for name in names}
del _HOME_OF["capture"]

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    module = _HOME_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'devgraph.api' has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "HOMES"]
