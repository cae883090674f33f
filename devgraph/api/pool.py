"""Pool: the memory that graphs share, kept alive as long as any of them uses it.

What graphs launch is kept with it, under one byte budget (devgraph/api/executable.py).
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from devgraph.api.device import Device
from devgraph.api.errors import CapabilityError, ConfigError, StateError, finite
from devgraph.api.executable import Recordings
from devgraph.api.process import identity

if TYPE_CHECKING:
    from devgraph.api.buffers import StaticBuffers


def _replay_lock(backend: Device) -> threading.RLock:
    """Return the lock that a new pool holds while it replays.

    It is the capture lock where other threads must not use the device during a capture: replays
    then wait until the capture has ended.
    """
    concurrent = backend.capabilities.concurrent_threads
    return threading.RLock() if concurrent else backend.capture_lock.lock


class Pool:
    """Graph memory of one backend: blocks, one capture stream, recordings and replay order.

    Graphs that share a pool share memory: their replays are serialised, whichever thread or
    stream starts them. Any order of dropping pools and graphs is safe.

    Args:
        backend: the backend that made it (``backend.make_pool()``).
        releasable: whether ``release`` can give the memory back.
    """

    def __init__(self, backend: Device, *, releasable: bool = False) -> None:
        if releasable and not backend.capabilities.releasable_memory:
            raise CapabilityError(
                f"backend {backend.name!r} cannot give the memory of a pool back to the device and "
                f"map it at the same addresses again (releasable_memory). Close the graphs and "
                f"capture them again instead: invalidate() and capture() of a runner."
            )
        self.backend = backend
        self.recordings = Recordings()
        self.releasable = releasable
        self._lock = _replay_lock(backend)
        self._process = identity.token
        self.occupied = False
        """Whether the thread that holds ``lock`` runs an eager body between segments of the pool,
        which count on its memory."""
        self.used = False
        """Whether a capture has ever been begun in it."""
        self.ordered_stream: int | None = None
        """The stream that was current in the last ``order``; None where there are no streams."""
        self.epoch = 0
        """Changes whenever a graph of the pool stops being replayable."""
        self._static: list[weakref.ref[StaticBuffers]] = []

    @property
    def lock(self) -> threading.RLock:
        """Held while a replay of the pool is being launched or its memory changes hands.

        Raises:
            StateError: in a forked process, where the thread that holds it may not exist.
        """
        identity.require(self._process, "use a pool")
        return self._lock

    def require_free(self, call: str) -> None:
        """Raise StateError inside an eager body between segments of the pool; called under
        ``lock``."""
        if self.occupied:
            raise StateError(
                f"cannot {call} inside an eager body of a step whose graphs share the pool: the "
                f"segments around it count on the pool's memory. Do it before or after the step, "
                f"or use a pool of its own (backend.make_pool())."
            )

    def release(self) -> None:
        """Give the device memory of the graphs and their executables back until ``restore``.

        Every graph stays, and is replayed at the same addresses afterwards, without a capture. What
        tensors that are alive have in the pool is kept, on the host, and what regions and eager
        bodies allocated: kernels may count on what an earlier launch left there. Of memory that
        captures freed a replay writes what it reads. Idempotent.

        Raises:
            CapabilityError: the pool was not made by ``make_pool(releasable=True)``.
            StateError: this thread captures, or is inside an eager body of a step on the pool.
        """
        with self.lock:
            self.require_free("release the memory of a pool")
            if self.backend.capture_lock.is_recording_here:
                raise StateError("cannot release the memory of a pool inside a capture.")
            if not self.releasable:
                raise CapabilityError(
                    "the memory of this pool cannot be given back: make it with "
                    "backend.make_pool(releasable=True) and hand it to what captures."
                )
            if self.recordings.released:
                return
            self.backend.synchronize()
            self.epoch += 1
            self.recordings.release()
            self._release()

    def restore(self) -> None:
        """Take memory for what ``release`` gave back. Idempotent.

        Raises:
            ResourceError: there is not enough; nothing is lost, and it may be tried again.
        """
        with self.lock:
            if self.recordings.released:
                self._restore()
                self.recordings.released = False

    def _release(self) -> None:
        """Give the memory back; the device has nothing to do."""
        raise NotImplementedError

    def _restore(self) -> None:
        """Take memory at the same addresses; raises ResourceError and changes nothing."""
        raise NotImplementedError

    @contextlib.contextmanager
    def eager_body(self) -> Iterator[None]:
        """Run an eager body between segments of the pool; called under ``lock``."""
        self.occupied = True
        try:
            yield
        finally:
            self.occupied = False

    def limit(self, memory: float) -> None:
        """Give executables and recordings a budget, unless it is lower already.

        Args:
            memory: bytes, or between 0 and 1 a share of the device's memory.

        Raises:
            InputError: it is no such number.
            ConfigError: it is a share, and the backend does not know its memory.
        """
        share = 0 < finite("memory", memory) < 1
        info = self.backend.memory_info() if share else None
        if share and info is None:
            raise ConfigError(
                f"memory={memory!r} is a share, and backend {self.backend.name!r} cannot tell the "
                f"memory of its device; give a number of bytes"
            )
        with self.lock:
            self.require_free("give a budget to a pool")
            self.recordings.limit(int(memory * info[1] if info else memory))

    def register(self, buffers: StaticBuffers) -> None:
        """Let regions touch ``buffers``, and what is bound there, in every recording."""
        self._static = [*(ref for ref in self._static if ref() is not None), weakref.ref(buffers)]

    @property
    def registered(self) -> list[torch.Tensor]:
        """The tensors of registered static buffers, bound ones included."""
        alive = [buffers for ref in self._static if (buffers := ref()) is not None]
        return [tensor for b in alive for tensor in (*b.values(), *b.bound.values())]

    @property
    def bytes(self) -> int:
        """Device memory that the pool holds, without recordings."""
        return 0

    @property
    def segments(self) -> Sequence[int]:
        """The sizes in which that memory was taken from the device; no block lies in two."""
        return [self.bytes]

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor over the same memory that does not keep this pool's block from reuse.

        Memory that is not the pool's is returned as it is, owned.
        """
        return tensor

    def bare(self, tensor: torch.Tensor) -> torch.Tensor:
        """``alias`` for a tensor that is known to be the pool's, or whose owner outlives the use:
        nothing is looked up."""
        return self.alias(tensor)

    def graph_memory(self) -> contextlib.AbstractContextManager[Any]:
        """Return what allocates from the pool outside captures, between segments of one. What is
        freed before the last segment ends is reused by later segments, and by other graphs."""
        return contextlib.nullcontext()

    def order(self) -> None:
        """Make the current stream wait for the pool's last replay. Called under ``lock``."""

    def __reduce__(self) -> Any:
        raise TypeError("a Pool owns device memory and cannot be pickled or copied")

    def check(self, backend: Device) -> None:
        """Raise StateError when the pool belongs to another backend."""
        if self.backend is not backend:
            raise StateError(
                f"this pool belongs to backend {self.backend.name!r} and was given to "
                f"{backend.name!r}; make one with backend.make_pool()"
            )
