"""NodeGraph: a torch graph whose regions are updated node by node.

For every vendor whose captures become graphs of nodes with parameters; what its driver has to
offer for that is ``devgraph.api.torchlike.nodes.NodeRuntime``.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from devgraph.api.errors import CaptureError, UnjoinedStreamError, UpdateError, UpdateTopologyError
from devgraph.api.executable import Call, Executable, Finding
from devgraph.api.marks.calls import RegionHit
from devgraph.api.marks.host_values import HostSpec
from devgraph.api.marks.marks import Absorbed, Mark, entered, marked_functions
from devgraph.api.torchlike.base import TorchGraph, TorchPool
from devgraph.api.torchlike.nodes import NodeRuntime, RegionPattern, RuntimeCallError
from devgraph.api.torchlike.recording import NodeRecording, RegionUpdate, Scratch
from devgraph.api.torchlike.side_streams import name_streams

if TYPE_CHECKING:
    from devgraph.api.torchlike.node_backend import NodeBackend

__all__ = ["NodeGraph"]

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
        assert backend.runtime is not None
        self._runtime = backend.runtime
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
        return self.graph._find_random()

    def bound(self, stream: int | None) -> Callable[[], None]:
        """Return torch's launch, which needs to know nothing, or for a stream this one."""
        replay: Callable[[], None] = self.graph._native.replay
        return replay if stream is None else self.launch


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
        self._updatable = False
        self._nodes: int | None = None
        self._stream: Any = None
        self._pattern: RegionPattern | None = None
        self._current: NodeRecording | None = None
        self._held: NodeRecording | None = None
        self._random: bool | None = None
        self._own: Executable = self._unready
        self._closing: tuple[int, ...] = ()
        self._made = 0

    # Capture and launch.

    def begin(self, mode: str, *, spec: HostSpec | None = None) -> None:
        # Only a graph that may hold updatable regions has to keep its nodes.
        self._updatable = (
            self._torch.runtime is not None
            and spec is not None
            and (bool(spec.declared) or _some_context())
        )
        super().begin(mode, spec=spec)

    def _begin(self, mode: str) -> None:
        if self._updatable:
            self._stream = self._torch.namespace.current_stream(self._torch.device)
        super()._begin(mode)

    def _end_native(self) -> None:
        if self._nodes:
            self._native.capture_end()  # torch warns of empty graphs only; a filter costs host time
        else:
            super()._end_native()

    def _make_native(self) -> Any:
        if not self._updatable:
            return super()._make_native()
        return self._torch.make_kept_graph()

    def _end(self) -> Executable:
        runtime = self._torch.runtime
        if runtime is None:
            return super()._end()
        if self.hits and self._updatable:
            self._find_region_nodes(runtime)
        stream = self._torch.current_stream_id()
        capture = runtime.capture_of(stream)
        self._nodes, unjoined = 0, []
        if capture is not None:
            self._nodes = runtime.count(capture[1])
            if self.names_side_streams:
                unjoined = self._torch.side_streams.unjoined(stream, capture)
        try:
            super()._end()
        except UnjoinedStreamError as error:
            if not unjoined:
                raise
            raise UnjoinedStreamError(name_streams(unjoined)) from error
        self._own = _FirstLaunch(self)
        return self._own

    def _finish(self) -> None:
        runtime = self._torch.runtime
        if runtime is None or not self._nodes:
            return
        if self._updatable:
            self._torch.instantiate(self._native)
        if self.hits:
            regions = [(hit.mark.name, hit.note.nodes) for hit in self.hits]
            regions.append(("(behind the regions)", self._closing))
            self._pattern = RegionPattern(runtime, self._torch.raw_graph(self._native), regions)

    def _find_random(self) -> Executable:
        """Launch through torch, find out whether that drew random numbers, and return what launches
        torch's executable from now on."""
        self._random = self._torch.draws_random(self._native, self.pool)
        self._own = self._own_executable()
        return self._own

    def _own_executable(self) -> Executable:
        """Return torch's executable, launched directly if that is the same."""
        if self._torch.runtime is None or self._random is not False:
            return Call(self._native.replay)
        return _Direct(self._torch, self._torch.raw_executable(self._native), self._native.replay)

    def _abort(self) -> None:
        super()._abort()
        self._forget()

    def _free(self) -> None:
        super()._free()
        self._forget()

    def _forget(self) -> None:
        self._nodes = None
        self._stream = None
        self._pattern = None
        self._current = None
        self._held = None
        self._random = None
        self._own = self._unready
        self._closing = ()

    def _size(self) -> tuple[int | None, int]:
        if not self._nodes:
            return self._nodes, 0
        return self._nodes, self._torch.meter.bytes_of(self._nodes)

    def region_size(self, hit: RegionHit) -> int | None:
        return len(hit.note.nodes) if isinstance(hit.note, _Span) else None

    # Regions in a capture.

    def _region_begin(self, hit: RegionHit) -> None:
        if self._updatable:
            hit.note = self._captured_so_far()

    def _region_end(self, hit: RegionHit) -> None:
        if not self._updatable:
            return
        (start, before), (stop, last) = hit.note, self._captured_so_far()
        stream = self._torch.namespace.current_stream(self._torch.device)
        lane = None if stream == self._stream else stream
        hit.note = _Bounds(start, stop, frozenset(last).difference(before), lane)

    def _captured_so_far(self) -> tuple[int, Sequence[int]]:
        """Return how many nodes the capture has, and those that its stream goes on from."""
        runtime = self._runtime()
        capture = runtime.capture_of(self._torch.stream_handle(self._stream))
        return (0, ()) if capture is None else (runtime.count(capture[1]), capture[2])

    def _find_region_nodes(self, runtime: NodeRuntime) -> None:
        """Turn the bounds of every region into nodes, while the capture is still open."""
        before, _ = self._captured_so_far()
        self._close_regions(0)
        capture = runtime.capture_of(self._torch.stream_handle(self._stream))
        nodes = [] if capture is None else runtime.nodes(capture[1])
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

    def _runtime(self) -> NodeRuntime:
        runtime = self._torch.runtime
        assert runtime is not None
        return runtime

    # Recordings.

    def _own_recording(self) -> NodeRecording:
        """Record the capture's own key: proves, while it can be refused, that updates will work."""
        try:
            with self.pool.region_memory():
                recording = self._recorded(self._host)
        except (UpdateError, RuntimeCallError) as error:
            raise CaptureError(
                f"{error} (Its regions were recorded once more after the capture, as every new "
                f"host argument will do.)"
            ) from error
        self._current = self._held = recording
        return recording

    def _record(self, host: Mapping[Mark, dict[str, Any]]) -> NodeRecording:
        with self._torch.capturing(self.pool, self._stream):
            recording = self._recorded(host)
        if not recording.exact:
            self._build_inexact(recording)
        return recording

    def _build_inexact(self, recording: NodeRecording) -> None:
        """Make the executable of a recording that no other executable can take.

        Raises:
            UpdateTopologyError: there can be none.
        """
        if self._random is not False:
            what = "draws random numbers" if self._random else "has not been replayed yet"
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
            recording.uses = 0  # an update serves as well; the next try comes later
            logger.info("no executable for %s: %s", recording.key, error)
        else:
            self.pool.recordings.recharge(self, recording.key)

    def _build(self, recording: NodeRecording) -> None:
        recording.build(self._torch.raw_graph(self._native))

    def _recorded(self, host: Mapping[Mark, dict[str, Any]]) -> NodeRecording:
        pattern, runtime = self._pattern, self._runtime()
        assert pattern is not None
        known = {} if self._current is None else self._current.parts
        parts: dict[Mark | None, RegionUpdate] = {
            mark: known[mark]
            for mark, values in host.items()
            if mark in known and known[mark].values == values
        }
        picks = [hit.index for hit in self.hits if hit.mark not in parts]
        graph, bounds = self._capture_regions(picks, host)
        scratch = Scratch(runtime, graph)
        *matched, closing = pattern.match([*picks, len(self.hits)], graph, bounds)
        for mark in host:
            if mark not in parts:
                updates = tuple(
                    update
                    for pick, found in zip(picks, matched, strict=True)
                    if self.hits[pick].mark is mark
                    for update in found
                )
                parts[mark] = RegionUpdate(dict(host[mark]), updates, scratch)
        assert self._nodes is not None
        parts[None] = RegionUpdate({}, closing, scratch)
        return NodeRecording(
            runtime, self._torch.meter, pattern, self._nodes, self.key_of(host), parts, self._made
        )

    def _capture_regions(
        self, picks: Sequence[int], host: Mapping[Mark, dict[str, Any]]
    ) -> tuple[int, list[int]]:
        """Capture regions into a new graph; return it and its node counts after each of them."""
        runtime, stream = self._runtime(), self._torch.stream_handle(self._stream)
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
            self._close_regions(self._made)
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

    def _run_again(self, hit: RegionHit, host: dict[str, Any]) -> None:
        lane = hit.note.lane
        try:
            if lane is None:
                hit.run(host)
                return
            lane.wait_stream(self._stream)
            with self._torch.namespace.stream(lane):
                hit.run(host)
            self._stream.wait_stream(lane)
        except RuntimeError as error:
            if not self._torch.is_random_refusal(error):
                raise
            raise UpdateError(
                f"region {hit.mark.name} draws random numbers, and an update cannot keep their "
                f"order. Draw them outside the region and pass the tensor, or use "
                f"policy='breakable'."
            ) from error

    def _apply(self, recording: NodeRecording) -> None:  # type: ignore[override]
        if self._torch.elsewhere():
            with self._torch.on_device():
                self._put(recording)
        else:
            self._put(recording)

    def _put(self, recording: NodeRecording) -> None:
        recording.uses += 1
        if not recording.executable and self._deserves_executable(recording):
            self._give_executable(recording)
        if recording.executable:
            self.use(_Direct(self._torch, recording.executable))
        else:
            if self._held is not recording:
                self._held = None
                self._write(recording)
                self._held = recording
            self.use(self._own)
        self._current = recording

    # What a vendor may add.

    def _close_regions(self, number: int) -> None:
        """Do device work that is recorded behind the regions, for each recording anew.

        Args:
            number: the recording's number; 0 is the capture.
        """

    def _write(self, recording: NodeRecording) -> None:
        """Write ``recording`` into the graph's own executable."""
        recording.write(self._torch.raw_executable(self._native))

    def _deserves_executable(self, recording: NodeRecording) -> bool:
        if self._random is not False:
            return False
        if not recording.exact:
            return True
        if recording.executable_bytes <= self.pool.recordings.room:
            return recording.uses >= _USES_WITH_ROOM
        return recording.uses >= _USES_WHEN_FULL


_mark_of = operator.attrgetter("mark")


def _some_context() -> bool:
    """Whether any mark depends on ambient context: its regions are updated without arguments."""
    return any(
        fn.__devgraph_mark__.context is not None  # type: ignore[attr-defined]
        for fn in marked_functions()
    )
