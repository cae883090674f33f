"""Pool: the memory that graphs share, kept alive as long as a graph uses it.

A pool also keeps the recordings and executables of its graphs under one byte budget
(devgraph/api/executable.py).
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from devgraph.api.device import Device
from devgraph.api.errors import CapabilityError, ConfigError, InputTypeError, StateError, finite
from devgraph.api.executable import Recordings
from devgraph.api.process import identity

if TYPE_CHECKING:
    from devgraph.api.buffers import StaticBuffers


class Pool:
    """The shared memory of graphs, and their capture stream, recordings and executables.

    Because graphs of a pool share memory, their replays run one at a time across all threads and
    streams. Pools and graphs can be dropped in any order.

    Args:
        backend: the backend of the pool; use ``backend.make_pool()``.
        releasable: whether ``release`` can return the memory to the device.
    """

    def __init__(self, backend: Device, *, releasable: bool = False) -> None:
        if releasable and not backend.capabilities.releasable_memory:
            raise CapabilityError(
                f"backend {backend.name!r} cannot release the memory of a pool and map it again at "
                f"the same addresses (releasable_memory). Close the graphs and capture them again "
                f"instead: invalidate() and capture() of a runner."
            )
        self.backend = backend
        self.recordings = Recordings()
        self.releasable = releasable
        # If other threads must not use the device during a capture, replays wait for the capture.
        concurrent = backend.capabilities.concurrent_threads
        self._lock = threading.RLock() if concurrent else backend.capture_lock.lock
        self._process = identity.token
        self.occupied = False
        """Whether a replay of the pool is running an eager body between its segments."""
        self.used = False
        """Whether a capture has ever begun in the pool."""
        self.ordered_stream: int | None = None
        """The current stream at the last ``order``; None on backends without streams."""
        self.epoch = 0
        """A number that changes whenever a bound launch of a graph of the pool becomes invalid."""
        self._static: list[weakref.ref[StaticBuffers]] = []

    @property
    def lock(self) -> threading.RLock:
        """A lock to hold during replays, captures, and changes of the pool's memory.

        Raises:
            StateError: this is a forked process, which lacks the thread that may hold the lock.
        """
        identity.require(self._process, "use a pool")
        return self._lock

    def require_free(self, call: str) -> None:
        """Raise StateError inside an eager body between segments of the pool.

        The caller holds ``lock``.
        """
        if self.occupied:
            raise StateError(
                f"cannot {call} inside an eager body of a step whose graphs share the pool, "
                f"because the segments before and after the body use the pool's memory. Move the "
                f"call out of the step, or use a separate pool (backend.make_pool())."
            )

    def release(self) -> None:
        """Release the device memory of the graphs and their executables until ``restore``.

        No graph needs a new capture, because ``restore`` maps memory at the same addresses. Live
        tensors, and memory that regions and eager bodies allocated, are saved on the host, because
        kernels may rely on data of an earlier launch. Memory that was freed during a capture is
        not saved, because a replay writes it before reading it. Idempotent.

        Raises:
            CapabilityError: the pool was not created with ``make_pool(releasable=True)``.
            StateError: this thread is capturing, or runs an eager body of a step on the pool.
        """
        with self.lock:
            self.require_free("release the memory of a pool")
            if self.backend.capture_lock.is_recording_here:
                raise StateError("cannot release the memory of a pool inside a capture.")
            if not self.releasable:
                raise CapabilityError(
                    "the memory of this pool cannot be released. Create the pool with "
                    "backend.make_pool(releasable=True) and pass it to the runner or the capture."
                )
            if self.recordings.released:
                return
            self.backend.synchronize()
            self.epoch += 1
            self.recordings.release()
            self._release()

    def restore(self) -> None:
        """Map the released memory again, and restore its contents. Idempotent.

        Raises:
            ResourceError: the device has too little memory. No data is lost, and the call can be
                repeated.
        """
        with self.lock:
            if self.recordings.released:
                self._restore()
                self.recordings.released = False

    def _release(self) -> None:
        """Release the memory; the device is idle."""
        raise NotImplementedError

    def _restore(self) -> None:
        """Map memory at the same addresses, or change nothing and raise ResourceError."""
        raise NotImplementedError

    @contextlib.contextmanager
    def eager_body(self) -> Iterator[None]:
        """Mark the block as an eager body between segments; the caller holds ``lock``."""
        self.occupied = True
        try:
            yield
        finally:
            self.occupied = False

    def limit(self, memory: float) -> None:
        """Lower the budget of executables and recordings to ``memory``; never raise it.

        Args:
            memory: number of bytes, or a share of the device's memory between 0 and 1.

        Raises:
            InputError: ``memory`` is not a finite number of at least 0.
            ConfigError: ``memory`` is a share, but the backend cannot report its memory.
        """
        share = 0 < finite("memory", memory) < 1
        info = self.backend.memory_info() if share else None
        if share and info is None:
            raise ConfigError(
                f"memory={memory!r} is a share, but backend {self.backend.name!r} cannot report "
                f"the memory of its device. Pass a number of bytes."
            )
        with self.lock:
            self.require_free("limit the memory of a pool")
            self.recordings.limit(int(memory * info[1] if info else memory))

    def register(self, buffers: StaticBuffers) -> None:
        """Allow regions to access ``buffers`` and their bound tensors, in all recordings."""
        self._static = [*(ref for ref in self._static if ref() is not None), weakref.ref(buffers)]

    @property
    def registered(self) -> list[torch.Tensor]:
        """The tensors of registered static buffers, including bound tensors."""
        alive = [buffers for ref in self._static if (buffers := ref()) is not None]
        return [tensor for b in alive for tensor in (*b.values(), *b.bound.values())]

    @property
    def bytes(self) -> int:
        """Device memory of the pool in bytes, without recordings."""
        return 0

    @property
    def segments(self) -> Sequence[int]:
        """Sizes of the allocator segments of the pool; a block never spans two of them."""
        return [self.bytes]

    def note_outputs(self, outputs: Iterable[torch.Tensor]) -> None:
        """Receive the tensors that the step returns, at the end of a recording."""

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor over the same memory that lets the pool reuse this memory.

        A tensor outside the pool's memory is returned unchanged and keeps its memory.
        """
        return tensor

    def bare(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return an alias of ``tensor`` without a lookup of its address.

        The tensor's memory must belong to the pool, or its owner must outlive the alias.
        """
        return self.alias(tensor)

    def graph_memory(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context manager in which eager allocations between segments use the pool.

        Later segments and other graphs may reuse memory that is freed in the block.
        """
        return contextlib.nullcontext()

    def order(self) -> None:
        """Make the current stream wait for the pool's last replay; the caller holds ``lock``."""

    def __reduce__(self) -> Any:
        raise InputTypeError("a Pool owns device memory and cannot be pickled or copied")

    def check(self, backend: Device) -> None:
        """Raise StateError if the pool belongs to another backend or to another process."""
        identity.require(self._process, "use a pool")
        if self.backend is not backend:
            raise StateError(
                f"this pool belongs to backend {self.backend.name!r} but was passed to "
                f"{backend.name!r}; create a pool with backend.make_pool()"
            )
