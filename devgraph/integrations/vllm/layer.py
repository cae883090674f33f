"""The graph layer of one process: its memory, its counters, and what surrounds a capture."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import attrs
import torch

from devgraph.api.marks.marks import is_capturing
from devgraph.api.pool import Pool
from devgraph.api.session import Session, session
from devgraph.integrations.engine.ledger import Ledger
from devgraph.integrations.engine.memory import GraphMemory
from devgraph.integrations.vllm.captures import Round


@attrs.define
class _Step:
    """A step whose pieces are being captured, and the pool that the device is held for."""

    around: contextlib.ExitStack
    thread: int = attrs.field(factory=threading.get_ident)
    session: Session | None = None


class Layer:
    """What all graph wrappers of this process share.

    Args:
        backend: name of the backend; None for the one of vLLM's platform.
        strict: raise where a step could not use its graph.
    """

    def __init__(self, *, backend: str | None = None, strict: bool = False) -> None:
        self.strict = strict
        self.memory = GraphMemory(_device_type, backend)
        self.ledger = Ledger(self.memory, "piecewise", "full", "breakable")
        self._step: _Step | None = None
        self.round: Round | None = None
        """Of captures, the one that is being made."""

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
            self._step = _Step(around)
            try:
                yield
            finally:
                self._step = None

    def capture_round(self, config: Any, capture: Callable[[Round], Any]) -> Any:
        """Return ``capture(round)``, which captures all steps of a round; see ``Round.make``."""
        made = self.round = Round(config)
        try:
            return made.make(lambda: capture(made))
        finally:
            self.round = None

    def within(self, pool: Pool, stream: Any = None) -> contextlib.AbstractContextManager[Session]:
        """Return the session that records into ``pool``.

        Args:
            stream: where vLLM would record. One that is current is not taken: all graphs of a pool
                are recorded on the pool's own, because memory is reused within one stream only.
        """
        if not _is_current(stream):
            return session(pool, stream=stream)
        step = self._step
        if step is None or step.thread != threading.get_ident() or is_capturing():
            return session(pool)
        if step.session is None or step.session.pool is not pool:
            step.session = None
            step.around.close()
            step.session = step.around.enter_context(session(pool))
        return contextlib.nullcontext(step.session)

    @contextlib.contextmanager
    def capturing(self, pool: Pool, *, settle: bool) -> Iterator[Callable[[], None]]:
        """What vLLM does around each capture of its own.

        Args:
            settle: free unused memory first.

        Yields:
            what joins the weight offloader's stream; call it at the end of the captured body.
        """
        from vllm.distributed.device_communicators.pynccl_allocator import set_graph_pool_id
        from vllm.model_executor.offloader.base import get_offloader

        if settle:
            self.memory.settle()
        handle = getattr(pool, "handle", None)
        if handle is not None:
            # Collectives that need registered memory leave the graph's pool and come back to it.
            set_graph_pool_id(handle)
        offloader = get_offloader()
        offloader.sync_prev_onload()
        yield offloader.join_after_forward


def _is_current(stream: Any) -> bool:
    number = getattr(stream, "stream_id", None)
    return number is None or number == torch.accelerator.current_stream().stream_id


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
