"""Counters of an engine's graphs, which other threads read while it captures."""

from __future__ import annotations

from typing import Any

from devgraph.api.graph import GraphInfo
from devgraph.integrations.engine.ledger import ModeCount


def test_counters_are_read_while_graphs_are_captured():
    count, kept = ModeCount(), []

    class Graph:
        def info(self) -> GraphInfo:
            more: Any = Graph()
            kept.append(more)
            count.captured(more, 0.0)  # as another thread does, any time
            rest = dict.fromkeys(("nodes", "regions", "segments", "bytes", "recordings"), 1)
            return GraphInfo(state="ready", capture_seconds=0.0, **rest)

    first: Any = Graph()
    count.captured(first, 0.5)
    assert count.as_dict()["graphs"] == 1
    assert count.as_dict()["graphs"] == 2
