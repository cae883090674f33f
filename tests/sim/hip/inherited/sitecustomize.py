"""Makes "rocm" the stand-in in Python processes that a test starts: see ``tests.sim.hip.plugin``.

Nothing is imported before the process asks for devgraph: workers of pytest-xdist load this as well,
and pytest wants to be the first to import what it rewrites.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from typing import Any


def _make() -> Any:
    from tests.sim.hip.standin import make

    return make()


class _Registration(importlib.abc.MetaPathFinder):
    """Registers the stand-in as soon as the registry is imported."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != "devgraph.api.registry":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            module.register("rocm", _make, replace=True)

        loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Registration())
