"""devgraph as the graph layer of vLLM: see docs/vllm.md.

``install()`` before the engine is made, or ``DEVGRAPH_VLLM=1`` in the environment of an
unmodified ``vllm serve``; ``stats()`` afterwards. An out-of-tree platform names
``devgraph.integrations.vllm.DeviceGraphWrapper`` in ``get_static_graph_wrapper_cls``.
Importing this package imports nothing of vLLM.
"""

from __future__ import annotations

from typing import Any

from devgraph.integrations.engine.installation import InstallError
from devgraph.integrations.engine.ledger import totals
from devgraph.integrations.vllm.install import here, install, plugin, uninstall
from devgraph.integrations.vllm.layer import current_layer

__all__ = ["DeviceGraphWrapper", "InstallError", "install", "plugin", "stats", "uninstall"]


def stats() -> dict[str, Any]:
    """Return what the graph layer of this process did.

    Keys: ``installed`` (the places of vLLM that are devgraph's), ``backend``, ``pool_bytes``, and
    ``modes``: for "piecewise", "full" and "breakable" the captures, replays, live graphs, segments,
    regions, bytes of the graphs themselves, capture seconds, and ``eager``: calls that ran without
    a graph, by reason. In mode piecewise every piece of a model counts as a call.
    """
    places = [] if here.now is None else list(here.now.places)
    layer = current_layer()
    return {"installed": places, **totals(layer.memory, layer.counts)}


def __getattr__(name: str) -> Any:
    if name != "DeviceGraphWrapper":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from devgraph.integrations.vllm.wrappers import graph_wrapper

    return graph_wrapper()
