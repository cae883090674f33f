"""Policy ``breakable``: captured segments, with eager work between them where the marks say so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from devgraph.api.capturing import plain_host_values
from devgraph.api.errors import EmptyCaptureError
from devgraph.api.graph import DeviceGraph
from devgraph.api.marks import Mark, entered
from devgraph.api.policy import Job
from devgraph.api.regions import RegionHit

__all__ = ["POLICY", "BreakablePlan", "EagerSegment"]


class EagerSegment:
    """The eager body of one break, bound to its tensors and to the live host values.

    Args:
        hit: the marked call.
        host: the host keyword arguments, a dictionary that the plan refreshes in place.
    """

    def __init__(self, hit: RegionHit, host: dict[str, Any]) -> None:
        self.mark = hit.mark
        self.hit: RegionHit | None = hit
        self.replay: Callable[[], None] = hit.runner(host)

    def reset(self) -> None:
        """Let go of every tensor."""
        self.hit = None
        self.replay = self._refuse

    def _refuse(self) -> None:
        raise EmptyCaptureError(f"the eager segment of {self.mark.name} was reset")

    def __repr__(self) -> str:
        return f"<eager {self.mark.name}>"


class BreakablePlan:
    """Graphs and eager segments, launched in order by one flat loop."""

    def __init__(self, segments: list[Any], outputs: Any, host: dict[Mark, dict[str, Any]]) -> None:
        self.segments = segments
        self.outputs = outputs
        self.notes: dict[str, Any] = {}
        self._host = host
        self.marks = [mark for mark in host if mark.dynamic]
        self._steps = tuple(segment.replay for segment in segments)

    def bind(self, host: dict[Mark, dict[str, Any]]) -> None:
        """Refresh the host values in the dictionaries that the eager segments hold."""
        for mark, kwargs in host.items():
            self._host[mark].update(kwargs)

    def run(self) -> None:
        """Run every segment; an exception of an eager body stops before the next one."""
        for step in self._steps:
            step()

    def close(self) -> None:
        """Free graphs and let go of tensors."""
        self.outputs = None
        self._steps = ()
        _close(self.segments)


def _close(segments: list[Any]) -> None:
    for segment in segments:
        if isinstance(segment, DeviceGraph):
            segment.close()
        else:
            segment.reset()


class _BreakableScope:
    """The capture in progress: what is finished, and the graph that is being recorded."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.segments: list[Any] = []
        self.host: dict[Mark, dict[str, Any]] = {}
        self.graph: DeviceGraph | None = None

    def open(self) -> None:
        graph = self._job.backend.make_graph(self._job.pool)
        graph.begin(self._job.capture_error_mode)
        self.graph = graph

    def finish_segment(self) -> DeviceGraph | None:
        """End the current graph; keep it unless it is empty."""
        graph, self.graph = self.graph, None
        assert graph is not None
        graph.end(allow_empty=True)
        if graph.info().nodes == 0:
            graph.close()
            return None
        self.segments.append(graph)
        return graph

    def cancel(self) -> None:
        """Destroy everything; the exception under way stays the one that is raised."""
        graph, self.graph = self.graph, None
        if graph is not None:
            graph.cancel()
        _close(self.segments)
        self.segments.clear()

    def graph_break(self) -> None:
        self._break()
        self.open()

    def call(self, mark: Mark, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        job = self._job
        args, kwargs, given = mark.split(args, kwargs)
        if mark not in self.host:
            self.host[mark] = mark.host_kwargs(plain_host_values(mark, given, job.spec))
        else:
            plain_host_values(mark, given, job.spec)
        host = self.host[mark]
        self._break()
        with entered(None):
            if job.before_break is not None:
                job.before_break()
            hit = RegionHit(job.pool, mark, args, kwargs, len(self.segments))
            result = hit.first_run(args, kwargs, host, body=mark.capture_stub)
        self.segments.append(EagerSegment(hit, host))
        self.open()
        return result

    def _break(self) -> None:
        finished = self.finish_segment()
        if finished is not None:
            # Run what was recorded, so that the eager body sees written inputs.
            with entered(None):
                finished.replay()


class _Breakable:
    name = "breakable"

    def capture(self, job: Job) -> BreakablePlan:
        scope = _BreakableScope(job)
        try:
            scope.open()
            with entered(scope):
                outputs = job.fn(*job.args, **job.kwargs, **job.spec.tracked())
            scope.finish_segment()
            if not scope.segments:
                raise EmptyCaptureError(
                    "the capture recorded no device work and no eager segment. Run the step on "
                    f"this backend's device ({job.backend.device})."
                )
        except BaseException:
            scope.cancel()
            raise
        return BreakablePlan(scope.segments, outputs, scope.host)


POLICY = _Breakable()
