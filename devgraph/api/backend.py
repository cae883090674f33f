"""Backend: how one capture is made, replayed and updated on one vendor's device."""

from __future__ import annotations

import abc
import contextlib
import gc
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from devgraph.api import process
from devgraph.api.attention import SlotAttention
from devgraph.api.capabilities import Capabilities
from devgraph.api.errors import (
    CaptureBusyError,
    DeviceLost,
    InputError,
    InputTypeError,
)
from devgraph.api.graph import DeviceGraph
from devgraph.api.marks.host_values import HostSpec, Tracked
from devgraph.api.marks.scopes import GraphScope
from devgraph.api.pool import Pool, keep_for_ever
from devgraph.api.session import session

__all__ = ["Backend"]

logger = logging.getLogger(__name__)

CAPTURE_ERROR_MODES = ("global", "thread_local", "relaxed")


class Backend(abc.ABC):
    """One vendor's device. Subclasses give identity, capabilities and a graph class.

    ``make_graph`` and ``capture_context`` have the signatures of PyTorch's device-graph proposal.
    """

    name: str = ""
    capabilities: Capabilities = Capabilities()
    capture_lock_timeout: float = 60.0
    """Seconds that a capture waits for another thread's capture on the same device."""

    def __init__(self) -> None:
        self.after_fork()
        process.identity.renewed.add(self)
        self._lost = ""
        self._buried: list[Any] = []
        self.graphs: weakref.WeakSet[DeviceGraph] = weakref.WeakSet()
        """Every living graph, which must be told when the device is lost."""

    def after_fork(self) -> None:
        """Forget who captures: that thread is not in the child."""
        self._capture_lock = threading.RLock()
        self._capture_owner = ""
        self._capture_thread: int | None = None
        self.recording = False
        """Whether a session is open."""

    @property
    @abc.abstractmethod
    def device(self) -> torch.device:
        """The device whose work is captured."""

    @abc.abstractmethod
    def make_graph(self, pool: Pool | None = None) -> DeviceGraph:
        """Return an empty graph in ``pool`` (in a pool of its own if None)."""

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Wait until all work of the device is done."""

    def fence(self) -> Callable[[], bool]:
        """Return what tells, without waiting, whether the current stream's work so far is done.

        The base class has no streams: what was called has been done.
        """
        return lambda: True

    @property
    def version(self) -> str:
        """Version of the vendor's runtime, for reports and rank agreement."""
        return torch.__version__

    @property
    def device_name(self) -> str:
        """The product name of the device."""
        return str(self.device)

    def details(self) -> dict[str, str]:
        """Return what else a report should tell of this backend's runtime, by topic."""
        return {}

    def make_pool(self, budget_bytes: int | None = None) -> Pool:
        """Return a new pool.

        Args:
            budget_bytes: the most that recordings of its graphs may take; None for the default.
        """
        return Pool(self, budget_bytes)

    def poison(self, tensor: torch.Tensor) -> None:
        """Fill ``tensor`` with values that no correct result contains."""
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.fill_(float("nan"))
        elif tensor.dtype is torch.bool:
            tensor.fill_(True)
        else:
            tensor.fill_(torch.iinfo(tensor.dtype).max // 3)

    def get_rng_state(self) -> torch.Tensor:
        """Return the state of the device's default random generator."""
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Restore what ``get_rng_state`` returned."""
        torch.set_rng_state(state)

    def memory_info(self) -> tuple[int, int] | None:
        """Return (free, total) bytes of device memory, or None where that is not known."""
        return None

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``tensor``'s data in host memory from which copies to the device are async."""
        return tensor

    def slot_attention(
        self, *, slots: int, rows: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> SlotAttention | None:
        """Return the device's own attention over a cache of slots, or None where it has none.

        Args:
            slots: requests that the cache holds.
            rows: positions of a slot; the cache rounds them up to the result's ``row_multiple``.
            heads, kv_heads: of queries, and of keys and values.
            head_dim: elements of a head, the same for keys and values.
            dtype: of queries, keys and values.
        """
        return None

    def wrap_compiled(self, run: Callable[..., Any], source: Any) -> Callable[..., Any]:
        """Return ``run``, a compiled piece of a step, in a form that a capture can record.

        Args:
            run: takes and returns tensors.
            source: the ``torch.fx.GraphModule`` that it was compiled from.
        """
        return run

    def lost_reason(self, error: BaseException) -> str | None:
        """Return why ``error`` means that the device is lost, or None if it does not."""
        return None

    def shortage(self, error: BaseException) -> str | None:
        """Return what a capture lacked if ``error`` says that a resource of the device, other than
        torch's memory, ran out; else None."""
        return None

    def is_host_read(self, error: BaseException) -> bool:
        """Whether the vendor raised ``error`` because a capture read device data on the host."""
        return False

    def new_replay_lock(self) -> threading.RLock:
        """Return the lock that a new pool holds while it replays.

        Where other threads must leave the device alone during a capture, it is the capture's own:
        a replay then waits until the capture is over.
        """
        return threading.RLock() if self.capabilities.concurrent_threads else self._capture_lock

    def own_pool(self, pool: Pool | None) -> Pool:
        """Return ``pool``, or a new one for None.

        Raises:
            InputTypeError: it is no pool. StateError: it belongs to another backend.
        """
        if pool is None:
            return self.make_pool()
        if not isinstance(pool, Pool):
            raise InputTypeError(f"pool must come from backend.make_pool(), got {pool!r}")
        pool.check(self)
        return pool

    @contextlib.contextmanager
    def side_stream(self, pool: Pool, stream: Any = None) -> Iterator[None]:
        """Run the block on a stream that can be captured, ordered after and before the current.

        The base class has no streams and runs it in place.
        """
        yield

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """Have the device to oneself, and collect no garbage meanwhile.

        A collection inside a capture, or while allocations are routed to a pool, could free graphs
        and pools or unload kernels: drivers and allocators refuse that, or worse, record it.
        """
        with self.exclusive():
            collecting = gc.isenabled()
            try:
                gc.disable()
                yield
            finally:
                if collecting:
                    gc.enable()

    @property
    def held_here(self) -> bool:
        """Whether this thread has the device to itself."""
        return self._capture_thread == threading.get_ident()

    @property
    def recording_here(self) -> bool:
        """Whether this thread has a session open."""
        return self.recording and self.held_here

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Have the device to oneself: no other thread captures meanwhile.

        What waits for the whole device needs this, because drivers refuse to wait for a device
        with a capture under way, and end that capture as well. May be nested in one thread.

        Raises:
            CaptureBusyError: another thread captures on this device for too long.
        """
        if self.held_here:
            yield
            return
        with self.locked(self._capture_lock):
            try:
                self._capture_owner = threading.current_thread().name
                self._capture_thread = threading.get_ident()
                yield
            finally:
                self._capture_owner = ""
                self._capture_thread = None
                self._buried.clear()

    def bury(self, *things: Any) -> None:
        """Keep ``things`` until no capture is under way, if one is, and those of a lost device.

        Device memory that is given back meanwhile would end the process.
        """
        if self._lost:
            keep_for_ever(*things)
        elif self._capture_owner:
            self._buried.append(things)

    @contextlib.contextmanager
    def locked(self, lock: Any) -> Iterator[None]:
        """Hold ``lock``, which a capture of another thread may hold.

        Raises:
            CaptureBusyError: it does so for too long.
        """
        held: list[bool] = []
        try:
            # One call, so that no interrupt comes between taking the lock and knowing that.
            held.extend(map(lock.acquire, (True,), (self.capture_lock_timeout,)))
            if not held[0]:
                raise CaptureBusyError(
                    f"thread {self._capture_owner!r} has been capturing on {self.device} for more "
                    f"than {self.capture_lock_timeout:g} s; only one thread captures at a time."
                )
            yield
        finally:
            if held and held[0]:
                lock.release()

    @contextlib.contextmanager
    def capture_context(
        self,
        graph: DeviceGraph,
        stream: Any = None,
        pool: Pool | None = None,
        capture_error_mode: str = "thread_local",
        *,
        host_args: Mapping[str, Any] | None = None,
    ) -> Iterator[dict[str, Tracked]]:
        """Capture the device work of the block into ``graph`` without running it.

        Args:
            graph: an empty graph of this backend.
            stream: the stream to capture on; None, or the default stream, means the pool's own.
            pool: the pool to allocate from, if it is not the graph's.
            capture_error_mode: which threads' unsafe calls make the capture fail: "global",
                "thread_local" or "relaxed".
            host_args: host arguments of regions in the block and their values at capture.

        Yields:
            the tracked host arguments by name, to hand to regions. A plain value equal to the
            declared one is taken as well.

        Raises:
            StateError: the graph is not empty.
            CaptureError: the block cannot be captured. The graph stays empty.
        """
        if not isinstance(graph, DeviceGraph):
            raise InputTypeError(f"graph must come from backend.make_graph(), got {graph!r}")
        if pool is not None and graph.pool is not pool:
            graph.use_pool(self.own_pool(pool))
        graph.pool.check(self)
        spec = HostSpec(host_args)
        scope = GraphScope(graph, spec, accept_equal=True)
        with session(graph.pool, scope, stream=stream, mode=capture_error_mode) as recording:
            recording.begin(graph, spec=spec)
            yield spec.tracked()
            recording.end()

    def check_capture_error_mode(self, mode: str) -> str:
        """Return the backend's own mode for ``mode``; the strictest it has if it lacks it."""
        if mode not in CAPTURE_ERROR_MODES:
            raise InputError(
                f"capture_error_mode {mode!r} is none of {', '.join(CAPTURE_ERROR_MODES)}"
            )
        known = self.capabilities.capture_error_modes
        if mode in known:
            return mode
        logger.info("%s has no capture error mode %s; using %s", self.name, mode, known[0])
        return known[0]

    @property
    def lost(self) -> bool:
        """Whether an earlier call found the device in an error state that does not end."""
        return bool(self._lost)

    def require_alive(self) -> None:
        """Raise DeviceLost if the device is ``lost``."""
        if self._lost:
            raise DeviceLost(f"{self.device} is lost ({self._lost}); start a new process.")

    def raise_if_lost(self, error: BaseException) -> None:
        """Raise DeviceLost from ``error``, and at every later capture, if it means just that."""
        reason = self.lost_reason(error)
        if reason is not None and not isinstance(error, DeviceLost):
            self._lost = reason
            keep_for_ever(*self._buried)
            for graph in list(self.graphs):
                graph.give_up()
            raise DeviceLost(
                f"{self.device} is in a sticky error state and every later call will fail; "
                f"start a new process ({reason})."
            ) from error

    def elsewhere(self) -> bool:
        """Whether this thread's current device is another one than the backend's."""
        return False

    def on_device(self) -> contextlib.AbstractContextManager[Any]:
        """Make the backend's device the current one of this thread for a block."""
        return contextlib.nullcontext()

    def __repr__(self) -> str:
        return f"<backend {self.name} on {self.device}>"
