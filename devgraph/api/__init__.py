"""The contract that backends implement and that policies and runners use.

Public names are imported on first use. ``capture`` is excluded, because a module has this name.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from devgraph.api.errors import __all__ as _errors

__version__ = "0.1.0"

HOMES = {
    "devgraph.api.backend": ("Backend",),
    "devgraph.api.buffers": ("StaticBuffers",),
    "devgraph.api.capabilities": ("Capabilities",),
    "devgraph.api.capture": ("Captured", "capture"),
    "devgraph.api.config.cluster": ("plan_cluster",),
    "devgraph.api.config.facts": ("EngineFacts",),
    "devgraph.api.config.flags": ("add_cli_args",),
    "devgraph.api.config.model": ("DeviceGraphConfig",),
    "devgraph.api.config.phase": ("DeviceGraphWarning", "PhaseConfig"),
    "devgraph.api.config.resolve": ("resolve",),
    "devgraph.api.errors": tuple(_errors),
    "devgraph.api.gates": ("Gate", "Gates"),
    "devgraph.api.graph": ("DeviceGraph", "GraphInfo", "GraphState"),
    "devgraph.api.callables": ("Graphed", "graphed", "ungraphed"),
    "devgraph.api.marks.gates": ("signal", "wait"),
    "devgraph.api.marks.marks": ("graph_break", "is_capturing", "no_graph", "region"),
    "devgraph.api.policy.job": ("UpdateBudget",),
    "devgraph.api.pool": ("Pool",),
    "devgraph.api.prove": ("Report",),
    "devgraph.api.registry": ("BackendInfo", "backends", "get_backend", "register"),
    "devgraph.api.training": ("make_graphed_callables",),
}
"""The public names that each module defines."""


def bound_on_use(package: str, home_of: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a ``__getattr__`` for ``package`` that imports each name from ``home_of[name]``."""

    def bind(name: str) -> Any:
        here = sys.modules[package]
        if name not in home_of:
            # With ``obj``, a traceback suggests the nearest existing name.
            text = f"module {package!r} has no attribute {name!r}"
            raise AttributeError(text, name=name, obj=here)
        value = getattr(importlib.import_module(home_of[name]), name)
        setattr(here, name, value)
        return value

    return bind


_HOME_OF = {name: module for module, names in HOMES.items() for name in names}
del _HOME_OF["capture"]

__all__ = sorted(_HOME_OF)
__getattr__ = bound_on_use(__name__, _HOME_OF)


def __dir__() -> list[str]:
    return [*__all__, "HOMES"]
