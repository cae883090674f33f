"""SGLang's breakable capture with segments of devgraph."""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import types
from collections.abc import Callable
from typing import Any

import torch

from devgraph.api.backend import Backend
from devgraph.api.graph import GraphInfo
from devgraph.api.pool import Pool
from devgraph.api.session import Session
from devgraph.integrations.engine.ledger import ModeCount

BREAKS = "sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.breakable_cuda_graph"
"""SGLang's module of marks, and of the capture to which they talk."""


def undifferentiated() -> contextlib.AbstractContextManager[Any]:
    """Lead the block's operations past torch's differentiation, where that is off: going through it
    is a sixth of what a small one takes. Code is compiled for it, so that warm-ups do the same."""
    if torch.is_grad_enabled():
        return contextlib.nullcontext()
    return torch._C._AutoDispatchBelowAutograd()


@functools.cache
def segment_classes() -> tuple[Any, Any]:
    """Return what stands for SGLang's segmented graph and for its capture."""
    engine: Any = importlib.import_module(BREAKS)

    class Segments(engine.BreakableCUDAGraph):  # type: ignore[misc]
        """SGLang's list of segments and eager bodies; the segments are graphs of devgraph."""

        def __init__(self, backend: Backend, pool: Pool, count: ModeCount) -> None:
            super().__init__(None)
            self.backend = backend
            self._pool = pool
            self._count = count
            self._calls: dict[int | None, list[Callable[[], Any]]] = {}
            self._epoch: int | None = None
            self.seconds = 0.0

        def _append_segment(self, graph: Any, needs_instantiate: bool) -> None:
            self._segments.append(graph.graph)

        def replay(self) -> None:
            """Run segments and eager bodies in order on the current stream, as SGLang does, by
            calls that were bound to that stream beforehand."""
            pool = self._pool
            self._count.replays += 1
            token = engine._current_stream_var.set(engine.get_device_module().current_stream())
            try:
                with pool.lock, undifferentiated():
                    pool.order()
                    if self._epoch != pool.epoch:
                        self._calls, self._epoch = {}, pool.epoch
                    for call in self._calls.get(pool.ordered_stream) or self._bound_calls():
                        call()
            finally:
                engine._current_stream_var.reset(token)

        def _bound_calls(self) -> list[Callable[[], Any]]:
            stream = self._pool.ordered_stream
            launches = [segment.bound(stream) for segment in self._segments]
            calls = itertools.chain(*itertools.zip_longest(launches, self._break_fns))
            self._calls[stream] = [call for call in calls if call is not None]
            return self._calls[stream]

        def info(self) -> GraphInfo:
            infos = [segment.info() for segment in self._segments]
            return GraphInfo(
                state=infos[0].state if infos else "closed",
                nodes=None,
                regions=len(self._break_fns),
                segments=len(infos) + len(self._break_fns),
                bytes=sum(info.bytes for info in infos),
                capture_seconds=self.seconds,
                recordings=0,
            )

        def reset(self) -> None:
            for segment in self._segments:
                segment.close()
            for kept in (self._segments, self._break_fns, self._calls):
                kept.clear()

    class SegmentCapture(engine.BreakableCUDAGraphCapture):  # type: ignore[misc]
        """SGLang's capture, which its marks talk to, recording graphs of devgraph.

        Entered inside ``session``, on the stream that is current there.
        """

        def __init__(
            self, segments: Any, session: Session, barrier_fn: Callable[[], None] | None
        ) -> None:
            super().__init__(cuda_graph=segments, barrier_fn=barrier_fn)
            self._session = session
            self._current_graph: Any = None

        def __exit__(self, *error: Any) -> Any:
            if error[0] is not None:
                self._current_graph = None  # the session destroys it
            return super().__exit__(*error)

        def run_eagerly(self, body: Callable[[], Any]) -> Any:
            """Make ``body`` a break of its own, which runs now and in every replay."""
            self._end_current_segment()
            output = body()
            self.cuda_graph._break_fns.append(body)
            self._begin_new_segment()
            return output

        def _begin_new_segment(self) -> None:
            graph = self.cuda_graph.backend.make_graph(self._session.pool)
            graph.names_side_streams = False  # SGLang joins those that a segment forked
            self._session.begin(graph)
            # SGLang ends what it records by this name.
            end = functools.partial(self._session.end, allow_empty=True)
            self._current_graph = types.SimpleNamespace(graph=graph, capture_end=end)
            self._current_graph_needs_instantiate = False

        def _end_current_segment(self) -> None:
            if self._current_graph is not None:  # None if a body between two segments raised
                super()._end_current_segment()

    return Segments, SegmentCapture
