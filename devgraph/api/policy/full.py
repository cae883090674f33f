"""Policy ``full``: the whole callable is one graph, and dynamic regions are updated in place."""

from __future__ import annotations

from typing import Any

from devgraph.api.capturing import GraphScope
from devgraph.api.graph import DeviceGraph
from devgraph.api.marks import Mark, entered
from devgraph.api.policy import Job

__all__ = ["POLICY", "FullPlan"]


class FullPlan:
    """One graph."""

    def __init__(self, graph: DeviceGraph, outputs: Any) -> None:
        self.segments: list[Any] = [graph]
        self.outputs = outputs
        self.marks: list[Mark] = graph.marks
        self.notes: dict[str, Any] = {}
        self.bind = graph.select
        self.run = graph.replay
        self._graph = graph

    def close(self) -> None:
        """Close the graph."""
        self.outputs = None
        self._graph.close()


class _Full:
    name = "full"

    def capture(self, job: Job) -> FullPlan:
        graph = job.backend.make_graph(job.pool)
        scope = GraphScope(graph, job.spec)
        with graph.recording(job.capture_error_mode, spec=job.spec), entered(scope):
            outputs = job.fn(*job.args, **job.kwargs, **job.spec.tracked())
        return FullPlan(graph, outputs)


POLICY = _Full()
