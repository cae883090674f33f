"""Session: the context manager around every recording."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch

from devgraph.api.device import (
    Device,
    locked,
    raise_if_lost,
    refuse_foreign_capture,
    require_alive,
)
from devgraph.api.errors import (
    CaptureError,
    DeviceGraphError,
    InputError,
    NestedCaptureError,
    ResourceError,
    without_first_frame,
)
from devgraph.api.graph import DeviceGraph
from devgraph.api.marks.gates import recording_gates
from devgraph.api.marks.host_reads import host_read_error
from devgraph.api.marks.host_values import HostSpec
from devgraph.api.marks.marks import Scope, entered, is_capturing
from devgraph.api.marks.names import Names
from devgraph.api.marks.source import raising_line
from devgraph.api.modes import autocast_uncached
from devgraph.api.pool import Pool
from devgraph.api.process import collector

logger = logging.getLogger(__name__)

CAPTURE_ERROR_MODES = ("global", "thread_local", "relaxed")

SEEDING = (
    "the step seeds a random generator, sets its state, or draws from a generator that is not part "
    "of the capture"
)
SEEDING_CURE = (
    "Seed outside the step, pass your own generators to the step as arguments, and pass "
    "preserve_rng_state=False to torch.utils.checkpoint"
)


class Session:
    """A context in which graphs of one pool are recorded one after another."""

    def __init__(self, pool: Pool, mode: str) -> None:
        self.pool = pool
        self._mode = mode
        self._graph: DeviceGraph | None = None
        self._undo = contextlib.ExitStack()
        self.caches_casts = torch.is_autocast_cache_enabled() and torch.is_grad_enabled()
        """Whether eager code would cache autocast's casts for gradients."""

    @contextlib.contextmanager
    def recording(self, scope: Scope | None) -> Iterator[Session]:
        """Let ``scope`` decide the effect of marks in the block.

        If the block raises, every graph that it began becomes empty, even if it was finished.
        """
        outer, graph = self._undo, self._graph
        with contextlib.ExitStack() as self._undo:
            try:
                gates = contextlib.nullcontext() if scope is None else recording_gates()
                with entered(scope), gates:
                    yield self
                self._undo.pop_all()
            finally:
                self._undo, self._graph = outer, graph

    def begin(
        self,
        graph: DeviceGraph,
        *,
        spec: HostSpec | None = None,
        arguments: tuple[torch.Tensor, ...] = (),
        names: Names | None = None,
    ) -> None:
        """Start recording into ``graph``, an empty graph of the pool.

        Regions receive the host arguments declared in ``spec``. They may access ``arguments``, the
        caller's tensors, even if the capture does not. ``names`` assigns nodes to named calls.
        """
        graph.require_empty()
        self.on_failure(graph.cancel)
        self.pool.used = True
        graph.begin(self._mode, spec=spec, arguments=arguments, names=names)
        self._graph = graph

    def end(self, *, allow_empty: bool = False) -> DeviceGraph:
        """Finish and return the current graph; see ``DeviceGraph.end``."""
        graph, self._graph = self._graph, None
        assert graph is not None, "no graph is being recorded"
        graph.end(allow_empty=allow_empty)
        return graph

    def on_failure(self, undo: Callable[[], None]) -> None:
        """Call ``undo`` if the recording fails."""
        self._undo.callback(undo)


@contextlib.contextmanager
def session(
    pool: Pool,
    scope: Scope | None = None,
    *,
    stream: Any = None,
    mode: str = "thread_local",
    may_autocast: bool = True,
) -> Iterator[Session]:
    """Record device work of this thread.

    During the block, no other thread captures on the device, no graph of the pool is replayed, and
    the garbage collector is off. A collection could free graphs or unload kernels, and drivers and
    allocators refuse or record such calls during a capture.

    Args:
        pool: memory for the graphs.
        scope: decides the effect of marks in the block; see ``Session.recording``.
        stream: the stream to record on; None and the default stream select the pool's stream.
        mode: see ``Backend.capture_context``.
        may_autocast: whether the block may enter autocast. If so, the block caches no casts.

    Raises:
        NestedCaptureError: this thread is already inside a session.
        CaptureBusyError: another thread is capturing on this device and does not finish in time.
        ResourceError: the device lacks a resource that a capture needs, such as streams.
    """
    backend = pool.backend
    capture = Session(pool, supported_error_mode(backend, mode))
    if is_capturing() or backend.capture_lock.is_recording_here:
        raise NestedCaptureError(
            "a capture was started in a step that is being captured itself (or in its warm-up, or "
            "in the eager body of a break). Capture the inner callable before or after this step."
        )
    refuse_foreign_capture(backend, "capture")
    require_alive(backend)
    # Acquire the pool's lock before the capture lock, as replays that record a region do. No graph
    # of the pool may replay while the session uses the pool's memory and stream.
    with locked(backend, pool.lock), backend.exclusive(), collector.paused():
        pool.require_free("capture")
        pool.recordings.require_memory()
        try:
            backend.capture_lock.recording = True
            uncached = may_autocast or torch._C._is_any_autocast_enabled()
            with (
                explained(backend),
                autocast_uncached() if uncached else contextlib.nullcontext(),
                # A backward pass must run on this thread, where the scope handles its marks.
                torch.autograd.set_multithreading_enabled(False),
                backend.side_stream(pool, stream),
                capture.recording(scope),
            ):
                yield capture
        finally:
            backend.capture_lock.recording = False


@contextlib.contextmanager
def explained(backend: Device) -> Iterator[None]:
    """Convert torch and driver errors in the block to devgraph errors, if possible.

    Raises:
        DeviceLost: the device is in a sticky error state.
    """
    try:
        yield
    except Exception as error:
        raise_if_lost(backend, error)
        explanation = None
        if not isinstance(error, DeviceGraphError):
            explanation = _explanation(backend, error)
        if explanation is None:
            raise
        try:
            raise explanation from without_first_frame(error)
        finally:
            del explanation  # breaks a reference cycle: its traceback refers to this frame


def supported_error_mode(backend: Device, mode: str) -> str:
    """Return ``mode`` if the backend supports it, or the backend's first mode."""
    if mode not in CAPTURE_ERROR_MODES:
        known = ", ".join(CAPTURE_ERROR_MODES)
        raise InputError(f"capture_error_mode must be one of {known}, got {mode!r}")
    supported = backend.capabilities.capture_error_modes
    if mode in supported:
        return mode
    logger.info("%s has no capture error mode %s; using %s", backend.name, mode, supported[0])
    return supported[0]


def _explanation(backend: Device, error: Exception) -> DeviceGraphError | None:
    """Return a devgraph error that explains ``error``, or None if there is no better error."""
    if backend.is_host_read(error):
        text = str(error).partition("\n")[0]
        return host_read_error(
            "the host read device data or waited for the device inside a capture",
            raising_line(error),
            f"({text})",
        )
    if type(error).__module__ == "torch._dynamo.exc" or "found no compiled frames" in str(error):
        text = str(error).partition("\n")[0]
        return CaptureError(
            f"the step calls a function that torch.compile returned, at {raising_line(error)}, and "
            f"torch cannot run it in a capture ({text}). Pass the function itself to the step, or "
            f"call the compiled function in a function marked @dg.no_graph and capture with "
            f"policy='breakable'."
        )
    said = str(error).lower()
    if type(error) is RuntimeError and "generator" in said and "captur" in said:
        return CaptureError(f"{SEEDING}, at {raising_line(error)}. {SEEDING_CURE}. ({error})")
    lacking = backend.shortage(error)
    return None if lacking is None else ResourceError(lacking)
