"""Executable: what a graph launches, and the byte budget for all that graphs of a pool launch.

A graph holds one at a time, swaps it with ``use`` and refers to it strongly. So an executable holds
what it launches and never the graph: that cycle would keep device memory until a collection.
"""

from __future__ import annotations

import abc
import contextlib
import logging
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Protocol, TypeVar

import attrs
import torch

from devgraph.api.errors import ExecutableError, ResourceError, StateError

DEFAULT_BUDGET_BYTES = 256 * 2**20
"""Recordings of a pool may take this much where nobody gave a budget: about 160 executables of a
36-layer decode step at 1.6 MiB each (measured on one H200, see docs/benchmarks.md)."""

logger = logging.getLogger(__name__)

EXHAUSTED = (ResourceError, torch.OutOfMemoryError, MemoryError)
"""What is raised where memory or another resource of the device runs out."""

_OWN = object()
"""In the place of a key: the executable of the graph itself."""


class Executable(Protocol):
    """What a graph launches; called in legal states only, under the lock of the graph's pool."""

    def launch(self) -> None:
        """Launch once on the current stream, whichever device is this thread's own."""

    def bound(self, stream: int | None) -> Callable[[], None]:
        """Return the launch as one call, for threads on the graph's device.

        Args:
            stream: the stream that is current whenever it is called; None if that is not known.
        """


class Call:
    """An executable that is one call, which launches once on the current stream."""

    def __init__(self, launch: Callable[[], None]) -> None:
        self.launch = launch

    def bound(self, stream: int | None) -> Callable[[], None]:
        return self.launch


_Held = TypeVar("_Held")


def weakly(method: Callable[[], None]) -> Callable[[], None]:
    """Return a call of a graph's method that does not keep the graph."""
    reference = weakref.WeakMethod(method)
    return lambda: held(reference)()


def held(reference: Callable[[], _Held | None]) -> _Held:
    """Return the graph, or its method, that a ``replay`` which was kept refers to."""
    found = reference()
    if found is None:
        raise StateError("cannot replay a graph that is gone: keep the graph, not its replay.")
    return found


class Recording(abc.ABC):
    """A region set's parameters for one key, made by a backend; owned by the pool."""

    @property
    @abc.abstractmethod
    def bytes(self) -> int:
        """Memory that the recording takes."""

    def shrink(self) -> None:  # noqa: B027
        """Free what a later use can make again without running a region."""

    def close(self) -> None:  # noqa: B027
        """Free it; safe while a replay that used it is in flight."""


class Owner(Protocol):
    """What recordings belong to: a graph."""

    pinned: bool
    """Whether its own executable stays."""
    key: Hashable
    """The key of the host values that the next launch uses."""

    def launch_by(self, executable: Executable, launch: Callable[[], None]) -> None:
        """Let ``launch`` stand for the launch of ``executable``, if that is launched next."""

    def apply_again(self) -> None:
        """What the recording of ``key`` launched was dropped: apply it anew at the next launch."""


@attrs.define
class _Kept:
    owner: weakref.ref[Owner]
    recording: Any
    charged: int = 0


@attrs.frozen(kw_only=True)
class Residency:
    """What the graphs of a pool keep to launch, and what keeping it within the budget has cost."""

    bytes: int
    """Taken now by executables and recordings."""
    budget_bytes: int | None
    made: int
    """Executables made so far, again and for the first time."""
    evicted: int
    """Executables and recordings that gave up their memory for others."""
    seconds: float
    """Time that making executables took; where torch makes one in a capture, that time is the
    capture's."""


class Recordings:
    """What graphs launch, under one byte budget: least recently used first out.

    Recordings are kept by graph and key, a graph's own executable by graph. When the budget is
    exceeded, what can be made again without running a region goes first, executables that is, and
    then recordings, oldest first. The newest and what a graph's next launch uses stay, and so do
    pinned executables, which count all the same. Those that a vendor cannot make again do not.

    Without a budget graphs keep their executables, and recordings may take what is the default.

    In the midst of every method an interrupt may come, and a graph may end, which drops what is
    kept for it.
    """

    def __init__(self, budget_bytes: int | None = None) -> None:
        self.budget_bytes = budget_bytes
        self.bytes = 0
        self.hits = 0
        self.misses = 0
        self.evictions = 0
        """Recordings that went."""
        self._own_bytes = 0
        self._made = 0
        self._dropped = 0
        self._seconds = 0.0
        self._items: OrderedDict[tuple[int, Hashable], _Kept] = OrderedDict()
        self.released = False
        """Whether the pool's memory was given back: then nothing is made."""
        self.latest: object = None
        """What was used last."""
        self.direct: Remade | None = None
        """The same, if its graph launches it directly although there is a budget."""

    def __len__(self) -> int:
        return len(self.kept())

    def kept(self) -> list[Any]:
        """Return the recordings, least recently used first."""
        return [kept.recording for (_, key), kept in self._all() if key is not _OWN]

    @property
    def room(self) -> int:
        """Bytes that are left in the budget."""
        return max(-self._excess, 0)

    @property
    def _excess(self) -> int:
        if self.budget_bytes is None:
            return self.bytes - self._own_bytes - DEFAULT_BUDGET_BYTES
        return self.bytes - self.budget_bytes

    def limit(self, budget_bytes: int) -> None:
        """Lower the budget to ``budget_bytes``, unless it is lower already."""
        if self.budget_bytes is None or budget_bytes < self.budget_bytes:
            for (_, key), kept in self._all():
                if key is _OWN:
                    kept.recording.watch()
            self.latest, self.direct, self.budget_bytes = None, None, budget_bytes
            self.trim()

    def residency(self) -> Residency:
        """Return what is kept now, and the counters."""
        return Residency(
            bytes=self.bytes,
            budget_bytes=self.budget_bytes,
            made=self._made,
            evicted=self.evictions + self._dropped,
            seconds=self._seconds,
        )

    def holds(self, owner: object, key: Hashable) -> bool:
        """Whether there is a recording for ``key``; counts nothing."""
        found = self._items.get((id(owner), key))
        # An interrupt may have kept a graph that is gone from dropping what it had.
        return found is not None and found.owner() is owner

    def get(self, owner: object, key: Hashable) -> Any:
        """Return the recording for ``key`` or None, and count the hit or the miss."""
        if not self.holds(owner, key):
            self.misses += 1
            return None
        self.hits += 1
        self.use((id(owner), key))
        return self._items[id(owner), key].recording

    def put(self, owner: Owner, key: Hashable, recording: Recording | Remade) -> None:
        """Keep ``recording`` and bring the rest under the budget."""
        item, kept = (id(owner), key), _Kept(weakref.ref(owner), recording)
        self._remove(item)
        self._charge(kept, recording.bytes, own=key is _OWN)
        self._items[item] = kept
        self.use(item)
        self.trim()

    def use(self, item: tuple[int, Hashable], latest: object = None) -> None:
        """Note that ``item``, which is kept, is used, and is the ``latest`` to be."""
        if self.direct is not None:
            self.direct.watch()
        self.latest, self.direct = latest, None
        self._items.move_to_end(item)

    def settle_own(self, item: tuple[int, Hashable]) -> None:
        """Drop the own executable of a graph, which was launched, if nothing else could go."""
        if self._excess > 0 and not self._in_use(item):
            self._shrink(item)

    def drop_own(self, owner: object) -> None:
        """Drop the own executable of a graph, if it is made; its next launch makes it again."""
        self._remove((id(owner), _OWN))

    @contextlib.contextmanager
    def making(self) -> Iterator[None]:
        """Count the executable that the block makes."""
        started = time.perf_counter()
        yield
        self._made += 1
        self._seconds += time.perf_counter() - started

    def made(self, make: Callable[[], Executable]) -> Executable:
        """Return ``make()``, an executable; where there is no memory for it, others go.

        Raises:
            ExecutableError: there is no memory even so.
        """
        self.require_memory()
        with self.making():
            try:
                return make()
            except EXHAUSTED as error:
                logger.info("no memory for an executable, so that others go: %s", error)
            try:
                for item in self._spare():
                    self._shrink(item)
                return make()
            except EXHAUSTED as error:
                raise ExecutableError(
                    f"there is no memory to make the executable of a graph: {error}. The graph is "
                    f"ready as before; launch it again when there is memory."
                ) from error

    def release(self) -> None:
        """Drop every executable that can be made again, and make none until ``released`` is
        False."""
        self.released = True
        for item, kept in self._all():
            self._shrink(item)
            graph = kept.owner()
            if graph is not None and graph.key == item[1]:
                graph.apply_again()

    def require_memory(self) -> None:
        """Raise ExecutableError if the pool's memory was given back."""
        if self.released:
            raise ExecutableError(
                "the device memory of this graph's pool was given back: call resume() of the "
                "runner that was suspended, or restore() of the pool, first."
            )

    def recharge(self, recording: Recording) -> None:
        """Count anew what ``recording`` takes, and bring the rest under the budget."""
        for _, kept in self._all():
            if kept.recording is recording:
                self._charge(kept, recording.bytes)
                self.trim()
                return

    def trim(self) -> None:
        """Shrink, then evict, the least recently used until the budget holds."""
        if self._excess <= 0:
            return
        newest = next(reversed(self._items), None)
        spare = [item for item in self._spare() if item != newest]
        for item in spare:
            self._shrink(item)
            if self._excess <= 0:
                return
        for item in spare:
            if item in self._items:
                self._remove(item)
                self.evictions += 1
            if self._excess <= 0:
                return

    def count(self, owner: object) -> int:
        """Number of recordings of ``owner``."""
        return sum(1 for (known, key), _ in self._all() if known == id(owner) and key is not _OWN)

    def drop(self, owner: object) -> None:
        """Free every recording of ``owner``, and its own executable."""
        for item, _ in self._all():
            if item[0] == id(owner):
                self._remove(item)

    def _all(self) -> Iterator[tuple[tuple[int, Hashable], _Kept]]:
        """Iterate over what is kept, from which items may go meanwhile."""
        for item in list(self._items):
            if (kept := self._items.get(item)) is not None:
                yield item, kept

    def _spare(self) -> list[tuple[int, Hashable]]:
        return [item for item, _ in self._all() if not self._in_use(item)]

    def _in_use(self, item: tuple[int, Hashable]) -> bool:
        kept = self._items.get(item)
        graph = None if kept is None else kept.owner()
        if graph is None:
            return False
        if item[1] is not _OWN:
            return graph.key == item[1]
        return self.budget_bytes is None or graph.pinned

    def _shrink(self, item: tuple[int, Hashable]) -> None:
        kept = self._items.get(item)
        if item[1] is _OWN:
            self._remove(item)
            self._dropped += 1
        elif kept is not None:
            before = kept.charged
            kept.recording.shrink()
            if item in self._items:
                self._charge(kept, kept.recording.bytes)
            self._dropped += kept.charged < before

    def _charge(self, kept: _Kept, size: int, *, own: bool = False) -> None:
        # Without a call: an interrupt comes before all of it or behind.
        more, kept.charged = size - kept.charged, size
        self.bytes += more
        if own:
            self._own_bytes += more

    def _remove(self, item: tuple[int, Hashable]) -> None:
        kept = self._items.get(item)
        if kept is None:
            return
        own = item[1] is _OWN
        if own:  # what was interrupted is done by the next launch
            if kept.recording is self.latest:
                self.latest = self.direct = None
            kept.recording.close()
        self._charge(kept, 0, own=own)
        self._items.pop(item, None)
        if not own:  # nobody may find it any more
            kept.recording.close()


class Remade:
    """The own executable of a graph where it can be dropped while the graph stays: it is made when
    it is launched.

    What was bound to it stays valid, for that is this object: a step in whose middle it is dropped
    makes it again. The graph launches what was made directly, under a budget as long as it is the
    one of the pool that was used last, so that the rest are evicted in the order of their use.
    Without a budget it is not dropped while the graph can be launched, and steps launch what was
    made directly too.

    Args:
        make: makes what is launched.
        drop: frees that; safe while a launch of it is in flight.
        nbytes: what it takes.
    """

    def __init__(
        self,
        graph: Owner,
        recordings: Recordings,
        *,
        make: Callable[[], Executable],
        drop: Callable[[], None],
        nbytes: int,
    ) -> None:
        self._graph = weakref.ref(graph)
        self._item = (id(graph), _OWN)
        self._recordings = recordings
        self._make, self._drop = make, drop
        self._made: Executable | None = None
        self.bytes = nbytes

    def launch(self) -> None:
        """Launch once, made before if need be.

        Raises:
            ExecutableError: there is no memory to make it; nothing was launched.
        """
        made = self._made
        if made is None:
            self._launch_anew()
        else:
            self._note(made)
            made.launch()

    def bound(self, stream: int | None) -> Callable[[], None]:
        """Return the launch, by what the executable that is then made binds to ``stream``."""
        if stream is not None and self._made is not None and self._recordings.budget_bytes is None:
            return self._made.bound(stream)  # asked for anew when a budget comes
        recordings, item, anew = self._recordings, self._item, self._launch_anew
        bound_to: Executable | None = None
        call = anew

        def launch() -> None:
            nonlocal bound_to, call
            made = self._made
            if made is None:
                anew()
                return
            if made is not bound_to:
                bound_to, call = made, made.bound(stream)
            if recordings.latest is not self:
                recordings.use(item, self)
            call()

        return launch

    def close(self) -> None:
        """Give up the memory until the next launch. Idempotent."""
        self.watch()
        self._made = None
        self._drop()

    def watch(self) -> None:
        """See the next launch: what is launched directly is not noted and cannot be dropped."""
        graph = self._graph()
        if graph is not None:
            graph.launch_by(self, self.launch)

    def _note(self, made: Executable) -> None:
        recordings = self._recordings
        if recordings.latest is not self:
            recordings.use(self._item, self)
        else:  # as long as nothing else is used
            if recordings.budget_bytes is not None:
                recordings.direct = self
            held(self._graph).launch_by(self, made.launch)

    def _launch_anew(self) -> None:
        graph = held(self._graph)
        self._recordings.drop_own(graph)  # what an interrupt left
        made = self._recordings.made(self._make)
        self._recordings.put(graph, _OWN, self)
        self._made = made  # counted: an interrupt before leaves it to be made anew
        made.launch()
        self._recordings.settle_own(self._item)
        if self._recordings.budget_bytes is None:
            graph.launch_by(self, made.launch)
