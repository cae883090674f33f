"""One NPU as its graphs share it: events, streams, the update channel, what waits to be freed."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from devgraph.api.errors import UpdateError
from devgraph.api.torchlike.base import TorchBackend, TorchPool
from devgraph.npu.channel import UpdateChannel
from devgraph.npu.errors import NO_RESOURCE, means
from devgraph.npu.lifetimes import Burials, StreamBudget
from devgraph.npu.task_groups import EventStore, TaskGroups

logger = logging.getLogger(__name__)


class NpuDevice(TorchBackend):
    """The base of the backend, without its identity: what ``NpuGraph`` knows of it."""

    replay_first: bool = True
    """Launch a replay before its update, so that they overlap. Devices that are shared in software
    slices need the reverse."""
    try_new_values: bool = True
    """Apply host values that a graph never took before its replay is launched, so that a refusal is
    raised by the call and nothing has run. False overlaps them too; a refusal then spoils that
    replay, whose graph becomes dirty, and is raised by the graph's next call."""
    update_timeout: float = 60.0
    """Seconds after which an update, or a replay whose update was issued, counts as stuck."""

    def __init__(self) -> None:
        super().__init__()
        self._native_class = getattr(self.namespace, self.graph_class_name)
        self._bind()

    def _bind(self) -> None:
        self._burials = Burials(self)
        index = self._device.index
        self.budget = StreamBudget()
        self.events = EventStore(self.namespace)
        self.channel = UpdateChannel(self.namespace, index, self.update_timeout)

    def count_nodes(self, native: Any) -> int | None:
        """Return the number of tasks in an ended capture, or None where the driver cannot tell.

        The budget learns from it how many streams the graph holds.
        """
        streams = dumped_streams(native, self._native_class)
        if streams is None:
            return None
        self.budget.take(native, len(set(streams)))
        return len(streams)

    def drain(self) -> None:
        """Wait until torch_npu's launch thread has handed everything so far to the driver.

        The update stream has no queue, so its waits must not overtake records that are queued.
        """
        # Asking for the driver's handle of a stream does that.
        _ = self.namespace.current_stream(self._device).npu_stream

    def shortage(self, error: BaseException) -> str | None:
        return self.budget.shortage(error) if means(error, NO_RESOURCE) else None

    def begin_native(self, native: Any, pool: TorchPool, mode: str) -> None:
        self.budget.require()
        try:
            super().begin_native(native, pool, mode)
        except BaseException:
            self._undo_begin(pool)
            raise
        self.budget.take(native)

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
        """Destroy a captured graph now, or once its last replay is over; see ``Burials.retire``."""

        def give_back() -> None:
            self.budget.give_back(native)
            if regions is not None:
                self.events.give_back(regions.free_events())

        self._burials.retire(native, fence, give_back)
        self.free_buried()

    def bury_memory(self, owners: list[Any]) -> None:
        """Drop ``owners`` of a pool's memory, the last one first, now or when that is allowed."""
        self._burials.bury(owners)
        self.free_buried()

    def free_buried(self) -> None:
        """Free what was retired or buried and may go now; nothing while a capture is under way."""
        if not self._burials or self.held_here or self.channel.on_thread():
            return
        if not self._capture_lock.acquire(blocking=False):
            return
        try:
            if self.channel.order.acquire(blocking=False):
                try:
                    self._burials.free(may_wait=self.channel.quiet)
                finally:
                    self.channel.order.release()
        finally:
            self._capture_lock.release()

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
            UpdateError: a replay waited longer than ``update_timeout`` for an event whose record
                was lost. The device is free again and the graph is dirty.
        """
        for regions in self.channel.settle():
            self.channel.unwatch(regions)
            if isinstance(regions.failure, UpdateError):
                raise regions.failure
        super().synchronize()
        self.free_buried()

    def bind_worker(self, index: int) -> None:
        super().bind_worker(index)
        self._bind()


def dumped_streams(native: Any, graph_class: Any) -> list[Any] | None:
    """Return the stream of every task that the vendor's dump of a graph lists, or None if it makes
    no dump."""
    with tempfile.TemporaryDirectory(prefix="devgraph") as folder:
        path = Path(folder) / "graph.json"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # it warns that it was called
                # The class's own method also writes an aligned copy, which nobody reads here.
                super(graph_class, native).debug_dump(str(path))
            tasks = json.loads(path.read_text())
        except Exception:
            logger.debug("no dump of the graph", exc_info=True)
            return None
    if not isinstance(tasks, list):
        return None
    return [task.get("tid") for task in tasks if isinstance(task, dict) and task.get("ph") == "X"]
