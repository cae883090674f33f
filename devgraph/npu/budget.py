"""Hardware streams: every captured graph holds at least one of them as long as it lives."""

from __future__ import annotations

import logging
import weakref
from typing import Any

from devgraph.api.errors import ResourceError

__all__ = ["StreamBudget"]

logger = logging.getLogger(__name__)

HARDWARE_STREAMS = 2048
"""Streams of one device (reported for the 910 series by users whose captures ran out)."""
OTHER_STREAMS = 248
"""Set aside for eager work: 70 of torch_npu's own pools (2 + 32 + 32 + 4), the rest for
collectives, of which each communicator takes several."""


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


_CURE = (
    "Capture fewer buckets, or with fewer segments each: a breakable capture holds a stream per "
    "segment, policy='full' one per bucket."
)
