"""The resources that graphs share on one NPU: events, streams, update channel, deferred frees.

A captured graph holds every hardware stream on which it was captured. CANN does not document
whether a running graph may be destroyed, so a graph is kept until its last replay has ended.

To free a pool's memory, torch_npu waits for the device while it holds the GIL. A capture forbids
this wait. While a replay waits for an update, this wait would deadlock, because the update
thread needs the GIL. Frees are therefore deferred until they are safe.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import tempfile
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from devgraph.api.device import acquiring, raise_if_lost
from devgraph.api.errors import DeviceLost, ResourceError, counted
from devgraph.api.process import keep_forever
from devgraph.api.torchlike.base import TorchBackend, TorchPool
from devgraph.npu.channel import UpdateChannel
from devgraph.npu.errors import NO_RESOURCE, means
from devgraph.npu.task_groups import TaskGroups

logger = logging.getLogger(__name__)

GRAPH_STREAMS = 2048 - 248
"""Number of device streams that graphs can use. According to bug reports, the 910 series has 2048.
torch_npu's stream pools use 70, and each communicator uses several."""

_CURE = (
    "Capture fewer buckets, or fewer segments per bucket: a breakable capture holds one stream per "
    "segment, but policy='full' only one per bucket."
)


class _Retired:
    """A closed graph that has yet to be destroyed, with its regions."""

    def __init__(
        self, native: Any, regions: TaskGroups | None, fence: Callable[[], Callable[[], bool]]
    ) -> None:
        self.native, self.regions = native, regions
        self._fence = fence  # This bound method keeps the pool alive until the graph is freed.
        self._is_done: Callable[[], bool] | None = None

    def done(self) -> bool:
        """Whether the last replay has ended. Must not be called during a capture."""
        if self._is_done is None:
            self._is_done = self._fence()
        return self._is_done()


class NpuDevice(TorchBackend):
    """The part of the backend that ``NpuGraph`` uses."""

    replay_first: bool = True
    """Whether a replay is launched before its update, so that both overlap. Devices that are sliced
    by software need the reverse order."""
    try_new_values: bool = True
    """Whether new host values are applied before the replay is launched, so that a refusal raises
    before the replay runs. If False, new values are applied during the replay. A refusal then
    leaves the result invalid and the graph dirty, and the next call of the graph raises the
    error."""
    stream_limit: int = GRAPH_STREAMS
    """Maximum number of streams that graphs may hold. The driver may have fewer free streams. A
    later capture can succeed after other work or destroyed graphs have released streams."""

    def __init__(self) -> None:
        super().__init__()
        self.native_class = getattr(self.namespace, self.graph_class_name)
        """torch_npu's Python class for graphs. Its base class is compiled."""
        self._bind()

    def _bind(self) -> None:
        # Any thread may append at any time, but only one thread at a time removes entries.
        self._retired: deque[_Retired] = deque()
        self._memories: list[list[Any]] = []
        self._freeing = False
        self.streams: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        """Number of streams per captured graph, including graphs that keep a pool alive."""
        self._events: list[Any] = []
        self.channel = UpdateChannel(self.namespace, self._device.index)

    def take_event(self) -> Any:
        """Return an external event that is unrecorded and has no waiters.

        torch_npu never frees the memory of an external event, so events of destroyed graphs are
        reused if finished replays have consumed all their records.
        """
        if self._events:
            return self._events.pop()
        event = self.namespace.ExternalEvent()
        if not event.npu_event:
            # Events of this older driver are flags instead of words of device memory, and torch_npu
            # ignores waits for a flag that was never recorded.
            event.record(self.channel.stream)
            event.reset(self.channel.stream)
        return event

    def count_nodes(self, native: Any) -> int | None:
        """Return the number of tasks in a finished capture, or None if unknown.

        Also store in ``streams`` the number of streams that the graph holds.
        """
        with tempfile.TemporaryDirectory(prefix="devgraph") as folder:
            path = Path(folder) / "graph.json"
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # debug_dump warns on every call.
                    # Call the base class, because torch_npu's override also writes an aligned copy.
                    super(self.native_class, native).debug_dump(str(path))  # type: ignore[misc]
                tasks = json.loads(path.read_text())
                task_streams = [task.get("tid") for task in tasks if task.get("ph") == "X"]
            except Exception:
                logger.debug("the nodes of the graph cannot be counted", exc_info=True)
                return None
        self.streams[native] = max(1, len(set(task_streams)))
        return len(task_streams)

    def drain(self) -> None:
        """Wait until torch_npu's launch thread has passed all queued work to the driver.

        Otherwise the update stream, which bypasses the queue, could overtake event records.
        """
        # Reading the driver's handle of a stream drains torch_npu's task queue.
        _ = self.namespace.current_stream(self._device).npu_stream

    def shortage(self, error: BaseException) -> str | None:
        if not means(error, NO_RESOURCE):
            return None
        return f"the driver has no stream or event left; {self.streams_held}. {_CURE} ({error})"

    @property
    def streams_held(self) -> str:
        """The number of streams that graphs hold, as text."""
        counts = list(self.streams.values())
        held = f"{sum(counts)} of at most {counted(self.stream_limit, 'stream')}"
        return f"{counted(len(counts), 'graph')} with {held}"

    def begin_native(self, native: Any, pool: TorchPool, mode: str) -> None:
        if sum(list(self.streams.values())) >= self.stream_limit:
            raise ResourceError(f"{self.streams_held}. {_CURE}")
        try:
            super().begin_native(native, pool, mode)
        except BaseException:
            self._undo_begin(pool)
            raise
        self.streams[native] = 1

    def _undo_begin(self, pool: TorchPool) -> None:
        """Restore torch_npu's allocators after a capture failed to begin."""
        try:
            self.native_module._npu_endAllocateToPool(self._device.index, pool.handle)
        except Exception:
            return  # The driver refused before torch_npu changed its allocators.
        self.release_pool(pool)
        # The allocator of pinned memory cannot be restored, and refuses the pool's old handle.
        pool.renew(None)

    def release_pool(self, pool: TorchPool) -> None:
        """Decrease the use count of the pool's memory by one."""
        self.native_module._npu_releasePool(self._device.index, pool.handle)

    def retire(
        self, native: Any, fence: Callable[[], Callable[[], bool]], regions: TaskGroups | None
    ) -> None:
        """Destroy a captured graph and release its streams and events after its last replay."""
        self._retired.append(_Retired(native, regions, fence))
        self.free_buried()

    def bury_memory(self, owners: list[Any]) -> None:
        """Free ``owners`` of pool memory in reverse order, once no replay waits for the host."""
        self._memories.append(owners)
        self.free_buried()

    def keep_memory(self) -> None:
        super().keep_memory()
        keep_forever(*self._memories)

    def free_buried(self) -> None:
        """Free retired graphs and buried memory if that is safe now; never free in a capture."""
        waiting = self._retired or self._memories
        if not waiting or self.capture_lock.is_held_here or self.channel.on_thread():
            return
        with acquiring(self.capture_lock.lock) as free:
            if free:
                with acquiring(self.channel.order) as free:
                    if free:
                        # A replay may wait for a gate that another thread opens with the GIL.
                        idle = all(gates.idle for gates in list(self.gate_sets))
                        self._free(may_wait=self.channel.quiet and idle)

    def _free(self, *, may_wait: bool) -> None:
        """Free graphs whose last replay has ended and, with ``may_wait``, buried memory."""
        if self._freeing:
            return  # A destructor called this method; the outer call handles the new entry.
        self._freeing = True
        try:
            for _ in range(len(self._retired)):
                graph = self._retired[0]  # Remove it later, so that an interrupt does not lose it.
                try:
                    if graph.done():
                        self._destroy(graph)
                    else:
                        self._retired.append(graph)
                except Exception as error:
                    self._give_up(graph, error)
                self._retired.popleft()
                del graph  # May drop the last reference to a pool, whose memory is then buried.
            while may_wait and self._memories:
                owners = self._memories.pop()
                if self.keeps_memory:
                    keep_forever(owners)
                    continue
                try:
                    self.namespace.synchronize(self._device)
                except Exception as error:
                    self._give_up(owners, error)
                else:
                    while owners:
                        owners.pop()
        finally:
            self._freeing = False

    def _destroy(self, graph: _Retired) -> None:
        graph.native.reset()
        self.streams.pop(graph.native, None)
        regions, graph.regions = graph.regions, None
        if regions is not None:
            self._events.extend(regions.free_events())

    def _give_up(self, things: object, error: Exception) -> None:
        """Keep ``things`` forever, because their destructors would fail as well."""
        keep_forever(things)
        with contextlib.suppress(DeviceLost):
            raise_if_lost(self, error)
        reason = str(error).partition("\n")[0]
        logger.warning("device resources of closed graphs are kept: freeing failed (%s)", reason)

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        self.free_buried()  # Closed graphs may hold streams that this capture needs.
        try:
            with super().exclusive():
                yield
        finally:
            self.free_buried()

    @property
    def native_module(self) -> Any:
        return sys.modules["torch_npu"]._C

    def _make_current_stream_id(self) -> Callable[[], int]:
        index = self._device.index
        current = self.native_module._npu_getCurrentStream
        return lambda: int(current(index)[0])

    def synchronize(self) -> None:
        """Wait until the device has finished all work."""
        for regions in self.channel.settle():
            self.channel.unwatch(regions)
            if regions.lost is not None:
                raise regions.lost
        super().synchronize()
        self.free_buried()

    def bind_worker(self, index: int) -> None:
        super().bind_worker(index)
        self._bind()
