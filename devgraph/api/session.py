"""Session: the one way to record device work."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from devgraph.api.device import Device
from devgraph.api.errors import DeviceGraphError, NestedCaptureError, ResourceError
from devgraph.api.graph import DeviceGraph
from devgraph.api.marks.host_reads import host_read_error
from devgraph.api.marks.host_values import HostSpec
from devgraph.api.marks.marks import Scope, entered, is_capturing
from devgraph.api.marks.modes import autocast_uncached
from devgraph.api.marks.source import raising_line
from devgraph.api.pool import Pool


class Session:
    """A device held for recording: graphs of one pool, recorded one after the other."""

    def __init__(self, pool: Pool, mode: str) -> None:
        self.pool = pool
        self._mode = mode
        self._graph: DeviceGraph | None = None
        self._undo = contextlib.ExitStack()

    @contextlib.contextmanager
    def recording(self, scope: Scope | None) -> Iterator[Session]:
        """Let marks in the block mean what ``scope`` says; all or nothing.

        On an exception every graph that was begun in the block is empty again, whether it had ended
        or not, and the exception goes on unchanged.
        """
        outer, graph = self._undo, self._graph
        with contextlib.ExitStack() as self._undo:
            try:
                with entered(scope):
                    yield self
                self._undo.pop_all()
            finally:
                self._undo, self._graph = outer, graph

    def begin(self, graph: DeviceGraph, *, spec: HostSpec | None = None) -> None:
        """Record what follows into ``graph``, an empty one of the pool."""
        graph.require_empty()
        self.on_failure(graph.cancel)
        self.pool.used = True
        graph.begin(self._mode, spec=spec)
        self._graph = graph

    def end(self, *, allow_empty: bool = False) -> DeviceGraph:
        """Finish the graph that was begun last, and return it; see ``DeviceGraph.end``."""
        graph, self._graph = self._graph, None
        assert graph is not None, "no graph is being recorded"
        graph.end(allow_empty=allow_empty)
        return graph

    def on_failure(self, undo: Callable[[], None]) -> None:
        """Call ``undo`` if the recording fails."""
        self._undo.callback(undo)


@contextlib.contextmanager
def session(
    pool: Pool, scope: Scope | None = None, *, stream: Any = None, mode: str = "thread_local"
) -> Iterator[Session]:
    """Record device work of this thread: no other thread captures on the device meanwhile, no
    graph of the pool is replayed, and no garbage is collected.

    Args:
        pool: where the graphs take memory from.
        scope: what marks in the block mean; see ``Session.recording``.
        stream: the stream to record on; None, or the default stream, means the pool's own.
        mode: see ``Backend.capture_context``.

    Raises:
        NestedCaptureError: this thread is already inside a session.
        CaptureBusyError: another thread captures on this device for too long.
        ResourceError: the device lacks what a capture needs, such as streams.
    """
    backend = pool.backend
    made = Session(pool, backend.check_capture_error_mode(mode))
    if is_capturing() or backend.recording_here:
        raise NestedCaptureError(
            "a capture was started in a step that is being captured itself (or in its warm-up, or "
            "in the eager body of a break). Capture the inner callable before or after this one."
        )
    backend.require_alive()
    # The pool's lock comes first, as it does in a replay that has to record a region: no graph of
    # the pool may replay while its memory and its capture stream are in use here.
    with backend.locked(pool.lock), backend.quiet():
        pool.require_free("capture")
        pool.recordings.require_memory()
        try:
            backend.recording = True
            with autocast_uncached(), backend.side_stream(pool, stream), made.recording(scope):
                yield made
        except Exception as error:
            backend.raise_if_lost(error)
            explained = _explained(backend, error)
            if explained is not None:
                raise explained from error
            raise
        finally:
            backend.recording = False


def _explained(backend: Device, error: Exception) -> DeviceGraphError | None:
    """Return the typed error for a vendor's own, or None if ``error`` says it all."""
    if backend.is_host_read(error):
        what = str(error).partition("\n")[0]
        return host_read_error(
            "device data was read on the host, or the device waited for, inside a capture",
            raising_line(error),
            f"({what})",
        )
    lacking = None if isinstance(error, ResourceError) else backend.shortage(error)
    return None if lacking is None else ResourceError(lacking)
