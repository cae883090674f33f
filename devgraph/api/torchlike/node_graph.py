"""NodeGraph, a torch graph whose regions are updated node by node, and its backend.

For every vendor whose captures become graphs of nodes with parameters; what its driver has to
offer for that is ``devgraph.api.torchlike.nodes.NodeRuntime``.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from devgraph.api.errors import CaptureError, UnjoinedStreamError, UpdateError, UpdateTopologyError
from devgraph.api.executable import Call, Executable, Finding
from devgraph.api.graph import GraphState
from devgraph.api.marks.calls import MarkedCall
from devgraph.api.marks.host_values import HostSpec
from devgraph.api.marks.marks import Absorbed, Mark, entered, marked_functions
from devgraph.api.session import session
from devgraph.api.torchlike.base import TorchBackend, TorchGraph, TorchPool
from devgraph.api.torchlike.guards import RandomGuard, SideStreams, name_streams
from devgraph.api.torchlike.nodes import NodeRuntime, RegionPattern, RuntimeCallError, Update
from devgraph.api.torchlike.recording import ExecutableMeter, NodeRecording, RegionUpdate, Scratch

logger = logging.getLogger(__name__)

_USES_WITH_ROOM = 2
"""A key gets an executable of its own at this use while the budget has room: a key that came back
once tends to come back, and the executable saves the update at each return."""

_USES_WHEN_FULL = 16
"""... and at this use when another key has to give up its own: making one costs the host time of
some 12 updates (docs/benchmarks.md), so that from here on the exchange has paid."""


@attrs.frozen
class _Bounds:
    """Where one call of a region is in a capture that is still going on."""

    start: int
    stop: int
    last: frozenset[int]
    """What the capture stream newly goes on from: one of them at least is the region's own."""
    lane: Any


@attrs.frozen
class _Span:
    """Where one call of a region is in the graph."""

    nodes: tuple[int, ...]
    lane: Any
    """The stream that it was called on, or None for the capture stream."""


class _Direct:
    """An executable of the driver, launched without torch.

    Args:
        handle: the driver's handle.
        replay: torch's launch of the same executable, where it has one.
    """

    def __init__(
        self, backend: NodeBackend, handle: int, replay: Callable[[], None] | None = None
    ) -> None:
        self._runtime = backend.driver
        self._handle = handle
        launch = self._runtime.launcher(handle, backend.current_stream_id)
        self._replay = replay or launch
        self.launch = backend.guarded(launch)

    def bound(self, stream: int | None) -> Callable[[], None]:
        """Return torch's launch, or for a stream the driver's own call."""
        if stream is None:
            return self._replay
        return self._runtime.bound(self._handle, stream)


class _FirstLaunch(Finding["NodeGraph"]):
    """Launches through torch, and finds out whether the graph draws random numbers."""

    def find(self) -> Executable:
        graph = self.graph
        graph.random = graph._torch.draws_random(graph._native, graph.pool)
        graph._own = graph._own_executable()
        return graph._own

    def bound(self, stream: int | None) -> Callable[[], None]:
        """Return torch's launch, which needs to know nothing, or for a stream this one."""
        replay: Callable[[], None] = self.graph._native.replay
        return replay if stream is None else self.launch


class Applying:
    """What one graph does to apply a recording; a vendor may do more.

    Each call is handed the graph, which owns this object.
    """

    def prepare(self, graph: NodeGraph) -> None:
        """Get ready for a capture that may hold updatable regions."""

    def close_regions(self, graph: NodeGraph, number: int) -> None:
        """Do device work that is recorded behind the regions, for each recording anew.

        Args:
            number: the recording's number; 0 is the capture.
        """

    def require(self, graph: NodeGraph) -> None:
        """Raise UpdateTopologyError if no recording can be applied."""

    def deserves_executable(self, graph: NodeGraph, recording: NodeRecording) -> bool:
        """Whether ``recording``, which has no executable of its own, shall get one."""
        if graph.random is not False:
            return False
        if not recording.exact:
            return True
        if recording.executable_bytes <= graph.pool.recordings.room:
            return recording.uses >= _USES_WITH_ROOM
        return recording.uses >= _USES_WHEN_FULL

    def write(self, graph: NodeGraph, recording: NodeRecording) -> None:
        """Write ``recording`` into the graph's own executable, which is torch's."""
        backend = graph.backend
        backend.driver.write(recording.updates, backend.raw_executable(graph._native))

    def launches(
        self, graph: NodeGraph, recording: NodeRecording, executable: Executable
    ) -> Executable:
        """Return what launches ``recording``, which ``executable`` holds."""
        return executable


class NodeGraph(TorchGraph):
    """One captured graph, its executable, and the recordings of its regions.

    The graph's *own* executable is torch's. It holds the parameters of one recording at a time and
    is launched through torch until it is known that the graph draws no random numbers, because
    only torch advances the generators. Without random numbers, recordings may have executables.
    """

    _torch: NodeBackend
    backend: NodeBackend

    def __init__(self, backend: NodeBackend, pool: TorchPool) -> None:
        super().__init__(backend, pool)
        self._runtime = backend.driver
        self._updatable = False
        self._made = 0
        self._forget()

    def _forget(self) -> None:
        self._nodes: int | None = None
        self._stream: Any = None
        self._pattern: RegionPattern | None = None
        self._current: NodeRecording | None = None
        self._held: NodeRecording | None = None
        self.random: bool | None = None
        """Whether the graph draws random numbers; None before its first launch."""
        self.applying = self._torch.applying_type()
        self._own: Executable = self._unready
        self._closing: tuple[int, ...] = ()

    # Capture and launch.

    def begin(self, mode: str, *, spec: HostSpec | None = None) -> None:
        # Only a graph that may hold updatable regions has to keep its nodes.
        self._updatable = spec is not None and (bool(spec.declared) or _some_context())
        super().begin(mode, spec=spec)

    def _make_native(self) -> Any:
        if not self._updatable:
            return super()._make_native()
        self._stream = self._torch.namespace.current_stream(self._torch.device)
        self.applying.prepare(self)
        return self._torch.make_kept_graph()

    def _end(self) -> Executable:
        runtime, stream = self._runtime, self._torch.current_stream_id()
        if self.hits and self._updatable:
            self._find_region_nodes()
        capture = runtime.capture_of(stream)
        self._nodes, unjoined = 0, []
        if capture is not None:
            self._nodes = runtime.count(capture[1])
            if self.names_side_streams:
                unjoined = self._torch.side_streams.unjoined(stream, capture)
        self._may_be_empty = not self._nodes
        try:
            super()._end()
        except UnjoinedStreamError as error:
            if not unjoined:
                raise
            raise UnjoinedStreamError(name_streams(unjoined)) from error
        if self._nodes and self._updatable:
            self._torch.instantiate(self._native)
        if self._nodes and self.hits:
            regions = [(hit.mark.name, hit.note.nodes) for hit in self.hits]
            regions.append(("(behind the regions)", self._closing))
            graph = self._torch.raw_graph(self._native)
            self._pattern = RegionPattern(runtime, graph, regions)
        self._own = _FirstLaunch(self)
        return self._own

    def _own_executable(self) -> Executable:
        """Return torch's executable, launched directly if that is the same."""
        if self.random is not False:
            return Call(self._native.replay)
        return _Direct(self._torch, self._torch.raw_executable(self._native), self._native.replay)

    def _abort(self) -> None:
        super()._abort()
        self._forget()

    def _free(self) -> None:
        super()._free()
        self._forget()

    def _size(self) -> tuple[int | None, int]:
        if not self._nodes:
            return self._nodes, 0
        return self._nodes, self._torch.meter.bytes_of(self._nodes)

    def region_size(self, hit: MarkedCall) -> int | None:
        return len(hit.note.nodes) if isinstance(hit.note, _Span) else None

    # Regions in a capture.

    def _region_begin(self, hit: MarkedCall) -> None:
        if self._updatable:
            hit.note = self._captured_so_far()

    def _region_end(self, hit: MarkedCall) -> None:
        if not self._updatable:
            return
        (start, before), (stop, last) = hit.note, self._captured_so_far()
        stream = self._torch.namespace.current_stream(self._torch.device)
        lane = None if stream == self._stream else stream
        hit.note = _Bounds(start, stop, frozenset(last).difference(before), lane)

    def _captured_so_far(self) -> tuple[int, Sequence[int]]:
        """Return how many nodes the capture has, and those that its stream goes on from."""
        capture = self._runtime.capture_of(self._torch.stream_handle(self._stream))
        return (0, ()) if capture is None else (self._runtime.count(capture[1]), capture[2])

    def _find_region_nodes(self) -> None:
        """Turn the bounds of every region into nodes, while the capture is still open."""
        before, _ = self._captured_so_far()
        self.applying.close_regions(self, 0)
        capture = self._runtime.capture_of(self._torch.stream_handle(self._stream))
        nodes = [] if capture is None else self._runtime.nodes(capture[1])
        for hit in self.hits:
            bounds = hit.note
            found = tuple(nodes[bounds.start : bounds.stop])
            if found and bounds.last and bounds.last.isdisjoint(found):
                raise CaptureError(
                    f"the driver lists captured nodes in another order than they were made, so "
                    f"that the nodes of region {hit.mark.name} cannot be told; use "
                    f"policy='breakable'."
                )
            hit.note = _Span(found, bounds.lane)
        self._closing = tuple(nodes[before:])

    # Recordings.

    def _own_recording(self) -> NodeRecording:
        """Record the capture's own key: proves, while it can be refused, that updates will work."""
        try:
            recording = self._recorded(self._host)
        except (UpdateError, RuntimeCallError) as error:
            raise CaptureError(
                f"{error} (Its regions were recorded once more after the capture, as every new "
                f"host argument will do.)"
            ) from error
        self._current = self._held = recording
        return recording

    def _record(self, host: Mapping[Mark, dict[str, Any]]) -> NodeRecording:
        with session(self.pool, stream=self._stream):
            self._stream = self._torch.namespace.current_stream(self._torch.device)
            recording = self._recorded(host)
        if not recording.exact:
            self._build_inexact(recording)
        self.applying.require(self)
        return recording

    def _build_inexact(self, recording: NodeRecording) -> None:
        """Make the executable of a recording that no other executable can take.

        Raises:
            UpdateTopologyError: there can be none.
        """
        if self.random is not False:
            what = "draws random numbers" if self.random else "has not been replayed yet"
            raise UpdateTopologyError(
                f"for these host arguments a region launches a kernel in another way (cluster "
                f"size, cooperation or geometry of a copy), which only a new executable can do, "
                f"and this graph {what}, so that only torch's own executable may run."
            )
        try:
            self._build(recording)
        except RuntimeCallError as error:
            recording.close()
            raise UpdateTopologyError(
                f"for these host arguments a region launches a kernel in another way, and the "
                f"driver made no executable of the captured graph with it: {error}"
            ) from error

    def _give_executable(self, recording: NodeRecording) -> None:
        try:
            self._build(recording)
        except RuntimeCallError as error:
            if not recording.exact:
                raise
            recording.shrink()  # an update serves as well; the next try comes later
            logger.info("no executable for recording %d: %s", recording.number, error)
        else:
            self.pool.recordings.recharge(recording)

    def _build(self, recording: NodeRecording) -> None:
        with self.pool.recordings.making():
            recording.build(self._torch.raw_graph(self._native))
        recording.direct = _Direct(self._torch, recording.executable)

    def _recorded(self, host: Mapping[Mark, dict[str, Any]]) -> NodeRecording:
        pattern = self._pattern
        assert pattern is not None and self._nodes is not None
        known = {} if self._current is None else self._current.parts
        keys = {mark: self.key_of({mark: values}) for mark, values in host.items()}
        parts: dict[Mark | None, RegionUpdate] = {
            mark: known[mark]
            for mark, key in keys.items()
            if mark in known and known[mark].key == key
        }
        picks = [hit.index for hit in self.hits if hit.mark not in parts]
        with self.pool.region_memory():
            graph, bounds = self._capture_regions(picks, host)
        scratch = Scratch(self._runtime, graph)
        *matched, closing = pattern.match([*picks, len(self.hits)], graph, bounds)
        updates: dict[Mark, list[Update]] = {}
        for pick, found in zip(picks, matched, strict=True):
            updates.setdefault(self.hits[pick].mark, []).extend(found)
        for mark, own in updates.items():
            parts[mark] = RegionUpdate(keys[mark], own, scratch)
        parts[None] = RegionUpdate((), closing, scratch)
        return NodeRecording(self._runtime, self._torch.meter, self._nodes, parts, self._made)

    def _capture_regions(
        self, picks: Sequence[int], host: Mapping[Mark, dict[str, Any]]
    ) -> tuple[int, list[int]]:
        """Capture regions into a new graph; return it and its node counts after each of them."""
        runtime, stream = self._runtime, self._torch.stream_handle(self._stream)
        bounds = []
        runtime.begin_capture(stream)
        try:
            capture = runtime.capture_of(stream)
            assert capture is not None
            for mark, hits in itertools.groupby(map(self.hits.__getitem__, picks), _mark_of):
                with entered(Absorbed(mark, "full")):
                    for hit in hits:
                        self._run_again(hit, host[mark])
                        bounds.append(runtime.count(capture[1]))
            self._made += 1
            self.applying.close_regions(self, self._made)
            bounds.append(runtime.count(capture[1]))
        except BaseException:
            with contextlib.suppress(RuntimeCallError):
                runtime.destroy(runtime.end_capture(stream))
            raise
        try:
            return runtime.end_capture(stream), bounds
        except RuntimeCallError as error:
            names = ", ".join(dict.fromkeys(self.hits[pick].mark.name for pick in picks))
            raise UpdateError(
                f"recording {names} again failed: {error}. A region must join every stream that "
                f"it forks, and must not use one that was forked before it."
            ) from error

    def _run_again(self, hit: MarkedCall, host: dict[str, Any]) -> None:
        try:
            self._run_in_lane(hit, host)
        except RuntimeError:
            # torch draws no random numbers in a capture that it does not know of, and says so in
            # the words of its version. Run once more, the operation that draws is told.
            why = (
                f"an update of region {hit.mark.name} cannot keep their order. Draw them outside "
                f"the region and pass the tensor, or use policy='breakable'."
            )
            with contextlib.suppress(RuntimeError), RandomGuard(why, UpdateError):
                self._run_in_lane(hit, host)
            raise

    def _run_in_lane(self, hit: MarkedCall, host: dict[str, Any]) -> None:
        lane = hit.note.lane
        if lane is None:
            hit.run(host)
            return
        lane.wait_stream(self._stream)
        with self._torch.namespace.stream(lane):
            hit.run(host)
        self._stream.wait_stream(lane)

    def _apply(self, recording: NodeRecording) -> None:  # type: ignore[override]
        backend = self._torch
        recording.uses += 1
        with backend.on_device() if backend.elsewhere() else contextlib.nullcontext():
            if not recording.direct and self.applying.deserves_executable(self, recording):
                self._give_executable(recording)
            if not recording.direct and self._held is not recording:
                self._held = None
                self.applying.write(self, recording)
                self._held = recording
        self.use(self.applying.launches(self, recording, recording.direct or self._own))
        self._current = recording

    # What ``Applying`` calls.

    def renew_executable(self) -> None:
        """Make the graph's own executable anew, which holds what was captured."""
        self._torch.instantiate(self._native)
        if self.random is not None:
            self._own = self._own_executable()

    def mark_dirty(self) -> None:
        """Be dirty: what the last launch did was wrong."""
        self._leave_for(GraphState.DIRTY)


class NodeBackend(TorchBackend):
    """What graphs with node parameters need besides a torch namespace.

    A vendor names what its graph and stream objects call the driver's handles, or overrides the
    methods that ask them, and calls ``use_runtime`` once; without a runtime graphs are plain ones
    of torch, with neither updates nor counts.
    """

    graph_type: type[TorchGraph] = NodeGraph
    applying_type: Callable[[], Applying] = Applying
    """Makes what a graph applies its recordings with."""
    raw_graph_name: str = ""
    """Name of the native graph's method that returns the handle of a kept graph."""
    raw_executable_name: str = ""
    """Name of the native graph's method that returns the handle of its executable."""
    stream_handle_name: str = ""
    """Name of the attribute that is the handle of a stream."""
    runtime: NodeRuntime | None = None

    def use_runtime(self, runtime: NodeRuntime | None) -> None:
        """Take the driver's graph calls from ``runtime``."""
        self.runtime = runtime
        self._lazy_generators: bool | None = None
        if runtime is None:
            self.graph_type = TorchGraph
            return
        namespace = self.namespace
        self.meter = ExecutableMeter(lambda: int(namespace.mem_get_info(self._device)[0]))
        make = functools.partial(namespace.Stream, self._device)
        self.side_streams = SideStreams(runtime, make, self.stream_handle)

    @property
    def driver(self) -> NodeRuntime:
        """The driver's graph calls, for the graphs that are made of nodes."""
        assert self.runtime is not None
        return self.runtime

    def bind_worker(self, index: int) -> None:
        super().bind_worker(index)
        self.use_runtime(self.runtime)  # streams and memory are those of the device

    # What the vendor's graph and stream objects are asked for.

    def make_kept_graph(self) -> Any:
        """Return a new, empty graph that keeps its nodes; ``instantiate`` makes it launchable."""
        return getattr(self.namespace, self.graph_class_name)(keep_graph=True)

    def instantiate(self, native: Any) -> None:
        """Make the executable of a kept graph, anew if it has one."""
        native.instantiate()

    def raw_graph(self, native: Any) -> int:
        """Return the driver's handle of a kept graph."""
        return int(getattr(native, self.raw_graph_name)())

    def raw_executable(self, native: Any) -> int:
        """Return the driver's handle of the executable that ``native`` launches."""
        return int(getattr(native, self.raw_executable_name)())

    def stream_handle(self, stream: Any) -> int:
        """Return the driver's handle of a stream."""
        return int(getattr(stream, self.stream_handle_name))

    def _make_current_stream_id(self) -> Callable[[], int]:
        namespace, device, handle = self.namespace, self._device, self.stream_handle
        return lambda: handle(namespace.current_stream(device))

    # What goes through the driver.

    def reopen_capture(self) -> None:
        if self.runtime is None:
            super().reopen_capture()
            return
        self.runtime.begin_capture(self.current_stream_id())

    def guarded(self, launch: Callable[[], None]) -> Callable[[], None]:
        """Return ``launch`` made safe for a thread whose current device is another one."""
        elsewhere, on_device = self.elsewhere, self.on_device

        def run() -> None:
            if elsewhere():
                with on_device():
                    launch()
            else:
                launch()

        return run

    def draws_random(self, native: Any, pool: TorchPool) -> bool:
        """Replay ``native`` once; return whether that drew random numbers.

        A torch that registers generators with every capture tells by the default generator's
        offset (another generator could not be captured). One that registers them when they are
        first used refuses to replay such a graph, and no other, inside a capture.
        """
        generator = self.namespace.default_generators[self._device.index or 0]
        before = generator.get_offset()
        native.replay()
        if generator.get_offset() != before:
            return True
        # A capture that failed has taken the keeper along; then it is left open which torch it is.
        if self._lazy_generators is None and pool.keeper is not None:
            self._lazy_generators = not self._refuses_in_capture(pool.keeper, pool)
        return self._lazy_generators is not False and self._refuses_in_capture(native, pool)

    def _refuses_in_capture(self, native: Any, pool: TorchPool) -> bool:
        runtime = self.driver
        with self.exclusive(), self.namespace.stream(pool.stream):
            stream = self.current_stream_id()
            runtime.begin_capture(stream)
            try:
                native.replay()
            except RuntimeError:
                return True
            finally:
                try:
                    runtime.destroy(runtime.end_capture(stream))
                except RuntimeCallError:
                    self.retire_if_capturing(pool.stream)
        return False


def compilers() -> tuple[str, ...]:
    """Return what may compile pieces for a device for which Inductor generates Triton code."""
    return ("eager", "inductor") if importlib.util.find_spec("triton") else ("eager",)


_mark_of = operator.attrgetter("mark")


def _some_context() -> bool:
    """Whether any mark depends on ambient context: its regions are updated without arguments."""
    return any(
        fn.__devgraph_mark__.context is not None  # type: ignore[attr-defined]
        for fn in marked_functions()
    )
