"""The base of backends whose device is a torch namespace (``torch.<device type>``).

A vendor sets the names of its namespace and graph class, and declares capabilities. This module
implements everything that torch's device modules have in common: streams, memory pools, aliases,
capture and replay.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import logging
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch

from devgraph.api.backend import Backend
from devgraph.api.capabilities import Capabilities
from devgraph.api.device import raise_if_lost, refuse_foreign_capture, require_alive
from devgraph.api.errors import (
    BackendError,
    BackendUnavailableError,
    ResourceError,
    UnjoinedStreamError,
)
from devgraph.api.executable import Call, Executable
from devgraph.api.graph import DeviceGraph
from devgraph.api.pool import Pool
from devgraph.api.process import keep_forever
from devgraph.api.tensors import with_bits_of
from devgraph.api.torchlike.guards import RandomGuard

logger = logging.getLogger(__name__)

FULL_BUILD = Capabilities(
    region_update=True,
    shared_pool=True,
    rng=True,
    refuses_host_reads=True,
    streams=True,
    capture_error_modes=("thread_local", "global", "relaxed"),
    concurrent_threads=True,
    collectives=True,
    piecewise=True,
    compilers=("eager", "inductor"),
    node_counts=True,
    node_ranges=True,
    remakes_executables=True,
)
"""Capabilities of a vendor with full support in torch and a driver with graphs of nodes."""


class Pages(Protocol):
    """An allocator that can release device memory and map it again at the same addresses."""

    @property
    def allocator(self) -> Any:
        """The allocator to pass to a MemPool of the namespace."""

    def release(self, addresses: Sequence[int]) -> None:
        """Release the memory of the segments at ``addresses``, while the device is idle."""

    def restore(self, addresses: Sequence[int]) -> None:
        """Map memory for the segments at ``addresses`` that have no memory.

        Raises:
            ResourceError: the device has too little memory.
        """


class TorchPool(Pool):
    """Graph memory in a private pool of torch's caching allocator, and the stream for captures.

    torch's pool handle becomes invalid when its last graph is freed, and the next capture would
    fail an internal assertion. Therefore the pool keeps the handle alive: with a MemPool for device
    memory, and with a one-node graph (the *keeper*) for pinned host memory. Captures use one
    stream unless the caller passes another, because the allocator reuses blocks only within a
    stream.
    """

    backend: TorchBackend

    def __init__(self, backend: TorchBackend, *, releasable: bool = False) -> None:
        super().__init__(backend, releasable=releasable)
        self._pages = backend.make_pages() if releasable else None
        self._saved: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._memory = self._make_memory()
        self._region_memory: Any = None
        self.handle: Any = self._memory.id
        self._last_stream: Any = None
        self._starts: list[int] = []
        self._sizes: list[int] = []
        self._foreign: set[int] = set()
        self._freed: int | None = None
        self._stuck: list[Any] = []
        self.keeper: Any = None
        """The one-node graph that keeps the handle alive; None before the first capture."""
        # The keeper writes this tensor. Keep it alive, because ``draws_random`` may launch the
        # keeper.
        self._word: torch.Tensor | None = None

    def _make_memory(self) -> Any:
        make = self.backend.namespace.MemPool
        return make() if self._pages is None else make(self._pages.allocator)

    def _segments(self, *memories: Any) -> dict[int, int]:
        """Return the sizes of the allocator segments in ``memories`` (MemPools), by address."""
        snapshots = [self.snapshot(memory) for memory in memories if memory is not None]
        return {
            segment["address"]: segment["total_size"]
            for segments in snapshots
            for segment in segments
        }

    def _release(self) -> None:
        assert self._pages is not None
        # Blocks that are free between replays need no copy: a replay writes them before reading.
        device = self.backend.device
        blocks = (block for segment in self.snapshot(self._memory) for block in segment["blocks"])
        alive = {b["address"]: b["size"] for b in blocks if b["state"].startswith("active")}
        for address, size in {**alive, **self._segments(self._region_memory)}.items():
            storage = torch._C._construct_storage_from_data_pointer(address, device, size)
            memory = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
            self._saved.append((memory, memory.cpu()))
        self._pages.release([*self._segments(self._memory, self._region_memory)])

    def _restore(self) -> None:
        assert self._pages is not None
        addresses = [*self._segments(self._memory, self._region_memory)]
        try:
            try:
                self._pages.restore(addresses)
            except ResourceError:
                self.backend.namespace.empty_cache()  # releases free blocks that torch caches
                self._pages.restore(addresses)
        except ResourceError:
            self._pages.release(addresses)
            raise
        for memory, saved in self._saved:
            memory.copy_(saved)
        self._saved.clear()
        self.backend.synchronize()  # the next stream that uses the memory is unknown

    def keep_alive(self) -> None:
        """Capture the ``keeper`` if there is none. The capture stream must be current."""
        if self.keeper is not None:
            return
        keeper = self.backend.make_native_graph()
        self._word = torch.empty(1, device=self.backend.device)
        self.backend.begin_native(keeper, self, "thread_local")
        try:
            try:
                self._word.zero_()
            finally:
                self.backend.end_native(keeper)
        except BaseException:
            self.renew(keeper)
            raise
        self.keeper = keeper

    @property
    def stream(self) -> Any:
        """The stream for captures into this pool."""
        # All pools share one stream. Libraries keep a workspace for every stream that they have
        # seen (cuBLAS on an H200: 32 MiB), and the allocator keeps the memory of warm-up runs for
        # their stream only. In any case, only one thread captures at a time.
        return self.backend.capture_stream

    @property
    def bytes(self) -> int:
        return 0 if self.recordings.released else sum(self.segments)

    @property
    def segments(self) -> Sequence[int]:
        return [*self._segments(self._memory, self._region_memory).values()]

    def snapshot(self, memory: Any) -> Any:
        """Return torch's description of the segments of ``memory``, a MemPool."""
        # memory.snapshot() is unsafe: torch drops one reference too many to each number in its
        # argument (pytorch/pytorch#196366), so Python would free a number above 256 while in use.
        backend = self.backend
        if backend.drops_references is None:
            backend.drops_references = self._drops_references()
        number = memory.id
        if backend.drops_references:
            _add_references(number)
        return backend.namespace.memory_snapshot(number)

    def _drops_references(self) -> bool:
        """Whether torch drops a reference to a pool number, tested with a nonexistent pool."""
        number = int("987654321987")
        absent_pool = (0, number)
        _add_references(absent_pool)
        before = sys.getrefcount(number)
        self.backend.namespace.memory_snapshot(absent_pool)
        return sys.getrefcount(number) < before

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # The constructor failed before allocating.
            self.backend.bury(self._memory, self._region_memory, self.keeper, *self._stuck)
            # A MemPool releases its memory only if it is the last owner.
            self.keeper = None
            self._stuck.clear()

    def order(self) -> None:
        current = self.backend.current_stream_id()
        if current != self.ordered_stream:
            self._switch(current)

    def _switch(self, current: int) -> None:
        # A wait for the whole previous stream includes its last replay, so the stream is stored
        # only when it changes.
        refuse_foreign_capture(self.backend, "replay")
        stream = self.backend.namespace.current_stream(self.backend.device)
        if self._last_stream is not None:
            self.backend.join(stream, self._last_stream)
        self._last_stream, self.ordered_stream = stream, current

    @property
    def uses(self) -> int:
        """Number of owners of the pool's memory (graphs and the MemPool), as torch counts them."""
        return int(self._memory.use_count())

    def renew(self, stuck: Any) -> None:
        """Use new memory for later captures, and keep the old memory and the graph ``stuck``.

        The next capture creates a new keeper; the current stream may be unable to capture one now.
        """
        if stuck is not None:
            # torch still considers the capture active, so freeing memory would fail an assertion.
            self.backend.keep_memory()
        self._stuck.append((stuck, self._memory, self.keeper))
        self._memory = self._make_memory()
        self.handle = self._memory.id
        self.keeper = None
        self._freed = None

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.bare(tensor) if self.owns(tensor.untyped_storage().data_ptr()) else tensor

    def bare(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        bare = torch._C._construct_storage_from_data_pointer(
            storage.data_ptr(), tensor.device, storage.nbytes()
        )
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        plain = empty.set_(bare, tensor.storage_offset(), tensor.shape, tensor.stride())
        return with_bits_of(tensor, plain)

    def owns(self, address: int) -> bool:
        """Whether a device address is in this pool's graph memory."""
        if self._find(address):
            return True
        if address in self._foreign:
            return False
        segments = sorted(self._segments(self._memory).items())
        self._starts = [start for start, _ in segments]
        self._sizes = [size for _, size in segments]
        if self._find(address):
            return True
        self._foreign.add(address)
        return False

    def _find(self, address: int) -> bool:
        at = bisect.bisect_right(self._starts, address) - 1
        return at >= 0 and address < self._starts[at] + self._sizes[at]

    def forget_addresses(self) -> None:
        """Clear the cache of ``owns`` if segments may have changed owner since the last capture.

        A segment belongs to one pool until the allocator frees it. The cache is kept if the
        allocator counts frees and the count is unchanged. A lookup takes 0.2 ms without the cache.
        """
        look = getattr(self.backend.namespace, "memory_stats_as_nested_dict", None)
        stats = {} if look is None else look(self.backend.device)
        freed, self._freed = self._freed, stats.get("num_device_free")
        if freed is None or freed != self._freed:
            self._starts, self._sizes = [], []
            self._foreign.clear()

    def region_memory(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which this thread allocates memory of regions, apart from graphs."""
        if self._region_memory is None:
            self._region_memory = self._make_memory()
        return self.allocating_in(self._region_memory)

    def allocating_in(self, memory: Any) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which this thread allocates from ``memory``, a MemPool.

        No pool may be freed in the block, not even by another thread: torch would abort the
        process.
        """
        routed: contextlib.AbstractContextManager[Any] = self.backend.namespace.use_mem_pool(
            memory, self.backend.device
        )
        return routed


def _add_references(number: tuple[int, int]) -> None:
    # memory_snapshot of some vendors also drops a reference to True. Python before 3.12 would then
    # free True.
    for value in (*number, True):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


class TorchGraph(DeviceGraph):
    """A DeviceGraph over the graph class of the vendor's torch namespace."""

    backend: TorchBackend
    pool: TorchPool

    def __init__(self, backend: TorchBackend, pool: TorchPool) -> None:
        super().__init__(backend, pool)
        self._native: Any = None
        self._open = False
        self._ended = False
        self._uses = 0

    def end(self, *, allow_empty: bool = False) -> None:
        if self.backend.current_stream_id() != self._begun_on:
            raise UnjoinedStreamError(
                "a capture must end or break on the stream on which it began, but another stream "
                "is current. Leave the block of the side stream and join it "
                "(current_stream.wait_stream(side)) before the capture or segment ends."
            )
        super().end(allow_empty=allow_empty)

    def _begin(self, mode: str) -> None:
        self._begun_on = self.backend.current_stream_id()
        self._uses = self.pool.uses
        self._native = self.backend.make_native_graph()
        try:
            self.backend.register_generators(self._native, self.generators)
            self.backend.begin_native(self._native, self.pool, mode)
        except BaseException:
            self._native = None
            raise
        self._open = True
        self._ended = False

    def _end(self) -> Executable:
        self._open = False  # Never end twice: a second end of a failed capture can crash.
        try:
            self._close_capture()
        except Exception as error:
            if self.backend.is_unjoined(error):
                raise UnjoinedStreamError(
                    "a side stream that was forked inside the capture was not joined. Make the "
                    "capturing stream wait for it (current_stream.wait_stream(side)) before the "
                    f"capture or segment ends. ({error})"
                ) from error
            raise
        self._ended = True
        return Call(self._native.replay)

    def _close_capture(self) -> None:
        self.backend.end_native(self._native)

    def _abort(self) -> None:
        native, self._native = self._native, None
        if native is None:
            return
        if self._open:
            self._open = False
            with contextlib.suppress(Exception):
                self._drop_capture(native)
                self._ended = True
        if not self._ended:
            self._recover(native)
        with contextlib.suppress(Exception):
            native.reset()

    def _drop_capture(self, native: Any) -> None:
        self.backend.end_native(native)

    def _recover(self, native: Any) -> None:
        """Restore torch's state after the driver refused to end a capture.

        Some versions of torch then continue to route allocations to the pool, and the random
        generator stays in capture mode. To run torch's clean-up, begin an empty capture and end it
        through the same object.
        """
        if self.pool.uses == self._uses:
            return  # torch itself has cleaned up
        try:
            self.backend.reopen_capture()
            self.backend.end_native(native)
        except Exception as error:
            logger.warning(
                "%s: a failed capture could not be undone (%s); its memory stays reserved, and "
                "later captures of this pool use new memory",
                self.backend.name,
                str(error),  # not the error itself: a kept log record would keep its traceback
            )
            self.pool.renew(native)

    def _free(self) -> None:
        native, self._native = self._native, None
        if native is not None:
            native.reset()

    def _size(self) -> tuple[int | None, int]:
        return None, 0


class TorchBackend(Backend):
    """A backend over one torch device namespace.

    Subclasses set ``name``, ``device_type``, ``graph_class_name`` and ``capabilities``.
    """

    device_type: str = ""
    """torch's name for the device type and for the namespace ``torch.<device_type>``."""
    graph_class_name: str = ""
    """Name of the native graph class in the namespace."""
    graph_type: type[TorchGraph] = TorchGraph
    pool_type: type[TorchPool] = TorchPool
    sticky_errors: frozenset[int] = frozenset()
    """Error codes of the driver after which every later call of the process fails."""
    drops_references: bool | None = None
    """Whether ``memory_snapshot`` drops references to its argument; None if not yet tested."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("device_type", "graph_class_name"):
            if not getattr(self, name):
                raise BackendError(f"{type(self).__name__} has no {name}; set it in the class")
        self.namespace: Any = getattr(torch, self.device_type, None)
        self.check_available()
        assert self.namespace is not None
        self._device = torch.device(self.device_type, self.namespace.current_device())
        self.current_stream_id: Callable[[], int] = self._make_current_stream_id()
        self._capture_stream: Any = None
        # The lock of a forked child lacks this query, which would initialize the device.
        self.capture_lock.is_stream_capturing = self.namespace.is_current_stream_capturing

    @property
    def capture_stream(self) -> Any:
        """The stream of captures for which the caller passes no stream."""
        if self._capture_stream is None:
            self._capture_stream = self.fresh_stream()
        return self._capture_stream

    def fresh_stream(self) -> Any:
        """Return a stream that is not stuck in a failed capture."""
        return self.namespace.Stream(self._device)

    def check_available(self) -> None:
        """Raise BackendUnavailableError with a remedy if the device cannot be used."""
        namespace = self.namespace
        if namespace is None:
            raise BackendUnavailableError(
                f"torch {torch.__version__} has no torch.{self.device_type}: install the vendor's "
                f"build of torch or its extension."
            )
        if not namespace.is_available():
            raise BackendUnavailableError(
                f"torch.{self.device_type} sees no device: check the driver, and check that this "
                f"build of torch supports {self.device_type} (this is {torch.__version__})."
            )
        if not hasattr(namespace, self.graph_class_name):
            raise BackendUnavailableError(
                f"torch.{self.device_type} has no {self.graph_class_name}: upgrade torch or the "
                f"vendor's extension (this is {torch.__version__})."
            )

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def device_name(self) -> str:
        return str(self.namespace.get_device_name(self._device))

    def make_pool(self, *, releasable: bool = False) -> TorchPool:
        return self.pool_type(self, releasable=releasable)

    def make_pages(self) -> Pages:
        """Return an allocator that can release pool memory and map it again.

        Raises:
            CapabilityError: the allocator cannot be created on this host.
        """
        raise NotImplementedError(
            f"backend {self.name!r} declares releasable_memory but does not implement make_pages"
        )

    def begin_native(self, native: Any, pool: TorchPool, mode: str) -> None:
        """Begin the capture of ``native`` into ``pool``; a failure changes nothing."""
        native.capture_begin(pool=pool.handle, capture_error_mode=mode)

    def end_native(self, native: Any) -> None:
        """End the capture of ``native`` without torch's warning about an empty graph."""
        with warnings.catch_warnings():
            # Empty segments between two breaks are legal; other empty graphs are detected later.
            warnings.filterwarnings("ignore", message=".*Graph is empty.*")
            native.capture_end()

    def reopen_capture(self) -> None:
        """Begin an empty driver capture on the current stream, which torch's clean-up can then end.

        Raises:
            RuntimeError: the stream is still in a capture.
        """
        raise NotImplementedError(f"backend {self.name!r} has no raw stream capture")

    def prepare_stream(self) -> None:
        """Create library handles for the current stream that a capture could not create."""

    def make_native_graph(self) -> Any:
        return getattr(self.namespace, self.graph_class_name)()

    def synchronize(self) -> None:
        require_alive(self)
        with self.exclusive():
            try:
                self.namespace.synchronize(self._device)
            except Exception as error:
                raise_if_lost(self, error)
                raise
        if not self.capture_lock.is_recording_here:
            for gates in list(self.gate_sets):
                gates.check()

    def keep_memory(self) -> None:
        super().keep_memory()
        keep_forever(*self.capture_lock.buried)

    def bury(self, *objects: Any) -> None:
        """Keep ``objects`` alive until no capture is running, or forever after ``keep_memory``.

        Freeing device memory during a capture would abort the process.
        """
        if self.keeps_memory:
            keep_forever(*objects)
        elif self.capture_lock.owner is not None:
            self.capture_lock.buried.append(objects)

    def fence(self, stream: Any = None) -> Callable[[], bool]:
        event = self.namespace.Event()
        event.record(self.namespace.current_stream(self._device) if stream is None else stream)
        done: Callable[[], bool] = event.query
        return done

    def stopwatch(self) -> Callable[[], Callable[[], float | None]]:
        stream = self.namespace.current_stream(self._device)
        begin, end = (self.namespace.Event(enable_timing=True) for _ in range(2))
        begin.record(stream)

        def stop() -> Callable[[], float | None]:
            end.record(stream)
            return lambda: begin.elapsed_time(end) / 1e3 if end.query() else None

        return stop

    def is_current(self) -> bool:
        return bool(self.namespace.current_device() == self._device.index)

    def on_device(self) -> contextlib.AbstractContextManager[Any]:
        device = self.namespace.device
        return contextlib.nullcontext() if self.is_current() else device(self._device)

    def register_generators(self, native: Any, generators: Iterable[torch.Generator]) -> None:
        """Register the caller's random generators, so that each replay advances them.

        Versions of torch without registration raise an error when the capture uses a generator.
        """
        register = getattr(native, "register_generator_state", None)
        for generator in generators:
            if register is not None and generator.device.type == self._device.type:
                register(generator)

    def get_rng_state(self) -> torch.Tensor:
        state: torch.Tensor = self.namespace.get_rng_state(self._device)
        return state

    def set_rng_state(self, state: torch.Tensor) -> None:
        self.namespace.set_rng_state(state, self._device)

    def memory_info(self) -> tuple[int, int] | None:
        free, total = self.namespace.mem_get_info(self._device)
        return int(free), int(total)

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.pin_memory()

    def hold(self, tensor: torch.Tensor, stream: Any) -> None:
        """Keep the memory of a deleted ``tensor`` until the queued work of ``stream`` is done."""
        tensor.record_stream(stream)

    def _make_current_stream_id(self) -> Callable[[], int]:
        namespace, device = self.namespace, self._device
        return lambda: int(namespace.current_stream(device).stream_id)

    def lost_reason(self, error: BaseException) -> str | None:
        lost = getattr(error, "error_code", None) in self.sticky_errors
        return str(error).partition("\n")[0] if lost else None

    def is_unjoined(self, error: BaseException) -> bool:
        """Whether the end of a capture raised ``error`` because a stream was not joined."""
        return "unjoined" in str(error).lower()

    def retire_if_capturing(self, stream: Any) -> bool:
        """Retire ``stream`` unless it is certainly not capturing; return whether it was retired."""
        with contextlib.suppress(Exception), self.namespace.stream(stream):
            if not self.namespace.is_current_stream_capturing():
                return False
        self.retire_stream(stream)
        return True

    @contextlib.contextmanager
    def on_working_stream(self) -> Iterator[None]:
        if not self.namespace.is_current_stream_capturing():
            yield
            return
        stream = self.fresh_stream()
        with self.namespace.stream(stream):
            yield
        stream.synchronize()

    def retire_stream(self, stream: Any) -> None:
        """Replace ``stream`` as capture stream; overrides also keep it out of ``fresh_stream``."""
        logger.warning("%s: retired a stream that a failed capture left capturing", self.name)
        if stream == self._capture_stream:
            self._capture_stream = None

    @contextlib.contextmanager
    def side_stream(self, pool: Pool, stream: Any = None) -> Iterator[None]:
        assert isinstance(pool, TorchPool)
        current = self.namespace.current_stream(self._device)
        if type(stream) is torch.Stream:  # A generic stream lacks the attributes of the vendor's.
            names = ("stream_id", "device_index", "device_type")
            stream = self.namespace.Stream(**{name: getattr(stream, name) for name in names})
        side = stream if self.captures_on(stream) else pool.stream
        pool.forget_addresses()
        try:
            side.wait_stream(current)
            with self.namespace.stream(side):
                self.prepare_stream()
                pool.keep_alive()
                with self.guard():
                    yield
        except BaseException:
            # A wait for a stream that is still capturing would join the current stream to it.
            if not self.retire_if_capturing(side):
                with contextlib.suppress(Exception):
                    self.join(current, side)
            raise
        self.join(current, side)
        if pool.ordered_stream is not None and pool._last_stream == side:
            # Another thread may capture on ``side`` next, and replays must not wait for a capturing
            # stream.
            pool._last_stream, pool.ordered_stream = current, self.current_stream_id()

    def captures_on(self, stream: Any) -> bool:
        """Whether captures may use the caller's ``stream`` instead of the pool's stream."""
        # If a device does not report its default stream, accept every stream.
        default = getattr(self.namespace, "default_stream", lambda device: None)
        return stream is not None and bool(stream != default(self._device))

    def guard(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context that refuses operations that this device's graphs do not support.

        The default refuses random numbers, unless the backend declares ``rng``.
        """
        if self.capabilities.rng:
            return contextlib.nullcontext()
        return RandomGuard(
            f"backend {self.name!r} does not declare that replays draw new numbers (rng). Draw "
            f"them before the step into a bound tensor, or in a function marked @dg.no_graph under "
            f"policy='breakable'."
        )

    def join(self, current: Any, side: Any) -> None:
        """Make ``current`` wait for ``side``, the stream of captures or replays."""
        current.wait_stream(side)

    def bind_worker(self, index: int) -> None:
        """Bind this pytest-xdist worker to device ``index`` modulo the number of devices."""
        self.namespace.set_device(index % self.namespace.device_count())
        self._device = torch.device(self.device_type, self.namespace.current_device())
        self._capture_stream = None
        self.current_stream_id = self._make_current_stream_id()
