"""Device time of replays, as a histogram for each graph."""

from __future__ import annotations

import bisect
import collections
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from devgraph.api.backend import Backend

BOUNDS = tuple(base * 10.0**power for power in range(-5, 1) for base in (1, 2.5, 5))
"""Upper bounds of the histogram bins in seconds, from 10 us to 5 s; the last bin is unbounded."""

MAX_UNREAD = 64


@attrs.frozen(kw_only=True)
class ReplayTimes:
    """Device time of the replays of one graph."""

    count: int
    seconds: float
    bins: tuple[int, ...]
    """Number of replays in each bin, including the unbounded bin."""


class ReplayTimer:
    """A timer for the replays of one graph."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._unread: collections.deque[Callable[[], float | None]] = collections.deque()
        self._bins = [0] * (len(BOUNDS) + 1)
        self._seconds = 0.0

    def timed(self, replay: Callable[[Mapping[str, Any]], None]) -> Callable[..., None]:
        """Return ``replay`` with a measurement of its device time."""

        def run(values: Mapping[str, Any]) -> None:
            stop = self._backend.stopwatch()
            replay(values)
            self._unread.append(stop())
            if len(self._unread) > MAX_UNREAD:
                self.read()

        return run

    def read(self) -> None:
        """Count finished replays without blocking; the caller holds the lock of the pool."""
        while self._unread and (seconds := self._unread[0]()) is not None:
            self._unread.popleft()
            self._bins[bisect.bisect_left(BOUNDS, seconds)] += 1
            self._seconds += seconds

    @property
    def times(self) -> ReplayTimes:
        """The times that have been read so far."""
        return ReplayTimes(count=sum(self._bins), seconds=self._seconds, bins=tuple(self._bins))
