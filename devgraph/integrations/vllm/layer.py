"""The graph layer of one process: its memory, its counters, and what surrounds a capture."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import logging
import threading
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterator
from typing import Any

from devgraph.api.marks.marks import is_capturing
from devgraph.api.pool import Pool
from devgraph.api.session import Session, session
from devgraph.integrations.engine.ledger import ModeCount
from devgraph.integrations.engine.memory import GraphMemory

logger = logging.getLogger(__name__)

_NEVER = 2**31 - 1
"""The largest threshold: so many collections of the middle generation do not happen."""


class Round:
    """A round of captures, on either runner: with fewer runs before and less around each piece.

    vLLM runs every step once before it captures it, though what a first run finds (compiled code,
    modules to load, workspaces) is the same for most sizes. Here the first step of each kind is
    run. Where another turns out to need a run of its own, its capture fails; nothing of the round
    is left, and it is made anew as vLLM does it.

    Args:
        config: vLLM's.
    """

    def __init__(self, config: Any) -> None:
        compilation = config.compilation_config
        self._ends = [part.end for part in compilation.get_compile_ranges()]
        self._compiled_alone = frozenset(compilation.compile_sizes or ())
        # A rank that made its round anew would wait for others that do not.
        self._all = config.parallel_config.world_size_across_dp > 1
        self._seen: set[Hashable] = set()
        self._skipped = False
        self.runs_step = True
        """What ``wants_run`` said of the step that is being captured."""
        self._undo = contextlib.ExitStack()
        from vllm.compilation.counter import compilation_counter

        self._counter = compilation_counter

    def wants_run(self, desc: Any) -> bool:
        """Whether a step is to be run, given its descriptor; ask once for each."""
        kind = self._kind(desc)
        wanted = self._all or kind not in self._seen
        self._seen.add(kind)
        self._skipped |= not wanted
        self.runs_step = wanted
        return wanted

    def _kind(self, desc: Any) -> Hashable:
        """Return all of a descriptor that its size does not change, and of the size what code may
        be compiled for: a range, a size of its own, one, and what sixteen divides."""
        sizes = tokens, _ = desc.num_tokens, desc.num_reqs
        shapes = tuple(size is not None and (size == 1, size % 16 == 0) for size in sizes)
        alone = tokens if tokens in self._compiled_alone else None
        rest = dataclasses.replace(desc, num_tokens=0, num_reqs=None)
        return rest, shapes, bisect_left(self._ends, tokens), alone

    def on_failure(self, undo: Callable[..., object], *args: Any) -> None:
        """Call ``undo(*args)`` if the round fails."""
        self._undo.callback(undo, *args)

    def make(self, capture: Callable[[], Any]) -> Any:
        """Return ``capture()``, which captures all steps of the round; if it fails, nothing that
        was captured is left, and it is called once more if steps were not run."""
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
                    logger.info("a step needs a run before its capture: captured anew (%s)", error)
                    self._all, self._skipped = True, False


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


class _Step:
    """A step whose pieces are being captured, and the session that is held for them."""

    session: Session | None = None

    def __init__(self, around: contextlib.ExitStack) -> None:
        self._around = around

    def leave(self) -> None:
        """Let the session go."""
        self.session = None
        self._around.close()

    def enter(self, pool: Pool) -> Session:
        """Return the session of ``pool``, which is held from now on."""
        if self.session is None or self.session.pool is not pool:
            self.leave()
            self.session = self._around.enter_context(session(pool))
        return self.session


class _Here(threading.local):
    """What this thread captures; engines on other threads capture for themselves."""

    step: _Step | None = None
    round: Round | None = None


class Layer:
    """What all graph wrappers of this process share.

    Args:
        backend: name of the backend; None for the one of vLLM's platform.
        strict: raise where a step could not use its graph.
    """

    def __init__(self, *, backend: str | None = None, strict: bool = False) -> None:
        self.strict = strict
        self.memory = GraphMemory(_device_type, backend)
        self.counts = {name: ModeCount() for name in ("piecewise", "full", "breakable")}
        self._here = _Here()

    @property
    def round(self) -> Round | None:
        """Of captures, the one that this thread makes."""
        return self._here.round

    def default_handle(self) -> Hashable:
        """Return the platform's handle of graph memory; one of our own where it has none."""
        from vllm.platforms import current_platform

        if getattr(current_platform, "graph_pool_handle", None) is None:
            return ("devgraph", "default")
        handle: Hashable = current_platform.get_global_graph_pool()
        return handle

    @contextlib.contextmanager
    def one_step(self) -> Iterator[None]:
        """Capture the pieces of a step: what the first capture of the block needs around it (the
        device's lock, the stream to capture on) stays for the others and for what runs between
        them, because a step has many pieces and each is small."""
        with contextlib.ExitStack() as around:
            self._here.step = _Step(around)
            try:
                yield
            finally:
                self._here.step = None

    def capture_round(self, config: Any, capture: Callable[[Round], Any]) -> Any:
        """Return ``capture(round)``, which captures all steps of a round; see ``Round.make``."""
        outer, made = self.round, Round(config)
        self._here.round = made
        try:
            return made.make(lambda: capture(made))
        finally:
            self._here.round = outer

    def allocated(self) -> int:
        """Return how many bytes of the device tensors have; 0 where nobody counts them."""
        count = getattr(getattr(self.memory.backend, "namespace", None), "memory_allocated", None)
        return 0 if count is None else count()

    @contextlib.contextmanager
    def writing(self, replay: Callable[[], object]) -> Iterator[None]:
        """Capture a step in the block, and ``replay`` it if it was not run and keeps memory that it
        took: vLLM keeps tensors by size, which the first run writes and later steps only read."""
        if self.round is None or self.round.runs_step:
            yield
            return
        before = self.allocated()
        yield
        if self.allocated() > before:
            replay()

    def within(self, pool: Pool) -> contextlib.AbstractContextManager[Session]:
        """Return the session that records a piece into ``pool``."""
        step = self._here.step
        if step is None or is_capturing():
            return session(pool)
        return contextlib.nullcontext(step.enter(pool))

    def prepare(self, pool: Pool, *, settle: bool) -> Callable[[], None]:
        """Do what vLLM does before each capture of its own.

        Args:
            settle: free unused memory first.

        Returns:
            what joins the weight offloader's stream; call it at the end of the captured body.
        """
        if settle:
            self.memory.settle()
        set_graph_pool_id, get_offloader = self._engine
        handle = getattr(pool, "handle", None)
        if handle is not None:
            # Collectives that need registered memory leave the graph's pool and come back to it.
            set_graph_pool_id(handle)
        offloader = get_offloader()
        offloader.sync_prev_onload()
        join: Callable[[], None] = offloader.join_after_forward
        return join

    @functools.cached_property
    def _engine(self) -> tuple[Callable[..., Any], Callable[[], Any]]:
        from vllm.distributed.device_communicators.pynccl_allocator import set_graph_pool_id
        from vllm.model_executor.offloader.base import get_offloader

        return set_graph_pool_id, get_offloader

    def leave_step(self) -> None:
        """Let go of what is held for the pieces of a step, for what captures by itself there."""
        if self._here.step is not None:
            self._here.step.leave()


def _device_type() -> str:
    from vllm.platforms import current_platform

    return current_platform.device_type or ""


class _Holder:
    """The process's layer; made when it is first asked for."""

    layer: Layer | None = None


def current_layer() -> Layer:
    """Return this process's layer, with the defaults if nothing was installed."""
    if _Holder.layer is None:
        _Holder.layer = Layer()
    return _Holder.layer


def reset_layer(layer: Layer | None) -> Layer | None:
    """Put ``layer`` in place of the process's; return what was there."""
    before, _Holder.layer = _Holder.layer, layer
    return before
