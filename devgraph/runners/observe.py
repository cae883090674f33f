"""What can be seen of replays from outside: the device's time, and ranges in a profile.

Nothing of it is in the way of a step until somebody asks.
"""

from __future__ import annotations

import bisect
import collections
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch

from devgraph.api.backend import Backend

BOUNDS = tuple(base * 10.0**power for power in range(-5, 1) for base in (1, 2.5, 5))
"""Upper bounds of the histogram's bins in seconds, from 10 us to 5 s; longer ones have the last."""

MOST_OPEN = 64
"""Replays whose end the device may not have reached before somebody looks for the first ones."""


@attrs.frozen(kw_only=True)
class ReplayTimes:
    """How long the device took for the replays of one graph."""

    count: int
    seconds: float
    """All together."""
    bins: tuple[int, ...]
    """How many took at most as long as each of ``BOUNDS``, and last how many took longer."""


class Timing:
    """Times the replays of one graph.

    Args:
        backend: whose clock.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._open: collections.deque[Callable[[], float | None]] = collections.deque()
        self._bins = [0] * (len(BOUNDS) + 1)
        self._seconds = 0.0

    def over(self, replay: Callable[[Mapping[str, Any]], None]) -> Callable[..., None]:
        """Return ``replay``, timed."""

        def timed(values: Mapping[str, Any]) -> None:
            stop = self._backend.stopwatch()
            replay(values)
            self._open.append(stop())
            if len(self._open) > MOST_OPEN:
                self.read()

        return timed

    def read(self) -> None:
        """Count the replays that the device has done, without waiting; under the pool's lock."""
        while self._open and (seconds := self._open[0]()) is not None:
            self._open.popleft()
            self._bins[bisect.bisect_left(BOUNDS, seconds)] += 1
            self._seconds += seconds

    @property
    def times(self) -> ReplayTimes:
        """What was read so far."""
        return ReplayTimes(count=sum(self._bins), seconds=self._seconds, bins=tuple(self._bins))


def in_range(title: str, replay: Callable[[Mapping[str, Any]], None]) -> Callable[..., None]:
    """Return ``replay`` in a range of that name, which profilers of torch and vendors show."""

    def ranged(values: Mapping[str, Any]) -> None:
        with torch.profiler.record_function(title):
            replay(values)

    return ranged
