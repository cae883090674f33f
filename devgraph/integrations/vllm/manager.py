"""Where vLLM makes graphs by itself: its own code runs on, over graphs of devgraph.

The managers of the V2 runner (of the model, of drafts, of decoder replay), encoder graphs and
micro-batch pairs make a ``torch.cuda.CUDAGraph()`` and record it in ``torch.cuda.graph(...)``. In
the modules that do, these two names are devgraph's. What is prepared for a capture, in which order,
on which thread and with which signatures changes from version to version, and stays vLLM's own.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any

from devgraph.api.errors import StateError
from devgraph.integrations.engine.ledger import EagerReason
from devgraph.integrations.engine.steps import CapturedStep, recorded
from devgraph.integrations.vllm.layer import current_layer
from devgraph.integrations.vllm.wrappers import BreakableStep

_UNNAMED = ("devgraph", "graphs without a pool")
_NEVER = 2**31 - 1
"""The largest threshold: so many collections of the middle generation do not happen."""


class EngineGraph:
    """What ``CUDAGraph()`` makes in vLLM's modules: empty until ``_recording`` of it ends."""

    __slots__ = ("__weakref__", "step")

    def __init__(self) -> None:
        self.step: CapturedStep | None = None

    def replay(self) -> None:
        """Replay once on the current stream.

        Raises:
            StateError: nothing was captured.
        """
        if self.step is None:
            raise StateError("a graph of vLLM is replayed that was never captured")
        self.step.replay()


@contextlib.contextmanager
def _recording(graph: EngineGraph, pool: Any = None, stream: Any = None) -> Iterator[None]:
    """Capture the block into ``graph``, as ``torch.cuda.graph`` does.

    Args:
        pool: vLLM's handle of graph memory; graphs without one share a pool of their own.
        stream: recorded on if it is not the current one: other threads launch on it then.
    """
    layer = current_layer()
    count = layer.ledger.of("full")
    memory = layer.memory.pool(_UNNAMED if pool is None else pool)
    with layer.capturing(memory, settle=True):
        recording = recorded(
            layer.memory.backend, memory, count, within=layer.within(memory, stream)
        )
        with recording as made:
            yield
    graph.step = CapturedStep(made, count)


class _Overlay:
    """A namespace with some names of its own and all others of ``base``."""

    def __init__(self, base: Any, **names: Any) -> None:
        vars(self).update(names, _base=base)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)


def graph_making_torch(torch: Any) -> Any:
    """Return the module ``torch`` with graphs of devgraph."""
    return _Overlay(torch, cuda=_Overlay(torch.cuda, CUDAGraph=EngineGraph, graph=_recording))


def stepwise_capture(capture: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``CudaGraphManager.capture`` with what makes captures of many small pieces fast, and
    without the segments of an earlier capture: they read other buffers."""
    from vllm.config import CUDAGraphMode

    layer = current_layer()

    def by_step(forward: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def run(mode: Any) -> Any:
            with layer.one_step() if mode == CUDAGraphMode.PIECEWISE else contextlib.nullcontext():
                return forward(mode)

        return run

    @functools.wraps(capture)
    def capture_by_step(self: Any, create_forward_fn: Any, *args: Any, **kwargs: Any) -> Any:
        def create(*args: Any, **kwargs: Any) -> Any:
            made = create_forward_fn(*args, **kwargs)
            # Up to vLLM 0.24 the attention state comes with it.
            return (by_step(made[0]), *made[1:]) if isinstance(made, tuple) else by_step(made)

        runner = getattr(self, "breakable_cg_runner", None)
        if self._graphs_captured and runner is not None:
            runner.clear_graphs()
        # vLLM collects its whole heap before: nothing old is worth another walk.
        with no_full_collections():
            return capture(self, create, *args, **kwargs)

    return capture_by_step


def counting_dispatch(dispatch: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``CudaGraphManager.dispatch`` which counts why a step has no graph."""
    from vllm.config import CUDAGraphMode

    count = current_layer().ledger.of("full")

    @functools.wraps(dispatch)
    def dispatch_counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        desc = dispatch(self, *args, **kwargs)
        if desc.cg_mode == CUDAGraphMode.NONE:
            count.eager[_why(self, desc.num_tokens)] += 1
        return desc

    return dispatch_counted


def _why(manager: Any, num_tokens: int) -> str:
    if not manager._graphs_captured:
        return EagerReason.NOT_CAPTURED
    sizes = (desc.num_tokens for descs in manager._capture_descs.values() for desc in descs)
    return EagerReason.TOO_LARGE if num_tokens > max(sizes, default=0) else EagerReason.NO_MATCH


def breaking_manager(base: Any) -> Any:
    """Return ``base``, a graph manager without a breakable mode of its own (vLLM 0.22), under which
    the model's forward captures PIECEWISE itself, in segments around attention."""

    class Manager(base):  # type: ignore[misc]
        __doc__ = base.__doc__

        def capture(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(model.forward, BreakableStep):
                model.forward.clear_graphs()  # An earlier capture read other buffers.
            else:
                # On the instance: vLLM asks the model itself for the interfaces it has.
                model.forward = BreakableStep(model.forward, self.vllm_config)
            return super().capture(model, *args, **kwargs)

    Manager.__name__ = Manager.__qualname__ = base.__name__
    return Manager


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
