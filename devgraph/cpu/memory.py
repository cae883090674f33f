"""The memory of captured CPU graphs: blocks that are re-carved like those of a device's pool.

A tensor that a capture hands out owns its block; when the last tensor over the block dies, the
block is free and a later allocation of the pool, in this capture or in another, may take it. What
a graph keeps of such a tensor is an alias, which does not hold the block. So programs that read
memory that is no longer theirs misbehave here exactly as they do on a device.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from operator import attrgetter, itemgetter
from typing import Any

import attrs
import torch

from devgraph.api.errors import ResourceError
from devgraph.api.tensors import seen_by

ALIGNMENT = 64
"""Bytes; torch's own CPU allocator guarantees it, and equal bits of matrix kernels depend on it."""

SLAB_BYTES = 2 * 2**20
"""Smallest reservation; the size that device caching allocators use for small blocks."""


def _poison_byte(dtype: torch.dtype) -> int:
    """Return the byte that, repeated, is NaN, a huge integer or True in ``dtype``."""
    if dtype in (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz):
        return 0x80
    if dtype.is_floating_point or dtype.is_complex:
        return 0xFF
    return 0x01 if dtype is torch.bool else 0x7F


@attrs.frozen(kw_only=True, eq=False)
class Block:
    """One allocation that a live tensor owns: ``bytes`` at ``address``.

    ``storage_id`` names the owning storage: an alias has the same address and another storage.
    """

    address: int
    bytes: int
    storage_id: int
    shared: torch.UntypedStorage
    """A storage over the same bytes that does not hold the block."""
    origin: Any
    """What the allocation was made for, as given to ``empty``."""
    recording: int
    """Which recording it was made in."""
    owner: _Owner


class _Owner(weakref.ref[memoryview]):
    """Tells when the owner of the block at ``address`` is gone."""

    __slots__ = ("address",)
    address: int


_first, _second, _base = itemgetter(0), itemgetter(1), attrgetter("base")


class _Ranges:
    """Disjoint ranges of addresses, in their order."""

    def __init__(self, *ranges: tuple[int, int]) -> None:
        self.all = list(ranges)

    def add(self, start: int, end: int) -> None:
        """Add a range; it joins those that it touches."""
        first = bisect.bisect_left(self.all, start, key=_second)
        last = bisect.bisect_right(self.all, end, key=_first)
        if first < last:
            start, end = min(start, self.all[first][0]), max(end, self.all[last - 1][1])
        self.all[first:last] = [(start, end)]

    def remove(self, start: int, end: int) -> None:
        """Remove a part of one of the ranges."""
        at = bisect.bisect_right(self.all, start, key=_first) - 1
        rest = (self.all[at][0], start), (end, self.all[at][1])
        self.all[at : at + 1] = [(first, last) for first, last in rest if first < last]

    def meet(self, start: int, end: int) -> bool:
        """Whether some address from ``start`` to before ``end`` lies in a range."""
        at = bisect.bisect_right(self.all, start, key=_second)
        return at < len(self.all) and self.all[at][0] < end


_PRIVATE: dict[str, int] = (
    {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
)
"""What keeps a forked child's writes to itself, where there is fork."""


class _Slab:
    """A contiguous reservation; alive as long as anything points into it."""

    def __init__(self, size: int) -> None:
        try:
            self.pages = mmap.mmap(-1, size, **_PRIVATE)
        except (OSError, OverflowError, ValueError) as error:
            raise ResourceError(f"no memory for a tensor of {size} bytes: {error}") from error
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.pages))
        self.end = self.base + size
        self.free = _Ranges((self.base, self.end))
        self.window = memoryview(self.pages)
        """The bytes; a slice of it keeps the slab, and nothing else, alive."""


class Hold:
    """One user of a pool's memory; let go by ``release``, or when it is dropped."""

    __slots__ = ("__weakref__", "_known", "_pool")

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._known = weakref.ref(self, pool._holds.discard)
        pool._holds.add(self._known)

    def release(self) -> None:
        """Let go. Idempotent."""
        self._pool._holds.discard(self._known)
        self._pool._tidy()


class BlockPool:
    """Blocks of CPU memory for the tensors of captures; safe to use from several threads.

    Every block is handed out poisoned: NaN, huge integers, True. Only memory that held results
    before the recording under way keeps them: operations that read them are recorded and have not
    run.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # An interrupt may stop a change of the pool anywhere. So slabs by address and live blocks,
        # each changed in one step, are the truth; what is free is made anew after such a change.
        self._slabs: list[_Slab] = []
        self._live: dict[int, Block] = {}
        self._whole = True
        """Whether the last change came to its end."""
        # What died; filled without the lock, from any thread and from inside any call.
        self._dead: deque[_Owner] = deque()
        self._holds: set[weakref.ref[Hold]] = set()
        self._released = False
        self._saved: list[tuple[Block, bytes]] = []
        self._recording = 0
        self._unread = _Ranges()
        """What died in the recording under way and is older than it."""

    def begin_recording(self) -> None:
        """Say that no recorded operation is still to read memory that is free now."""
        with self._lock:
            self._collect()
            self._recording += 1
            self._unread = _Ranges()
            self._whole = True

    @property
    def reserved_bytes(self) -> int:
        """Bytes that the pool holds, used or free."""
        self._tidy()
        return 0 if self._released else sum(slab.end - slab.base for slab in self._slabs)

    def release(self) -> None:
        """Give the pages of all blocks back; what live tensors hold is kept elsewhere."""
        self._saved = [(b, ctypes.string_at(b.address, b.bytes)) for b in self.live()]
        self._released = True
        for slab in self._slabs:
            if hasattr(mmap, "MADV_DONTNEED"):
                slab.pages.madvise(mmap.MADV_DONTNEED)

    def restore(self) -> None:
        """Take pages again at the same addresses; where no live tensor is they hold poison."""
        for slab in self._slabs:
            ctypes.memset(slab.base, _poison_byte(torch.float32), slab.end - slab.base)
        self._tidy()
        for block, held in self._saved:
            if self._live.get(block.address) is block:
                ctypes.memmove(block.address, held, block.bytes)
        self._saved.clear()
        self._released = False

    def live(self) -> list[Block]:
        """Return the blocks that live tensors own, oldest first."""
        self._tidy()
        return list(self._live.values())

    def empty(
        self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, *, origin: Any = None
    ) -> torch.Tensor:
        """Return a poisoned tensor over a block of its own.

        Args:
            origin: kept with the block for ``live``.
        """
        extent = 1
        for length, step in zip(size, stride, strict=True):
            if length == 0:
                return torch.empty_strided(tuple(size), tuple(stride), dtype=dtype)
            extent += (length - 1) * step
        nbytes = -(-extent * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        with self._lock:
            self._collect()
            slab, address = self._take(nbytes)
            start = address - slab.base
            owner, other = slab.window[start : start + nbytes], slab.window[start : start + nbytes]
            storage = torch.frombuffer(owner, dtype=torch.uint8).untyped_storage()
            shared = torch.frombuffer(other, dtype=torch.uint8).untyped_storage()
            # The storage holds the window; when it dies the block is queued. That may be at any
            # point of any thread, so it runs no code of Python, which an interrupt could stop.
            gone = _Owner(owner, self._dead.append)
            gone.address = address
            self._live[address] = Block(
                address=address,
                bytes=nbytes,
                storage_id=storage._cdata,
                shared=shared,
                origin=origin,
                recording=self._recording,
                owner=gone,
            )
            del owner
            read_later = self._unread.meet(address, address + nbytes)
            self._whole = True
        if not read_later:
            ctypes.memset(address, _poison_byte(dtype), nbytes)
        return torch.empty(0, dtype=dtype).set_(storage, 0, tuple(size), tuple(stride))

    def covers(self, address: int) -> bool:
        """Whether ``address`` lies in this pool's memory, be it used or free."""
        with self._lock:
            at = bisect.bisect_right(self._slabs, address, key=_base) - 1
            return at >= 0 and address < self._slabs[at].end

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor over the same memory that does not keep its block from reuse.

        A tensor whose memory is not this pool's, or that is an alias already, is returned as is.
        """
        storage = tensor.untyped_storage()
        block = self._live.get(storage.data_ptr())
        if block is None or block.storage_id != storage._cdata:
            return tensor
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():  # no step's work
            plain = torch.empty(0, dtype=tensor.dtype).set_(
                block.shared, tensor.storage_offset(), tensor.size(), tensor.stride()
            )
            return seen_by(tensor, plain)

    def hold(self) -> Hold:
        """Keep all reserved memory while the result is held: a graph's temporaries live in blocks
        that look free. Without holds, reservations that have no live block are given back."""
        return Hold(self)

    def _tidy(self) -> None:
        # A collection may drop a hold while this very thread is inside the lock: then the rest is
        # left to whoever comes next.
        if not self._lock.locked():
            with self._lock:
                self._collect()
                self._whole = True

    def _find_free(self) -> None:
        for slab in self._slabs:
            slab.free = _Ranges((slab.base, slab.end))
        for block in self._live.values():
            self._slab_of(block.address).free.remove(block.address, block.address + block.bytes)

    def _collect(self) -> None:
        """Begin a change: make free what died. Whoever asks says when the change is ``_whole``."""
        if not self._whole:
            self._find_free()
        self._whole = False
        while self._dead:
            owner = self._dead[0]
            block = self._live.get(owner.address)
            # Another one's: what made the owner was interrupted.
            if block is not None and block.owner is owner:
                start, end = block.address, block.address + block.bytes
                if block.recording != self._recording:
                    self._unread.add(start, end)
                del self._live[start]
                self._slab_of(start).free.add(start, end)
            self._dead.popleft()
        if not self._holds:
            for slab in list(self._slabs):
                if slab.free.all == [(slab.base, slab.end)]:
                    self._slabs.remove(slab)

    def _take(self, nbytes: int) -> tuple[_Slab, int]:
        """Return the slab and the address of the smallest free range that is large enough."""
        found = [
            (end - start, start, slab)
            for slab in self._slabs
            for start, end in slab.free.all
            if end - start >= nbytes
        ]
        if found:
            _, address, slab = min(found, key=itemgetter(0, 1))
        else:
            slab = _Slab(-(-nbytes // SLAB_BYTES) * SLAB_BYTES)
            address = slab.base
            bisect.insort(self._slabs, slab, key=_base)
        slab.free.remove(address, address + nbytes)
        return slab, address

    def _slab_of(self, address: int) -> _Slab:
        return self._slabs[bisect.bisect_right(self._slabs, address, key=_base) - 1]
