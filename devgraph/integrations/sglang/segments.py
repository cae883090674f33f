"""SGLang's breakable capture with segments of devgraph."""

from __future__ import annotations

import functools
import importlib
import types
from collections.abc import Callable
from typing import Any

from devgraph.api.backend import Backend
from devgraph.api.graph import GraphInfo
from devgraph.api.session import Session
from devgraph.integrations.engine.ledger import ModeCount
from devgraph.integrations.engine.steps import CapturedStep

BREAKS = "sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.breakable_cuda_graph"
"""SGLang's module of marks, and of the capture to which they talk."""


@functools.cache
def segment_classes() -> tuple[Any, Any]:
    """Return what stands for SGLang's segmented graph and for its capture."""
    engine: Any = importlib.import_module(BREAKS)

    class Segments(engine.BreakableCUDAGraph):  # type: ignore[misc]
        """SGLang's list of segments and eager bodies; the segments are graphs of devgraph."""

        def __init__(self, backend: Backend, count: ModeCount) -> None:
            super().__init__(None)
            self.backend = backend
            self._count = count
            self._own = ModeCount()
            self.seconds = 0.0

        def _append_segment(self, graph: Any, needs_instantiate: bool) -> None:
            self._segments.append(CapturedStep(graph.graph, self._own))

        def replay(self) -> None:
            self._count.replays += 1
            super().replay()

        def info(self) -> GraphInfo:
            infos = [segment.graph.info() for segment in self._segments]
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
                segment.reset()
            self._segments.clear()
            self._break_fns.clear()

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
            self._leaving = False

        def __exit__(self, *error: Any) -> Any:
            self._leaving = True
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
            self._session.begin(graph)
            # SGLang ends what it records by this name.
            end = functools.partial(self._session.end, allow_empty=True)
            self._current_graph = types.SimpleNamespace(graph=graph, capture_end=end)
            self._current_graph_needs_instantiate = False

        def _end_current_segment(self) -> None:
            if self._current_graph is None:  # a body between two segments raised
                return
            super()._end_current_segment()
            if not self._leaving:
                # The eager body that follows reads what this segment writes.
                self.cuda_graph._segments[-1].launch()

    return Segments, SegmentCapture
