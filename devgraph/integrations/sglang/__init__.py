"""devgraph as the graph layer of SGLang 0.5.17 to 0.5.23: see docs/sglang.md.

``DEVGRAPH_SGLANG=1`` in the environment of an unmodified ``sglang serve``, or ``install()`` in
every process of the engine before it captures; ``stats()`` afterwards in the process that did. An
out-of-tree platform derives from ``DeviceGraphPlatform``. Importing this package imports nothing
of SGLang.
"""

from __future__ import annotations

from typing import Any

from devgraph.integrations.engine.installation import InstallError
from devgraph.integrations.sglang.backends import breakable_backend, full_backend, shared
from devgraph.integrations.sglang.install import install, plugin, uninstall

__all__ = [
    "DeviceGraphPlatform",
    "InstallError",
    "breakable_backend",
    "full_backend",
    "install",
    "plugin",
    "stats",
    "uninstall",
]


def stats() -> dict[str, Any]:
    """Return what the graph layer of this process did.

    Keys: ``backend``, ``pool_bytes``, and ``modes``: for "full" and "breakable" the captures,
    replays, live graphs, segments, regions, bytes of the graphs, capture seconds, and ``eager``.
    """
    return shared().stats()


def __getattr__(name: str) -> Any:
    if name != "DeviceGraphPlatform":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from devgraph.integrations.sglang.install import platform_class

    return platform_class()
