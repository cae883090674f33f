"""Region updates that run concurrently with replays, on one thread and one stream per device.

In a replay, each region waits on the device for its event. The update thread runs the region's host
code again in update mode, and then records the event. All graphs of a device share the thread, the
stream and one queue of jobs in launch order. A replay waits only for its own and earlier jobs, and
a job waits only for earlier replays, so there is no deadlock.

The update stream bypasses torch_npu's task queue. If the driver refuses an operator, the call
raises. In the task queue, a refusal would end the queue's thread, and torch_npu would silently drop
all later launches of the process.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from devgraph.api.errors import UpdateError
from devgraph.api.process import identity

logger = logging.getLogger(__name__)

_IDLE_SECONDS = 1.0  # interval at which the idle thread checks for overdue replays


class Job:
    """Host work for the update stream. The work runs once, even if the job is queued twice.

    The work must not reference a graph, because the update thread must not drop the last reference
    to a graph.
    """

    __slots__ = ("_held", "done", "error", "work")

    def __init__(self, work: Callable[[], None]) -> None:
        self.work: Callable[[], None] | None = work
        self.error: BaseException | None = None
        self.done = False
        """Whether the work has been issued."""
        # Locked until the work is issued. An interrupt could leave a threading.Event locked.
        self._held = threading.Lock()
        self._held.acquire()

    def run(self) -> None:
        """Run the work, and store an exception in ``error``."""
        work, self.work = self.work, None
        if work is None:
            return
        try:
            work()
        except BaseException as error:
            self.error = error
        finally:
            del work
            self.done = True
            self._held.release()

    def wait(self, seconds: float) -> bool:
        """Wait until the work has been issued; return False after ``seconds``."""
        if not self.done and self._held.acquire(timeout=seconds):
            self._held.release()
        return self.done


class UpdateChannel:
    """The update thread and stream of one device."""

    def __init__(self, namespace: Any, index: int, timeout: float = 60.0) -> None:
        self._namespace = namespace
        self._index = index
        self.timeout = timeout
        self.order = threading.RLock()
        """Held while a replay is launched and its job is queued, so that both orders match."""
        self.stream: Any = None
        self.rescue_stream: Any = None
        """Stream on which the events of an overdue replay are recorded again."""
        self._queue: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        # The thread reports its own end: Thread.is_alive() may be wrong after an interrupt.
        self._running = False
        self._watched: weakref.WeakSet[Any] = weakref.WeakSet()
        # Guards ``_watched``, because iteration would raise if another thread changed the set.
        self._watching = threading.RLock()
        self._launching = False
        self._last: Job | None = None

    @property
    def quiet(self) -> bool:
        """Whether no replay waits or will wait for host work. The caller must hold ``order``.

        A thread that holds the GIL may wait for the device only if the channel is quiet.
        """
        last = self._last
        if self._launching or not (last is None or last.done):
            return False
        # A replay whose event record was lost waits until it is released.
        return all(regions.settled() for regions in self.watched())

    @contextlib.contextmanager
    def launching(self) -> Iterator[None]:
        """Hold ``order`` while a replay is launched and its job is queued."""
        with self.order:
            self._launching = True
            try:
                yield
            finally:
                self._launching = False

    def start(self) -> None:
        """Create the streams and start the thread. Idempotent."""
        if self._thread is not None:
            return
        # At exit, wait for replays while the update thread still runs: torch_npu waits too late.
        atexit.register(_settle_at_exit, weakref.ref(self), identity.token)
        self.stream = self._namespace.SyncLaunchStream(self._index)
        self.rescue_stream = self._namespace.SyncLaunchStream(self._index)
        self._thread = threading.Thread(
            target=self._run, name=f"devgraph update npu:{self._index}", daemon=True
        )
        self._running = True
        try:
            self._thread.start()
        except RuntimeError:
            self._running = False
            raise

    def submit(self, work: Callable[[], None]) -> Job:
        """Queue ``work`` after all earlier jobs."""
        self.require_alive()
        job = Job(work)
        self.queue(job)
        return job

    def queue(self, job: Job) -> None:
        """Queue ``job``. After an interrupt, it may be queued a second time."""
        with self.order:
            self._last = job
            self._queue.put(job)

    def require_alive(self) -> None:
        """Raise UpdateError if the thread has ended, because a replay would wait forever."""
        if not self._running:
            raise UpdateError(
                f"the update thread of npu:{self._index} has ended, and a graph with updatable "
                f"regions would wait for it forever. Start a new process, or capture with "
                f"policy='breakable'."
            )

    def finish(self, job: Job, what: str) -> None:
        """Wait until ``job`` has been issued, and re-raise its exception."""
        if self.on_thread():
            return
        deadline = time.monotonic() + self.timeout
        while not job.wait(min(0.2, self.timeout)):
            self.require_alive()
            if time.monotonic() > deadline:
                raise UpdateError(
                    f"{what} was not issued within {self.timeout:g} s, because the host code of a "
                    f"region does not return or the driver's queue is full. Inspect the stack of "
                    f"the update thread."
                )
        if job.error is not None:
            error, job.error = job.error, None
            raise error

    def on_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def watch(self, regions: Any) -> None:
        """Check periodically whether the last replay of ``regions`` is over, until ``unwatch``."""
        with self._watching:
            self._watched.add(regions)

    def unwatch(self, regions: Any) -> None:
        """Stop watching ``regions`` after their last replay has ended or has been released."""
        with self._watching:
            self._watched.discard(regions)

    def watched(self) -> list[Any]:
        """Return the regions whose last replay may still be running."""
        with self._watching:
            return list(self._watched)

    def settle(self) -> list[Any]:
        """Wait until all watched replays have ended or have been released; return their regions."""
        waiting = watched = self.watched()
        while waiting := [regions for regions in waiting if not regions.settled()]:
            time.sleep(0.0001)
        return watched

    def _run(self) -> None:
        try:
            self._namespace.set_device(self._index)
            while True:
                self._next()
        finally:
            self._running = False

    def _next(self) -> None:
        try:
            job = self._queue.get(timeout=_IDLE_SECONDS if self._watched else None)
        except queue.Empty:
            for regions in self.watched():
                if regions.settled():
                    self.unwatch(regions)
        else:
            with self._namespace.stream(self.stream):
                job.run()


def _settle_at_exit(reference: weakref.ref[UpdateChannel], owner: object) -> None:
    channel = reference()
    if channel is not None and identity.token is owner:
        with contextlib.suppress(Exception):  # Nothing waits on a lost device.
            channel.settle()
