"""A clock for ranks in tests, on which a host that stalls makes no rank late."""

from __future__ import annotations

import math
import threading
import time
from typing import Any

__all__ = ["Waiting"]


class Waiting:
    """The time of ranks, threads or processes: it passes for one only while all the others wait.

    A host that stalls, or gives one of them no processor, takes none of it: late is only who does
    not come. Each step of a rank's time takes two looks of every other that has not ended.

    Args:
        looks: how often each rank looked, for all of them; shared memory where they are processes.
        step: the least seconds of a step.
    """

    def __init__(self, looks: Any, step: float = 0.01) -> None:
        self.looks = looks
        self.now = [0.0] * len(looks)
        self._step = step
        self._own = threading.local()

    def enter(self, rank: int) -> None:
        """Make the time of ``rank`` that of this thread."""
        self._own.rank, self._own.seen = rank, list(self.looks)

    def leave(self, rank: int) -> None:
        """Wait for ``rank`` no more: it has ended, or waits for ever where no clock sees it."""
        self.looks[rank] = math.inf

    def monotonic(self) -> float:
        return self.now[self._own.rank]

    def sleep(self, seconds: float) -> None:
        rank = self._own.rank
        self.looks[rank] += 1
        time.sleep(0.0005)
        looks = list(self.looks)
        pairs = enumerate(zip(looks, self._own.seen, strict=True))
        if all(n == rank or now == math.inf or now - before >= 2 for n, (now, before) in pairs):
            self.now[rank] += max(seconds, self._step)
            self._own.seen = looks
