"""SGLang's breakable capture with graphs of devgraph as segments."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch

from devgraph.api.backend import Backend, new_graph
from devgraph.api.graph import GraphInfo, summed
from devgraph.api.policy.breakable import BreakablePlan
from devgraph.api.pool import Pool
from devgraph.api.session import Session
from devgraph.integrations.engine.ledger import ModeCount

BREAKS = "sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.breakable_cuda_graph"
"""SGLang's module of marks and breakable captures."""


def undifferentiated() -> contextlib.AbstractContextManager[Any]:
    """Skip autograd in the dispatch of operations in the block if gradients are off.

    Dispatch through autograd takes 17% of the time of a small operation. Warm-up runs need this
    context too, because compiled code depends on the dispatch.
    """
    if torch.is_grad_enabled():
        return contextlib.nullcontext()
    return torch._C._AutoDispatchBelowAutograd()


def _called_directly(body: Callable[[], Any]) -> Callable[[], Any]:
    """Return ``body``, or the function in ``body`` if that function returned None at capture.

    ``body`` is a break of SGLang that would check the type of the result in each replay. The check
    takes longer than a graph launch.
    """
    held = inspect.getclosurevars(body).nonlocals
    if held.get("captured_output", body) is not None:
        return body
    call, args, kwargs = (held[f"captured_{name}"] for name in ("inner", "args", "kwargs"))
    return functools.partial(call, *args, **kwargs)


class _Break:
    """An eager body of SGLang that writes its result into the inputs of later segments."""

    def __init__(self, body: Callable[[], Any]) -> None:
        self._body = _called_directly(body)

    def bound(self, stream: int | None) -> Callable[[], Any]:
        return self._body

    def reset(self) -> None:
        pass

    def __repr__(self) -> str:
        return "<eager code of SGLang>"


@functools.cache
def segment_classes() -> tuple[Any, Any]:
    """Return replacements for SGLang's classes of segmented graphs and of their captures."""
    engine: Any = importlib.import_module(BREAKS)

    class Segments(engine.BreakableCUDAGraph):  # type: ignore[misc]
        """SGLang's list of segments and eager bodies, as a plan of devgraph."""

        def __init__(self, pool: Pool, count: ModeCount) -> None:
            super().__init__(None)
            self.plan = BreakablePlan([], pool, {})
            self._pool = pool
            self._count = count
            self.seconds = 0.0

        def _append_segment(self, graph: Any, needs_instantiate: bool) -> None:
            # SGLang's marks appended the bodies that run before this segment.
            self.plan.segments += map(_Break, self._break_fns)
            self._break_fns.clear()
            if graph.graph.recorded_nothing:
                graph.graph.close()
            else:
                self.plan.segments.append(graph.graph)

        def replay(self) -> None:
            """Run segments and eager bodies in order on the current stream."""
            pool = self._pool
            self._count.replays += 1
            token = engine._current_stream_var.set(engine.get_device_module().current_stream())
            try:
                with pool.lock, undifferentiated():
                    if pool.occupied:
                        pool.require_free("replay a graph of SGLang")
                    pool.order()
                    self.plan.run()
            finally:
                engine._current_stream_var.reset(token)

        def info(self) -> GraphInfo:
            state = "ready" if self.plan.segments else "closed"
            return summed(self.plan.segments, state=state, capture_seconds=self.seconds)

        def reset(self) -> None:
            self.plan.close()
            self.plan.segments.clear()

    class SegmentCapture(engine.BreakableCUDAGraphCapture):  # type: ignore[misc]
        """The capture for SGLang's marks. Enter it inside ``session``, on the current stream."""

        def __init__(
            self,
            segments: Any,
            backend: Backend,
            session: Session,
            barrier_fn: Callable[[], None] | None,
        ) -> None:
            super().__init__(cuda_graph=segments, barrier_fn=barrier_fn)
            self._backend = backend
            self._session = session
            self._current_graph: Any = None

        def __exit__(self, *error: Any) -> Any:
            if error[0] is not None:
                self._current_graph = None  # The session destroys the graph.
            return super().__exit__(*error)

        def run_eagerly(self, body: Callable[[], Any]) -> Any:
            """Run ``body`` now, and as a break in each replay."""
            self._end_current_segment()
            output = body()
            self.cuda_graph._break_fns.append(body)
            self._begin_new_segment()
            return output

        def _begin_new_segment(self) -> None:
            graph = new_graph(self._backend, self._session.pool)
            self._session.begin(graph)
            # SGLang calls ``capture_end`` to end a recording.
            end = functools.partial(self._session.end, allow_empty=True)
            self._current_graph = types.SimpleNamespace(graph=graph, capture_end=end)
            self._current_graph_needs_instantiate = False

        def _end_current_segment(self) -> None:
            if self._current_graph is not None:  # None after a failed body
                super()._end_current_segment()

    return Segments, SegmentCapture
