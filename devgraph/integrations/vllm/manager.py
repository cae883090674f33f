"""vLLM's V2 model runner: its graph managers with the graphs of devgraph."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch

from devgraph.integrations.engine.ledger import EagerReason
from devgraph.integrations.engine.steps import CapturedStep, capture_whole
from devgraph.integrations.vllm.layer import current_layer
from devgraph.integrations.vllm.wrappers import BreakableStep

__all__ = ["graph_manager", "no_full_collections"]

_NEVER = 2**31 - 1
"""The largest threshold: so many collections of the middle generation do not happen."""


@functools.cache
def _capturing_manager() -> Any:
    """Return a class between vLLM's managers and their common base that captures and replays.

    vLLM's subclasses prepare the forward and call ``super().capture``; in a class that inherits
    from them and from this one, that is the capture below.
    """
    from vllm.compilation.counter import compilation_counter
    from vllm.config.compilation import CUDAGraphMode
    from vllm.distributed.parallel_state import graph_capture, is_global_first_rank
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    class CapturingManager(CudaGraphManager):  # type: ignore[misc]
        """``CudaGraphManager`` whose FULL graphs are devgraph's."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._layer = current_layer()
            self._count = self._layer.ledger.of("full")
            self._devgraph_pool: Any = None

        @torch.inference_mode()
        def capture(
            self,
            create_forward_fn: Callable[[Any], tuple[Callable[[Any], None], Any]],
            progress_bar_desc: str = "Capturing graphs",
        ) -> dict[Any, Any]:
            states = {}
            # vLLM collects its whole heap before: nothing old is worth another walk.
            with graph_capture(device=self.device), no_full_collections():
                # Pieces first: they have the larger activations, whose memory whole steps reuse.
                for mode in (CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL):
                    descriptors = self._capture_descs.get(mode, [])
                    for desc in _progress(
                        descriptors, f"{progress_bar_desc} ({mode.name})", is_global_first_rank()
                    ):
                        states[desc] = self._capture_one(desc, mode, create_forward_fn)
            self._graphs_captured = True
            return states

        def _capture_one(self, desc: Any, mode: Any, create: Callable[[Any], Any]) -> Any:
            forward, state = create(desc)
            forward(CUDAGraphMode.NONE)  # warm-up
            if mode == CUDAGraphMode.PIECEWISE:
                with self._layer.one_step():
                    forward(CUDAGraphMode.PIECEWISE)
                return state
            # Attention state anew: some attention backends set it up lazily, and that belongs
            # into the graph.
            forward, state = create(desc)
            self.graphs[desc] = CapturedStep(self._capture_full(forward), self._count)
            compilation_counter.num_cudagraph_captured += 1
            return state

        def _capture_full(self, forward: Callable[[Any], None]) -> Any:
            if self._devgraph_pool is None:
                self._devgraph_pool = self._layer.memory.pool(self.pool)
            pool = self._devgraph_pool
            backend = self._layer.memory.backend
            with self._layer.capturing(pool, settle=True) as join:

                def body() -> None:
                    forward(CUDAGraphMode.NONE)
                    join()

                return capture_whole(backend, pool, self._count, body, release=True)[0]

        def dispatch(self, num_reqs: int, num_tokens: int, uniform_token_count: int | None) -> Any:
            desc = super().dispatch(num_reqs, num_tokens, uniform_token_count)
            if desc.cg_mode == CUDAGraphMode.NONE:
                self._count.eager[self._why(num_tokens)] += 1
            return desc

        def _why(self, num_tokens: int) -> str:
            if not self._graphs_captured:
                return EagerReason.NOT_CAPTURED
            if num_tokens >= len(self._candidates):
                return EagerReason.TOO_LARGE
            return EagerReason.NO_MATCH

    return CapturingManager


def graph_manager(base: type, *, breakable: bool) -> Any:
    """Return ``base``, a graph manager of vLLM, with the graphs of devgraph.

    Args:
        breakable: let the model's forward capture PIECEWISE itself, in segments around attention.
    """

    class Manager(base, _capturing_manager()):  # type: ignore[misc]
        __doc__ = base.__doc__

        if breakable:

            def capture(self, model: Any, *args: Any, **kwargs: Any) -> Any:
                if isinstance(model.forward, BreakableStep):
                    model.forward.clear_graphs()  # An earlier capture read other buffers.
                else:
                    # On the instance: vLLM asks the model itself for the interfaces it has.
                    model.forward = BreakableStep(model.forward, self.vllm_config)
                return super().capture(model, *args, **kwargs)

    Manager.__name__ = Manager.__qualname__ = base.__name__
    return Manager


def _progress(items: list[Any], title: str, shown: bool) -> Any:
    if not shown or not items:
        return items
    from tqdm import tqdm

    return tqdm(items, desc=title)


@contextlib.contextmanager
def no_full_collections() -> Iterator[None]:
    """Let the collector visit young objects only. A full collection walks the whole heap (0.4 s in
    an engine of vLLM) and would come several times in a round of captures; one that the program
    asks for itself still does, and where Python collects in steps they stay as they are.

    Not by freezing the heap: thawing it afterwards would thaw what the program froze itself, and
    asking whether it did walks what is frozen.
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(*thresholds[:2], _NEVER)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
