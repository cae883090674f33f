"""One NPU as its graphs share it: events, streams, the update channel, what waits to be freed.

A captured graph holds every hardware stream that it was captured on.

Nobody documents what a device does to a graph that is destroyed while it runs, so a graph outlives
its last replay. Freeing a pool's memory waits for the device with the interpreter's lock held: a
capture forbids that, and a replay that waits for its update would never end.
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

from devgraph.api.device import raise_if_lost
from devgraph.api.errors import DeviceLost, ResourceError
from devgraph.api.process import keep_forever
from devgraph.api.torchlike.base import TorchBackend, TorchPool
from devgraph.npu.channel import UpdateChannel
from devgraph.npu.errors import NO_RESOURCE, means
from devgraph.npu.task_groups import TaskGroups

logger = logging.getLogger(__name__)

GRAPH_STREAMS = 2048 - 248
"""What graphs have of a device's streams (2048 on the 910 series, as users report whose captures
ran out): eager work takes 70 for torch_npu's own pools, and each communicator several."""

_CURE = (
    "Capture fewer buckets, or with fewer segments each: a breakable capture holds a stream per "
    "segment, policy='full' one per bucket."
)


class _Retired:
    """A captured graph that nobody uses any more, and its regions."""

    def __init__(
        self, native: Any, regions: TaskGroups | None, fence: Callable[[], Callable[[], bool]]
    ) -> None:
        self.native, self.regions = native, regions
        self._fence = fence  # of its pool, which it keeps: the pool must go last
        self._is_done: Callable[[], bool] | None = None

    def done(self) -> bool:
        """Whether its last replay is over. Not to be asked in a capture."""
        if self._is_done is None:
            self._is_done = self._fence()
        return self._is_done()


class NpuDevice(TorchBackend):
    """The base of the backend, without its identity: what ``NpuGraph`` knows of it."""

    replay_first: bool = True
    """Launch a replay before its update, so that they overlap. Devices that are shared in software
    slices need the reverse."""
    try_new_values: bool = True
    """Apply host values that a graph never took before its replay is launched, so that a refusal is
    raised by the call and nothing has run. False overlaps them too; a refusal then spoils that
    replay, whose graph becomes dirty, and is raised by the graph's next call."""
    stream_limit: int = GRAPH_STREAMS
    """Streams that graphs may hold; within it every capture asks the driver, whose refusals say
    nothing of later: other work gives streams back, and so do graphs that wait to be destroyed."""

    def __init__(self) -> None:
        super().__init__()
        self.native_class = getattr(self.namespace, self.graph_class_name)
        """torch_npu's own, beneath which is the binary's."""
        self._bind()

    def _bind(self) -> None:
        # Filled by any thread at any time, emptied by one at a time.
        self._retired: deque[_Retired] = deque()
        self._memories: list[list[Any]] = []
        self._freeing = False
        self.streams: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        """How many streams each captured graph holds, those that keep a pool alive included."""
        self._events: list[Any] = []
        self.channel = UpdateChannel(self.namespace, self._device.index)

    def take_event(self) -> Any:
        """Return an external event that nothing waits for and that is not recorded.

        A captured region waits for one, and an update records it, in either order. torch_npu never
        frees the memory of such an event, so a graph that goes away gives its events back: one may
        be used again when each of its records was consumed by a replay that is done.
        """
        if self._events:
            return self._events.pop()
        event = self.namespace.ExternalEvent()
        if not event.npu_event:
            # No word of device memory, which a wait resets by itself, but an older driver's flag:
            # torch_npu ignores a wait for one that was never recorded.
            event.record(self.channel.stream)
            event.reset(self.channel.stream)
        return event

    def count_nodes(self, native: Any) -> int | None:
        """Return the number of tasks in an ended capture, or None where the driver cannot tell;
        ``streams`` learns from it how many the graph holds."""
        with tempfile.TemporaryDirectory(prefix="devgraph") as folder:
            path = Path(folder) / "graph.json"
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # it warns that it was called
                    # The class's own method also writes an aligned copy, which nobody reads here.
                    super(self.native_class, native).debug_dump(str(path))  # type: ignore[misc]
                tasks = json.loads(path.read_text())
                found = [task.get("tid") for task in tasks if task.get("ph") == "X"]
            except Exception:
                logger.debug("no dump of the graph", exc_info=True)
                return None
        self.streams[native] = max(1, len(set(found)))
        return len(found)

    def drain(self) -> None:
        """Wait until torch_npu's launch thread has handed everything so far to the driver.

        The update stream has no queue, so its waits must not overtake records that are queued.
        """
        # Asking for the driver's handle of a stream does that.
        _ = self.namespace.current_stream(self._device).npu_stream

    def shortage(self, error: BaseException) -> str | None:
        if not means(error, NO_RESOURCE):
            return None
        return f"the driver has no stream or event left; {self.streams_held}. {_CURE} ({error})"

    @property
    def streams_held(self) -> str:
        """Which part of the streams graphs hold, in words."""
        counts = list(self.streams.values())
        return f"{len(counts)} graphs hold {sum(counts)} of at most {self.stream_limit} streams"

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
        """Undo what a refused begin of a capture leaves behind in torch_npu's allocators."""
        try:
            self.native_module._npu_endAllocateToPool(self._device.index, pool.handle)
        except Exception:
            return  # It was refused before it touched the allocators.
        self.release_pool(pool)
        # The allocator of pinned memory has no such call: it would refuse this handle for ever.
        pool.renew(None)

    def release_pool(self, pool: TorchPool) -> None:
        """Take back one use of the pool's memory."""
        self.native_module._npu_releasePool(self._device.index, pool.handle)

    def retire(
        self, native: Any, fence: Callable[[], Callable[[], bool]], regions: TaskGroups | None
    ) -> None:
        """Destroy a captured graph, and give back what it and its ``regions`` held, once its last
        replay, as ``fence`` of its pool tells, is over."""
        self._retired.append(_Retired(native, regions, fence))
        self.free_buried()

    def bury_memory(self, owners: list[Any]) -> None:
        """Drop ``owners`` of a pool's memory, the last one first, now or when nothing waits for the
        host."""
        self._memories.append(owners)
        self.free_buried()

    def keep_memory(self) -> None:
        super().keep_memory()
        keep_forever(*self._memories)

    def free_buried(self) -> None:
        """Free what was retired or buried and may go now; nothing while a capture is under way."""
        waiting = self._retired or self._memories
        if not waiting or self.capture_lock.is_held_here or self.channel.on_thread():
            return
        lock = self.capture_lock.lock
        if not lock.acquire(blocking=False):
            return
        try:
            order = self.channel.order
            if order.acquire(blocking=False):
                try:
                    self._free(may_wait=self.channel.quiet)
                finally:
                    order.release()
        finally:
            lock.release()

    def _free(self, *, may_wait: bool) -> None:
        """Free graphs whose last replay is over; memory as well if no replay waits for the host
        (``may_wait``)."""
        if self._freeing:
            return  # Called by what is being freed; the caller below sees it.
        self._freeing = True
        try:
            for _ in range(len(self._retired)):
                graph = self._retired[0]  # where an interrupt leaves it
                try:
                    if graph.done():
                        self._destroy(graph)
                    else:
                        self._retired.append(graph)
                except Exception as error:
                    self._give_up(graph, error)
                self._retired.popleft()
                del graph  # and with it perhaps a pool, which is buried then
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
        """Keep what cannot be freed: its destructor would fail in the same way."""
        keep_forever(things)
        with contextlib.suppress(DeviceLost):
            raise_if_lost(self, error)
        what = str(error).partition("\n")[0]
        logger.warning("what graphs held on the device is kept, because freeing fails (%s)", what)

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        self.free_buried()  # Graphs that were closed hold streams which a capture may need.
        try:
            with super().exclusive():
                yield
        finally:
            self.free_buried()

    @property
    def native_module(self) -> Any:
        """The compiled module of torch_npu."""
        return sys.modules["torch_npu"]._C

    def _make_current_stream_id(self) -> Callable[[], int]:
        index = self._device.index
        current = self.native_module._npu_getCurrentStream
        return lambda: int(current(index)[0])

    def synchronize(self) -> None:
        """Wait until all work of the device is done.

        Raises:
            UpdateError: a replay waited longer than the channel's timeout for an event whose record
                was lost. The device is free again and the graph is dirty.
        """
        for regions in self.channel.settle():
            self.channel.unwatch(regions)
            if regions.lost is not None:
                raise regions.lost
        super().synchronize()
        self.free_buried()

    def bind_worker(self, index: int) -> None:
        super().bind_worker(index)
        self._bind()
