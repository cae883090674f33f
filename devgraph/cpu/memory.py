"""Memory of CPU graphs: blocks that are freed and reused as in a device's pool.

The tensors of a capture own their blocks. When the last tensor that uses a block is freed, the pool
may reuse the block, in this capture or another. A graph holds only aliases, which own no blocks, so
a program that reads freed memory fails here as it does on a device.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
import re
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from operator import attrgetter, itemgetter
from typing import Any

import attrs
import torch

from devgraph.api.errors import ResourceError
from devgraph.api.tensors import with_bits_of

ALIGNMENT = 64
"""Alignment in bytes of torch's CPU allocator, which affects results of matrix kernels."""

SLAB_BYTES = 2 * 2**20
"""Smallest reservation in bytes, as in the caching allocators of devices."""


_SHORTAGE = re.compile("DefaultCPUAllocator|Storage size calculation overflowed")


def is_shortage(error: Exception) -> bool:
    """Whether torch raised ``error`` because it could not allocate memory for a tensor."""
    return _SHORTAGE.search(str(error)) is not None


def _poison_byte(dtype: torch.dtype) -> int:
    """Return a byte that, if repeated, reads as NaN, a huge integer or True in ``dtype``."""
    if dtype in (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz):
        return 0x80
    if dtype.is_floating_point or dtype.is_complex:
        return 0xFF
    return 0x01 if dtype is torch.bool else 0x7F


@attrs.frozen(kw_only=True, eq=False)
class Block:
    """An allocation that a live tensor owns."""

    address: int
    bytes: int
    storage_id: int
    """The id of the owning storage; aliases have another storage at the same address."""
    shared: torch.UntypedStorage
    """A storage over the same bytes that does not own the block."""
    origin: Any
    """The ``origin`` that was passed to ``empty``."""
    recording: int
    """Number of the recording that allocated the block."""
    owner: _Owner


class _Owner(weakref.ref[memoryview]):
    """A weak reference to the owner of the block at ``address``."""

    __slots__ = ("address",)
    address: int


_first, _second, _base = itemgetter(0), itemgetter(1), attrgetter("base")


class _Ranges:
    """Disjoint address ranges in ascending order."""

    def __init__(self, *ranges: tuple[int, int]) -> None:
        self.all = list(ranges)

    def add(self, start: int, end: int) -> None:
        """Add a range and merge it with adjacent ranges."""
        first = bisect.bisect_left(self.all, start, key=_second)
        last = bisect.bisect_right(self.all, end, key=_first)
        if first < last:
            start, end = min(start, self.all[first][0]), max(end, self.all[last - 1][1])
        self.all[first:last] = [(start, end)]

    def remove(self, start: int, end: int) -> None:
        """Remove a range, which must be part of one existing range."""
        at = bisect.bisect_right(self.all, start, key=_first) - 1
        rest = (self.all[at][0], start), (end, self.all[at][1])
        self.all[at : at + 1] = [(first, last) for first, last in rest if first < last]

    def meet(self, start: int, end: int) -> bool:
        """Whether the bytes from ``start`` up to ``end`` overlap a range."""
        at = bisect.bisect_right(self.all, start, key=_second)
        return at < len(self.all) and self.all[at][0] < end


# Pages are private, so that a forked child cannot write into the parent's memory.
_PRIVATE: dict[str, int] = (
    {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
)


class _Slab:
    """A contiguous reservation of memory that lives as long as a tensor uses it."""

    def __init__(self, size: int) -> None:
        try:
            self.pages = mmap.mmap(-1, size, **_PRIVATE)
        except (OSError, OverflowError, ValueError) as error:
            raise ResourceError(f"no memory for a tensor of {size} bytes: {error}") from error
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.pages))
        self.end = self.base + size
        self.free = _Ranges((self.base, self.end))
        self.window = memoryview(self.pages)
        """A view of the slab's bytes. Every slice of the view keeps the slab alive."""


class Hold:
    """A claim on a pool's memory that ends with ``release`` or when the object is freed."""

    __slots__ = ("__weakref__", "_pool", "_reference")

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._reference = weakref.ref(self, pool._holds.discard)
        pool._holds.add(self._reference)

    def release(self) -> None:
        """End the claim. Idempotent."""
        self._pool._holds.discard(self._reference)
        self._pool._tidy()


class BlockPool:
    """Blocks of CPU memory for the tensors of captures. Thread-safe.

    New blocks are poisoned with NaN, huge integers or True. Memory of older blocks that were freed
    in the current recording is not poisoned, because recorded operations may read its contents.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slabs: list[_Slab] = []  # by address
        self._live: dict[int, Block] = {}
        # Any thread may append freed owners, at any time and without the lock.
        self._dead: deque[_Owner] = deque()
        self._holds: set[weakref.ref[Hold]] = set()
        self._released = False
        self._saved: list[tuple[Block, bytes]] = []
        self._recording = 0
        self._unread = _Ranges()  # older memory that was freed during the current recording

    def begin_recording(self) -> None:
        """Begin a recording. Memory that is free at this point may be poisoned."""
        with self._lock:
            self._collect()
            self._recording += 1
            self._unread = _Ranges()

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all reservations, used or free."""
        self._tidy()
        return 0 if self._released else sum(slab.end - slab.base for slab in self._slabs)

    def release(self) -> None:
        """Save the contents of live blocks, and return all pages to the system."""
        self._saved = [(b, ctypes.string_at(b.address, b.bytes)) for b in self.live()]
        self._released = True
        for slab in self._slabs:
            if hasattr(mmap, "MADV_DONTNEED"):
                slab.pages.madvise(mmap.MADV_DONTNEED)

    def restore(self) -> None:
        """Restore live blocks at their original addresses, and poison all other memory."""
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
        """Return a poisoned tensor in a new block; ``origin`` is stored with the block."""
        extent = 1
        for length, step in zip(size, stride, strict=True):
            if length == 0:
                return torch.empty_strided(tuple(size), tuple(stride), dtype=dtype)
            extent += (length - 1) * step
        nbytes = extent * dtype.itemsize
        with self._lock:
            self._collect()
            storage, is_unread = self._allocate(nbytes, origin)
        if not is_unread:
            ctypes.memset(storage.data_ptr(), _poison_byte(dtype), nbytes)
        return torch.empty(0, dtype=dtype).set_(storage, 0, tuple(size), tuple(stride))

    def _allocate(self, nbytes: int, origin: Any) -> tuple[torch.UntypedStorage, bool]:
        """Return the storage of a new block, and whether recorded operations may read old data."""
        window, nbytes = nbytes, -(-nbytes // ALIGNMENT) * ALIGNMENT
        slab, address = self._take(nbytes)
        start = address - slab.base
        owner, other = slab.window[start : start + window], slab.window[start : start + window]
        storage = torch.frombuffer(owner, dtype=torch.uint8).untyped_storage()
        shared = torch.frombuffer(other, dtype=torch.uint8).untyped_storage()
        # When the storage is freed, so is its window, and the callback queues the block. This may
        # happen at any time in any thread, so the callback must not take the lock.
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
        return storage, self._unread.meet(address, address + nbytes)

    def covers(self, address: int) -> bool:
        """Whether ``address`` is in this pool's memory, used or free."""
        with self._lock:
            at = bisect.bisect_right(self._slabs, address, key=_base) - 1
            return at >= 0 and address < self._slabs[at].end

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor that shares the memory of ``tensor`` but does not own the block.

        Aliases and tensors outside the pool are returned unchanged.
        """
        storage = tensor.untyped_storage()
        block = self._live.get(storage.data_ptr())
        if block is None or block.storage_id != storage._cdata:
            return tensor
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            plain = torch.empty(0, dtype=tensor.dtype).set_(
                block.shared, tensor.storage_offset(), tensor.size(), tensor.stride()
            )
            return with_bits_of(tensor, plain)

    def hold(self) -> Hold:
        """Return a claim that keeps all reserved memory.

        A graph needs a claim because its temporaries are in free blocks. If there is no claim,
        reservations without live blocks are freed.
        """
        return Hold(self)

    def _tidy(self) -> None:
        # If a hold is garbage-collected while the lock is taken, the next change of the pool cleans
        # up.
        if not self._lock.locked():
            with self._lock:
                self._collect()

    def _collect(self) -> None:
        """Free the blocks of freed owners, and unused slabs if there are no holds."""
        while self._dead:
            owner = self._dead[0]
            block = self._live.get(owner.address)
            # An interrupted allocation leaves an owner without a block.
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
        """Take ``nbytes`` from the smallest sufficient free range; return slab and address."""
        ranges = [
            (end - start, start, slab)
            for slab in self._slabs
            for start, end in slab.free.all
            if end - start >= nbytes
        ]
        if ranges:
            _, address, slab = min(ranges, key=itemgetter(0, 1))
        else:
            slab = _Slab(-(-nbytes // SLAB_BYTES) * SLAB_BYTES)
            address = slab.base
            bisect.insort(self._slabs, slab, key=_base)
        slab.free.remove(address, address + nbytes)
        return slab, address

    def _slab_of(self, address: int) -> _Slab:
        return self._slabs[bisect.bisect_right(self._slabs, address, key=_base) - 1]
