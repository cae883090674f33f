"""DeviceGraph: captured device work and its states.

::

              capture_context                      update fails half-way
    empty ───────────────────▶ capturing ──▶ ready ──────────────────────▶ dirty
      ▲                            │          │ ▲                            │
      │        the body raised     │          │ └── update, replay           │
      ├────────────────────────────┘          │                              │
      │               reset                   ▼           reset              │
      ├─────────────────────────────── ready / stale ◀── expire              │
      └──────────────────────────────────────────────────────────────────────┘
    close() leads from every state except capturing to closed, which is final.
"""

from __future__ import annotations

import abc
import contextlib
import enum
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NoReturn

import attrs
import torch

from devgraph.api.device import Device, acquiring, raise_if_lost, require_alive
from devgraph.api.errors import (
    CaptureError,
    ExecutableError,
    HostArgumentError,
    InputTypeError,
    NestedCaptureError,
    StateError,
    UpdateUnsupportedError,
    empty_capture,
    require_result,
)
from devgraph.api.executable import Call, Executable, Recording, call_weakly
from devgraph.api.marks.calls import MarkedCall
from devgraph.api.marks.host_values import NO_HOST_ARGS, HostSpec, exact
from devgraph.api.marks.marks import Mark, current_scope, is_capturing
from devgraph.api.marks.names import Names, NodeRange
from devgraph.api.pool import Pool
from devgraph.api.process import identity
from devgraph.api.reach import PLAIN, Entry, Named

logger = logging.getLogger(__name__)


class GraphState(str, enum.Enum):
    """The states of a graph; each member equals its name in lower case."""

    EMPTY = "empty"
    CAPTURING = "capturing"
    READY = "ready"
    DIRTY = "dirty"
    STALE = "stale"
    CLOSED = "closed"

    def __str__(self) -> str:
        return self.value


_WAY_OUT = {
    GraphState.EMPTY: "capture into it first: with backend.capture_context(graph): ...",
    GraphState.CAPTURING: "leave its capture_context first",
    GraphState.READY: "call reset() first",
    GraphState.DIRTY: "an update failed half-way; call reset() and capture again",
    GraphState.STALE: "its weights or buffers were invalidated; call reset() and capture again",
    GraphState.CLOSED: "create another graph with backend.make_graph(pool)",
}


@attrs.frozen(kw_only=True)
class GraphInfo:
    """Size and content of a graph; values that the backend does not report are None."""

    state: str
    nodes: int | None
    """Number of device operations."""
    regions: int
    """Number of updatable regions."""
    segments: int
    bytes: int
    """Memory of the graph itself, without its pool."""
    capture_seconds: float
    recordings: int
    """Number of the graph's recordings that the pool keeps."""


def summed(segments: Sequence[Any], *, state: str, capture_seconds: float) -> GraphInfo:
    """Return the totals of ``segments``; a segment that is not a graph counts as a region."""
    infos = [segment.info() for segment in segments if isinstance(segment, DeviceGraph)]
    counts = [info.nodes for info in infos]
    return GraphInfo(
        state=state,
        nodes=None if None in counts else sum(n for n in counts if n is not None),
        regions=len(segments) - len(infos) + sum(info.regions for info in infos),
        segments=len(segments),
        bytes=sum(info.bytes for info in infos),
        capture_seconds=capture_seconds,
        recordings=sum(info.recordings for info in infos),
    )


class DeviceGraph(abc.ABC):
    """Device work that is captured once, replayed many times and updated in its regions.

    ``backend.make_graph(pool)`` creates a graph, and ``backend.capture_context(graph)`` captures
    into it. A vendor implements the first group of private methods, which are called only in a
    legal state.
    """

    applies_at_once = False
    """Whether a failed or interrupted update leaves the graph unchanged."""

    def __init__(self, backend: Device, pool: Pool) -> None:
        self.backend = backend
        self.pool = pool
        self.calls: list[MarkedCall] = []
        """The updatable regions in capture order."""
        self.arguments: tuple[torch.Tensor, ...] = ()
        """The caller's tensors that regions may access, even if the capture did not."""
        self.generators: Sequence[torch.Generator] = ()
        """The caller's random generators that the capture may draw from."""
        self.reached: Sequence[torch.Tensor] = ()
        """The caller's other tensors that the capture may use, such as weights."""
        self.names: Names | None = None
        """The named calls to which nodes of the current capture are assigned, if requested."""
        self.ranges: list[NodeRange] = []
        """The nodes of named calls, in the order in which the calls began."""
        self.spoiled: CaptureError | None = None
        """An error to raise at the end of the current capture, even if its body caught it."""
        self.pinned = False
        """Whether the executable is never evicted."""
        self._process = identity.token
        self._state = GraphState.EMPTY
        self.executable = self._refusal()
        """The launch target of the next replay."""
        self._capture_seconds = 0.0
        self.spec = NO_HOST_ARGS
        """The host arguments of the capture."""
        self._values: dict[str, Any] = {}
        self._host: dict[Mark, dict[str, Any]] = {}
        self._named: list[Entry] = []
        """Plain values that regions read by name and do not change; they are part of keys."""
        self.key: Hashable = None
        """The key of the host values that the next launch uses."""
        backend.graphs.add(self)

    # Methods that a vendor implements.

    @abc.abstractmethod
    def _begin(self, mode: str) -> None:
        """Start recording on the current stream; on failure, undo the start."""

    @abc.abstractmethod
    def _end(self) -> Executable:
        """Finish recording and return the graph's launch target."""

    @abc.abstractmethod
    def _abort(self) -> None:
        """Stop recording and free the work after a failed body, ``_begin`` or ``_end``."""

    @abc.abstractmethod
    def _free(self) -> None:
        """Drop everything captured."""

    @abc.abstractmethod
    def _size(self) -> tuple[int | None, int]:
        """Return the number of nodes (None if unknown) and the graph's own bytes."""

    def _region_begin(self, call: MarkedCall) -> None:  # noqa: B027
        """Mark the start of an updatable region."""

    def _region_end(self, call: MarkedCall) -> None:  # noqa: B027
        """Mark the end of an updatable region.

        A vendor may use ``call.note`` freely. If it can count nodes, it sets ``call.nodes`` to the
        range of the region's nodes.
        """

    def _loop(self, body: Callable[[], None], going: torch.Tensor) -> int:
        """Record the launches of ``body`` as a loop, and return its number of nodes.

        ``body`` is called once. Replays repeat its launches while the bool tensor ``going`` is
        true. The rest of the graph must not reuse memory that ``body`` allocates.
        """
        raise NotImplementedError

    def _nodes_so_far(self) -> int | None:
        """Return the number of nodes in the current capture so far; a loop's nodes count once.

        The result is None if the current stream is not part of the capture, or if the backend does
        not report nodes.
        """
        return None

    def _own_recording(self) -> Recording | None:
        """Return the capture itself as a recording, or None if it cannot be applied again."""
        return None

    def _record(self, host: Mapping[Mark, dict[str, Any]]) -> Recording:
        """Re-run the regions with new host values and return the recording. Graphs are unchanged.

        The regions must not allocate memory that belongs to a graph.
        """
        raise NotImplementedError

    def _apply(self, recording: Recording) -> None:
        """Make the next launch use ``recording``: write it, or ``use`` its executable."""
        raise NotImplementedError

    # Public methods.

    @property
    def state(self) -> GraphState:
        return self._state

    def replay(self) -> None:
        """Launch the graph once on the current stream, with the values of its last update.

        Replays of graphs that share a pool run one at a time.

        Raises:
            StateError: the graph is not ready; the message states the remedy.
            NestedCaptureError: this thread is inside a capture.
            DeviceLost: the device is in a sticky error state.
        """
        if current_scope() is not None or identity.token is not self._process:
            self._refuse_replay()
        pool = self.pool
        with pool.lock:
            if pool.occupied:
                pool.require_free("replay a graph")
            try:
                pool.order()
                self.executable.launch()
            except Exception as error:
                raise_if_lost(self.backend, error)
                raise

    def launch(self) -> None:
        """Replay without checks.

        The caller must hold the pool's lock, have called ``pool.order()``, be outside of captures
        and in the graph's process, and pass errors to ``raise_if_lost``.
        """
        self.executable.launch()

    def update(self, **host_args: Any) -> None:
        """Set host arguments of regions for the next and all later replays.

        Omitted arguments keep their last value. A call that changes no value has no effect.

        Args:
            **host_args: new values by name.

        Raises:
            HostArgumentError: a name is unknown, or a type differs from the type at capture (a
                TypeError).
            UpdateUnsupportedError: a value changed, and the backend cannot update.
            UpdateTopologyError: the new values need different nodes; the graph is unchanged.
        """
        self._require("update", GraphState.READY)
        self._refuse_in_capture("update")
        with self.pool.lock:
            self.pool.require_free("update a graph")
            values = {**self._values, **self.spec.checked(host_args)}
            self.select({mark: mark.host_kwargs(values) for mark in self.marks})
            self._values = values

    def reset(self) -> None:
        """Free the captured work, so that the graph is empty again. Idempotent."""
        if self._state is GraphState.EMPTY:
            return
        self._require("reset", GraphState.READY, GraphState.DIRTY, GraphState.STALE)
        with self.pool.lock:
            self.pool.require_free("reset a graph")
            self._clear(GraphState.EMPTY, self._free)

    def close(self) -> None:
        """Free everything permanently. Idempotent; refused during capture and in eager bodies."""
        if self._state is GraphState.CLOSED:
            return
        if self._state is GraphState.CAPTURING:
            self._refuse_state("close")
        if self._state is GraphState.EMPTY:
            self._leave_for(GraphState.CLOSED)
        else:
            with self.pool.lock:
                self.pool.require_free("close a graph")
                self._clear(GraphState.CLOSED, self._free)

    def expire(self) -> None:
        """Mark a ready graph stale, because captured weights or buffers are no longer valid."""
        if self._state is GraphState.READY:
            self._leave_for(GraphState.STALE)

    def info(self) -> GraphInfo:
        """Return nodes, regions, bytes and capture seconds."""
        nodes, size = (None, 0) if self._state is GraphState.CLOSED else self._sized()
        return GraphInfo(
            state=self._state.value,
            nodes=nodes,
            regions=len(self.calls),
            segments=1,
            bytes=size,
            capture_seconds=self._capture_seconds,
            recordings=self.pool.recordings.count(self) if self.calls else 0,
        )

    def give_up(self) -> None:
        """Refuse all later replays, because the device is lost."""
        self.use(self._refusal())

    # Methods for scopes and policies.

    def require_ready(self) -> None:
        """Raise the error of ``replay`` if the graph cannot be replayed now."""
        self._require("replay", GraphState.READY)
        self.pool.recordings.require_memory()

    def use(self, executable: Executable) -> None:
        """Make ``executable`` the launch target. Only this method changes the target.

        A change of ``pool.epoch`` invalidates bound launches of earlier executables.
        """
        self.executable = executable
        if not self.calls:  # launches of graphs with regions are never bound
            self.pool.epoch += 1

    def bound(self, stream: int | None = None) -> Callable[[], None]:
        """Return a callable that replays without the checks and the lock of ``replay``.

        For a graph with regions, the result is ``replay`` itself.

        Args:
            stream: stream that is current at every call of the result. The caller holds the pool's
                lock, has called ``pool.order()``, is on the backend's device, and calls ``bound``
                again when ``pool.epoch`` changes. If None, the result is the vendor's own replay,
                for an engine that replays on one thread, stream and device and drops the callable
                when it closes the graph.

        Raises:
            StateError: the graph is not ready.
        """
        self.require_ready()
        return self.replay if self.calls else self.executable.bound(stream)

    @property
    def recorded_nothing(self) -> bool:
        """Whether the capture is known to have recorded no device work."""
        return self._sized()[0] == 0

    def _sized(self) -> tuple[int | None, int]:
        return require_result(self._size(), tuple, self, "_size")

    def use_pool(self, pool: Pool) -> None:
        """Move an empty graph to ``pool``."""
        self._require("move", GraphState.EMPTY)
        pool.check(self.backend)
        self.pool = pool

    # Methods for sessions.

    def require_empty(self) -> None:
        """Raise StateError unless the graph can be captured into now."""
        self._require("capture", GraphState.EMPTY)

    def begin(
        self,
        mode: str,
        *,
        spec: HostSpec | None,
        arguments: tuple[torch.Tensor, ...],
        names: Names | None,
    ) -> None:
        """Start recording into an empty graph; see ``Session.begin``.

        The caller must call ``end`` or ``cancel`` afterwards, even on failure.
        """
        self.arguments, self.names = arguments, names
        self.spec = spec or NO_HOST_ARGS
        self._values = dict(self.spec.declared)
        self.spoiled = None
        self._capture_seconds = -time.perf_counter()
        self._state = GraphState.CAPTURING
        self._begin(mode)
        if self.names is not None:
            self.ranges = self.names.begin(self._nodes_so_far)

    def end(self, *, allow_empty: bool = False) -> None:
        """Finish the recording; raise EmptyCaptureError if it is empty, unless ``allow_empty``."""
        self._refuse_spoiled()
        names, self.names = self.names, None
        if names is not None:
            names.end()
        executable = require_result(self._end(), Executable, self, "_end")
        if self.recorded_nothing:
            if not allow_empty:
                raise empty_capture(self.backend.device)
            executable = _NOTHING
        if self.calls:
            self.key = self.key_of(self._host)
            if (own := self._own_recording()) is not None:
                self.pool.recordings.put(self, self.key, own)
        self._capture_seconds += time.perf_counter()
        self._state = GraphState.READY
        self.use(executable)

    def cancel(self) -> None:
        """Undo a failed recording, or a recording whose session failed.

        This method never raises, so that it does not hide the original exception.
        """
        if self._state in (GraphState.EMPTY, GraphState.CLOSED):
            return
        capturing = self._state is GraphState.CAPTURING
        try:
            self._clear(GraphState.EMPTY, self._abort if capturing else self._free)
        except Exception:
            logger.exception("cleaning up after a failed capture failed as well")
            self._state = GraphState.EMPTY

    def capture_region(
        self, mark: Mark, args: tuple[Any, ...], kwargs: dict[str, Any], host: dict[str, Any]
    ) -> Any:
        """Capture one call of an updatable region and return its result."""
        self._refuse_spoiled()
        call = MarkedCall(self.pool, mark, args, kwargs, len(self.calls))
        if mark not in self._host:
            plain = (e for e in Named([(mark.name, mark.fn)]).places if isinstance(e.value, PLAIN))
            # A region often appends records to a list, so items of lists are not part of keys.
            self._named += [entry for entry in plain if not isinstance(entry.holder, list | deque)]
        self._host[mark] = host
        self._region_begin(call)
        result = call.first_run(args, kwargs, host)
        self._region_end(call)
        self._named = [entry for entry in self._named if entry.now() is entry.value]
        call.alias_bridges()
        self.calls.append(call)
        return result

    def capture_loop(self, body: Callable[[], None], going: torch.Tensor) -> int:
        self._refuse_spoiled()
        return self._loop(body, going)

    def select(self, host: Mapping[Mark, dict[str, Any]], key: Hashable = None) -> None:
        """Make the next launch use ``host``, the values by mark. An unchanged key has no effect.

        ``key`` is ``key_of(host)``, if the caller has computed it.
        """
        key = key or self.key_of(host)
        if key == self.key:
            return
        if not self.backend.capabilities.region_update:
            raise UpdateUnsupportedError(
                f"backend {self.backend.name!r} cannot update regions: "
                f"{', '.join(mark.name for mark in host)} would replay the captured values, "
                f"{self._values}. Replay with these values, capture with policy='breakable', or "
                f"read the value from a device tensor."
            )
        recordings = self.pool.recordings
        recordings.require_memory()
        recording = recordings.get(self, key)
        if recording is None:
            recording = self._record(host)
            recordings.put(self, key, recording)
        self.require_ready()
        try:
            self._apply(recording)
        except ExecutableError:
            raise  # nothing was written
        except BaseException:
            if not self.applies_at_once:
                self._leave_for(GraphState.DIRTY)
            raise
        self.key = key

    def key_of(self, host: Mapping[Mark, dict[str, Any]]) -> Hashable:
        """Return a hashable key of the regions' host values and of the plain values they read."""
        try:
            pairs = [(name, exact(v)) for kwargs in host.values() for name, v in kwargs.items()]
            for entry in self._named:
                now = entry.now()
                pairs.append((entry.path, exact(now) if isinstance(now, PLAIN) else id(now)))
            key = tuple(pairs)
            hash(key)
        except TypeError:
            for mark, kwargs in host.items():
                for name, value in kwargs.items():
                    _require_key(mark, name, value)
            raise
        return key

    @property
    def marks(self) -> list[Mark]:
        """The distinct marks of the updatable regions, in capture order."""
        return list(dict.fromkeys(call.mark for call in self.calls))

    # Implementation.

    def _leave_for(self, state: GraphState) -> None:
        """Enter a state in which the graph cannot be launched."""
        self._state = state
        self.use(self._refusal())

    def _refusal(self) -> Executable:
        """Return the launch target of a graph that cannot be launched."""
        return Call(call_weakly(self._refuse_replay))

    def _refuse_replay(self) -> NoReturn:
        self._require("replay", GraphState.READY)
        self._refuse_in_capture("replay")
        raise AssertionError("replay was refused without a reason")

    def _clear(self, state: GraphState, free: Callable[[], None]) -> None:
        """Free the captured work. The caller must hold the pool's lock."""
        self._leave_for(GraphState.DIRTY)  # A second call must be possible after an interrupt.
        self.pool.recordings.drop(self)
        self.calls, self.ranges = [], []
        self.arguments, self.reached, self.generators = (), (), ()
        self.names = None
        self._host, self._named = {}, []
        self.key = None
        free()
        self._state = state

    def _require(self, call: str, *allowed: GraphState) -> None:
        if call != "reset":
            require_alive(self.backend)
        if self._state not in allowed:
            self._refuse_state(call)
        identity.require(self._process, f"{call} a graph")

    def _refuse_spoiled(self) -> None:
        if self.spoiled is not None:
            raise self.spoiled

    def _refuse_state(self, call: str) -> NoReturn:
        raise StateError(
            f"cannot {call} a graph that is {self._state.value}: {_WAY_OUT[self._state]}."
        )

    def _refuse_in_capture(self, call: str) -> None:
        if is_capturing():
            raise NestedCaptureError(
                f"cannot {call} a graph inside a capture: leave the capture first, or mark the "
                f"calling function @dg.no_graph and capture with policy='breakable'."
            )

    def __reduce__(self) -> NoReturn:
        raise InputTypeError(
            "a DeviceGraph owns device resources and cannot be pickled or copied; capture it again"
        )

    def __del__(self) -> None:
        try:
            if self._state not in (GraphState.CLOSED, GraphState.EMPTY):
                with acquiring(self.pool.lock) as acquired:
                    if acquired:
                        self._clear(GraphState.CLOSED, self._free)
                    else:  # Waiting here could deadlock with the thread that holds the lock.
                        self._end_later()
        # ``pool.lock`` raises in a forked child, and modules are gone at interpreter exit.
        except Exception:
            pass

    def _end_later(self) -> None:
        """Close the graph on a new thread, which can wait for the pool's lock."""

        def end() -> None:
            # A new thread starts on the first device, where the driver would create a context.
            with contextlib.suppress(Exception), self.backend.on_device():
                self.close()

        threading.Thread(target=end, daemon=True).start()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._state.value} on {self.backend.device}>"


_NOTHING = Call(lambda: None)
"""The launch target of an empty graph, which some drivers cannot instantiate."""


def _require_key(mark: Mark, name: str, value: object) -> None:
    try:
        hash(exact(value))
    except TypeError as error:
        subject = "the context" if name == "context" else f"host argument {name!r}"
        raise HostArgumentError(
            f"{subject} of {mark.name} is a {type(value).__name__}, which cannot be a key "
            f"({error}). "
            f"Declare reduce={{{name!r}: tuple}} (or another function that returns numbers, "
            f"strings or tuples of them) on the mark."
        ) from error
