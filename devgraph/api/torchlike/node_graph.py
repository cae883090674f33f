"""NodeGraph, a torch graph whose regions are updated node by node, and its backend.

Both serve all vendors whose driver has graphs of nodes with parameters (``NodeRuntime``).
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import logging
import operator
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch

from devgraph.api.errors import (
    CaptureError,
    StateError,
    UnjoinedStreamError,
    UpdateError,
    UpdateTopologyError,
)
from devgraph.api.executable import Call, EvictableExecutable, Executable, dereference
from devgraph.api.graph import GraphState
from devgraph.api.marks.calls import MarkedCall
from devgraph.api.marks.marks import Mark, RegionScope, entered
from devgraph.api.marks.scopes import LoopError
from devgraph.api.modes import OwnMode
from devgraph.api.session import session
from devgraph.api.torchlike.base import TorchBackend, TorchGraph, TorchPool
from devgraph.api.torchlike.guards import RandomGuard, SideStreams, name_streams
from devgraph.api.torchlike.node_calls import NodeRuntime, RuntimeCallError
from devgraph.api.torchlike.recording import (
    NodeRecording,
    RawGraph,
    RegionPattern,
    executable_bytes,
    free_executable,
)

logger = logging.getLogger(__name__)

_USES_WITH_ROOM = 2
"""Number of uses at which a recording receives a separate executable if the budget has room. A key
that is used twice tends to be used again, and later uses then need no update."""

_USES_WHEN_FULL = 16
"""Number of uses at which a recording receives a separate executable if another must be evicted.
Creating an executable costs the host time of about 12 updates (docs/benchmarks.md)."""


@attrs.define
class _Call:
    lane: Any  # the stream of the call, or None for the capture stream
    last: frozenset[int]
    """Nodes on which the capture stream's next work depends after the call but not before it. At
    least one of them belongs to the region."""
    start: int  # position of the call's first node, not counting nodes of loops
    nodes: tuple[int, ...] = ()  # the call's nodes; empty until the end of the capture


class _Direct:
    """The launch of a driver's executable, after ``prologue`` if the graph draws random numbers."""

    def __init__(
        self, backend: NodeBackend, handle: int, prologue: Callable[[], None] | None
    ) -> None:
        self._runtime = backend.driver
        self._handle = handle
        self._prologue = prologue
        launch = self._runtime.launcher(handle, backend.current_stream_id)
        self._launch = self._after_prologue(launch)
        self.launch = backend.guarded(self._launch)

    def bound(self, stream: int | None) -> Callable[[], None]:
        if stream is None:
            return self._launch
        return self._after_prologue(self._runtime.bound(self._handle, stream))

    def _after_prologue(self, launch: Callable[[], None]) -> Callable[[], None]:
        prologue = self._prologue
        if prologue is None:
            return launch

        def run() -> None:
            prologue()
            launch()

        return run


class _Own:
    """The captured graph and its *own* executable, with the parameters of one recording at a time.

    An ``EvictableExecutable`` calls ``make`` and ``drop``.
    """

    def __init__(self, graph: NodeGraph, raw: int) -> None:
        self._graph = weakref.ref(graph)
        self._backend = graph.backend
        self._executable = 0
        self.raw: RawGraph | None = RawGraph(self._backend.driver, raw)
        """The captured graph, or None after it was freed."""
        self.prologue: Callable[[], None] | None = None
        """torch's replay of its empty graph, to advance random generators; None without draws."""
        self.captured: NodeRecording | None = None  # the recording of the capture
        self.held: NodeRecording | None = None  # the recording that the executable launches

    def make(self) -> Executable:
        """Create the executable, with the parameters of ``held``."""
        backend, graph = self._backend, dereference(self._graph)
        if self.raw is None:
            raise StateError("cannot replay a graph that was closed or reset.")
        self.drop()  # frees an executable that an interrupt left
        self._executable = backend.driver.instantiate(self.raw.graph)
        recording = None if self.held is self.captured else self.held
        try:
            backend.driver.write(recording.updates if recording else (), self._executable)
        except BaseException:
            self.drop()
            raise
        direct = _Direct(backend, self._executable, self.prologue)
        return graph.update_strategy.launches(graph, direct, recording, own=True)

    def close(self) -> None:
        """Free everything now; bound launches may keep this object alive."""
        self.drop()
        self.raw = None

    def drop(self) -> None:
        """Free the executable, if any, even if a launch of it is in flight."""
        executable, self._executable = self._executable, 0
        if executable:
            free_executable(self._backend.driver, executable)

    def write(self, recording: NodeRecording) -> None:
        """Use ``recording`` in later launches."""
        self.held = None
        if self._executable:
            self._backend.driver.write(recording.updates, self._executable)
        self.held = recording


class UpdateStrategy:
    """The strategy for applying recordings to one graph; vendors override its methods.

    Each method receives the graph, which owns this object.
    """

    def prepare(self, graph: NodeGraph) -> None:
        """Prepare for a capture that may have updatable regions."""

    def close_regions(self, graph: NodeGraph, number: int) -> None:
        """Launch work that must follow the regions of recording ``number`` (0: the capture)."""

    def deserves_executable(self, graph: NodeGraph, recording: NodeRecording) -> bool:
        """Whether to create an executable for ``recording``, which has none."""
        if not recording.fits_own:
            return True
        if recording.executable_bytes <= graph.pool.recordings.room:
            return recording.uses >= _USES_WITH_ROOM
        return recording.uses >= _USES_WHEN_FULL

    def write(self, graph: NodeGraph, recording: NodeRecording) -> None:
        """Write ``recording`` into the graph's own executable."""
        assert graph._own is not None
        graph._own.write(recording)

    def launches(
        self,
        graph: NodeGraph,
        executable: Executable,
        recording: NodeRecording | None,
        *,
        own: bool,
    ) -> Executable:
        """Return a launch target for ``executable``, which has the parameters of ``recording``.

        Without ``recording``, the executable has the parameters of the capture. ``own`` marks the
        graph's own executable, into which recordings are written.
        """
        return executable


class NodePool(TorchPool):
    """A pool that also provides memory for results of eager bodies."""

    def graph_memory(self) -> contextlib.AbstractContextManager[Any]:
        return self.allocating_in(self._memory)


class NodeGraph(TorchGraph):
    """A captured graph, its executable, and the recordings of its regions.

    torch owns the memory pool and the random state, and captures an empty graph. This object owns
    the driver's graph and instantiates it, so its executable can be dropped and rebuilt. For a
    graph that draws random numbers, torch's empty graph is replayed before each launch, because
    only torch can advance random generators.
    """

    backend: NodeBackend

    def __init__(self, backend: NodeBackend, pool: TorchPool) -> None:
        super().__init__(backend, pool)
        self._runtime = backend.driver
        self._last_number = 0
        self._forget()

    def _forget(self) -> None:
        self._nodes: int | None = None
        self._repeated = 0
        self._stream: Any = None
        self._pattern: RegionPattern | None = None
        self.update_strategy = self.backend.update_strategy_type()
        self._own: _Own | None = None
        self._own_executable = self._refusal()
        self._closing: tuple[int, ...] = ()

    # Capture and launch.

    def _begin(self, mode: str) -> None:
        self._stream = self.backend.namespace.current_stream(self.backend.device)
        self.update_strategy.prepare(self)
        super()._begin(mode)

    def _end(self) -> Executable:
        runtime, stream = self._runtime, self.backend.current_stream_id()
        if self.calls:
            self._find_region_nodes()
        unjoined = []
        if (capture := runtime.capture_of(stream)) is not None:
            unjoined = self.backend.side_streams.unjoined(stream, capture)
        try:
            super()._end()
        except UnjoinedStreamError as error:
            if not unjoined:
                raise
            raise UnjoinedStreamError(name_streams(unjoined)) from error
        own = self._own
        assert own is not None and own.raw is not None
        self._nodes = runtime.count(own.raw.graph) + self._repeated
        if self._repeated:  # The driver refuses unsupported loops only at instantiation.
            try:
                runtime.destroy_executable(runtime.instantiate(own.raw.graph))
            except RuntimeCallError as error:
                raise LoopError("failed", f"a loop has no executable: {error}") from error
        if self._nodes and self.backend.draws_random(self._native, self.pool, self.generators):
            if self._repeated:  # All iterations would draw equal numbers.
                raise LoopError("random", "a step with a loop draws random numbers")
            own.prologue = self._native.replay
        else:  # torch's empty graph is not needed.
            native, self._native = self._native, None
            native.reset()
        if self._nodes and self.calls:
            regions = [(call.mark.name, call.note.nodes) for call in self.calls]
            regions.append(("(after the regions)", self._closing))
            self._pattern = RegionPattern(runtime, own.raw.graph, regions)
        size = executable_bytes(self._nodes)
        self._own_executable = EvictableExecutable(
            self, self.pool.recordings, make=own.make, drop=own.drop, nbytes=size
        )
        return self._own_executable

    def _close_capture(self) -> None:
        stream = self.backend.current_stream_id()
        self._own = _Own(self, self._runtime.end_capture(stream))
        self._runtime.begin_capture(stream)  # torch ends this empty capture.
        super()._close_capture()

    def _drop_capture(self, native: Any) -> None:
        # End an invalid capture here, because torch 2.15 allows only one end, which must succeed.
        with contextlib.suppress(RuntimeCallError):
            self._runtime.destroy(self._runtime.end_capture(self.backend.current_stream_id()))
        self.backend.reopen_capture()
        super()._drop_capture(native)

    def _abort(self) -> None:
        super()._abort()
        self._forget()

    def _free(self) -> None:
        if self._own is not None:
            self._own.close()
        super()._free()
        self._forget()

    def _size(self) -> tuple[int | None, int]:
        if not self._nodes:
            return self._nodes, 0
        return self._nodes, executable_bytes(self._nodes)

    def _nodes_so_far(self) -> int | None:
        capture = self._runtime.capture_of(self.backend.current_stream_id())
        return None if capture is None else self._runtime.count(capture[1]) + self._repeated

    def _loop(self, body: Callable[[], None], going: torch.Tensor) -> int:
        backend, stream = self.backend, self.backend.current_stream_id()
        other, address, before = backend.loop_stream, going.data_ptr(), self._repeated
        looping = functools.partial(self._runtime.looping, stream, backend.stream_handle(other))
        captured = backend.namespace.current_stream(backend.device)
        with (
            backend.namespace.stream(other),
            looping(address, backend.prepare_stream) as count,
            # During the loop's capture, torch does not allocate from the graph's pool, and torch
            # 2.14 cannot switch pools on a stream whose capture it did not begin. Therefore switch
            # to the region pool on the capture stream.
            backend.namespace.stream(captured),
            self.pool.region_memory(),
            backend.namespace.stream(other),
        ):
            if self.names is not None and (outer := self._runtime.capture_of(stream)):
                self._repeated += self._runtime.count(outer[1])  # the body is a separate graph
            body()
        nodes = count()
        self._repeated = before + nodes
        return nodes

    # Regions in a capture.

    def _region_begin(self, call: MarkedCall) -> None:
        call.note = self._captured_so_far()

    def _region_end(self, call: MarkedCall) -> None:
        (start, before), (stop, last) = call.note, self._captured_so_far()
        stream = self.backend.namespace.current_stream(self.backend.device)
        lane = None if stream == self._stream else stream
        call.nodes = range(start + self._repeated, stop + self._repeated)
        call.note = _Call(lane, frozenset(last).difference(before), start)

    def _captured_so_far(self) -> tuple[int, Sequence[int]]:
        """Return the capture's number of nodes, and the nodes on which its next work depends."""
        capture = self._runtime.capture_of(self.backend.stream_handle(self._stream))
        return (0, ()) if capture is None else (self._runtime.count(capture[1]), capture[2])

    def _find_region_nodes(self) -> None:
        """Find the nodes of each region, and of the work after them, before the capture ends."""
        before, _ = self._captured_so_far()
        self.update_strategy.close_regions(self, 0)
        capture = self._runtime.capture_of(self.backend.stream_handle(self._stream))
        nodes = [] if capture is None else self._runtime.nodes(capture[1])
        for call in self.calls:
            assert call.nodes is not None
            start, last = call.note.start, call.note.last
            call.note.nodes = region_nodes = tuple(nodes[start : start + len(call.nodes)])
            if region_nodes and last and last.isdisjoint(region_nodes):
                raise CaptureError(
                    f"the driver does not list captured nodes in capture order, so the nodes of "
                    f"region {call.mark.name} cannot be identified. Use policy='breakable'."
                )
        self._closing = tuple(nodes[before:])

    # Recordings.

    def _own_recording(self) -> NodeRecording:
        """Record the regions for the captured key, so that regions without updates fail now."""
        try:
            recording = self._recorded(self._host)
        except (UpdateError, RuntimeCallError) as error:
            raise CaptureError(
                f"{error} (The regions were recorded again after the capture, as for every new "
                f"host argument.)"
            ) from error
        assert self._own is not None
        self._own.captured = self._own.held = recording
        return recording

    def _record(self, host: Mapping[Mark, dict[str, Any]]) -> NodeRecording:
        with session(self.pool, stream=self._stream):
            self._stream = self.backend.namespace.current_stream(self.backend.device)
            recording = self._recorded(host)
        if not recording.fits_own:
            try:
                self.pool.recordings.make(functools.partial(self._build, recording))
            except RuntimeCallError as error:
                recording.close()
                raise UpdateTopologyError(
                    f"for these host arguments a region launches a kernel differently, but the "
                    f"driver cannot instantiate the captured graph with that change: {error}"
                ) from error
        return recording

    def _give_executable(self, recording: NodeRecording) -> None:
        build, recordings = functools.partial(self._build, recording), self.pool.recordings
        if not recording.fits_own:  # the graph's own executable does not accept its parameters
            recordings.make(build)
        else:
            try:
                with recordings.making():
                    build()
            except RuntimeCallError as error:
                recording.shrink()  # the graph's own executable is updated instead
                logger.info("no executable for recording %d: %s", recording.number, error)
                return
        recordings.trim()

    def _build(self, recording: NodeRecording) -> Executable:
        own = self._own
        assert own is not None and own.raw is not None
        recording.build(own.raw.graph)
        direct = _Direct(self.backend, recording.executable, own.prologue)
        recording.direct = self.update_strategy.launches(self, direct, recording, own=False)
        return recording.direct

    def _recorded(self, host: Mapping[Mark, dict[str, Any]]) -> NodeRecording:
        assert self._pattern is not None and self._nodes is not None
        with self.pool.region_memory():
            graph, bounds = self._capture_regions(host)
        scratch = RawGraph(self._runtime, graph)
        updates = self._pattern.match(graph, bounds)
        return NodeRecording(self._runtime, self._nodes, updates, scratch, self._last_number)

    def _capture_regions(self, host: Mapping[Mark, dict[str, Any]]) -> tuple[int, list[int]]:
        """Capture all regions, and the work after them, into a new graph.

        Return the graph, and the number of nodes after each region.
        """
        runtime, stream = self._runtime, self.backend.stream_handle(self._stream)
        bounds = []
        runtime.begin_capture(stream)
        try:
            capture = runtime.capture_of(stream)
            assert capture is not None
            for mark, calls in itertools.groupby(self.calls, operator.attrgetter("mark")):
                with entered(RegionScope(mark)):
                    for call in calls:
                        self._run_again(call, host[mark])
                        bounds.append(runtime.count(capture[1]))
            self._last_number += 1
            self.update_strategy.close_regions(self, self._last_number)
            bounds.append(runtime.count(capture[1]))
        except BaseException:
            with contextlib.suppress(RuntimeCallError):
                runtime.destroy(runtime.end_capture(stream))
            raise
        try:
            return runtime.end_capture(stream), bounds
        except RuntimeCallError as error:
            names = ", ".join(dict.fromkeys(call.mark.name for call in self.calls))
            raise UpdateError(
                f"recording {names} again failed: {error}. A region must join every stream that "
                f"it forks, and must not use a stream that was forked before the region."
            ) from error

    def _run_again(self, call: MarkedCall, host: dict[str, Any]) -> None:
        try:
            self._run_in_lane(call, host)
        except RuntimeError:
            # torch refuses random numbers in a capture that it did not begin. The message depends
            # on torch's version, so run the region again under a guard that names the operation.
            reason = (
                f"an update of region {call.mark.name} cannot keep the order of random numbers. "
                f"Draw them outside the region and pass the tensor, or use policy='breakable'."
            )
            with contextlib.suppress(RuntimeError), RandomGuard(reason, UpdateError):
                self._run_in_lane(call, host)
            raise

    def _run_in_lane(self, call: MarkedCall, host: dict[str, Any]) -> None:
        if (lane := call.note.lane) is None:
            call.run(host)
            return
        lane.wait_stream(self._stream)
        with self.backend.namespace.stream(lane):
            call.run(host)
        self._stream.wait_stream(lane)

    def _apply(self, recording: NodeRecording) -> None:  # type: ignore[override]
        backend = self.backend
        recording.uses += 1
        with backend.on_device():
            if not recording.direct and self.update_strategy.deserves_executable(self, recording):
                self._give_executable(recording)
            if not recording.direct and self._own and self._own.held is not recording:
                self.update_strategy.write(self, recording)
        self.use(self._launch_of(recording) if recording.direct else self._own_executable)

    def _launch_of(self, recording: NodeRecording) -> Executable:
        """Return a target that launches the recording's executable, and rebuilds it if evicted."""
        reference = weakref.ref(self)

        def launch() -> None:
            if recording.direct is not None:
                recording.direct.launch()
                return
            graph = dereference(reference)
            graph.pool.recordings.require_memory()
            graph._apply(recording)
            graph.executable.launch()

        return Call(launch)

    def mark_dirty(self) -> None:
        """Mark the graph dirty, because a launch had wrong results."""
        self._leave_for(GraphState.DIRTY)


class NodeBackend(TorchBackend):
    """A backend over a torch namespace and a driver with graphs of nodes.

    A vendor sets ``stream_handle_name`` or overrides ``stream_handle``, and calls ``use_runtime``
    once. Without a runtime, graphs are plain ``TorchGraph`` objects, without updates, node counts
    or evictable executables.
    """

    graph_type: type[TorchGraph] = NodeGraph
    pool_type = NodePool
    update_strategy_type: Callable[[], UpdateStrategy] = UpdateStrategy
    """Factory of the update strategy of a graph."""
    stream_handle_name: str = ""
    """Attribute of a torch stream with the driver's handle."""
    runtime: NodeRuntime | None = None

    def use_runtime(self, runtime: NodeRuntime | None) -> None:
        self.runtime = runtime
        self._lazy_generators: bool | None = None
        self._loop_stream: Any = None
        if runtime is None:
            self.graph_type = TorchGraph
            return
        namespace = self.namespace
        make = functools.partial(namespace.Stream, self._device)
        self.side_streams = SideStreams(runtime, make, self.stream_handle)

    @property
    def driver(self) -> NodeRuntime:
        """The runtime, which must exist."""
        assert self.runtime is not None
        return self.runtime

    @property
    def loop_stream(self) -> Any:
        """The stream for captures of loop bodies; never the capture stream."""
        if self._loop_stream is None:
            streams = [self.namespace.Stream(self._device) for _ in range(2)]
            self._loop_stream = next(s for s in streams if s != self.capture_stream)
        return self._loop_stream

    def bind_worker(self, index: int) -> None:
        super().bind_worker(index)
        self.use_runtime(self.runtime)  # drops streams of the previous device

    def stream_handle(self, stream: Any) -> int:
        return int(getattr(stream, self.stream_handle_name))

    def _make_current_stream_id(self) -> Callable[[], int]:
        namespace, device, handle = self.namespace, self._device, self.stream_handle
        return lambda: handle(namespace.current_stream(device))

    # Methods that use the driver.

    def reopen_capture(self) -> None:
        if self.runtime is None:
            super().reopen_capture()
            return
        self.runtime.begin_capture(self.current_stream_id())

    def guarded(self, launch: Callable[[], None]) -> Callable[[], None]:
        """Return a callable that launches, on the backend's device if another is current."""
        is_current, on_device = self.is_current, self.on_device

        def run() -> None:
            if is_current():
                launch()
            else:
                with on_device():
                    launch()

        return run

    def draws_random(
        self, native: Any, pool: TorchPool, own: Iterable[torch.Generator] = ()
    ) -> bool:
        """Whether the capture of ``native`` draws random numbers.

        Call this in the session after the capture, when a replay of ``native`` launches nothing.
        In the replay of a graph that draws random numbers, torch first writes the offsets of the
        generators with torch operations. Some versions of torch do so in every replay. With these
        versions, only a changed offset of the default generator, or of a generator in ``own``,
        shows that the graph draws. A replay of the keeper of ``pool``, which draws nothing,
        identifies these versions.
        """
        # Without a keeper (after a failed capture), the version is unknown.
        if self._lazy_generators is None and pool.keeper is not None:
            self._lazy_generators = not _replay_calls_operations(pool.keeper)
        if self._lazy_generators is not False:
            return _replay_calls_operations(native)
        default = self.namespace.default_generators[self._device.index or 0]
        generators = [default, *(g for g in own if g.device.type == self._device.type)]
        before = [generator.get_offset() for generator in generators]
        native.replay()
        after = [generator.get_offset() for generator in generators]
        for generator, offset in zip(generators, before, strict=True):
            generator.set_offset(offset)
        return after != before


class _Refusing(OwnMode):
    """A mode that refuses every operation and records whether it refused any."""

    refused = False

    def take(self, *_: Any) -> Any:
        self.refused = True
        raise RuntimeError("this replay only tests whether it calls operations")


def _replay_calls_operations(native: Any) -> bool:
    """Whether a replay of ``native`` calls a torch operation, which ends the replay."""
    refusing = _Refusing()
    try:
        with refusing:
            native.replay()
    except Exception:
        if not refusing.refused:
            raise
    return refusing.refused


def compilers() -> tuple[str, ...]:
    """Return the compilers of a device on which Inductor needs Triton."""
    return ("eager", "inductor") if importlib.util.find_spec("triton") else ("eager",)
