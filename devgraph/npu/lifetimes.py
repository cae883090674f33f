"""What graphs hold as long as they live, and what may be freed only later.

Every captured graph holds at least one hardware stream.

Nobody documents what a device does to a graph that is destroyed while it runs, so a graph outlives
its last replay. Freeing a pool's memory waits for the device with the interpreter's lock held: a
capture forbids that, and a replay that waits for its update would never end.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from devgraph.api.errors import ResourceError

if TYPE_CHECKING:
    from devgraph.npu.backend import NpuBackend
    from devgraph.npu.graph import NpuPool
    from devgraph.npu.task_groups import TaskGroups

__all__ = ["Burials", "StreamBudget"]

logger = logging.getLogger(__name__)

HARDWARE_STREAMS = 2048
"""Streams of one device (reported for the 910 series by users whose captures ran out)."""
OTHER_STREAMS = 248
"""Set aside for eager work: 70 of torch_npu's own pools (2 + 32 + 32 + 4), the rest for
collectives, of which each communicator takes several."""

_CURE = (
    "Capture fewer buckets, or with fewer segments each: a breakable capture holds a stream per "
    "segment, policy='full' one per bucket."
)


class StreamBudget:
    """Counts the streams that graphs hold, and learns the true limit when the driver refuses one.

    Args:
        limit: the most that graphs may hold.
    """

    def __init__(self, limit: int = HARDWARE_STREAMS - OTHER_STREAMS) -> None:
        self.limit = limit
        self._holders: weakref.WeakSet[Any] = weakref.WeakSet()

    @property
    def held(self) -> int:
        """Graphs that exist now."""
        return len(self._holders)

    @property
    def left(self) -> int:
        """Graphs that may still be captured."""
        return max(0, self.limit - self.held)

    def take(self, graph: Any) -> None:
        """Count ``graph``."""
        self._holders.add(graph)

    def give_back(self, graph: Any) -> None:
        """Stop counting ``graph``. Idempotent."""
        self._holders.discard(graph)

    def require(self) -> None:
        """Raise ResourceError if no further graph may be captured."""
        if self.left == 0:
            raise ResourceError(
                f"{self.held} graphs hold a hardware stream each, and the limit is {self.limit}. "
                f"{_CURE}"
            )

    def exhausted(self, error: BaseException) -> ResourceError:
        """Return the error for a capture that the driver refused, and remember the limit."""
        self.limit = min(self.limit, self.held)
        logger.warning("the driver has no stream for another graph; %d exist", self.held)
        return ResourceError(
            f"the driver has no stream or event left for another graph; {self.held} graphs hold "
            f"one or more each. {_CURE} ({error})"
        )


class _Retired:
    """A captured graph that nobody uses any more. It keeps its pool, which must go last."""

    def __init__(
        self, backend: NpuBackend, pool: NpuPool, native: Any, regions: TaskGroups | None
    ) -> None:
        self._backend, self._pool = backend, pool
        self._native, self._regions = native, regions
        self._is_done: Callable[[], bool] | None = None

    def done(self) -> bool:
        """Whether its last replay is over. Not to be asked in a capture."""
        if self._is_done is None:
            self._is_done = self._pool.fence()
        return self._is_done()

    def free(self) -> None:
        """Destroy the graph, and give back its stream and its events."""
        self._native.reset()
        self._backend.budget.give_back(self._native)
        if self._regions is not None:
            self._backend.events.give_back(self._regions.free_events())


class Burials:
    """Graphs and memory of one backend that wait to be freed.

    Args:
        backend: whose locks tell when that is allowed.
    """

    def __init__(self, backend: NpuBackend) -> None:
        self._backend = backend
        # Filled by any thread at any time, emptied by one at a time.
        self._graphs: deque[_Retired] = deque()
        self._memory: list[list[Any]] = []
        self._freeing = False

    def retire(self, pool: NpuPool, native: Any, regions: TaskGroups | None) -> None:
        """Destroy a captured graph once its last replay is over."""
        self._graphs.append(_Retired(self._backend, pool, native, regions))

    def bury(self, things: list[Any]) -> None:
        """Drop ``things``, which hold a pool's memory, from the end when nothing waits for the
        host."""
        self._memory.append(things)

    def free(self, *, may_wait: bool) -> None:
        """Free what may go now, in a moment when no capture is under way.

        Args:
            may_wait: whether no replay waits for the host, so that memory may be freed as well.
        """
        if self._freeing:
            return  # Called by what is being freed; the caller below sees it.
        self._freeing = True
        try:
            for _ in range(len(self._graphs)):
                graph = self._graphs.popleft()
                try:
                    if graph.done():
                        graph.free()
                    else:
                        self._graphs.append(graph)
                except Exception:  # a lost device destroys nothing any more
                    logger.warning("a graph could not be destroyed", exc_info=True)
                del graph  # and with it perhaps a pool, which is buried then
            while may_wait and self._memory:
                things = self._memory.pop()
                while things:
                    things.pop()
        finally:
            self._freeing = False

    def __bool__(self) -> bool:
        return bool(self._graphs or self._memory)
