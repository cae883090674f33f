"""The graph layer of a process: memory, counters, and the setup of captures."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import threading
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterator
from typing import Any

from devgraph.api.marks.marks import is_capturing
from devgraph.api.pool import Pool
from devgraph.api.session import Session
from devgraph.integrations.engine.ledger import ModeCount
from devgraph.integrations.engine.memory import GraphMemory
from devgraph.integrations.engine.steps import engine_session
from devgraph.integrations.engine.verification import StartCheck

logger = logging.getLogger(__name__)

_NEVER = 2**31 - 1
"""The largest threshold of the garbage collector, which is never reached."""


class Round:
    """A round of captures on the V1 or V2 runner, with fewer warm-up runs than in vLLM.

    vLLM runs each step once before its capture, but most sizes share the work of a first run:
    compiled code, loaded modules, workspaces. A round therefore warms up only the first step of
    each kind. If a capture fails although a warm-up run was skipped, the round is undone and
    repeated with all warm-up runs.
    """

    def __init__(self, config: Any) -> None:
        compilation = config.compilation_config
        self._ends = [part.end for part in compilation.get_compile_ranges()]
        self._compiled_alone = frozenset(compilation.compile_sizes or ())
        # With several ranks, a rank that repeats its round would wait forever for the others.
        self._all = config.parallel_config.world_size_across_dp > 1
        self._seen: set[Hashable] = set()
        self._skipped = False
        self.runs_step = True
        """Result of ``wants_run`` for the current step."""
        self._undo = contextlib.ExitStack()
        from vllm.compilation.counter import compilation_counter

        self._counter = compilation_counter

    def wants_run(self, desc: Any) -> bool:
        """Return whether the step of ``desc`` needs a warm-up run. Call once per step."""
        kind = self._kind(desc)
        wanted = self._all or kind not in self._seen
        self._seen.add(kind)
        self._skipped |= not wanted
        self.runs_step = wanted
        return wanted

    def _kind(self, desc: Any) -> Hashable:
        """Return the kind of a step; steps of one kind share compiled code.

        A kind consists of the descriptor without its size and the properties of the size that
        determine the compiled code: whether it is one or divisible by 16, its range, and whether
        vLLM compiles code for this size only.
        """
        sizes = tokens, _ = desc.num_tokens, desc.num_reqs
        shapes = tuple(size is not None and (size == 1, size % 16 == 0) for size in sizes)
        alone = tokens if tokens in self._compiled_alone else None
        rest = dataclasses.replace(desc, num_tokens=0, num_reqs=None)
        return rest, shapes, bisect_left(self._ends, tokens), alone

    def on_failure(self, undo: Callable[..., object], *args: Any) -> None:
        """Call ``undo(*args)`` if the round fails."""
        self._undo.callback(undo, *args)

    def make(self, capture: Callable[[], Any]) -> Any:
        """Return the result of ``capture()``, which captures all steps of the round.

        If ``capture`` fails, all captures of the round are undone. If warm-up runs were skipped,
        ``capture`` is then called again.
        """
        with no_full_collections():
            while True:
                try:
                    with self._undo:
                        name = "num_cudagraph_captured"
                        self.on_failure(setattr, self._counter, name, getattr(self._counter, name))
                        result = capture()
                        self._undo.pop_all()
                    return result
                except Exception as error:
                    if not self._skipped:
                        raise
                    logger.info(
                        "repeating the captures with more warm-up runs, because one failed: %s",
                        error,
                    )
                    self._all, self._skipped = True, False


@contextlib.contextmanager
def no_full_collections() -> Iterator[None]:
    """Limit the garbage collector to young objects inside the block.

    A full collection walks the whole heap (0.4 s in an engine of vLLM) and would happen several
    times in a round of captures. Explicit collections still run, and incremental collectors are not
    affected. ``gc.freeze`` is not used, because ``gc.unfreeze`` would also unfreeze objects that
    the program froze.
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(*thresholds[:2], _NEVER)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


class _Step:
    """A step that is captured in pieces, with its open session."""

    session: Session | None = None

    def __init__(self, around: contextlib.ExitStack) -> None:
        self._around = around

    def leave(self) -> None:
        self.session = None
        self._around.close()

    def enter(self, pool: Pool) -> Session:
        if self.session is None or self.session.pool is not pool:
            self.leave()
            self.session = self._around.enter_context(engine_session(pool))
        return self.session


class _ThreadState(threading.local):
    """The captures of a thread. Engines on different threads capture independently."""

    step: _Step | None = None
    round: Round | None = None


class Layer:
    """The state that all graph wrappers of this process share."""

    def __init__(self, *, backend: str | None = None, strict: bool = False) -> None:
        self.strict = strict
        self.memory = GraphMemory(_device_type, backend)
        self.counts = {name: ModeCount() for name in ("piecewise", "full", "breakable")}
        self.check = StartCheck("vLLM", self.memory, strict=strict)
        self._local = _ThreadState()

    @property
    def round(self) -> Round | None:
        """The current round of captures on this thread, or None."""
        return self._local.round

    def default_handle(self) -> Hashable:
        """Return the platform's handle of graph memory, or a fixed handle if there is none."""
        from vllm.platforms import current_platform

        if getattr(current_platform, "graph_pool_handle", None) is None:
            return ("devgraph", "default")
        handle: Hashable = current_platform.get_global_graph_pool()
        return handle

    @contextlib.contextmanager
    def one_step(self) -> Iterator[None]:
        """Use one session for all pieces of a step that are captured in the block.

        The session holds the capture lock and the capture stream. A session for each piece would
        take longer to open than a small piece takes to capture.
        """
        with contextlib.ExitStack() as around:
            self._local.step = _Step(around)
            try:
                yield
            finally:
                self._local.step = None

    def capture_round(self, config: Any, capture: Callable[[Round], Any]) -> Any:
        """Return ``capture(round)`` for a new round; see ``Round.make``."""
        outer, inner = self.round, Round(config)
        self._local.round = inner
        try:
            return inner.make(lambda: capture(inner))
        finally:
            self._local.round = outer

    def allocated(self) -> int:
        """Return the bytes of live device tensors, or 0 if the allocator does not count them."""
        count = getattr(getattr(self.memory.backend, "namespace", None), "memory_allocated", None)
        return 0 if count is None else count()

    @contextlib.contextmanager
    def filling_caches(self, replay: Callable[[], object]) -> Iterator[None]:
        """Capture a step in the block. Then call ``replay`` if the step must fill new caches.

        vLLM caches tensors by size: the first run of a step writes them, and later runs only read
        them. A capture only allocates the tensors.
        """
        if self.round is None or self.round.runs_step:
            yield
            return
        before = self.allocated()
        yield
        if self.allocated() > before:
            replay()

    def within(self, pool: Pool) -> contextlib.AbstractContextManager[Session]:
        """Return the session in which a piece is captured into ``pool``."""
        step = self._local.step
        if step is None or is_capturing():
            return engine_session(pool)
        return contextlib.nullcontext(step.enter(pool))

    def prepare(self, pool: Pool, *, settle: bool) -> Callable[[], None]:
        """Prepare a capture as vLLM does; return the function to call after the capture."""
        from vllm.distributed.device_communicators.pynccl_allocator import set_graph_pool_id
        from vllm.model_executor.offloader.base import get_offloader

        if settle:
            self.memory.settle()
        handle = getattr(pool, "handle", None)
        if handle is not None:
            # Collectives allocate registered memory outside the graph's pool.
            set_graph_pool_id(handle)
        offloader = get_offloader()
        offloader.sync_prev_onload()
        join: Callable[[], None] = offloader.join_after_forward
        return join

    def leave_step(self) -> None:
        """Close the session of a step's pieces before other code opens its own session."""
        if self._local.step is not None:
            self._local.step.leave()


def _device_type() -> str:
    from vllm.platforms import current_platform

    return current_platform.device_type or ""


_layers: list[Layer | None] = [None]
"""The layer of this process, created on demand."""


def current_layer() -> Layer:
    """Return the layer of this process, which is created with default settings if necessary."""
    layer = _layers[0] = _layers[0] or Layer()
    return layer


def reset_layer(layer: Layer | None) -> Layer | None:
    """Replace the layer of this process and return the old layer."""
    before, _layers[0] = _layers[0], layer
    return before
