"""External events: what a captured region waits for, and an update records.

An event may be waited for before it is recorded. On current drivers it is a word of device memory
that the wait resets by itself; on older ones a flag that is reset by a task of its own, and that
exists only from its first record on.
"""

from __future__ import annotations

import logging
from typing import Any

__all__ = ["EventStore"]

logger = logging.getLogger(__name__)


class EventStore:
    """External events of one device, used again by later graphs.

    torch_npu never frees the memory of such an event, so a graph that goes away gives its events
    back. One may be used again when each of its records was consumed by a replay that is done.

    Args:
        namespace: ``torch.npu``.
    """

    def __init__(self, namespace: Any) -> None:
        self._namespace = namespace
        self._free: list[Any] = []
        self.made = 0
        """Events made so far."""

    def take(self, stream: Any) -> Any:
        """Return an event that nothing waits for and that is not recorded.

        Args:
            stream: where a new one is set up, if it must be; not a capturing stream.
        """
        if self._free:
            return self._free.pop()
        event = self._namespace.ExternalEvent()
        self.made += 1
        if not event.npu_event:
            # A flag: torch_npu ignores a wait for one that was never recorded.
            event.record(stream)
            event.reset(stream)
        return event

    def give_back(self, events: list[Any]) -> None:
        """Take events whose records were all consumed."""
        self._free.extend(events)
