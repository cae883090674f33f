"""Graph backends for SGLang that capture with devgraph, and their shared state.

The backends subclass SGLang's own backends, because SGLang's runners check for these classes.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from devgraph.api.errors import CapabilityError, StateError
from devgraph.api.pool import Pool
from devgraph.integrations.engine.ledger import ModeCount, Publisher, totals
from devgraph.integrations.engine.memory import GraphMemory
from devgraph.integrations.engine.steps import (
    CapturedStep,
    SharedOutputs,
    capture_under,
    copy_into,
    engine_session,
    recorded,
)
from devgraph.integrations.engine.verification import StartCheck
from devgraph.integrations.sglang.segments import segment_classes, undifferentiated
from devgraph.integrations.sglang.updated import WholeCapture, is_torch_native, require_updatable

MODEL = "sglang.srt.model_executor"

_WARMUPS = 2
"""Number of eager runs before the first capture of a session.

SGLang's own backends run every shape this many times. Here, later shapes run only once, because one
run is enough to select and load their kernels.
"""


class Shared:
    """The shared state of all backends of this process, created with the first backend."""

    def __init__(self) -> None:
        self.memory = GraphMemory(lambda: "")
        self.counts = {name: ModeCount() for name in ("full", "breakable")}
        self.publisher = Publisher("sglang", self.stats)
        self.check = StartCheck("SGLang", self.memory)
        self.checked: set[str] = set()
        """Phases whose graphs were checked at start."""

    def stats(self) -> dict[str, Any]:
        return totals(self.memory, self.counts, self.check.counts)


@functools.cache
def shared() -> Shared:
    return Shared()


class _OnDevgraph:
    """The common part of all backends: memory, warm-up runs, and the setup of captures.

    Some features are looked up by name, because older versions of SGLang lack them: pre-carving and
    borrowing of graph memory, profiler steps, and row counts of outputs.
    """

    _devgraph_mode: str
    """The key of this backend in ``Shared.counts``."""
    _graphs: dict[Any, Any]
    _outputs: dict[Any, Any]
    _capture_stream: Any
    _device_module: Any
    _tp_group: Any
    _pool: Any
    _precarve: Any = None
    _reuse_output_buffer = False
    _devgraph_pool: Pool | None = None
    _warm = False
    """Whether a shape was warmed up in this session."""
    _output_views: Any
    """A method that returns buffers for the tensors of a warm-up result, or None."""
    _capture: Any
    """A method that captures a body and returns the captured step and its output."""

    def __init__(
        self, cuda_graph_runner: Any, *, enable_memory_saver: bool = False, **options: Any
    ) -> None:
        super().__init__(cuda_graph_runner, **options)  # type: ignore[call-arg]
        if enable_memory_saver:
            self._use_releasable_memory()
        self._runner = cuda_graph_runner
        self._count = shared().counts[self._devgraph_mode]
        self._shared_outputs = SharedOutputs()
        self._capture_inputs: dict[Any, Any] = {}
        self._eager_forms: dict[Any, tuple[Callable[[], Any], Callable[[], object]]] = {}

    def _use_releasable_memory(self) -> None:
        """Use releasable memory if SGLang's memory saver pauses graph memory."""
        asked = "SGLANG_MEMORY_SAVER_CUDA_GRAPH"
        if not importlib.import_module("sglang.srt.utils").get_bool_env_var(asked):
            return
        memory = shared().memory
        if not memory.backend.capabilities.releasable_memory:
            raise CapabilityError(
                f"SGLang's memory saver pauses graph memory ({asked}), but backend "
                f"{memory.backend.name!r} cannot release graph memory (releasable_memory). Unset "
                f"{asked}, or do not install devgraph."
            )
        memory.releasable = True

    @contextlib.contextmanager
    def capture_session(self, stream: Any) -> Iterator[None]:
        """Set up captures of shapes in the block, in the pool that all backends of SGLang share."""
        self._open_pool()
        # Capture on SGLang's warm-up stream: another stream would need its own cuBLAS workspace.
        self._capture_stream, self._warm = stream, False
        with self.replay_session():  # type: ignore[attr-defined]
            yield
        shared().memory.settle()
        shared().publisher.captured()

    def _open_pool(self) -> None:
        # Use SGLang's own pool: graphs that SGLang captures itself share the memory, and SGLang
        # borrows blocks of this pool between replays.
        pools = importlib.import_module(f"{MODEL}.runner_utils.pool")
        handle = pools.get_global_graph_memory_pool()
        self._devgraph_pool, self._pool = shared().memory.shared(handle)
        pools.set_global_graph_memory_pool(self._pool)
        if getattr(self._devgraph_pool, "handle", None) is not None:
            allocator = importlib.import_module(
                "sglang.srt.distributed.device_communicators.pynccl_allocator"
            )
            allocator.set_graph_pool_id(self._pool)

    def _warm_up(self, forward: Callable[[], Any], after: Callable[[], None] | None) -> Any:
        measured = self._precarve.measure if self._precarve else contextlib.nullcontext
        output = None
        for run in range(_WARMUPS):
            if run == 0 or not self._warm:
                self._device_module.synchronize()
                self._tp_group.barrier()
                with measured():
                    output = forward()
                if after is not None:
                    after()  # Attention restores the state from before the run.
            self._step_profiler()  # The profiler expects this number of runs.
        if not self._warm:
            # The first shape is the largest, so later shapes need no additional memory.
            shared().memory.settle()
            self._warm = True
        return output

    def _step_profiler(self) -> None:
        if getattr(self._runner, "enable_profile_cuda_graph", False):
            profiler = getattr(self._runner, "_profiler", None)
            if profiler is not None:
                profiler.step()

    def capture_one(
        self,
        shape_key: Any,
        forward_fn: Callable[[], Any],
        capture_inputs: Any = None,
        post_warmup_hook: Callable[[], None] | None = None,
    ) -> None:
        """Warm up and capture the step for replays of ``shape_key``."""
        pool = self._devgraph_pool
        if pool is None:
            raise StateError("capture_one was called outside capture_session")
        targets = self._output_views(self._warm_up(forward_fn, post_warmup_hook))

        def body() -> Any:
            if self._precarve:
                self._precarve.mint()  # Reserve the memory in one block.
            output = forward_fn()
            return output if targets is None else copy_into(targets, output)

        pools = importlib.import_module(f"{MODEL}.runner_utils.pool")
        with getattr(pools, "graph_pool_capture_scope", contextlib.nullcontext)():
            captured = self._capture(pool, body)
        self._step_profiler()
        self._graphs[shape_key], self._outputs[shape_key] = captured
        self._capture_inputs[shape_key] = capture_inputs
        if shared().check.phases:
            self._eager_forms[shape_key] = forward_fn, self._setting_lengths()

    def _setting_lengths(self) -> Callable[[], object]:
        """Return a function that sets the attention lengths of this shape for full prefill.

        All shapes share the attention metadata. SGLang sets a shape's maximum lengths there only at
        capture, and other maximum lengths would select other kernels.
        """
        chosen = getattr(self._runner.model_runner, "attn_backend", None)
        metadata = getattr(getattr(chosen, "prefill_backend", chosen), "forward_metadata", None)
        values = getattr(metadata, "__dict__", {}) if self._reuse_output_buffer else {}
        lengths = {name: value for name, value in values.items() if type(value) is int}
        return functools.partial(values.update, lengths)

    def cleanup(self) -> None:
        """Free all graphs. Afterwards, the backend can capture again."""
        for graph in self._graphs.values():
            graph.reset()
        for kept in (self._graphs, self._capture_inputs, self._shared_outputs, self._eager_forms):
            kept.clear()
        super().cleanup()  # type: ignore[misc]
        self._devgraph_pool = None


@functools.cache
def full_backend() -> Any:
    """Return the backend class that captures each shape as one graph."""
    engine: Any = importlib.import_module(f"{MODEL}.runner_backend.full_cuda_graph_backend")

    class DeviceGraphBackend(_OnDevgraph, engine.FullCudaGraphBackend):  # type: ignore[misc]
        """SGLang's full backend with graphs of devgraph."""

        _devgraph_mode = "full"

        def __new__(cls, cuda_graph_runner: Any = None, **options: Any) -> Any:
            model_runner = getattr(cuda_graph_runner, "model_runner", None)
            # SGLang requests a shared output buffer only for prefill.
            if options.pop("reuse_output_buffer", False) and is_torch_native(model_runner):
                return updated_backend()(cuda_graph_runner, **options)
            return super().__new__(cls)

        def _output_views(self, warm: Any) -> list[torch.Tensor] | None:
            if not self._reuse_output_buffer:
                return None
            return self._shared_outputs.views(warm, rows=None, capacity=None)

        def _capture(self, pool: Pool, body: Callable[[], Any]) -> tuple[Any, Any]:
            backend = shared().memory.backend
            within = engine_session(pool, stream=self._capture_stream)
            with recorded(backend, pool, self._count, within=within) as graph:
                output = body()
            return CapturedStep(graph, self._count), output

    return DeviceGraphBackend


@functools.cache
def breakable_backend() -> Any:
    """Return the backend class that breaks steps at the marks in SGLang's models."""
    engine: Any = importlib.import_module(f"{MODEL}.runner_backend.breakable_cuda_graph_backend")
    segment_class, capture_class = segment_classes()
    base: Any = engine.BreakableCudaGraphBackend

    class DeviceGraphBreakableBackend(_OnDevgraph, base):  # type: ignore[misc]
        """SGLang's breakable backend with graphs of devgraph."""

        _devgraph_mode = "breakable"

        def __init__(self, cuda_graph_runner: Any, **options: Any) -> None:
            super().__init__(cuda_graph_runner, **options)
            if self._debug_eager and hasattr(cuda_graph_runner, "layer_model"):
                raise CapabilityError(
                    "--debug-cuda-graph cannot run a prefill: the eager step calls layers that "
                    "SGLang has replaced by the replay. Add --disable-prefill-cuda-graph."
                )

        def _warm_up(self, *step: Any) -> Any:
            with undifferentiated():
                return super()._warm_up(*step)

        def _output_views(self, warm: Any) -> list[torch.Tensor] | None:
            return self._shared_outputs.views(
                warm,
                rows=self._asked("cuda_graph_output_rows", warm),
                capacity=self._asked("cuda_graph_output_capacity_rows", warm),
            )

        def _capture(self, pool: Pool, body: Callable[[], Any]) -> tuple[Any, Any]:
            backend = shared().memory.backend
            segments = segment_class(pool, self._count)
            started = time.perf_counter()
            try:
                with (
                    undifferentiated(),
                    engine_session(pool, stream=self._capture_stream) as held,
                    capture_class(segments, backend, held, self._tp_group.barrier) as capture,
                ):
                    output = capture.run_eagerly(body) if self._debug_eager else body()
            except BaseException:
                segments.reset()
                raise
            segments.seconds = time.perf_counter() - started
            self._count.captured(segments, segments.seconds)
            return segments, output

        def _asked(self, name: str, output: Any) -> int | None:
            answer: Callable[[Any], int | None] | None = getattr(self._runner, name, None)
            return None if answer is None else answer(output)

    return DeviceGraphBreakableBackend


@functools.cache
def updated_backend() -> Any:
    """Return the backend class that captures each shape as one graph, updated for each batch."""
    base: Any = breakable_backend()

    class DeviceGraphUpdatedBackend(base):  # type: ignore[misc]
        """SGLang's breakable backend, but with attention as a region inside the graph."""

        _devgraph_mode = "full"

        def __init__(self, cuda_graph_runner: Any, **options: Any) -> None:
            super().__init__(cuda_graph_runner, **options)
            require_updatable(cuda_graph_runner.model_runner)
            self._whole = WholeCapture()

        def _warm_up(self, *step: Any) -> Any:
            with self._whole.current():
                return super()._warm_up(*step)

        def _capture(self, pool: Pool, body: Callable[[], Any]) -> tuple[Any, Any]:
            layers = self._runner.layer_model
            forward = layers.forward

            def step() -> Any:
                # If a replay captures again, SGLang has already replaced ``forward``.
                replaying, layers.forward = layers.forward, forward
                try:
                    with self._whole.current():
                        return body()
                finally:
                    layers.forward = replaying

            captured = capture_under("full", shared().memory.backend, pool, self._count, step)
            return CapturedStep(captured, self._count), captured.outputs

        def replay(self, shape_key: Any, static_forward_batch: Any, **options: Any) -> Any:
            # SGLang waits in its breaks for layers whose cache is still loading. This graph has no
            # breaks, so wait before the replay.
            loads = self._runner.model_runner.token_to_kv_pool.layer_transfer_counter
            if loads is not None and loads.consumer_index >= 0:
                loads.wait_until(loads.num_layers - 1)
            return super().replay(shape_key, static_forward_batch, **options)

    return DeviceGraphUpdatedBackend
