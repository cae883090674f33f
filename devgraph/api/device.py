"""Device: exclusive access for captures, and detection of a lost device."""

from __future__ import annotations

import abc
import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from devgraph.api.capabilities import Capabilities
from devgraph.api.errors import CaptureBusyError, DeviceLost, NestedCaptureError
from devgraph.api.process import identity


class CaptureLock:
    """The lock that a thread holds while it captures on a device."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.owner: threading.Thread | None = None
        self.recording = False
        """Whether a session is open."""
        self.buried: list[object] = []
        """Objects to free after a capture, because freeing them earlier would abort the process."""
        self.is_stream_capturing: Callable[[], bool] = lambda: False
        """Return whether the current stream is being captured, by devgraph or by other code."""

    @property
    def is_held_here(self) -> bool:
        return self.owner is threading.current_thread()

    @property
    def is_recording_here(self) -> bool:
        return self.recording and self.is_held_here

    @property
    def is_foreign_here(self) -> bool:
        """Whether the current stream is being captured by code other than devgraph."""
        return not self.is_recording_here and self.is_stream_capturing()


class Device(abc.ABC):
    """The methods of a backend that pools, graphs and sessions use."""

    name: str = ""
    capabilities: Capabilities = Capabilities()
    capture_lock_timeout: float = 60.0
    """Seconds that a capture waits for another thread's capture on the same device."""

    def __init__(self) -> None:
        self.after_fork()
        identity.devices.add(self)
        self.lost = ""
        """Reason why the device is lost; empty while the device works."""
        self.keeps_memory = False
        """Whether memory of graphs stays allocated until the process ends."""
        self.graphs: weakref.WeakSet[Any] = weakref.WeakSet()
        """Live graphs, whose ``give_up`` is called when the device is lost."""
        self.gate_sets: weakref.WeakSet[Any] = weakref.WeakSet()
        """``Gates`` at which the device waits; ``synchronize`` raises their errors."""

    def after_fork(self) -> None:
        """Replace the capture lock, because its owner may be a thread of the parent process."""
        self.capture_lock = CaptureLock()

    @property
    @abc.abstractmethod
    def device(self) -> torch.device:
        """The device whose work is captured."""

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Wait until all work of the device has finished."""

    def memory_info(self) -> tuple[int, int] | None:
        """Return (free, total) bytes of device memory, or None if they are unknown."""
        return None

    def is_current(self) -> bool:
        """Whether the backend's device is this thread's current device."""
        return True

    def on_device(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which the backend's device is this thread's current device."""
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def side_stream(self, pool: Any, stream: Any = None) -> Iterator[None]:
        """Run the block on a stream that can be captured, in order with the current stream.

        The base class has no streams and only runs the block.
        """
        yield

    def on_working_stream(self) -> contextlib.AbstractContextManager[None]:
        """Return a context on another stream if a failed capture left the current one capturing."""
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Prevent captures by other threads during the block; may be nested.

        Enter this context before waiting for the whole device. During a capture, drivers refuse
        such a wait and invalidate the capture.

        Raises:
            CaptureBusyError: another thread's capture does not finish in time.
        """
        if self.capture_lock.is_held_here:
            yield
            return
        capture_lock = self.capture_lock
        with locked(self, capture_lock.lock):
            try:
                capture_lock.owner = threading.current_thread()
                yield
            finally:
                capture_lock.owner = None
                capture_lock.buried.clear()

    def keep_memory(self) -> None:
        """Stop freeing memory of graphs for the rest of the process.

        Called if the device is lost, or if the driver still considers a failed capture active.
        """
        self.keeps_memory = True

    def lost_reason(self, error: BaseException) -> str | None:
        """Return the reason if ``error`` means that the device is lost, or None."""
        return None

    def shortage(self, error: BaseException) -> str | None:
        """Return a message if ``error`` reports an exhausted resource other than memory, or None.

        torch raises its own error for exhausted memory.
        """
        return None

    def is_host_read(self, error: BaseException) -> bool:
        """Whether the vendor raised ``error`` because a capture read device data on the host."""
        return False

    def __repr__(self) -> str:
        return f"<backend {self.name} on {self.device}>"


@contextlib.contextmanager
def locked(device: Device, lock: Any) -> Iterator[None]:
    """Hold ``lock`` in the block; raise CaptureBusyError if a capture holds it for too long."""
    with acquiring(lock, device.capture_lock_timeout) as acquired:
        if not acquired:
            who = getattr(device.capture_lock.owner, "name", "")
            raise CaptureBusyError(
                f"thread {who!r} has been capturing on {device.device} for more than "
                f"{device.capture_lock_timeout:g} s; only one thread captures at a time."
            )
        yield


@contextlib.contextmanager
def acquiring(lock: Any, seconds: float = 0) -> Iterator[bool]:
    """Try to acquire ``lock`` for the block within ``seconds``; yield whether that succeeded."""
    acquired: list[bool] = []
    try:
        # A single call acquires the lock and records it, because an interrupt between two calls
        # would leave the lock acquired.
        acquired.extend(map(lock.acquire, (True,), (seconds,)))
        yield acquired[0]
    finally:
        if acquired == [True]:
            lock.release()


def refuse_foreign_capture(device: Device, action: str) -> None:
    if device.capture_lock.is_foreign_here:
        raise NestedCaptureError(
            f"cannot {action} inside a capture by other code. Capture the whole step with "
            f"dg.capture, or call the original function there."
        )


def require_alive(device: Device) -> None:
    """Raise DeviceLost if an earlier call found the device in a sticky error state."""
    if device.lost:
        raise DeviceLost(f"{device.device} is lost ({device.lost}); start a new process.")


def raise_if_lost(device: Device, error: BaseException) -> None:
    """If ``error`` means that the device is lost, raise DeviceLost from it.

    Afterwards no graph of the device can be launched, and no capture can begin.
    """
    reason = device.lost_reason(error)
    if reason is not None and not isinstance(error, DeviceLost):
        device.lost = reason
        device.keep_memory()
        for graph in list(device.graphs):
            graph.give_up()
        raise DeviceLost(
            f"{device.device} is in a sticky error state and every later call will fail; "
            f"start a new process ({reason})."
        ) from error
