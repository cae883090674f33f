"""Device: who has a vendor's device to himself, and whether it still works.

And in which process: handles of a device do not survive a fork.
"""

from __future__ import annotations

import abc
import contextlib
import ctypes
import gc
import logging
import os
import threading
import weakref
from collections.abc import Iterator
from typing import Any, Protocol

import torch

from devgraph.api.capabilities import Capabilities
from devgraph.api.errors import CaptureBusyError, DeviceLost, InputError, StateError

logger = logging.getLogger(__name__)

CAPTURE_ERROR_MODES = ("global", "thread_local", "relaxed")


class _Identity:
    """Replaced in every forked child, so that comparing by ``is`` costs no system call."""

    def __init__(self) -> None:
        self.token = object()
        self.devices: weakref.WeakSet[Device] = weakref.WeakSet()
        """Told of every fork, in the child, which has no other thread yet."""

    def renew(self) -> None:
        self.token = object()
        for device in list(self.devices):
            device.after_fork()

    def require(self, token: object, call: str) -> None:
        """Raise StateError unless ``token`` is that of this process."""
        if token is not self.token:
            raise StateError(
                f"cannot {call} in a forked process: graphs, captures, pools and runners belong "
                f"to the process that made them. Start workers with 'spawn' and capture there."
            )


identity = _Identity()
os.register_at_fork(after_in_child=identity.renew)


class _Collector:
    """The garbage collector, off while any thread has it rest: captures of several devices overlap,
    and the last to end must not leave it off."""

    def __init__(self) -> None:
        self._resting: list[int] = []
        """The threads that have it rest."""
        self._was_on = False
        self.after_fork()

    def after_fork(self) -> None:
        """Forget the threads that are not in the child."""
        self._lock = threading.RLock()
        self._resting = [each for each in self._resting if each == threading.get_ident()]
        self._wake()

    def _wake(self) -> None:
        if self._was_on and not self._resting:
            self._was_on = False
            gc.enable()

    @contextlib.contextmanager
    def at_rest(self) -> Iterator[None]:
        """Collect no garbage in the block."""
        here = threading.get_ident()
        before = self._resting.count(here)
        try:
            with self._lock:
                self._was_on |= gc.isenabled()
                self._resting.append(here)
                gc.disable()
            yield
        finally:
            try:
                self._end_rest(here, before)
            except BaseException:  # an interrupt
                self._end_rest(here, before)
                raise

    def _end_rest(self, here: int, before: int) -> None:
        with self._lock:
            if self._resting.count(here) > before:
                self._resting.remove(here)
            self._wake()


collector = _Collector()
os.register_at_fork(after_in_child=collector.after_fork)


def keep_for_ever(*things: object) -> None:
    """Let no one free ``things``, the end of the interpreter included.

    For what a lost device owns: its destructor would fail, and that ends the process.
    """
    for thing in things:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


class _Told(Protocol):
    def give_up(self) -> None:
        """The device is lost."""


class Device(abc.ABC):
    """A device as pools, graphs and sessions see it; the base of every backend."""

    name: str = ""
    capabilities: Capabilities = Capabilities()
    capture_lock_timeout: float = 60.0
    """Seconds that a capture waits for another thread's capture on the same device."""

    def __init__(self) -> None:
        self.after_fork()
        identity.devices.add(self)
        self._lost = ""
        self.keeps_memory = False
        """Whether memory of graphs is not given back any more."""
        self._buried: list[Any] = []
        self.graphs: weakref.WeakSet[_Told] = weakref.WeakSet()
        """Every living graph, which must be told when the device is lost."""

    def after_fork(self) -> None:
        """Forget who captures: that thread is not in the child."""
        self._capture_lock = threading.RLock()
        self._capturing: threading.Thread | None = None
        self.recording = False
        """Whether a session is open."""

    @property
    @abc.abstractmethod
    def device(self) -> torch.device:
        """The device whose work is captured."""

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Wait until all work of the device is done."""

    def memory_info(self) -> tuple[int, int] | None:
        """Return (free, total) bytes of device memory, or None where that is not known."""
        return None

    def elsewhere(self) -> bool:
        """Whether this thread's current device is another one than the backend's."""
        return False

    def on_device(self) -> contextlib.AbstractContextManager[Any]:
        """Make the backend's device the current one of this thread for a block."""
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def side_stream(self, pool: Any, stream: Any = None) -> Iterator[None]:
        """Run the block on a stream that can be captured, ordered after and before the current.

        The base class has no streams and runs it in place.
        """
        yield

    def off_stuck_stream(self) -> contextlib.AbstractContextManager[None]:
        """Do the work of the block, though a failed capture may have left the current stream
        recording for ever."""
        return contextlib.nullcontext()

    def new_replay_lock(self) -> threading.RLock:
        """Return the lock that a new pool holds while it replays.

        Where other threads must leave the device alone during a capture, it is the capture's own:
        a replay then waits until the capture is over.
        """
        return threading.RLock() if self.capabilities.concurrent_threads else self._capture_lock

    def check_capture_error_mode(self, mode: str) -> str:
        """Return the backend's own mode for ``mode``; the strictest it has if it lacks it."""
        if mode not in CAPTURE_ERROR_MODES:
            raise InputError(
                f"capture_error_mode {mode!r} is none of {', '.join(CAPTURE_ERROR_MODES)}"
            )
        known = self.capabilities.capture_error_modes
        if mode in known:
            return mode
        logger.info("%s has no capture error mode %s; using %s", self.name, mode, known[0])
        return known[0]

    @property
    def held_here(self) -> bool:
        """Whether this thread has the device to itself."""
        return self._capturing is threading.current_thread()

    @property
    def recording_here(self) -> bool:
        """Whether this thread has a session open."""
        return self.recording and self.held_here

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Have the device to oneself: no other thread captures meanwhile.

        What waits for the whole device needs this, because drivers refuse to wait for a device
        with a capture under way, and end that capture as well. May be nested in one thread. Raises
        what ``locked`` does.
        """
        if self.held_here:
            yield
            return
        with self.locked(self._capture_lock):
            try:
                self._capturing = threading.current_thread()
                yield
            finally:
                self._capturing = None
                self._buried.clear()

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """Have the device to oneself, and collect no garbage meanwhile.

        A collection inside a capture, or while allocations are routed to a pool, could free graphs
        and pools or unload kernels: drivers and allocators refuse that, or worse, record it.
        """
        with self.exclusive(), collector.at_rest():
            yield

    def keep_memory(self) -> None:
        """Give no memory back any more: the device is lost, or a capture that nothing could end
        counts as under way until the process ends."""
        self.keeps_memory = True
        keep_for_ever(*self._buried)

    def bury(self, *things: Any) -> None:
        """Keep ``things`` until no capture is under way, if one is; for ever with ``keep_memory``.

        Device memory that is given back meanwhile would end the process.
        """
        if self.keeps_memory:
            keep_for_ever(*things)
        elif self._capturing is not None:
            self._buried.append(things)

    @contextlib.contextmanager
    def locked(self, lock: Any) -> Iterator[None]:
        """Hold ``lock``, which a capture of another thread may hold.

        Raises:
            CaptureBusyError: it does so for too long.
        """
        held: list[bool] = []
        try:
            # One call, so that no interrupt comes between taking the lock and knowing that.
            held.extend(map(lock.acquire, (True,), (self.capture_lock_timeout,)))
            if not held[0]:
                who = getattr(self._capturing, "name", "")
                raise CaptureBusyError(
                    f"thread {who!r} has been capturing on {self.device} for more "
                    f"than {self.capture_lock_timeout:g} s; only one thread captures at a time."
                )
            yield
        finally:
            if held and held[0]:
                lock.release()

    def require_alive(self) -> None:
        """Raise DeviceLost if an earlier call found the device in an error state that does not
        end."""
        if self._lost:
            raise DeviceLost(f"{self.device} is lost ({self._lost}); start a new process.")

    def raise_if_lost(self, error: BaseException) -> None:
        """Raise DeviceLost from ``error``, and at every later capture, if it means just that."""
        reason = self.lost_reason(error)
        if reason is not None and not isinstance(error, DeviceLost):
            self._lost = reason
            self.keep_memory()
            for graph in list(self.graphs):
                graph.give_up()
            raise DeviceLost(
                f"{self.device} is in a sticky error state and every later call will fail; "
                f"start a new process ({reason})."
            ) from error

    def lost_reason(self, error: BaseException) -> str | None:
        """Return why ``error`` means that the device is lost, or None if it does not."""
        return None

    def shortage(self, error: BaseException) -> str | None:
        """Return what a capture lacked if ``error`` says that a resource of the device, other than
        torch's memory, ran out; else None."""
        return None

    def is_host_read(self, error: BaseException) -> bool:
        """Whether the vendor raised ``error`` because a capture read device data on the host."""
        return False

    def __repr__(self) -> str:
        return f"<backend {self.name} on {self.device}>"
