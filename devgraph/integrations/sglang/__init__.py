"""devgraph as the graph layer of SGLang 0.5.17 to 0.5.23; see docs/sglang.md.

Set ``DEVGRAPH_SGLANG=1`` in the environment of an unmodified ``sglang serve``, or call
``install()`` in each process before the engine is created. ``stats()`` returns the counters of a
process. An out-of-tree platform subclasses ``DeviceGraphPlatform``. Importing this package does not
import SGLang.
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
    """Return the counters of this process's graph layer.

    Keys: ``backend``, ``checks`` and ``failed_checks`` of the check at start, ``pool_bytes`` and
    ``modes``. ``modes`` maps "full" and "breakable" to captures, replays, live graphs, segments,
    regions, bytes of graphs, capture seconds, and ``eager``: calls without a graph, by reason.
    """
    return shared().stats()


def __getattr__(name: str) -> Any:
    if name != "DeviceGraphPlatform":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from devgraph.integrations.sglang.install import platform_class

    return platform_class()
