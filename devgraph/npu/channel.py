"""Updates beside replays: one thread and one stream per device, jobs in launch order.

A captured region waits on the device for its event. The thread here re-runs the region's host code
in update mode and records the event, while earlier parts of the replay already run. All graphs of
a device share the thread, the stream and the queue: a replay waits only for jobs that were queued
before or with it, and a job waits only for replays that were launched before, so neither can wait
for ever.

The stream has no task queue of torch_npu behind it. An operator that the driver refuses there
raises at its call; in the task queue it would end the queue's thread, after which torch_npu drops
every later launch of the process without a word.
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

_IDLE_SECONDS = 1.0
"""How often the thread looks for replays that wait too long, while there are any."""


class Job:
    """One piece of host work for the update stream, done once however often it is queued.

    It is done on the thread and must not hold a graph: the last reference to one must not be
    dropped there.
    """

    __slots__ = ("_held", "done", "error", "work")

    def __init__(self, work: Callable[[], None]) -> None:
        self.work: Callable[[], None] | None = work
        self.error: BaseException | None = None
        self.done = False
        """Whether the work was issued."""
        # Until then. No event of Python's, whose lock stays taken where an interrupt comes.
        self._held = threading.Lock()
        self._held.acquire()

    def run(self) -> None:
        """Do the work and remember its exception."""
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
        """Wait until the work was issued; False after ``seconds``."""
        if not self.done and self._held.acquire(timeout=seconds):
            self._held.release()
        return self.done


class UpdateChannel:
    """The update thread and stream of one device.

    Args:
        namespace: ``torch.npu``.
        index: the device.
        timeout: seconds after which a job, or a replay whose events were recorded, is stuck.
    """

    def __init__(self, namespace: Any, index: int, timeout: float = 60.0) -> None:
        self._namespace = namespace
        self._index = index
        self.timeout = timeout
        self.order = threading.RLock()
        """Held while a replay is launched and its job queued, which is one step."""
        self.stream: Any = None
        self.rescue_stream: Any = None
        """Where events are recorded again that a replay waits for too long."""
        self._queue: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._running = False  # Python forgets a thread if an interrupt comes while it is asked
        self._watched: weakref.WeakSet[Any] = weakref.WeakSet()
        # A set that changes while another thread looks at it would end the thread that looks.
        self._watching = threading.RLock()
        self._launching = False
        self._last: Job | None = None

    @property
    def quiet(self) -> bool:
        """Whether no replay waits, or may have to wait, for something that the host does.

        Only then may a thread that holds the interpreter's lock wait for the device. Ask while
        holding ``order``.
        """
        last = self._last
        if self._launching or not (last is None or last.done):
            return False
        # A replay whose signal was lost waits until it is given up.
        return all(regions.settled() for regions in self.watched())

    @contextlib.contextmanager
    def launching(self) -> Iterator[None]:
        """Hold ``order`` for one launch and the queueing of its job."""
        with self.order:
            self._launching = True
            try:
                yield
            finally:
                self._launching = False

    def start(self) -> None:
        """Start the thread and make the streams, once."""
        if self._thread is not None:
            return
        # torch_npu waits for the device when the process ends, after the thread was ended.
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
        """Queue ``work`` behind what is queued already.

        Raises:
            UpdateError: the thread has ended.
        """
        self.require_alive()
        job = Job(work)
        self.queue(job)
        return job

    def queue(self, job: Job) -> None:
        """Queue ``job``, which may be queued already: after an interrupt nobody knows."""
        with self.order:
            self._last = job
            self._queue.put(job)

    def require_alive(self) -> None:
        """Raise UpdateError if the thread has ended: a replay would wait for ever."""
        if not self._running:
            raise UpdateError(
                f"the update thread of npu:{self._index} has ended, and a graph with updatable "
                f"regions would wait for it for ever. Start a new process, or capture with "
                f"policy='breakable'."
            )

    def finish(self, job: Job, what: str) -> None:
        """Wait until ``job`` was issued and raise what it raised.

        Raises:
            UpdateError: it was not issued in time.
        """
        if self.on_thread():
            return
        deadline = time.monotonic() + self.timeout
        while not job.wait(min(0.2, self.timeout)):
            self.require_alive()
            if time.monotonic() > deadline:
                raise UpdateError(
                    f"{what} was not issued within {self.timeout:g} s: the host code of a region "
                    f"does not return, or the driver's queue is full."
                )
        if job.error is not None:
            error, job.error = job.error, None
            raise error

    def on_thread(self) -> bool:
        """Whether the caller is the update thread."""
        return threading.current_thread() is self._thread

    def watch(self, regions: Any) -> None:
        """Look from time to time whether the last replay of ``regions`` ends."""
        with self._watching:
            self._watched.add(regions)

    def unwatch(self, regions: Any) -> None:
        """Stop looking: the last replay of ``regions`` has ended, or was given up."""
        with self._watching:
            self._watched.discard(regions)

    def watched(self) -> list[Any]:
        """Return the regions whose last replay may be under way."""
        with self._watching:
            return list(self._watched)

    def settle(self) -> list[Any]:
        """Wait until every watched replay is done or was given up, and return their regions."""
        waiting = watched = self.watched()
        while waiting := [regions for regions in waiting if not regions.settled()]:
            time.sleep(0.0001)
        return watched

    # The thread.

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


def _settle_at_exit(known: weakref.ref[UpdateChannel], owner: object) -> None:
    channel = known()
    if channel is not None and identity.token is owner:
        with contextlib.suppress(Exception):  # a lost device waits for nothing
            channel.settle()
