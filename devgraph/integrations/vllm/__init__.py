"""devgraph as the graph layer of vLLM; see docs/vllm.md.

Call ``install()`` before the engine is created, or set ``DEVGRAPH_VLLM=1`` in the environment of an
unmodified ``vllm serve``. ``stats()`` returns the counters. An out-of-tree platform returns
``devgraph.integrations.vllm.DeviceGraphWrapper`` from ``get_static_graph_wrapper_cls``. Importing
this package does not import vLLM.
"""

from __future__ import annotations

from typing import Any

from devgraph.integrations.engine.installation import InstallError
from devgraph.integrations.engine.ledger import totals
from devgraph.integrations.vllm.install import here, install, plugin, uninstall
from devgraph.integrations.vllm.layer import current_layer

__all__ = ["DeviceGraphWrapper", "InstallError", "install", "plugin", "stats", "uninstall"]


def stats() -> dict[str, Any]:
    """Return the counters of this process's graph layer.

    Keys: ``installed`` (replaced attributes of vLLM), ``backend``, ``checks`` and ``failed_checks``
    of the check at start, ``pool_bytes`` and ``modes``. ``modes`` has entries for "piecewise",
    "full" and "breakable", each with captures, replays, live graphs, segments, regions, bytes of
    graphs, capture seconds, and ``eager``: calls without a graph, by reason. In mode piecewise,
    each piece of a model counts as one call.
    """
    replaced = [] if here.changes is None else list(here.changes.replaced)
    layer = current_layer()
    return {"installed": replaced, **totals(layer.memory, layer.counts, layer.check.counts)}


def __getattr__(name: str) -> Any:
    if name != "DeviceGraphWrapper":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from devgraph.integrations.vllm.wrappers import graph_wrapper

    return graph_wrapper()
