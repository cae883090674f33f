"""Policy ``breakable``: captured segments, with marked functions run eagerly between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from devgraph.api.backend import new_graph
from devgraph.api.device import raise_if_lost
from devgraph.api.errors import CaptureError, ExecutableError, StateError, note
from devgraph.api.graph import DeviceGraph
from devgraph.api.marks.calls import MarkedCall
from devgraph.api.marks.gates import open_recorded
from devgraph.api.marks.marks import Args, Kwargs, Mark, Scope, entered
from devgraph.api.marks.scopes import refuse_break_in_backward, split_host_args, swallowed
from devgraph.api.policy.job import Job, Policy
from devgraph.api.pool import Pool
from devgraph.api.session import Session


class EagerSegment:
    """The eager body of a break.

    ``host`` contains the host values of the body. The plan updates this dictionary in place.
    """

    def __init__(self, call: MarkedCall, host: dict[str, Any]) -> None:
        self.mark = call.mark
        self.call: MarkedCall | None = call
        self._host = host

    def replay(self) -> None:
        """Run the body once; see ``MarkedCall.run``."""
        self._held().run(self._host)

    def bound(self, stream: int | None = None) -> Callable[[], Any]:
        """Return a callable that runs the body under the current torch modes, on any stream."""
        return self._held().bound_run(self._host)

    def reset(self) -> None:
        self.call = None

    def _held(self) -> MarkedCall:
        if self.call is None:
            raise StateError(f"the eager segment of {self.mark.name} was reset; capture again")
        return self.call

    def __repr__(self) -> str:
        return f"<eager {self.mark.name}>"


class BreakablePlan:
    """A plan that runs its segments in one loop over bound callables.

    When the epoch of the pool changes, all segments are bound again.
    """

    def __init__(
        self,
        segments: list[Any],
        pool: Pool,
        host: dict[Mark, dict[str, Any]],
        *,
        check: bool = False,
    ) -> None:
        self.segments = segments
        self.outputs: Any = None
        self.notes: dict[str, Any] = {}
        self.held: Any = None
        """Objects that must live as long as the graphs."""
        self._pool = pool
        self._backend = pool.backend
        self._check = check
        self._host = host
        self.marks = [mark for mark in host if mark.dynamic]
        self._steps: dict[int | None, list[Callable[[], Any]]] = {}
        self._epoch: int | None = None

    def bind(self, host: dict[Mark, dict[str, Any]]) -> None:
        """Update the host values in the dictionaries of the eager segments."""
        for mark, kwargs in host.items():
            self._host[mark].update(kwargs)

    def run(self) -> None:
        pool = self._pool
        if self._epoch != pool.epoch:
            self._steps, self._epoch = {}, pool.epoch
        steps = self._steps.get(pool.ordered_stream) or self._bound_steps()
        ran = 0
        pool.occupied = True
        try:
            with self._backend.on_device():
                for ran, step in enumerate(steps):  # noqa: B007
                    step()
        except Exception as error:
            index, count = ran // (1 + self._check), len(self.segments)
            if isinstance(error, ExecutableError):
                error.partly = index > 0
            note(error, f"in segment {index} of {count}, {self.segments[index]!r}")
            raise_if_lost(self._backend, error)
            raise
        finally:
            pool.occupied = False

    def _bound_steps(self) -> list[Callable[[], Any]]:
        """Bind and return the segments, or raise StateError if one is not ready."""
        stream = self._pool.ordered_stream
        steps: list[Callable[[], Any]] = []
        for segment in self.segments:
            steps.append(segment.bound(stream))
            if self._check:
                steps.append(self._backend.synchronize)
        self._steps[stream] = steps
        return steps

    def close(self) -> None:
        self.outputs = None
        self._steps, self._epoch = {}, None
        for segment in self.segments:
            segment.close() if isinstance(segment, DeviceGraph) else segment.reset()
        self.held = None


class _BreakableScope(Scope):
    """The scope that ends the current graph at each marked function."""

    def __init__(
        self, job: Job, session: Session, host: Mapping[Mark, dict[str, Any]], *, stubs: bool
    ) -> None:
        self._job = job
        self._session = session
        reached, self._generators = job.owned.reached()
        self._reached = [tensor for _, tensor in reached]
        self._stubs = stubs
        self._unrun: list[DeviceGraph] = []
        self.segments: list[Any] = []
        self.host = {mark: dict(values) for mark, values in host.items()}
        self._spoiled: CaptureError | None = None

    def open(self) -> None:
        job = self._job
        graph = new_graph(job.backend, job.pool)
        graph.generators, graph.reached = self._generators, self._reached
        self._session.begin(graph, arguments=job.tensors, names=job.names)

    def finish_segment(self) -> None:
        """End the current graph, and add it to the segments unless it is empty."""
        if self._spoiled is not None:
            raise self._spoiled
        graph = self._session.end(allow_empty=True)
        if graph.recorded_nothing:
            graph.close()
        else:
            self.segments.append(graph)
            self._unrun.append(graph)

    def run_finished(self) -> None:
        """End the current graph, and replay new graphs, so that the next body sees its inputs."""
        self.finish_segment()
        open_recorded()
        try:
            with entered(None):
                while self._unrun:
                    self._unrun[0].replay()
                    del self._unrun[0]
        except ExecutableError as error:  # A replay under ``full`` may have started the capture.
            error.partly = len(self.segments) > 1
            raise

    def records_gates(self, call: str) -> bool:
        return True

    def graph_break(self) -> None:
        refuse_break_in_backward("dg.graph_break()")
        self.run_finished()
        self.open()

    def call(self, mark: Mark, args: Args, kwargs: Kwargs) -> Any:
        try:
            return self._call(mark, args, kwargs)
        except Exception as error:
            if self._spoiled is None:
                self._spoiled = swallowed(mark, error)
            raise

    def _call(self, mark: Mark, args: Args, kwargs: Kwargs) -> Any:
        job = self._job
        refuse_break_in_backward(mark.name)
        args, kwargs, host = split_host_args(mark, args, kwargs, job.spec, self.host)
        stub = mark.capture_stub if self._stubs else None
        (self.run_finished if stub is None else self.finish_segment)()
        with entered(None), job.pool.eager_body(), job.owned.eager_body(mark, args):
            if job.before_break is not None:
                job.before_break()
            call = MarkedCall(job.pool, mark, args, kwargs, len(self.segments))
            memory = job.pool.graph_memory
            result = call.first_run(args, kwargs, host, body=stub, memory=memory)
        call.alias_bridges()
        segment = EagerSegment(call, host)
        self._session.on_failure(segment.reset)
        self.segments.append(segment)
        self.open()
        return result


def capture_segments(
    job: Job,
    session: Session,
    *,
    host: Mapping[Mark, dict[str, Any]] | None = None,
    finish: Callable[[Any], None] | None = None,
) -> BreakablePlan:
    """Capture ``job.fn`` in segments. After a failure, all segments are freed.

    ``host`` contains the host keyword arguments by mark, if they differ from the job's arguments.
    ``finish`` is called with the outputs before the last segment ends. If it is given, the capture
    also runs all segments, and uses no capture stubs.
    """
    scope = _BreakableScope(job, session, host or {}, stubs=finish is None)
    with session.recording(scope):
        scope.open()
        outputs = job.outputs.filled(job.call_tracked())
        if finish is None:
            scope.finish_segment()
        else:
            finish(outputs)
            scope.run_finished()
        if not scope.segments:
            job.require_given(outputs)
    plan = BreakablePlan(scope.segments, job.pool, scope.host, check=job.check)
    plan.outputs = outputs
    return plan


class _Breakable(Policy):
    def capture(self, job: Job, session: Session) -> BreakablePlan:
        return capture_segments(job, session)


POLICY = _Breakable()
