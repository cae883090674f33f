"""Pool: the memory that graphs share, kept alive as long as any of them uses it."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import attrs
import torch

from devgraph.api import process
from devgraph.api.device import Device
from devgraph.api.errors import InputError, InputTypeError, StateError, brief

if TYPE_CHECKING:
    from devgraph.api.buffers import StaticBuffers

DEFAULT_BUDGET_BYTES = 256 * 2**20
"""Recordings of a pool may take this much by default: about 160 executables of a 36-layer decode
step at 1.6 MiB each (measured on one H200, see docs/benchmarks.md)."""


class Recording(Protocol):
    """A region set's parameters for one key, made by a backend; owned by the pool."""

    @property
    def bytes(self) -> int:
        """Memory that the recording takes."""

    def close(self) -> None:
        """Free it; safe while a replay that used it is in flight."""


@runtime_checkable
class Shrinkable(Protocol):
    """A recording that can give up memory and still be used."""

    def shrink(self) -> None:
        """Free what a later use can make again without running a region."""


class Owner(Protocol):
    """What recordings belong to: a graph."""

    @property
    def key(self) -> Hashable:
        """The key of the host values that the next launch uses."""


@attrs.define
class _Kept:
    owner: weakref.ref[Owner]
    recording: Recording
    charged: int


class Recordings:
    """Recordings by (graph, key) under one byte budget, least recently used first out.

    When the budget is exceeded, recordings first shrink and only then go, oldest first. The newest
    one and those that a graph's next launch uses stay as they are.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.bytes = 0
        self.hits = 0
        self.misses = 0
        self.evictions = 0
        self._items: OrderedDict[tuple[int, Hashable], _Kept] = OrderedDict()

    def __len__(self) -> int:
        return len(self._items)

    @property
    def room(self) -> int:
        """Bytes that are left in the budget."""
        return max(self.budget_bytes - self.bytes, 0)

    def holds(self, owner: object, key: Hashable) -> bool:
        """Whether there is a recording for ``key``; counts nothing."""
        return (id(owner), key) in self._items

    def get(self, owner: object, key: Hashable) -> Any:
        """Return the recording for ``key`` or None, and count the hit or the miss."""
        found = self._items.get((id(owner), key))
        if found is None:
            self.misses += 1
            return None
        self.hits += 1
        self._items.move_to_end((id(owner), key))
        return found.recording

    def put(self, owner: Owner, key: Hashable, recording: Recording) -> None:
        """Keep ``recording`` and bring the rest under the budget."""
        if (id(owner), key) in self._items:
            self._remove((id(owner), key))
        size = recording.bytes
        self._items[id(owner), key] = _Kept(weakref.ref(owner), recording, size)
        self.bytes += size
        self.trim()

    def recharge(self, recording: Recording) -> None:
        """Count anew what ``recording`` takes, and bring the rest under the budget."""
        for kept in self._items.values():
            if kept.recording is recording:
                self._charge(kept)
                self.trim()
                return

    def trim(self) -> None:
        """Shrink, then evict, the least recently used until the budget holds."""
        if self.bytes <= self.budget_bytes:
            return
        spare = [item for item in list(self._items)[:-1] if not self._in_use(item)]
        for item in spare:
            kept = self._items[item]
            if isinstance(kept.recording, Shrinkable):
                kept.recording.shrink()
                self._charge(kept)
            if self.bytes <= self.budget_bytes:
                return
        for item in spare:
            self._remove(item)
            self.evictions += 1
            if self.bytes <= self.budget_bytes:
                return

    def count(self, owner: object) -> int:
        """Number of recordings of ``owner``."""
        return sum(1 for known, _ in self._items if known == id(owner))

    def bytes_of(self, owner: object) -> int:
        """Bytes that recordings of ``owner`` take."""
        return sum(k.charged for (known, _), k in self._items.items() if known == id(owner))

    def drop(self, owner: object) -> None:
        """Free every recording of ``owner``."""
        for item in [item for item in self._items if item[0] == id(owner)]:
            self._remove(item)

    def _in_use(self, item: tuple[int, Hashable]) -> bool:
        graph = self._items[item].owner()
        return graph is not None and graph.key == item[1]

    def _charge(self, kept: _Kept) -> None:
        size = kept.recording.bytes
        self.bytes += size - kept.charged
        kept.charged = size

    def _remove(self, item: tuple[int, Hashable]) -> None:
        kept = self._items.pop(item)
        self.bytes -= kept.charged
        kept.recording.close()


class Pool:
    """Graph memory of one backend: blocks, one capture stream, recordings and replay order.

    Graphs that share a pool share memory: their replays are serialised, whichever thread or
    stream starts them. Any order of dropping pools and graphs is safe.

    Args:
        backend: the backend that made it (``backend.make_pool()``).
        budget_bytes: the most that recordings of this pool's graphs may take.
    """

    def __init__(self, backend: Device, budget_bytes: int | None = None) -> None:
        if budget_bytes is not None:
            if isinstance(budget_bytes, bool) or not isinstance(budget_bytes, int):
                raise InputTypeError(
                    f"budget_bytes must be a number of bytes, got {brief(budget_bytes)}"
                )
            if budget_bytes < 0:
                raise InputError(f"budget_bytes must be at least 0, got {budget_bytes}")
        self.backend = backend
        self.recordings = Recordings(DEFAULT_BUDGET_BYTES if budget_bytes is None else budget_bytes)
        self._lock = backend.new_replay_lock()
        self._process = process.identity.token
        self.occupied = False
        """Whether the thread that holds ``lock`` runs an eager body between segments of the pool,
        which count on its memory."""
        self.used = False
        """Whether a capture has ever been begun in it."""
        self.epoch = 0
        """Changes whenever a graph of the pool stops being replayable."""
        self._static: list[weakref.ref[StaticBuffers]] = []

    @property
    def lock(self) -> threading.RLock:
        """Held while a replay of the pool is being launched or its memory changes hands.

        Raises:
            StateError: in a forked process, where the thread that holds it may not exist.
        """
        process.identity.require(self._process, "use a pool")
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

    @contextlib.contextmanager
    def eager_body(self) -> Iterator[None]:
        """Run an eager body between segments of the pool; called under ``lock``."""
        self.occupied = True
        try:
            yield
        finally:
            self.occupied = False

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

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor over the same memory that does not keep this pool's block from reuse.

        Memory that is not the pool's is returned as it is, owned.
        """
        return tensor

    def bare(self, tensor: torch.Tensor) -> torch.Tensor:
        """``alias`` for a tensor that is known to be the pool's, or whose owner outlives the use:
        nothing is looked up."""
        return self.alias(tensor)

    def order(self) -> None:
        """Make the current stream wait for the pool's last replay. Called under ``lock``."""

    @property
    def ordered_stream(self) -> int | None:
        """The stream that was current in the last ``order``; None where there are no streams."""
        return None

    def __reduce__(self) -> Any:
        raise TypeError("a Pool owns device memory and cannot be pickled or copied")

    def check(self, backend: Device) -> None:
        """Raise StateError when the pool belongs to another backend."""
        if self.backend is not backend:
            raise StateError(
                f"this pool belongs to backend {self.backend.name!r} and was given to "
                f"{backend.name!r}; make one with backend.make_pool()"
            )
