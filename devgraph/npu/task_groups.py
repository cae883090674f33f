"""The updatable regions of a graph, as CANN task groups with events and current values."""

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
    """A captured region: its call, the event it waits for, and the handle of its task group."""

    call: MarkedCall
    event: Any
    handle: Any


class TaskGroups:
    """Task groups in capture order, with their values and the state of their replays.

    An instance must not reference a graph, because the update thread must not drop the last
    reference to a graph.
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
        self._settings = Settings.current()
        # Two events, because a queued job may wait for one while a replay records the other.
        self._done = (namespace.Event(), namespace.Event())
        self._launches = 0
        self._job: Job | None = None
        self._times = [0.0, 0.0]
        self.applied: Host = {}
        """The current host values of the groups."""
        self.planned: Host | None = {}
        """The values that the groups will have after all queued jobs, or None if unknown."""
        self.failure: BaseException | None = None
        """An exception that left the groups in an unknown state."""
        self.lost: UpdateError | None = None
        """The failure if a replay never received its event records; raised by ``synchronize``."""

    def free_events(self) -> list[Any]:
        """Return the events that another graph may use, after the last replay has ended.

        The list is empty after a failure, because an event may still be recorded. It is empty if
        the graph was never launched, because torch_npu refuses a second wait for an event that was
        not recorded after the first.
        """
        if not self._launches or self.failure is not None:
            return []
        return [group.event for group in self.groups]

    # The launching thread calls the following methods, in this order.

    def try_values(self, host: Host, what: str) -> None:
        """Apply ``host`` and wait for the driver's calls; restore old values if a region raises."""
        self.planned = None  # unknown after an interrupt, because the job still runs
        job = self._channel.submit(self._work(host, signal=False))
        self._channel.finish(job, what)
        self.planned = host

    def signal(self, host: Host) -> Job:
        """Return a job that records the events of the next replay; the caller must queue it.

        The job first applies ``host``, unless earlier jobs do so.
        """
        changed = None if host is self.planned else host
        return Job(self._work(changed, signal=True))

    def launched(self, job: Job, host: Host, stream: Any) -> None:
        """Queue ``job`` for a replay launched with ``host`` on ``stream``, and watch the replay.

        After an interrupt, repeat the call.
        """
        self._channel.queue(job)
        now = time.monotonic()
        if self._job is not job:  # No call in this block, so no interrupt can split it.
            self._job = job
            self.planned = host
            self._launches += 1
        slot = self._launches % 2
        self._times[slot] = now
        self._done[slot].record(stream)
        self._channel.watch(self)

    def make_room(self) -> None:
        """Wait for the second-to-last replay, so that the host stays at most two replays ahead."""
        while self._launches > 1 and not self._done[(self._launches + 1) % 2].query():
            if self.settled():
                return
            time.sleep(0.00005)

    def settled(self) -> bool:
        """Whether the last replay has ended, or was overdue and was released."""
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
            f"a replay waited longer than {self._channel.timeout:g} s for its update. The record "
            f"of an event was lost, or the host code of a region does not return. All events were "
            f"recorded again to release the device, so the state of the graph's events is unknown; "
            f"call reset() and capture again."
        )
        for group in self.groups:  # not on the update stream, which may wait for this replay
            group.event.record(self._channel.rescue_stream)

    # The update thread calls the following methods.

    def _work(self, host: Host | None, *, signal: bool) -> Callable[[], None]:
        fence = self._done[self._launches % 2] if self._launches else None

        def work() -> None:
            if fence is not None:
                # Let the last replay read its values and consume its records first.
                self._channel.stream.wait_event(fence)
            if host is None:
                self._run(None, signal=signal)
                return
            # Modes are thread-local, so restore the modes of the capture for the region's code.
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
                for group in self.groups[done:]:  # Let the waiting replay finish.
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
                    f"region {mark.name} needs other kernels for {values} than at capture, but "
                    f"an update of a task group can only change arguments. Capture again with "
                    f"these values, or use policy='breakable'. ({error})"
                ) from error
            raise

    def _take_back(self, last: int, cause: BaseException) -> None:
        """Restore the previous values of the regions up to ``last``."""
        try:
            for group in self.groups[: last + 1]:
                self._update(group, self.applied)
        except Exception as error:
            logger.exception("a refused update could not be undone")
            error.__context__ = cause
            self.failure = error
