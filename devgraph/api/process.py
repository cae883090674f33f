"""Process-wide state: the identity of a forked process, and the garbage collector."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from devgraph.api.errors import StateError


class _Identity:
    """A token that identifies the process, because device handles do not survive a fork.

    Each forked child has a different token. Compare tokens with ``is``.
    """

    def __init__(self) -> None:
        self.token = object()
        self.devices: weakref.WeakSet[Any] = weakref.WeakSet()
        """Devices whose ``after_fork`` is called in a forked child."""

    def renew(self) -> None:
        self.token = object()
        for device in list(self.devices):
            device.after_fork()

    def require(self, token: object, call: str) -> None:
        """Raise StateError unless ``token`` belongs to this process."""
        if token is not self.token:
            raise StateError(
                f"cannot {call} in a forked process: graphs, captures, pools and runners belong "
                f"to the process that created them. Start workers with 'spawn' and capture there."
            )


identity = _Identity()
os.register_at_fork(after_in_child=identity.renew)


class _Collector:
    """A switch that keeps the garbage collector off while at least one thread captures."""

    def __init__(self) -> None:
        self._pauses: dict[object, int] = {}
        """Thread of each pause."""
        self._was_enabled = False
        self.after_fork()

    def after_fork(self) -> None:
        """Forget the pauses of threads that the child process does not have."""
        self._lock = threading.RLock()
        own = threading.get_ident()
        self._pauses = {pause: thread for pause, thread in self._pauses.items() if thread == own}
        if self._was_enabled and not self._pauses:
            self._was_enabled = False
            gc.enable()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Prevent collections in all threads during the block."""
        pause = object()
        try:
            with self._lock:
                self._was_enabled |= gc.isenabled()
                self._pauses[pause] = threading.get_ident()
                gc.disable()
            yield
        finally:
            with self._lock:
                try:
                    self._pauses.pop(pause, None)
                finally:  # An interrupt in a Python function would leave the collector off.
                    if self._was_enabled and not self._pauses:
                        self._was_enabled = False
                        gc.enable()


collector = _Collector()
os.register_at_fork(after_in_child=collector.after_fork)


def several_ranks() -> bool:
    """Whether this process is one of several ranks of torch's process group."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def keep_forever(*objects: object) -> None:
    """Prevent the destruction of ``objects``, even at interpreter exit.

    On a lost device, the destructor of an object would fail and abort the process.
    """
    for kept in objects:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
