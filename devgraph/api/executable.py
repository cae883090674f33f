"""Executable: the launch target of a graph, and the byte budget of all targets in a pool.

A graph holds one executable at a time, chosen by ``DeviceGraph.use``. An executable must not hold a
strong reference to its graph, because the cycle would keep device memory until the next garbage
collection. An executable that can be evicted has these states::

              first launch             over budget, or out of memory
    absent ─────────────────▶ made ─────────────────────────────────▶ evicted
      ▲                        │ ▲                                       │
      │  close of the graph    │ └────────────── next launch ────────────┘
      └────────────────────────┴─────────────────────────────────────────┘
"""

from __future__ import annotations

import abc
import contextlib
import itertools
import logging
import time
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import attrs
import torch

from devgraph.api.errors import ExecutableError, ResourceError, StateError

DEFAULT_BUDGET_BYTES = 256 * 2**20
"""Default budget of a pool's recordings.

About 160 executables of a 36-layer decode step fit, at 1.6 MiB each (measured on one H200, see
docs/benchmarks.md).
"""

logger = logging.getLogger(__name__)

EXHAUSTED = (ResourceError, torch.OutOfMemoryError, MemoryError)
"""Errors that report exhausted memory or another exhausted resource."""

_OWN = object()  # the key of a graph's own executable


@runtime_checkable
class Executable(Protocol):
    """A launch target. Callers check the graph's state and hold the lock of its pool."""

    def launch(self) -> None:
        """Launch once on the current stream, even if another device is current."""

    def bound(self, stream: int | None) -> Callable[[], None]:
        """Return a callable that launches once per call. The graph's device must be current.

        Args:
            stream: the stream that is current at every call; None if unknown.
        """


class Call:
    """An executable that calls one function."""

    def __init__(self, launch: Callable[[], None]) -> None:
        self.launch = launch

    def bound(self, stream: int | None) -> Callable[[], None]:
        return self.launch


_Referent = TypeVar("_Referent")


def call_weakly(method: Callable[[], None]) -> Callable[[], None]:
    """Return a callable that calls a method of a graph without keeping the graph alive."""
    reference = weakref.WeakMethod(method)
    return lambda: dereference(reference)()


def dereference(reference: Callable[[], _Referent | None]) -> _Referent:
    """Return the referent of a weak reference to a graph or to its method."""
    referent = reference()
    if referent is None:
        raise StateError("cannot replay a deleted graph: keep the graph, not only its replay.")
    return referent


class Recording(abc.ABC):
    """The parameters of all regions of a graph for one key, owned by the pool."""

    used = 0
    """Stamp of the last use."""

    @property
    @abc.abstractmethod
    def bytes(self) -> int:
        """Memory of the recording."""

    def shrink(self) -> None:  # noqa: B027
        """Free the parts that can be rebuilt without running a region."""

    def close(self) -> None:  # noqa: B027
        """Free the recording; safe while a replay that used it is in flight."""


class _Item(NamedTuple):
    owner: weakref.ref[Any]  # the graph
    recording: Recording  # or the executable of the owner


@attrs.frozen(kw_only=True)
class Residency:
    """Memory of a pool's executables and recordings, and counters of rebuilds and evictions."""

    bytes: int
    """Current memory of executables and recordings."""
    budget_bytes: int | None
    made: int
    """Number of executables made so far, including rebuilds."""
    evicted: int
    """Number of evictions of executables and recordings."""
    seconds: float
    """Seconds spent on making executables, except those that torch makes in a capture."""


class Recordings:
    """The recordings and executables of a pool's graphs, under one byte budget.

    When the budget is exceeded, executables are evicted before recordings, because executables can
    be rebuilt without running a region. The least recently used items are evicted first. The newest
    item and each graph's recording for its next launch are kept. Pinned executables are never
    evicted but count against the budget. Executables that the vendor cannot rebuild do not count.

    If the budget is None, no executable is evicted, and recordings share ``DEFAULT_BUDGET_BYTES``.

    Every method must tolerate a re-entrant ``drop`` from a graph that is being collected.
    """

    def __init__(self, budget_bytes: int | None = None) -> None:
        self.budget_bytes = budget_bytes
        self.hits = 0
        self.misses = 0
        self.evictions = 0
        """Number of evicted recordings."""
        self.clock = itertools.count(1)
        """Counter that orders the uses of recordings and executables."""
        self._made = 0
        self._dropped = 0
        self._seconds = 0.0
        self._items: dict[tuple[int, Hashable], _Item] = {}
        self.released = False
        """Whether the pool's memory is released, so that no executable can be made."""

    def __len__(self) -> int:
        return len(self.kept())

    def kept(self) -> list[Any]:
        """Return the recordings, least recently used first."""
        return [self._items[place].recording for place in self._by_use() if place[1] is not _OWN]

    @property
    def room(self) -> int:
        """Bytes that are left in the budget."""
        return max(-self._excess, 0)

    @property
    def bytes(self) -> int:
        return sum(item.recording.bytes for item in [*self._items.values()])

    @property
    def _excess(self) -> int:
        if self.budget_bytes is not None:
            return self.bytes - self.budget_bytes
        items = [*self._items.items()]
        return sum(i.recording.bytes for (_, k), i in items if k is not _OWN) - DEFAULT_BUDGET_BYTES

    def limit(self, budget_bytes: int) -> None:
        if self.budget_bytes is None or budget_bytes < self.budget_bytes:
            self.budget_bytes = budget_bytes
            self.trim()

    def residency(self) -> Residency:
        return Residency(
            bytes=self.bytes,
            budget_bytes=self.budget_bytes,
            made=self._made,
            evicted=self.evictions + self._dropped,
            seconds=self._seconds,
        )

    def holds(self, owner: object, key: Hashable) -> bool:
        """Whether there is a recording for ``key``. The check does not count as a use."""
        item = self._items.get((id(owner), key))
        # The owner may have been deleted and its id may belong to another graph.
        return item is not None and item.owner() is owner

    def get(self, owner: object, key: Hashable) -> Any:
        """Return the recording for ``key`` or None, and count the hit or the miss."""
        if not self.holds(owner, key):
            self.misses += 1
            return None
        self.hits += 1
        recording = self._items[id(owner), key].recording
        recording.used = next(self.clock)
        return recording

    def put(self, owner: object, key: Hashable, recording: Recording) -> None:
        """Store ``recording`` and evict others until the budget is met."""
        place = (id(owner), key)
        self._remove(place)
        recording.used = next(self.clock)
        self._items[place] = _Item(weakref.ref(owner), recording)
        # Without a budget, a graph's own executable does not count.
        if key is not _OWN or self.budget_bytes is not None:
            self.trim()

    def drop_excess(self, owner: object) -> None:
        """Evict the graph's own executable after its launch if the budget is exceeded."""
        place = (id(owner), _OWN)
        if not self._is_in_use(place) and self._excess > 0:
            self._shrink(place)

    def drop_own(self, owner: object) -> None:
        """Drop the graph's own executable, if any; the next launch rebuilds it."""
        self._remove((id(owner), _OWN))

    @contextlib.contextmanager
    def making(self) -> Iterator[None]:
        """Count and time the executable that the block makes."""
        started = time.perf_counter()
        yield
        self._made += 1
        self._seconds += time.perf_counter() - started

    def make(self, make: Callable[[], Executable]) -> Executable:
        """Return the result of ``make``; if memory runs out, evict other executables and retry."""
        self.require_memory()
        with self.making():
            try:
                return make()
            except EXHAUSTED as error:
                logger.info("no memory for an executable; evicting others: %s", error)
            try:
                for place in self._evictable():
                    self._shrink(place)
                return make()
            except EXHAUSTED as error:
                raise ExecutableError(
                    f"there is no memory to make the executable of a graph: {error}. The graph "
                    f"stays ready: launch it again when there is memory."
                ) from error

    def release(self) -> None:
        """Drop all evictable executables, and refuse to make any until ``released`` is False."""
        self.released = True
        for place in list(self._items):
            self._shrink(place)

    def require_memory(self) -> None:
        """Raise ExecutableError if the pool's memory is released."""
        if self.released:
            raise ExecutableError(
                "the device memory of this graph's pool was released: call resume() on the "
                "suspended runner, or restore() on the pool, first."
            )

    def trim(self) -> None:
        """Drop executables, then recordings, least recently used first, until the budget is met."""
        if self._excess <= 0:
            return
        newest = self._by_use()[-1:]
        places = [place for place in self._evictable() if place not in newest]
        for place in places:
            self._shrink(place)
            if self._excess <= 0:
                return
        for place in places:
            if place in self._items:
                self._remove(place)
                self.evictions += 1
            if self._excess <= 0:
                return

    def count(self, owner: object) -> int:
        return sum(number == id(owner) and key is not _OWN for number, key in self._items)

    def drop(self, owner: object) -> None:
        """Free every recording of ``owner``, and its own executable."""
        for place in list(self._items):
            if place[0] == id(owner):
                self._remove(place)

    def _by_use(self) -> list[tuple[int, Hashable]]:
        stamps = {place: item.recording.used for place, item in list(self._items.items())}
        return sorted(stamps, key=stamps.__getitem__)

    def _evictable(self) -> list[tuple[int, Hashable]]:
        return [place for place in self._by_use() if not self._is_in_use(place)]

    def _is_in_use(self, place: tuple[int, Hashable]) -> bool:
        item = self._items.get(place)
        graph = None if item is None else item.owner()
        if graph is None:
            return False
        if place[1] is not _OWN:
            return bool(graph.key == place[1])
        return self.budget_bytes is None or bool(graph.pinned)

    def _shrink(self, place: tuple[int, Hashable]) -> None:
        item = self._items.get(place)
        if place[1] is _OWN:
            self._remove(place)
            self._dropped += 1
        elif item is not None:
            before = item.recording.bytes
            item.recording.shrink()
            self._dropped += item.recording.bytes < before

    def _remove(self, place: tuple[int, Hashable]) -> None:
        item = self._items.get(place)
        if item is not None:
            item.recording.shrink()  # Shrink first: an interrupt must leave no uncounted memory.
            self._items.pop(place, None)
            item.recording.close()


class EvictableExecutable(Recording):
    """A graph's own executable, created at a launch and rebuilt on demand after an eviction.

    Callables returned by ``bound`` survive evictions: each call looks up the executable and
    rebuilds it on demand.
    """

    def __init__(
        self,
        graph: Any,
        recordings: Recordings,
        *,
        make: Callable[[], Executable],
        drop: Callable[[], None],
        nbytes: int,
    ) -> None:
        self._graph = weakref.ref(graph)
        self._recordings = recordings
        self._make, self._drop = make, drop
        self._executable: Executable | None = None
        """The launch target; None while it is absent or evicted."""
        self._bound: dict[int | None, Callable[[], None]] = {}  # bound launches, by stream
        self._bytes = nbytes

    @property
    def bytes(self) -> int:
        return self._bytes

    def launch(self) -> None:
        """Launch once; make the executable first if there is none."""
        executable = self._executable
        if executable is None:
            self._make_and_launch()
        else:
            self.used = next(self._recordings.clock)
            executable.launch()

    def bound(self, stream: int | None) -> Callable[[], None]:
        """Return a callable that launches once per call; its first call binds later ones."""
        bound, clock = self._bound, self._recordings.clock

        def launch() -> None:
            call = bound.get(stream)
            if call is None:
                self.launch()
                if self._executable is not None:
                    bound[stream] = self._executable.bound(stream)
            else:
                self.used = next(clock)
                call()

        return launch

    def shrink(self) -> None:
        """Free the memory until the next launch. Idempotent."""
        self._executable = None
        self._bound.clear()
        self._drop()

    def _make_and_launch(self) -> None:
        graph, recordings = dereference(self._graph), self._recordings
        recordings.drop_own(graph)  # An interrupted launch may have left an executable.
        executable = recordings.make(self._make)
        recordings.put(graph, _OWN, self)
        self._executable = executable
        executable.launch()
        recordings.drop_excess(graph)
