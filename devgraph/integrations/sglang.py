"""devgraph under SGLang 0.5: its ``runner_backend`` interface on DeviceGraph.

``install()`` before the engine is made puts both backends where SGLang chooses one per phase.
They are subclasses of SGLang's own, because its runners ask for those classes; capture and replay
are devgraph's. Importing this module imports nothing of SGLang.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from devgraph.api.errors import CapabilityError, StateError
from devgraph.api.graph import GraphInfo
from devgraph.api.pool import Pool
from devgraph.api.session import Session, session
from devgraph.integrations.engine.ledger import Ledger, ModeCount
from devgraph.integrations.engine.memory import GraphMemory
from devgraph.integrations.engine.steps import CapturedStep, capture_whole

__all__ = ["breakable_backend", "full_backend", "install", "stats", "uninstall"]

_WARMUPS = 2
"""Eager runs before a capture, as SGLang's own backends make."""


class _Shared:
    """What all backends of this process share; made when the first is."""

    def __init__(self) -> None:
        self.memory = GraphMemory(lambda: "")
        self.ledger = Ledger()


class _Holder:
    shared: _Shared | None = None
    replaced: tuple[tuple[str, Any], ...] = ()


def _shared() -> _Shared:
    if _Holder.shared is None:
        _Holder.shared = _Shared()
    return _Holder.shared


class _OnDevgraph:
    """The part of both backends that is devgraph's: memory and warm-up."""

    _memory_saver_adapter: Any
    _device_module: Any
    _tp_group: Any
    _pool: Any
    _output_buffer: Any
    _reuse_output_buffer: bool
    _shared_output_buffer: Any
    _devgraph_pool: Pool | None = None

    def _check(self) -> None:
        saver = self._memory_saver_adapter
        if saver is not None and saver.enabled:
            raise CapabilityError(
                "SGLang's memory saver is to pause graph memory (SGLANG_MEMORY_SAVER_CUDA_GRAPH), "
                "and devgraph's pools cannot be paused. Unset it, or do not install devgraph."
            )

    @contextlib.contextmanager
    def capture_session(self, stream: Any) -> Iterator[None]:
        """Capture shapes inside; they take memory from the pool of all of SGLang's backends."""
        with super().capture_session(stream):  # type: ignore[misc]
            self._open_pool()
            yield

    def _open_pool(self) -> None:
        self._devgraph_pool = _shared().memory.pool(self._pool)
        handle = getattr(self._devgraph_pool, "handle", None)
        if handle is not None:
            allocator = importlib.import_module(
                "sglang.srt.distributed.device_communicators.pynccl_allocator"
            )
            allocator.set_graph_pool_id(handle)

    def _open(self) -> Pool:
        if self._devgraph_pool is None:
            raise StateError("capture_one was called outside capture_session")
        return self._devgraph_pool

    def _warm_up(self, forward: Callable[[], Any], after: Callable[[], None] | None) -> Any:
        output = None
        for _ in range(_WARMUPS):
            self._device_module.synchronize()
            self._tp_group.barrier()
            output = forward()
            if after is not None:
                after()  # attention puts back what the warm-up changed
        _shared().memory.settle()
        return output


@functools.cache
def full_backend() -> Any:
    """Return the backend class whose every shape is one graph."""
    engine: Any = importlib.import_module(
        "sglang.srt.model_executor.runner_backend.full_cuda_graph_backend"
    )

    class DeviceGraphBackend(_OnDevgraph, engine.FullCudaGraphBackend):  # type: ignore[misc]
        """SGLang's full backend with the graphs of devgraph."""

        def __init__(self, cuda_graph_runner: Any, **options: Any) -> None:
            super().__init__(cuda_graph_runner, **options)
            self._check()
            self._count = _shared().ledger.of("full")

        def capture_one(
            self,
            shape_key: Any,
            forward_fn: Callable[[], Any],
            capture_inputs: Any = None,
            post_warmup_hook: Callable[[], None] | None = None,
        ) -> None:
            pool = self._open()
            output = self._warm_up(forward_fn, post_warmup_hook)
            if self._reuse_output_buffer and self._output_buffer is None:
                # The first shape is the largest, and shapes replay one at a time.
                self._output_buffer = engine._allocate_output_buffer(output)
                self._reuse_output_buffer = self._output_buffer is not None
            del output

            def body() -> Any:
                return self._to_shared(forward_fn())

            backend = _shared().memory.backend
            graph, output = capture_whole(backend, pool, self._count, body, release=False)
            self._graphs[shape_key] = CapturedStep(graph, self._count)
            self._outputs[shape_key] = output

        def _to_shared(self, output: Any) -> Any:
            if not self._reuse_output_buffer:
                return output
            shared = engine._copy_output_to_buffer(output, self._output_buffer)
            self._reuse_output_buffer = shared is not None
            return output if shared is None else shared

        def cleanup(self) -> None:
            super().cleanup()
            self._devgraph_pool = None

    return DeviceGraphBackend


class _Recording:
    """A graph being recorded, under the name by which SGLang ends a segment."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.graph = _shared().memory.backend.make_graph(session.pool)
        session.begin(self.graph)

    def capture_end(self) -> None:
        self._session.end(allow_empty=True)


@functools.cache
def _segment_classes() -> tuple[Any, Any]:
    """Return what stands for SGLang's segmented graph and for its capture."""
    engine: Any = importlib.import_module(
        "sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.breakable_cuda_graph"
    )

    class Segments(engine.BreakableCUDAGraph):  # type: ignore[misc]
        """SGLang's list of segments and eager bodies; the segments are graphs of devgraph."""

        def __init__(self, count: ModeCount) -> None:
            super().__init__(None)
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

        def close(self) -> None:
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
            self._current_graph: _Recording | None = None
            self._leaving = False

        def __exit__(self, *error: Any) -> Any:
            self._leaving = True
            if error[0] is not None:
                self._current_graph = None  # the session destroys it
            return super().__exit__(*error)

        def _begin_new_segment(self) -> None:
            self._current_graph = _Recording(self._session)
            self._current_graph_needs_instantiate = False

        def _end_current_segment(self) -> None:
            if self._current_graph is None:  # a body between two segments raised
                return
            super()._end_current_segment()
            if not self._leaving:
                # The eager body that follows reads what this segment writes.
                self.cuda_graph._segments[-1].launch()

    return Segments, SegmentCapture


@functools.cache
def breakable_backend() -> Any:
    """Return the backend class whose shapes break where SGLang's models are marked."""
    engine: Any = importlib.import_module(
        "sglang.srt.model_executor.runner_backend.breakable_cuda_graph_backend"
    )
    segment_class, capture_class = _segment_classes()

    base: Any = engine.BreakableCudaGraphBackend

    class DeviceGraphBreakableBackend(_OnDevgraph, base):  # type: ignore[misc]
        """SGLang's breakable backend with the graphs of devgraph."""

        def __init__(self, cuda_graph_runner: Any, **options: Any) -> None:
            super().__init__(cuda_graph_runner, **options)
            self._count = _shared().ledger.of("breakable")

        def begin_cuda_graph_capture(self) -> None:
            """Sharing of executables is not devgraph's: every segment has its own."""

        def end_cuda_graph_capture(self) -> None:
            """See ``begin_cuda_graph_capture``."""

        def capture_one(
            self,
            shape_key: Any,
            forward_fn: Callable[[], Any],
            capture_inputs: Any = None,
            post_warmup_hook: Callable[[], None] | None = None,
        ) -> None:
            pool = self._open()
            warm = self._warm_up(forward_fn, post_warmup_hook)
            if self._shared_output_buffer is None:
                rows = self._cuda_graph_runner.cuda_graph_output_capacity_rows(warm)
                size = shape_key.size if rows is None else rows
                self._shared_output_buffer = self._alloc_full_buffer(warm, size)
            buffer = self._shared_output_buffer
            rows = self._output_rows(warm, shape_key.size)

            def body() -> None:
                self._copy_output_to_buffer(forward_fn(), buffer, rows)

            if self._debug_eager:
                body = engine.eager_on_graph(body)
            self._graphs[shape_key] = self._segments_of(pool, body)
            self._outputs[shape_key] = self._slice_output(buffer, rows)
            self._capture_inputs[shape_key] = capture_inputs

        def _segments_of(self, pool: Pool, body: Callable[[], None]) -> Any:
            started = time.perf_counter()
            segments = segment_class(self._count)
            try:
                with (
                    session(pool) as held,
                    capture_class(segments, held, self._tp_group.barrier),
                ):
                    body()
            except BaseException:
                segments.close()
                raise
            segments.seconds = time.perf_counter() - started
            self._count.captured(segments, segments.seconds)
            return segments

        def cleanup(self) -> None:
            for segments in self._graphs.values():
                segments.close()
            super().cleanup()
            self._devgraph_pool = None

    return DeviceGraphBreakableBackend


def install() -> None:
    """Let SGLang choose devgraph's backends wherever it would choose its own full or breakable.

    Call it before the engine is made. Idempotent. Devices for which SGLang has backends of their
    own keep those; an out-of-tree platform returns ``full_backend()`` from
    ``get_full_graph_backend_cls``.
    """
    if _Holder.replaced:
        return
    choice = importlib.import_module("sglang.srt.model_executor.runner_backend.utils")
    classes = {
        "FullCudaGraphBackend": full_backend(),
        "BreakableCudaGraphBackend": breakable_backend(),
    }
    _Holder.replaced = tuple((name, getattr(choice, name)) for name in classes)
    for name, value in classes.items():
        setattr(choice, name, value)


def uninstall() -> None:
    """Undo ``install``: engines made afterwards use SGLang's own backends. Idempotent."""
    replaced, _Holder.replaced = _Holder.replaced, ()
    if replaced:
        choice = importlib.import_module("sglang.srt.model_executor.runner_backend.utils")
        for name, value in replaced:
            setattr(choice, name, value)


def stats() -> dict[str, Any]:
    """Return the backend, counters for modes "full" and "breakable", and bytes of graph memory."""
    shared = _shared()
    backend = shared.memory.made
    modes = shared.ledger.as_dict()
    return {
        "backend": None if backend is None else backend.name,
        "modes": {name: modes[name] for name in ("full", "breakable")},
        "pool_bytes": shared.memory.bytes,
    }
