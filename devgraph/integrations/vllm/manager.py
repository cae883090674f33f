"""Graphs of devgraph for vLLM code that creates graphs without a wrapper.

The managers of the V2 runner (model, drafts, decoder replay), of encoders and of micro-batch pairs
create a ``torch.cuda.CUDAGraph()`` and record it in ``torch.cuda.graph(...)``. In their modules,
devgraph replaces these two names. The code that prepares and orders captures remains vLLM's,
because it differs between versions.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from devgraph.api.errors import StateError
from devgraph.api.marks.marks import is_capturing
from devgraph.integrations.engine.ledger import EagerReason
from devgraph.integrations.engine.steps import CapturedStep, engine_session, recorded
from devgraph.integrations.vllm.layer import Round, current_layer
from devgraph.integrations.vllm.verification import FORWARDS
from devgraph.integrations.vllm.wrappers import BreakableStep

_UNNAMED = ("devgraph", "graphs without a pool")


class EngineGraph:
    """The stand-in for ``CUDAGraph`` in vLLM's modules. It is empty until its recording ends."""

    __slots__ = ("__weakref__", "step")

    def __init__(self) -> None:
        self.step: CapturedStep | None = None

    def replay(self) -> None:
        if self.step is None:
            raise StateError("vLLM replayed a graph before its capture; capture the graph first")
        self.step.replay()


@contextlib.contextmanager
def _recording(
    threads: bool, graph: EngineGraph, pool: Any = None, stream: Any = None
) -> Iterator[None]:
    """Capture the block into ``graph``, like ``torch.cuda.graph``."""
    layer = current_layer()
    count = layer.counts["full"]
    memory = layer.memory.pool(_UNNAMED if pool is None else pool)
    layer.prepare(memory, settle=True)
    is_separate = threads or not _is_current(stream)
    within = engine_session(memory, stream=stream) if is_separate else layer.within(memory)
    with layer.filling_caches(lambda: graph.step and graph.step.launch()):
        with recorded(layer.memory.backend, memory, count, within=within) as captured:
            yield
        graph.step = CapturedStep(captured, count)


def _is_current(stream: Any) -> bool:
    number = getattr(stream, "stream_id", None)
    return number is None or number == torch.accelerator.current_stream().stream_id


@contextlib.contextmanager
def own_pool(pool: Any, config: Any) -> Iterator[Any]:
    """Stand in for vLLM's ``capture_pool``, which provides a separate pool for whole steps.

    With devgraph, whole steps and pieces share one pool, which sleep mode can release. Until a
    capture of devgraph begins, collectives allocate registered memory in vLLM's pool.
    """
    from vllm.distributed.device_communicators.pynccl_allocator import set_graph_pool_id

    if pool is not None:
        set_graph_pool_id(pool)
    yield pool


class _Overlay:
    """A namespace with the entries of ``names`` and all other attributes of ``base``."""

    def __init__(self, base: Any, **names: Any) -> None:
        vars(self).update(names, _base=base)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)


def graph_making_torch(base: Any, *, threads: bool = False) -> Any:
    """Return a stand-in for torch with ``cuda.CUDAGraph`` and ``cuda.graph`` of devgraph."""
    graph = functools.partial(_recording, threads)
    return _Overlay(base, cuda=_Overlay(base.cuda, CUDAGraph=EngineGraph, graph=graph))


def sparing_capture(capture: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``CudaGraphManager.capture`` of the V2 runner in a round of captures.

    The round drops segments of earlier rounds, because those segments read other buffers.
    """
    from vllm.config import CUDAGraphMode

    layer = current_layer()

    @functools.wraps(capture)
    def capture_sparingly(self: Any, create_forward_fn: Any, *args: Any, **kwargs: Any) -> Any:
        runner = getattr(self, "breakable_cg_runner", None)
        if self._graphs_captured and runner is not None:
            runner.clear_graphs()
        if not hasattr(self, "graphs"):  # a manager that handles only pieces
            return capture(self, create_forward_fn, *args, **kwargs)
        before = set(self.graphs)

        def drop() -> None:
            for desc in self.graphs.keys() - before:
                del self.graphs[desc]
            # Discard vLLM's memory measurements of these captures.
            (getattr(self, "_capture_mem_samples", None) or []).clear()

        def capture_all(made: Round) -> Any:
            def create(desc: Any, *args: Any, **kwargs: Any) -> Any:
                result = create_forward_fn(desc, *args, **kwargs)
                # Up to vLLM 0.24, the result also contains the attention state.
                forward, *state = result if isinstance(result, tuple) else (result,)
                if layer.check.phases:
                    vars(self).setdefault(FORWARDS, {})[desc] = forward

                def run(mode: Any) -> Any:
                    if mode == CUDAGraphMode.PIECEWISE:
                        with layer.filling_caches(lambda: forward(mode)), layer.one_step():
                            forward(mode)
                        return None
                    return forward(mode) if is_capturing() or made.wants_run(desc) else None

                return (run, *state) if state else run

            made.on_failure(drop)
            return capture(self, create, *args, **kwargs)

        # No collection is needed here, because vLLM has just collected its whole heap.
        return layer.capture_round(self.vllm_config, capture_all)

    return capture_sparingly


def sparing_round(capture_all: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``_capture_cudagraphs`` of the V1 runner in a round of captures in one mode."""
    layer = current_layer()

    @functools.wraps(capture_all)
    def capture_sparingly(self: Any, *args: Any, **kwargs: Any) -> Any:
        if layer.check.phases:
            layer.check.skip("the V1 runner")
        return layer.capture_round(self.vllm_config, lambda _: capture_all(self, *args, **kwargs))

    return capture_sparingly


def sparing_step(capture: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``_warmup_and_capture`` of the V1 runner as one step of a round or of profiling."""
    layer = current_layer()

    @functools.wraps(capture)
    def capture_sparingly(self: Any, desc: Any, *args: Any, **kwargs: Any) -> Any:
        if layer.round is not None and not layer.round.wants_run(desc):
            kwargs["num_warmups"] = 0
        again = functools.partial(capture, self, desc, *args, **kwargs)
        with layer.filling_caches(again), layer.one_step():
            again()

    return capture_sparingly


def counting_dispatch(dispatch: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``CudaGraphManager.dispatch`` to count steps without a graph, by reason."""
    from vllm.config import CUDAGraphMode

    count = current_layer().counts["full"]

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
    """Return a subclass of a graph manager that has no breakable mode (vLLM 0.22).

    In the subclass, the model's forward captures segments around attention under PIECEWISE.
    """

    class Manager(base):  # type: ignore[misc]
        __doc__ = base.__doc__

        def capture(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(model.forward, BreakableStep):
                model.forward.clear_graphs()  # Earlier captures read other buffers.
            else:
                # Replace ``forward`` on the instance, because vLLM checks the class.
                model.forward = BreakableStep(model.forward, self.vllm_config)
            return super().capture(model, *args, **kwargs)

    Manager.__name__ = Manager.__qualname__ = base.__name__
    return Manager
