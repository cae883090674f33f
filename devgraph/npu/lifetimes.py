"""What graphs hold as long as they live, and what may be freed only later.

A captured graph holds every hardware stream that it was captured on.

Nobody documents what a device does to a graph that is destroyed while it runs, so a graph outlives
its last replay. Freeing a pool's memory waits for the device with the interpreter's lock held: a
capture forbids that, and a replay that waits for its update would never end.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from devgraph.api.device import keep_for_ever
from devgraph.api.errors import DeviceLost, ResourceError
from devgraph.api.torchlike.base import TorchBackend

logger = logging.getLogger(__name__)

HARDWARE_STREAMS = 2048
"""Streams of one device (reported for the 910 series by users whose captures ran out)."""
OTHER_STREAMS = 248
"""Set aside for eager work: 70 of torch_npu's own pools (2 + 32 + 32 + 4), the rest for
collectives, of which each communicator takes several."""
GRAPH_STREAMS = HARDWARE_STREAMS - OTHER_STREAMS
"""What is left for graphs."""

_CURE = (
    "Capture fewer buckets, or with fewer segments each: a breakable capture holds a stream per "
    "segment, policy='full' one per bucket."
)


class StreamBudget:
    """Counts the streams that graphs hold.

    What the driver refuses says nothing of later: other work gives streams back, and so do graphs
    that wait to be destroyed. Every capture within the limit asks the driver.
    """

    def __init__(self, limit: int = GRAPH_STREAMS) -> None:
        self.limit = limit
        self._holders: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    @property
    def held(self) -> int:
        """Streams that graphs hold now, those that keep a pool alive included."""
        return sum(list(self._holders.values()))

    def take(self, graph: Any, streams: int = 1) -> None:
        """Count ``graph``, which holds ``streams``, and at least the one that it was begun on."""
        self._holders[graph] = max(1, streams)

    def give_back(self, graph: Any) -> None:
        """Stop counting ``graph``. Idempotent."""
        self._holders.pop(graph, None)

    def require(self) -> None:
        """Raise ResourceError if no further graph may be captured."""
        if self.held >= self.limit:
            raise ResourceError(
                f"{len(self._holders)} graphs hold {self.held} hardware streams, and the limit is "
                f"{self.limit}. {_CURE}"
            )

    def shortage(self, error: BaseException) -> str:
        """Return what a capture lacked that the driver refused with ``error``."""
        return (
            f"the driver has no stream or event left for another graph; {len(self._holders)} "
            f"graphs hold {self.held} streams. {_CURE} ({error})"
        )


class _Retired:
    """A captured graph that nobody uses any more."""

    def __init__(
        self, native: Any, fence: Callable[[], Callable[[], bool]], give_back: Callable[[], None]
    ) -> None:
        self._native, self._give_back = native, give_back
        self._fence = fence  # of its pool, which it keeps: the pool must go last
        self._is_done: Callable[[], bool] | None = None

    def done(self) -> bool:
        """Whether its last replay is over. Not to be asked in a capture."""
        if self._is_done is None:
            self._is_done = self._fence()
        return self._is_done()

    def free(self) -> None:
        """Destroy the graph, and give back what it held."""
        self._native.reset()
        self._give_back()


class Burials:
    """Graphs and memory of one backend that wait to be freed."""

    def __init__(self, backend: TorchBackend) -> None:
        self._backend = backend
        # Filled by any thread at any time, emptied by one at a time.
        self._graphs: deque[_Retired] = deque()
        self._memory: list[list[Any]] = []
        self._freeing = False

    def retire(
        self, native: Any, fence: Callable[[], Callable[[], bool]], give_back: Callable[[], None]
    ) -> None:
        """Destroy a captured graph once its last replay, as ``fence`` of its pool tells, is over;
        ``give_back`` is called then, for what the graph held."""
        self._graphs.append(_Retired(native, fence, give_back))

    def bury(self, things: list[Any]) -> None:
        """Drop ``things``, which hold a pool's memory, from the end when nothing waits for the
        host."""
        self._memory.append(things)

    def free(self, *, may_wait: bool) -> None:
        """Free what may go now, in a moment when no capture is under way; memory as well if no
        replay waits for the host (``may_wait``)."""
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
                except Exception as error:
                    self._give_up(graph, error)
                del graph  # and with it perhaps a pool, which is buried then
            while may_wait and self._memory:
                things = self._memory.pop()
                if self._backend.keeps_memory:
                    keep_for_ever(things)
                    continue
                try:
                    self._backend.namespace.synchronize(self._backend.device)
                except Exception as error:
                    self._give_up(things, error)
                else:
                    while things:
                        things.pop()
        finally:
            self._freeing = False

    def _give_up(self, things: object, error: Exception) -> None:
        """Keep what cannot be freed: its destructor would fail in the same way."""
        keep_for_ever(things)
        with contextlib.suppress(DeviceLost):
            self._backend.raise_if_lost(error)
        what = str(error).partition("\n")[0]
        logger.warning("what graphs held on the device is kept, because freeing fails (%s)", what)

    def __bool__(self) -> bool:
        return bool(self._graphs or self._memory)
