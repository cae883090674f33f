"""Classes that stand where vLLM's graph wrappers stand, made when vLLM is there to subclass.

They are subclasses of vLLM's own, so that every ``isinstance`` check, instance set and class-wide
clear in vLLM keeps working.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Hashable
from typing import Any

from devgraph.api.errors import StateError
from devgraph.integrations.engine.ledger import EagerReason, ModeCount
from devgraph.integrations.engine.steps import (
    CapturedStep,
    addresses,
    capture_under,
    recorded,
)
from devgraph.integrations.vllm.breaks import AttentionBreaks, attention_ops
from devgraph.integrations.vllm.layer import Layer, current_layer

logger = logging.getLogger(__name__)


class _Graphs:
    """What both wrapper classes share: a pool by vLLM's handle, entries, and the way to capture.

    Subclasses set ``runnable`` and ``vllm_config`` before they call ``_prepare``.
    """

    runnable: Callable[..., Any]
    vllm_config: Any

    def _prepare(self) -> None:
        self._layer: Layer = current_layer()
        self.graph_pool = self._layer.default_handle()
        self.compilation_config = self.vllm_config.compilation_config
        self.is_debugging_mode = logging.getLogger("vllm").isEnabledFor(logging.DEBUG)
        self._runnable_str = str(self.runnable) if self.is_debugging_mode else None
        self.concrete_cudagraph_entries: dict[Hashable, CapturedStep] = {}

    @property
    def graph_pool(self) -> Hashable:
        """vLLM's handle of the memory that the next captures use; vLLM swaps it."""
        return self._handle

    @graph_pool.setter
    def graph_pool(self, handle: Hashable) -> None:
        self._handle = handle
        self._pool: Any = None

    def clear_graphs(self) -> None:
        """Free every graph of this wrapper; the next step with a graph mode captures anew."""
        entries = list(self.concrete_cudagraph_entries.values())
        self.concrete_cudagraph_entries.clear()
        self._pool = None
        for entry in entries:
            entry.reset()

    def unwrap(self) -> Any:
        """Return the callable inside all wrappers."""
        inner = getattr(self.runnable, "unwrap", None)
        return self.runnable if inner is None else inner()

    @property
    def cudagraph_wrapper(self) -> Any:
        """Itself; vLLM asks a wrapped model for it."""
        return self

    def __getattr__(self, name: str) -> Any:
        runnable = self.__dict__.get("runnable")
        if runnable is None or name.startswith("__"):
            raise AttributeError(name)
        return getattr(runnable, name)

    def _memory(self) -> Any:
        if self._pool is None:
            self._pool = self._layer.memory.pool(self._handle)
        return self._pool

    def _whole(
        self,
        count: ModeCount,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        first: bool = True,
        release: bool = True,
    ) -> tuple[CapturedStep, Any]:
        pool, backend = self._memory(), self._layer.memory.backend
        with (
            self._layer.capturing(pool, settle=first) as join,
            recorded(backend, pool, count, within=self._layer.within(pool)) as graph,
        ):
            output = self.runnable(*args, **kwargs)
            join()
            if release:
                output = self._layer.weak(pool, output)
        return CapturedStep(graph, count, self._layer.weak(pool, output)), output

    def _moved(
        self,
        count: ModeCount,
        entry: CapturedStep,
        descriptor: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> bool:
        """Whether an input lies elsewhere than at capture; counts it, and raises under strict.

        An engine that passes its static buffers once goes on to: after the first replay only
        ``strict`` and debugging look again, as the engine's own layer does.
        """
        if addresses(args, kwargs) == entry.inputs:
            if not (self._layer.strict or self.is_debugging_mode):
                entry.inputs = None
            return False
        count.eager[EagerReason.INPUT_MOVED] += 1
        text = (
            f"an input of the step for {descriptor} lies elsewhere than at capture, and a graph "
            f"would read the old address"
        )
        if self._layer.strict:
            raise StateError(f"{text}. Keep inputs in static buffers, or unset strict.")
        if count.eager[EagerReason.INPUT_MOVED] == 1:
            logger.warning("%s: such steps run eagerly", text)
        return True


@functools.cache
def graph_wrapper() -> Any:
    """Return the class that a platform's ``get_static_graph_wrapper_cls`` names.

    It follows vLLM's protocol for static graph wrappers: without a forward context, or when the
    context's runtime mode is not the wrapper's own, the runnable is called; else a batch
    descriptor that is new is captured and the live output returned, and a known one is replayed
    and the stored output returned.
    """
    from vllm.compilation import cuda_graph
    from vllm.compilation.counter import compilation_counter
    from vllm.compilation.monitor import validate_cudagraph_capturing_enabled
    from vllm.config import CUDAGraphMode
    from vllm.forward_context import get_forward_context, is_forward_context_available
    from vllm.model_executor.offloader.base import get_offloader

    none = CUDAGraphMode.NONE

    class DeviceGraphWrapper(_Graphs, cuda_graph.CUDAGraphWrapper):  # type: ignore[misc]
        """One runnable of vLLM with a graph per batch descriptor."""

        def __init__(
            self,
            runnable: Callable[..., Any],
            vllm_config: Any,
            runtime_mode: Any,
            cudagraph_options: Any = None,
            **_: Any,
        ) -> None:
            if runtime_mode == none:
                raise ValueError("a graph wrapper needs a runtime mode: FULL or PIECEWISE")
            self.runnable = runnable
            self.vllm_config = vllm_config
            self.runtime_mode = runtime_mode
            self.cudagraph_options = cudagraph_options or cuda_graph.CUDAGraphOptions()
            self.first_run_finished = False
            self._prepare()
            self._count = self._layer.ledger.of(runtime_mode.name.lower())
            # A piece reads what earlier pieces wrote; a whole step reads the engine's buffers.
            self._checked = self.is_debugging_mode or runtime_mode == CUDAGraphMode.FULL
            cuda_graph.CUDAGraphWrapper._all_instances.add(self)

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            if not is_forward_context_available():
                self._count.eager[EagerReason.NO_CONTEXT] += 1
                return self.runnable(*args, **kwargs)
            context = get_forward_context()
            mode = context.cudagraph_runtime_mode
            if mode != self.runtime_mode:
                reason = EagerReason.MODE_NONE if mode == none else EagerReason.OTHER_MODE
                self._count.eager[reason] += 1
                return self.runnable(*args, **kwargs)
            entry = self.concrete_cudagraph_entries.get(context.batch_descriptor)
            if entry is None:
                return self._capture(context.batch_descriptor, args, kwargs)
            if entry.inputs is not None and self._moved(
                self._count, entry, context.batch_descriptor, args, kwargs
            ):
                return self.runnable(*args, **kwargs)
            get_offloader().sync_prev_onload()
            entry.launch()
            self._count.replays += 1
            return entry.output

        def _capture(self, descriptor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if descriptor is None:
                raise StateError("vLLM dispatched a graph mode without a batch descriptor")
            validate_cudagraph_capturing_enabled()
            options = self.cudagraph_options
            if options.debug_log_enable:
                logger.debug("capturing %s for %s", self.runtime_mode.name, descriptor)
            entry, output = self._whole(
                self._count,
                args,
                kwargs,
                first=not options.gc_disable,
                release=options.weak_ref_output,
            )
            entry.inputs = addresses(args, kwargs) if self._checked else None
            self.concrete_cudagraph_entries[descriptor] = entry
            compilation_counter.num_cudagraph_captured += 1
            # The output itself: it keeps its memory while the next pieces are captured.
            return output

    DeviceGraphWrapper.__module__ = "devgraph.integrations.vllm"
    DeviceGraphWrapper.__qualname__ = "DeviceGraphWrapper"
    return DeviceGraphWrapper


class BreakableStep(_Graphs):
    """A model's forward whose attention runs eagerly between graphs, with live metadata.

    The step of a batch descriptor that is new is captured, for runtime mode PIECEWISE in segments
    around the attention ops and for FULL in one graph with them.

    Args:
        runnable: the forward of an uncompiled model.
        vllm_config: vLLM's.
        runtime_mode: the one mode that is captured; None for both.
        key_fn: what else of a call's arguments names its graph.
    """

    def __init__(
        self,
        runnable: Callable[..., Any],
        vllm_config: Any,
        runtime_mode: Any = None,
        key_fn: Callable[..., Hashable] | None = None,
    ) -> None:
        self.runnable = runnable
        self.vllm_config = vllm_config
        self.runtime_mode = runtime_mode
        self.key_fn = key_fn
        self._prepare()
        self._setup()

    def _setup(self) -> None:
        from vllm.config import CUDAGraphMode
        from vllm.forward_context import get_forward_context, is_forward_context_available
        from vllm.model_executor.offloader.base import get_offloader

        ledger = self._layer.ledger
        self._broken, self._full = ledger.of("breakable"), ledger.of("full")
        self._available, self._context = is_forward_context_available, get_forward_context
        self._offloader = get_offloader
        self._none, self._full_mode = CUDAGraphMode.NONE, CUDAGraphMode.FULL

    @property
    def entries(self) -> dict[Hashable, CapturedStep]:
        """Captured steps by runtime mode, batch descriptor and key."""
        return self.concrete_cudagraph_entries

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._available():
            self._broken.eager[EagerReason.NO_CONTEXT] += 1
            return self.runnable(*args, **kwargs)
        context = self._context()
        mode = context.cudagraph_runtime_mode
        if mode == self._none:
            self._broken.eager[EagerReason.MODE_NONE] += 1
            return self.runnable(*args, **kwargs)
        if mode != (self.runtime_mode or mode):
            self._broken.eager[EagerReason.OTHER_MODE] += 1
            return self.runnable(*args, **kwargs)
        count = self._full if mode == self._full_mode else self._broken
        more = None if self.key_fn is None else self.key_fn(*args, **kwargs)
        key = (mode, context.batch_descriptor, more)
        entry = self.concrete_cudagraph_entries.get(key)
        if entry is None:
            return self._capture(key, context, args, kwargs)
        if entry.inputs is not None and self._moved(
            count, entry, context.batch_descriptor, args, kwargs
        ):
            return self.runnable(*args, **kwargs)
        self._offloader().sync_prev_onload()
        entry.launch()
        count.replays += 1
        return entry.output

    def _capture(
        self, key: tuple[Any, Any, Any], context: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        from vllm.compilation.counter import compilation_counter
        from vllm.compilation.monitor import validate_cudagraph_capturing_enabled

        validate_cudagraph_capturing_enabled()
        if key[0] == self._full_mode:
            entry, output = self._whole(self._full, args, kwargs)
        else:
            entry, output = self._segments(context, args, kwargs)
        entry.inputs = addresses(args, kwargs)
        self.concrete_cudagraph_entries[key] = entry
        compilation_counter.num_cudagraph_captured += 1
        return output

    def _segments(
        self, context: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[CapturedStep, Any]:
        pool = self._memory()
        breaks = AttentionBreaks(attention_ops(self.compilation_config))
        with self._layer.capturing(pool, settle=True) as join:

            def body(*args: Any, **kwargs: Any) -> Any:
                with breaks:
                    output = self.runnable(*args, **kwargs)
                join()
                return output

            # Once more under the mode: what the model compiles by itself, it compiles per mode, and
            # never inside a capture.
            warmup = 0 if self.concrete_cudagraph_entries else 1
            backend = self._layer.memory.backend
            captured = capture_under(
                "breakable", backend, pool, self._broken, body, args, kwargs, warmup=warmup
            )
        try:
            breaks.require_calls(context.no_compile_layers)
        except BaseException:
            captured.close()
            raise
        return CapturedStep(captured, self._broken, captured.outputs), captured.outputs


@functools.cache
def step_wrapper() -> Any:
    """Return the class that stands for vLLM's own breakable wrapper on the V1 runner."""
    from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphWrapper

    class BreakableStepWrapper(BreakableStep, BreakableCUDAGraphWrapper):  # type: ignore[misc]
        """``BreakableStep`` known to vLLM as one of its wrappers."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            BreakableStep.__init__(self, *args, **kwargs)
            BreakableCUDAGraphWrapper._all_instances.add(self)

    return BreakableStepWrapper
