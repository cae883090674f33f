"""The updatable regions of one graph: task groups, their events, their values on the device."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from devgraph.api.errors import UpdateError, UpdateTopologyError
from devgraph.api.marks.calls import MarkedCall
from devgraph.api.marks.marks import Mark
from devgraph.api.modes import Settings
from devgraph.npu.channel import Job, UpdateChannel
from devgraph.npu.errors import OTHER_KERNELS, means

logger = logging.getLogger(__name__)

Host = Mapping[Mark, dict[str, Any]]


@attrs.frozen
class Group:
    """One captured region: its call, the event it waits for, the handle of its task group."""

    call: MarkedCall
    event: Any
    handle: Any


class TaskGroups:
    """Task groups in capture order, the values they hold, and the replays that use them.

    It holds no graph, so that the update thread never drops the last reference to one. ``memory``
    routes that thread's allocations to the region pool.
    """

    def __init__(
        self,
        channel: UpdateChannel,
        namespace: Any,
        memory: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> None:
        self._channel = channel
        self._namespace = namespace
        self._memory = memory
        self.groups: list[Group] = []
        """The captured regions."""
        self._settings = Settings.current()
        # Two, because the one that a queued job waits for must not be recorded again meanwhile.
        self._done = (namespace.Event(), namespace.Event())
        self._launches = 0
        self._job: Job | None = None
        self._times = [0.0, 0.0]
        self.applied: Host = {}
        """The values that the groups hold, by what the update thread has done."""
        self.planned: Host | None = {}
        """The values that they hold when every queued job has run; None if that is not known."""
        self.failure: BaseException | None = None
        """Why the groups can no longer be trusted."""
        self.lost: UpdateError | None = None
        """The same, if it is that a replay never got its records: nobody was told."""

    def free_events(self) -> list[Any]:
        """Return the events that another graph may wait for, once the last replay is over: none
        if a record may still be in them, or if the graph was never launched, for torch_npu refuses
        a second wait before the first one had its record."""
        if not self._launches or self.failure is not None:
            return []
        return [group.event for group in self.groups]

    # On the launching thread, in order.

    def try_values(self, host: Host, what: str) -> None:
        """Update to ``host`` and wait until that is issued; taken back if any region refuses it."""
        self.planned = None  # an interrupt leaves the rest to the thread
        job = self._channel.submit(self._work(host, signal=False))
        self._channel.finish(job, what)
        self.planned = host

    def signal(self, host: Host) -> Job:
        """Return the job, to be queued, of the records that the next replay waits for, and before
        them of an update to ``host`` unless that is what the groups will hold."""
        new = None if host is self.planned else host
        return Job(self._work(new, signal=True))

    def launched(self, job: Job, host: Host, stream: Any) -> None:
        """Queue the ``job`` of a replay to ``host`` that was launched on ``stream``, and watch it;
        to be called again if it was interrupted."""
        self._channel.queue(job)
        now = time.monotonic()
        if self._job is not job:  # all of it without a call
            self._job = job
            self.planned = host
            self._launches += 1
        slot = self._launches % 2
        self._times[slot] = now
        self._done[slot].record(stream)
        self._channel.watch(self)

    def make_room(self) -> None:
        """Wait until the last replay but one is done, which bounds how far the host runs ahead."""
        while self._launches > 1 and not self._done[(self._launches + 1) % 2].query():
            if self.settled():
                return
            time.sleep(0.00005)

    def settled(self) -> bool:
        """Whether the last replay is done; one that waits too long is released and given up."""
        last, older = self._launches % 2, (self._launches + 1) % 2
        if not self._launches or self._done[last].query():
            return True
        waiting = older if self._launches > 1 and not self._done[older].query() else last
        if time.monotonic() - self._times[waiting] > self._channel.timeout:
            self._release()
            return True
        return False

    def _release(self) -> None:
        if self.failure is not None:
            return
        logger.error("a replay waits too long for its update; recording its events again")
        self.failure = self.lost = UpdateError(
            f"a replay waited longer than {self._channel.timeout:g} s for its update: the record "
            f"of an event was lost, or the host code of a region does not return. The device was "
            f"released by recording all events again, and with them the graph lost count of its "
            f"events: call reset() and capture again."
        )
        for group in self.groups:  # not on the update stream: it may wait for this replay
            group.event.record(self._channel.rescue_stream)

    # On the update thread.

    def _work(self, host: Host | None, *, signal: bool) -> Callable[[], None]:
        fence = self._done[self._launches % 2] if self._launches else None

        def work() -> None:
            if fence is not None:
                # The last replay must have read its values and consumed its records.
                self._channel.stream.wait_event(fence)
            if host is None:
                self._run(None, signal=signal)
                return
            # This thread has modes of its own; region code must see those of the capture.
            with self._settings.restored(), self._memory():
                self._run(host, signal=signal)

        return work

    def _run(self, host: Host | None, *, signal: bool) -> None:
        stream, done = self._channel.stream, 0
        try:
            for group in self.groups:
                if host is not None:
                    self._update(group, host)
                if signal:
                    group.event.record(stream)
                done += 1
        except BaseException as error:
            if signal:
                self.failure = error
                for group in self.groups[done:]:  # the replay is parked: let it end
                    group.event.record(stream)
            else:
                self._take_back(done, error)
            raise
        if host is not None:
            self.applied = host

    def _update(self, group: Group, host: Host) -> None:
        stream = self._channel.stream
        mark = group.call.mark
        values = host[mark]
        try:
            self._namespace.graph_task_update_begin(stream, group.handle)
            try:
                group.call.run(values)
            except BaseException:
                with contextlib.suppress(Exception):
                    self._namespace.graph_task_update_end(stream)
                raise
            self._namespace.graph_task_update_end(stream)
        except Exception as error:
            if means(error, OTHER_KERNELS):
                raise UpdateTopologyError(
                    f"region {mark.name} needs other kernels for {values} than at capture, and "
                    f"a task group can only be given new arguments. Capture again with these "
                    f"values, or use policy='breakable'. ({error})"
                ) from error
            raise

    def _take_back(self, last: int, why: BaseException) -> None:
        """Give the regions up to ``last`` their old values again."""
        try:
            for group in self.groups[: last + 1]:
                self._update(group, self.applied)
        except Exception as error:
            logger.exception("taking back a refused update failed")
            error.__context__ = why
            self.failure = error
