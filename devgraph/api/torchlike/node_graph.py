"""NodeGraph, a torch graph whose regions are updated node by node, and its backend.

For every vendor whose captures become graphs of nodes with parameters; what its driver has to
offer for that is ``devgraph.api.torchlike.node_calls.NodeRuntime``.
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
from torch.utils._python_dispatch import TorchDispatchMode

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
from devgraph.api.marks.marks import Absorbed, Mark, entered
from devgraph.api.marks.scopes import LoopError
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
"""A key gets an executable of its own at this use while the budget has room: a key that came back
once tends to come back, and the executable saves the update at each return."""

_USES_WHEN_FULL = 16
"""... and at this use when another key has to give up its own: making one costs the host time of
some 12 updates (docs/benchmarks.md), so that from here on the exchange has paid."""


@attrs.define
class _Call:
    """One call of a region in a capture."""

    lane: Any
    """The stream that it was called on, or None for the capture stream."""
    last: frozenset[int]
    """What the capture stream newly goes on from: one of them at least is the region's own."""
    start: int
    """The first of its nodes, without those of loops."""
    nodes: tuple[int, ...] = ()
    """Known from the end of the capture on."""


class _Direct:
    """An executable of the driver; ``prologue`` is torch's part of a replay, where the graph draws
    random numbers."""

    def __init__(
        self, backend: NodeBackend, handle: int, prologue: Callable[[], None] | None
    ) -> None:
        self._runtime = backend.driver
        self._handle = handle
        self._prologue = prologue
        launch = self._runtime.launcher(handle, backend.current_stream_id)
        self._launch = self._behind_prologue(launch)
        self.launch = backend.guarded(self._launch)

    def bound(self, stream: int | None) -> Callable[[], None]:
        """Return the launch, for a stream the driver's own call."""
        if stream is None:
            return self._launch
        return self._behind_prologue(self._runtime.bound(self._handle, stream))

    def _behind_prologue(self, launch: Callable[[], None]) -> Callable[[], None]:
        prologue = self._prologue
        if prologue is None:
            return launch

        def run() -> None:
            prologue()
            launch()

        return run


class _Own:
    """What was captured, and the executable of it, which a ``EvictableExecutable`` makes and drops.

    The executable holds the parameters of one recording at a time.
    """

    def __init__(self, graph: NodeGraph, raw: int) -> None:
        self._graph = weakref.ref(graph)
        self._backend = graph.backend
        self._executable = 0
        self.raw: RawGraph | None = RawGraph(self._backend.driver, raw)
        """None once the graph is freed."""
        self.prologue: Callable[[], None] | None = None
        """Torch's part of a replay, where the graph draws random numbers."""
        self.captured: NodeRecording | None = None
        """The recording that the capture is."""
        self.held: NodeRecording | None = None
        """The recording that is launched."""

    def make(self) -> Executable:
        """Make the executable of what was captured, with the parameters of ``held``."""
        backend, graph = self._backend, dereference(self._graph)
        if self.raw is None:
            raise StateError("cannot replay a graph that was closed or reset.")
        self.drop()  # what an interrupt left
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
        """Free everything; what was bound may keep this object."""
        self.drop()
        self.raw = None

    def drop(self) -> None:
        """Free the executable, if there is one; safe while it is in flight."""
        executable, self._executable = self._executable, 0
        if executable:
            free_executable(self._backend.driver, executable)

    def write(self, recording: NodeRecording) -> None:
        """Launch ``recording`` from now on."""
        self.held = None
        if self._executable:
            self._backend.driver.write(recording.updates, self._executable)
        self.held = recording


class UpdateStrategy:
    """What one graph does to apply a recording; a vendor may do more.

    Each call is handed the graph, which owns this object.
    """

    def prepare(self, graph: NodeGraph) -> None:
        """Prepare for a capture, which may hold updatable regions."""

    def close_regions(self, graph: NodeGraph, number: int) -> None:
        """Do device work that is recorded behind the regions, for each recording anew.

        Args:
            number: the recording's number; 0 is the capture.
        """

    def deserves_executable(self, graph: NodeGraph, recording: NodeRecording) -> bool:
        """Whether ``recording``, which has no executable of its own, shall get one."""
        if not recording.exact:
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
        """Return what launches ``executable``, which was just made.

        Args:
            recording: whose parameters it holds; None for those of the capture.
            own: whether it is the graph's own, into which others are written.
        """
        return executable


class NodePool(TorchPool):
    """A pool that results of eager bodies share with the graphs around them."""

    def graph_memory(self) -> contextlib.AbstractContextManager[Any]:
        return self.allocating_in(self._memory)


class NodeGraph(TorchGraph):
    """One captured graph, its executable, and the recordings of its regions.

    torch has the capture's memory and random numbers, and a capture without work: the driver's
    graph is this object's, which makes the *own* executable of it. So executables can go and come
    back, and torch's replay, which launches nothing, is what must come before a launch of a graph
    that draws random numbers, because only torch advances the generators.
    """

    backend: NodeBackend

    def __init__(self, backend: NodeBackend, pool: TorchPool) -> None:
        super().__init__(backend, pool)
        self._runtime = backend.driver
        self._made = 0
        self._forget()

    def _forget(self) -> None:
        self._nodes: int | None = None
        self._repeated = 0
        self._stream: Any = None
        self._pattern: RegionPattern | None = None
        self.update_strategy = self.backend.update_strategy_type()
        self._own: _Own | None = None
        self._own_executable: Executable = self._unready
        self._closing: tuple[int, ...] = ()

    # Capture and launch.

    def _begin(self, mode: str) -> None:
        self._stream = self.backend.namespace.current_stream(self.backend.device)
        self.update_strategy.prepare(self)
        super()._begin(mode)

    def _end(self) -> Executable:
        runtime, stream = self._runtime, self.backend.current_stream_id()
        if self.hits:
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
        if self._repeated:  # a driver says only now what it does not repeat
            try:
                runtime.destroy_executable(runtime.instantiate(own.raw.graph))
            except RuntimeCallError as error:
                raise LoopError("failed", f"a loop has no executable: {error}") from error
        if self._nodes and self.backend.draws_random(self._native, self.pool, self.generators):
            if self._repeated:  # each turn would draw the numbers of the first
                raise LoopError("random", "a step with a loop draws random numbers")
            own.prologue = self._native.replay
        else:  # what torch made, of an empty graph, is never launched
            native, self._native = self._native, None
            native.reset()
        if self._nodes and self.hits:
            regions = [(hit.mark.name, hit.note.nodes) for hit in self.hits]
            regions.append(("(behind the regions)", self._closing))
            self._pattern = RegionPattern(runtime, own.raw.graph, regions)
        size = executable_bytes(self._nodes)
        self._own_executable = EvictableExecutable(
            self, self.pool.recordings, make=own.make, drop=own.drop, nbytes=size
        )
        return self._own_executable

    def _close_capture(self) -> None:
        stream = self.backend.current_stream_id()
        self._own = _Own(self, self._runtime.end_capture(stream))
        self._runtime.begin_capture(stream)  # for torch to end, whose executable stays
        super()._close_capture()

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
        other, where, before = backend.loop_stream, going.data_ptr(), self._repeated
        looping = functools.partial(self._runtime.looping, stream, backend.stream_handle(other))
        captured = backend.namespace.current_stream(backend.device)
        with (
            backend.namespace.stream(other),
            looping(where, backend.prepare_stream) as count,
            # A graph's pool takes allocations from the capture that torch knows of only, and torch
            # 2.14 gives another pool to no other capture.
            backend.namespace.stream(captured),
            self.pool.region_memory(),
            backend.namespace.stream(other),
        ):
            if self.names is not None and (around := self._runtime.capture_of(stream)):
                self._repeated += self._runtime.count(around[1])  # the body is a graph of its own
            body()
        nodes = count()
        self._repeated = before + nodes
        return nodes

    # Regions in a capture.

    def _region_begin(self, hit: MarkedCall) -> None:
        hit.note = self._captured_so_far()

    def _region_end(self, hit: MarkedCall) -> None:
        (start, before), (stop, last) = hit.note, self._captured_so_far()
        stream = self.backend.namespace.current_stream(self.backend.device)
        lane = None if stream == self._stream else stream
        hit.nodes = range(start + self._repeated, stop + self._repeated)
        hit.note = _Call(lane, frozenset(last).difference(before), start)

    def _captured_so_far(self) -> tuple[int, Sequence[int]]:
        """Return how many nodes the capture has, and those that its stream goes on from."""
        capture = self._runtime.capture_of(self.backend.stream_handle(self._stream))
        return (0, ()) if capture is None else (self._runtime.count(capture[1]), capture[2])

    def _find_region_nodes(self) -> None:
        """Turn the bounds of every region into nodes, while the capture is still open."""
        before, _ = self._captured_so_far()
        self.update_strategy.close_regions(self, 0)
        capture = self._runtime.capture_of(self.backend.stream_handle(self._stream))
        nodes = [] if capture is None else self._runtime.nodes(capture[1])
        for hit in self.hits:
            assert hit.nodes is not None
            start, last = hit.note.start, hit.note.last
            hit.note.nodes = found = tuple(nodes[start : start + len(hit.nodes)])
            if found and last and last.isdisjoint(found):
                raise CaptureError(
                    f"the driver lists captured nodes in another order than they were made, so "
                    f"that the nodes of region {hit.mark.name} cannot be told; use "
                    f"policy='breakable'."
                )
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
        assert self._own is not None
        self._own.captured = self._own.held = recording
        return recording

    def _record(self, host: Mapping[Mark, dict[str, Any]]) -> NodeRecording:
        with session(self.pool, stream=self._stream):
            self._stream = self.backend.namespace.current_stream(self.backend.device)
            recording = self._recorded(host)
        if not recording.exact:
            try:
                self.pool.recordings.made(functools.partial(self._build, recording))
            except RuntimeCallError as error:
                recording.close()
                raise UpdateTopologyError(
                    f"for these host arguments a region launches a kernel in another way, and the "
                    f"driver made no executable of the captured graph with it: {error}"
                ) from error
        return recording

    def _give_executable(self, recording: NodeRecording) -> None:
        build, recordings = functools.partial(self._build, recording), self.pool.recordings
        if not recording.exact:  # no other executable can take it
            recordings.made(build)
        else:
            try:
                with recordings.making():
                    build()
            except RuntimeCallError as error:
                recording.shrink()  # an update serves as well; the next try comes later
                logger.info("no executable for recording %d: %s", recording.number, error)
                return
        recordings.recharge(recording)

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
        return NodeRecording(self._runtime, self._nodes, updates, scratch, self._made)

    def _capture_regions(self, host: Mapping[Mark, dict[str, Any]]) -> tuple[int, list[int]]:
        """Capture all regions, and what closes them, into a new graph; return it and its node
        counts after each of them."""
        runtime, stream = self._runtime, self.backend.stream_handle(self._stream)
        bounds = []
        runtime.begin_capture(stream)
        try:
            capture = runtime.capture_of(stream)
            assert capture is not None
            for mark, hits in itertools.groupby(self.hits, _mark_of):
                with entered(Absorbed(mark, "full")):
                    for hit in hits:
                        self._run_again(hit, host[mark])
                        bounds.append(runtime.count(capture[1]))
            self._made += 1
            self.update_strategy.close_regions(self, self._made)
            bounds.append(runtime.count(capture[1]))
        except BaseException:
            with contextlib.suppress(RuntimeCallError):
                runtime.destroy(runtime.end_capture(stream))
            raise
        try:
            return runtime.end_capture(stream), bounds
        except RuntimeCallError as error:
            names = ", ".join(dict.fromkeys(hit.mark.name for hit in self.hits))
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
        with self.backend.namespace.stream(lane):
            hit.run(host)
        self._stream.wait_stream(lane)

    def _apply(self, recording: NodeRecording) -> None:  # type: ignore[override]
        backend = self.backend
        recording.uses += 1
        with backend.on_device() if backend.elsewhere() else contextlib.nullcontext():
            if not recording.direct and self.update_strategy.deserves_executable(self, recording):
                self._give_executable(recording)
            if not recording.direct and self._own and self._own.held is not recording:
                self.update_strategy.write(self, recording)
        self.use(recording.direct or self._own_executable)

    def apply_again(self, recording: NodeRecording) -> None:
        if self._state is not GraphState.READY:
            return
        reference = weakref.ref(self)

        def apply_and_launch() -> None:
            graph = dereference(reference)
            graph.pool.recordings.require_memory()
            graph._apply(recording)
            graph.executable.launch()

        self.use(Call(apply_and_launch))

    def mark_dirty(self) -> None:
        """Be dirty: what the last launch did was wrong."""
        self._leave_for(GraphState.DIRTY)


class NodeBackend(TorchBackend):
    """What graphs with node parameters need besides a torch namespace.

    A vendor names what its stream objects call the driver's handle, or overrides the method that
    asks them, and calls ``use_runtime`` once; without a runtime graphs are plain ones of torch,
    with neither updates nor counts, and their executables stay.
    """

    graph_type: type[TorchGraph] = NodeGraph
    pool_type = NodePool
    update_strategy_type: Callable[[], UpdateStrategy] = UpdateStrategy
    """Makes the object by which a graph applies its recordings."""
    stream_handle_name: str = ""
    """Name of the attribute that is the handle of a stream."""
    runtime: NodeRuntime | None = None

    def use_runtime(self, runtime: NodeRuntime | None) -> None:
        """Take the driver's graph calls from ``runtime``."""
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
        """The driver's graph calls, for the graphs that are made of nodes."""
        assert self.runtime is not None
        return self.runtime

    @property
    def loop_stream(self) -> Any:
        """The stream that the bodies of loops are captured on, while another captures the rest."""
        if self._loop_stream is None:
            made = [self.namespace.Stream(self._device) for _ in range(2)]  # handed out in turn
            self._loop_stream = next(one for one in made if one != self.capture_stream)
        return self._loop_stream

    def bind_worker(self, index: int) -> None:
        super().bind_worker(index)
        self.use_runtime(self.runtime)  # streams and memory are those of the device

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

    def draws_random(
        self, native: Any, pool: TorchPool, own: Iterable[torch.Generator] = ()
    ) -> bool:
        """Whether what ``native`` captured draws random numbers; a replay of it launches nothing.
        Called in the session, behind the capture.

        Before such a graph torch writes where its generators are, by operations. A torch that
        registers the default generator with every capture writes always, and tells by that
        generator's offset (another could not be captured).
        """
        # A capture that failed has taken the keeper along; then it is left open which torch it is.
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


class _Refusing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses the first operation, and knows of it."""

    refused = False

    def __torch_dispatch__(self, *_: Any, **__: Any) -> Any:
        self.refused = True
        raise RuntimeError("a replay is only asked for its operations")


def _replay_calls_operations(native: Any) -> bool:
    """Replay ``native``, up to the first operation of torch; whether it came that far."""
    refusing = _Refusing()  # type: ignore[no-untyped-call]
    try:
        with refusing:
            native.replay()
    except Exception:
        if not refusing.refused:
            raise
    return refusing.refused


def compilers() -> tuple[str, ...]:
    """Return what may compile pieces for a device for which Inductor generates Triton code."""
    return ("eager", "inductor") if importlib.util.find_spec("triton") else ("eager",)


_mark_of = operator.attrgetter("mark")
