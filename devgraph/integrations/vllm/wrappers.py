"""Replacements for vLLM's graph wrappers, whose classes are created after the import of vLLM.

The replacements subclass vLLM's wrappers, so that ``isinstance`` checks, sets of instances and
class-wide clears in vLLM keep working.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Hashable
from typing import Any

import torch

from devgraph.api.errors import StateError
from devgraph.integrations.engine.ledger import EagerReason, ModeCount
from devgraph.integrations.engine.steps import (
    CapturedStep,
    addresses,
    capture_under,
    recorded,
    tensors,
    weak,
)
from devgraph.integrations.vllm.breaks import AttentionBreaks, attention_ops
from devgraph.integrations.vllm.layer import Layer, current_layer

logger = logging.getLogger(__name__)


class _WrapperBase:
    """The common base of both wrapper classes, which implements vLLM's wrapper protocol.

    * Without a forward context, or under another runtime mode, a call runs the code without graphs.
    * A call with a new key is captured and returns its output.
    * A call with a known key replays its graph and returns the stored output.

    Subclasses set ``runnable``, ``vllm_config`` and ``runtime_mode`` (None for all modes) before
    they call ``_prepare``.
    """

    runnable: Callable[..., Any]
    vllm_config: Any
    runtime_mode: Any

    def _prepare(self, *, counts: dict[Any, str], checked: bool = True) -> None:
        from vllm.compilation.counter import compilation_counter
        from vllm.compilation.monitor import validate_cudagraph_capturing_enabled
        from vllm.config import CUDAGraphMode
        from vllm.forward_context import get_forward_context, is_forward_context_available
        from vllm.model_executor.offloader.base import get_offloader

        self._available, self._context = is_forward_context_available, get_forward_context
        self._validate, self._counter = validate_cudagraph_capturing_enabled, compilation_counter
        self._offloader, self._none = get_offloader, CUDAGraphMode.NONE
        self._layer: Layer = current_layer()
        self._check = self._layer.check
        self._counts = {mode: self._layer.counts[name] for mode, name in counts.items()}
        self.graph_pool = self._layer.default_handle()
        self.compilation_config = self.vllm_config.compilation_config
        self.is_debugging_mode = logging.getLogger("vllm").isEnabledFor(logging.DEBUG)
        self._checked = checked or self.is_debugging_mode
        self.concrete_cudagraph_entries: dict[Hashable, CapturedStep] = {}
        self._dropped: set[Hashable] = set()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._available():
            return self._eagerly(EagerReason.NO_CONTEXT, args, kwargs)
        context = self._context()
        mode = context.cudagraph_runtime_mode
        if mode == self._none:
            return self._eagerly(EagerReason.MODE_NONE, args, kwargs)
        if self.runtime_mode not in (None, mode):
            return self._eagerly(EagerReason.OTHER_MODE, args, kwargs)
        key = self._key(context, *args, **kwargs)
        entry = self.concrete_cudagraph_entries.get(key)
        if entry is None:
            if key in self._dropped:
                return self._eagerly(EagerReason.VERIFY_FAILED, args, kwargs)
            return self._capture(key, context, *args, **kwargs)
        if self._check.running:
            return self._compared(key, entry, args, kwargs)
        count = self._counts[mode]
        if entry.inputs is not None:
            if entry.inputs != addresses(args, kwargs):
                self._count_moved(count, context.batch_descriptor)
                return self.runnable(*args, **kwargs)
            # An engine that passes static buffers once always passes them. Like vLLM, repeat the
            # check only under strict or when debugging.
            if not (self._layer.strict or self.is_debugging_mode):
                entry.inputs = None
        self._offloader().sync_prev_onload()
        entry.launch()
        count.replays += 1
        return entry.output

    def _compared(self, key: Hashable, entry: CapturedStep, args: Any, kwargs: Any) -> Any:
        """Replay in a check at start; drop the graph if its results differ from eager."""

        def replay() -> Any:
            entry.launch()
            return entry.output

        name = f"piece {getattr(self.runnable, 'piecewise_compile_index', 0)} of {key}"
        eager = functools.partial(self.runnable, *args, **kwargs)
        inputs = [t for t in tensors((args, kwargs)) if not isinstance(t, torch.nn.Parameter)]
        output = self._check.run(name, eager, replay, inputs)
        if name in self._check.failed:
            self._dropped.add(key)
            output = eager()
            self._drop(key, entry)
        return output

    def _eagerly(self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._counts[None].eager[reason] += 1
        return self.runnable(*args, **kwargs)

    def _capture(self, key: Hashable, context: Any, /, *args: Any, **kwargs: Any) -> Any:
        if context.batch_descriptor is None:
            raise StateError("vLLM dispatched a graph mode without a batch descriptor")
        self._validate()
        entry, output = self._record(context, *args, **kwargs)
        entry.inputs = addresses(args, kwargs) if self._checked else None
        self.concrete_cudagraph_entries[key] = entry
        if self._layer.round is not None:
            self._layer.round.on_failure(self._drop, key, entry)
        self._counter.num_cudagraph_captured += 1
        # The live output keeps its memory alive while the next pieces are captured.
        return output

    def _drop(self, key: Hashable, entry: CapturedStep) -> None:
        if self.concrete_cudagraph_entries.get(key) is entry:  # vLLM may have cleared them.
            del self.concrete_cudagraph_entries[key]
        entry.reset()

    def _key(self, context: Any, /, *args: Any, **kwargs: Any) -> Hashable:
        """Return the key of a call: by default, the batch descriptor."""
        descriptor: Hashable = context.batch_descriptor
        return descriptor

    def _record(self, context: Any, /, *args: Any, **kwargs: Any) -> tuple[CapturedStep, Any]:
        """Capture a call; return the captured step and the live output."""
        raise NotImplementedError

    @property
    def graph_pool(self) -> Hashable:
        """The handle of graph memory for the next captures, which vLLM changes."""
        return self._handle

    @graph_pool.setter
    def graph_pool(self, handle: Hashable) -> None:
        self._handle = handle
        self._pool: Any = None

    def clear_graphs(self) -> None:
        """Free all graphs of this wrapper. The next step with a graph mode captures again."""
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
        """The wrapper itself. vLLM reads this attribute of a wrapped model."""
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
        mode: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        settle: bool = True,
        release: bool = True,
    ) -> tuple[CapturedStep, Any]:
        """Capture a call into one graph, counted under ``mode``."""
        pool, layer, count = self._memory(), self._layer, self._counts[mode]
        join = layer.prepare(pool, settle=settle)
        with recorded(layer.memory.backend, pool, count, within=layer.within(pool)) as graph:
            output = self.runnable(*args, **kwargs)
            join()
            if release:
                output = weak(pool, output)
        return CapturedStep(graph, count, output if release else weak(pool, output)), output

    def _count_moved(self, count: ModeCount, descriptor: Any) -> None:
        """Count a step with a moved input; raise StateError under strict."""
        count.eager[EagerReason.INPUT_MOVED] += 1
        text = (
            f"an input of the step for {descriptor} has moved since the capture, but a graph would "
            f"read the old address"
        )
        if self._layer.strict:
            raise StateError(f"{text}. Keep inputs in static buffers, or unset strict.")
        if count.eager[EagerReason.INPUT_MOVED] == 1:
            logger.warning("%s: such steps run eagerly", text)


@functools.cache
def graph_wrapper() -> Any:
    """Return the wrapper class for a platform's ``get_static_graph_wrapper_cls``."""
    from vllm.compilation import cuda_graph
    from vllm.config import CUDAGraphMode

    class DeviceGraphWrapper(_WrapperBase, cuda_graph.CUDAGraphWrapper):  # type: ignore[misc]
        """A vLLM runnable with one graph per batch descriptor."""

        def __init__(
            self,
            runnable: Callable[..., Any],
            vllm_config: Any,
            runtime_mode: Any,
            cudagraph_options: Any = None,
            **_: Any,
        ) -> None:
            if runtime_mode == CUDAGraphMode.NONE:
                raise ValueError("a graph wrapper needs a runtime mode: FULL or PIECEWISE")
            self.runnable = runnable
            self.vllm_config = vllm_config
            self.runtime_mode = runtime_mode
            self.cudagraph_options = cudagraph_options or cuda_graph.CUDAGraphOptions()
            # Check only whole steps: they read the engine's buffers, but pieces read results.
            self._prepare(
                counts=dict.fromkeys((None, runtime_mode), runtime_mode.name.lower()),
                checked=runtime_mode == CUDAGraphMode.FULL,
            )
            cuda_graph.CUDAGraphWrapper._all_instances.add(self)

        def _record(self, context: Any, /, *args: Any, **kwargs: Any) -> tuple[CapturedStep, Any]:
            options = self.cudagraph_options
            settle, release = not options.gc_disable, options.weak_ref_output
            return self._whole(None, args, kwargs, settle=settle, release=release)

    DeviceGraphWrapper.__module__ = "devgraph.integrations.vllm"
    DeviceGraphWrapper.__qualname__ = "DeviceGraphWrapper"
    return DeviceGraphWrapper


class BreakableStep(_WrapperBase):
    """A model's forward, as segments around attention under PIECEWISE or as one graph under FULL.

    Between the segments, attention runs eagerly on the metadata of the current batch.
    """

    def __init__(
        self,
        runnable: Callable[..., Any],
        vllm_config: Any,
        runtime_mode: Any = None,
        key_fn: Callable[..., Hashable] | None = None,
    ) -> None:
        from vllm.config import CUDAGraphMode

        self.runnable = runnable
        self.vllm_config = vllm_config
        self.runtime_mode = runtime_mode
        self.key_fn = key_fn
        broken = dict.fromkeys((None, *CUDAGraphMode), "breakable")
        self._prepare(counts={**broken, CUDAGraphMode.FULL: "full"})
        self._full_mode = CUDAGraphMode.FULL

    @property
    def entries(self) -> dict[Hashable, CapturedStep]:
        """Captured steps by runtime mode, batch descriptor and key, under vLLM's name."""
        return self.concrete_cudagraph_entries

    def _key(self, context: Any, /, *args: Any, **kwargs: Any) -> Hashable:
        more = None if self.key_fn is None else self.key_fn(*args, **kwargs)
        return context.cudagraph_runtime_mode, context.batch_descriptor, more

    def _record(self, context: Any, /, *args: Any, **kwargs: Any) -> tuple[CapturedStep, Any]:
        if context.cudagraph_runtime_mode == self._full_mode:
            return self._whole(self._full_mode, args, kwargs)
        pool, count = self._memory(), self._counts[None]
        breaks = AttentionBreaks(attention_ops(self.compilation_config))
        self._layer.leave_step()
        join = self._layer.prepare(pool, settle=True)

        def body(*args: Any, **kwargs: Any) -> Any:
            with breaks:
                output = self.runnable(*args, **kwargs)
            join()
            return output

        # The first capture needs another warm-up run, because the model compiles code for each
        # mode, and a capture cannot contain a compilation.
        warmup = 0 if self.concrete_cudagraph_entries else 1
        backend = self._layer.memory.backend
        captured = capture_under(
            "breakable", backend, pool, count, body, args, kwargs, warmup=warmup
        )
        try:
            breaks.require_calls(context.no_compile_layers)
        except BaseException:
            captured.close()
            raise
        return CapturedStep(captured, count, captured.outputs), captured.outputs


@functools.cache
def step_wrapper() -> Any:
    """Return the class that replaces vLLM's breakable wrapper on the V1 runner."""
    from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphWrapper

    class BreakableStepWrapper(BreakableStep, BreakableCUDAGraphWrapper):  # type: ignore[misc]
        """A ``BreakableStep`` that vLLM recognizes as its own wrapper."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            BreakableStep.__init__(self, *args, **kwargs)
            BreakableCUDAGraphWrapper._all_instances.add(self)

    return BreakableStepWrapper
