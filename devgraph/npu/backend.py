"""The Ascend backend: identity, capabilities, and what differs from other torch namespaces."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from devgraph.api.capabilities import Capabilities
from devgraph.api.errors import BackendUnavailableError, UpdateError
from devgraph.api.torchlike.base import TorchBackend, TorchPool
from devgraph.npu.attention import BLOCK, DTYPES, HEAD_DIMS, FusedSlotAttention
from devgraph.npu.channel import UpdateChannel
from devgraph.npu.diagnose import AUTOLOAD, diagnose
from devgraph.npu.errors import NO_RESOURCE, UNJOINED, error_code, lost_reason, means
from devgraph.npu.graph import NpuGraph, NpuPool, dumped_streams
from devgraph.npu.lifetimes import Burials, StreamBudget
from devgraph.npu.task_groups import EventStore, TaskGroups

__all__ = ["NpuBackend", "make_backend"]

logger = logging.getLogger(__name__)


class NpuBackend(TorchBackend):
    """Ascend NPUs through torch_npu."""

    name = "npu"
    device_type = "npu"
    graph_class_name = "NPUGraph"
    graph_type = NpuGraph
    pool_type = NpuPool

    replay_first: bool = True
    """Launch a replay before its update, so that they overlap. Devices that are shared in software
    slices need the reverse."""
    try_new_values: bool = True
    """Apply host values that a graph never took before its replay is launched, so that a refusal is
    raised by the call and nothing has run. False overlaps them too; a refusal then spoils that
    replay, whose graph becomes dirty, and is raised by the graph's next call."""
    attention_version: int = 2
    """The version of torch_npu's fused attention that engines get: 1 or 2."""
    update_timeout: float = 60.0
    """Seconds after which an update, or a replay whose update was issued, counts as stuck."""

    def __init__(self) -> None:
        super().__init__()
        self._native_class = getattr(self.namespace, self.graph_class_name)
        self._bind()
        self.capabilities = Capabilities(
            region_update=True,
            async_update=True,
            shared_pool=True,
            rng=True,
            refuses_host_reads=True,
            streams=True,
            capture_error_modes=("thread_local", "global", "relaxed"),
            concurrent_threads=True,
            node_counts=True,
            piecewise=True,
            max_streams=self.budget.limit,
        )

    def _bind(self) -> None:
        self._burials = Burials(self)
        index = self._device.index
        self.budget = StreamBudget()
        self.events = EventStore(self.namespace)
        self.channel = UpdateChannel(self.namespace, index, self.update_timeout)

    def check_available(self) -> None:
        if self.namespace is None or "torch_npu" not in sys.modules:
            _import_torch_npu()
            self.namespace = getattr(torch, self.device_type, None)
        super().check_available()
        if os.environ.get("TASK_QUEUE_ENABLE") == "2":
            raise BackendUnavailableError(
                "TASK_QUEUE_ENABLE=2 is set, and torch_npu captures no graph in that mode: set it "
                "to 1 (the default) or 0."
            )

    @property
    def version(self) -> str:
        npu = sys.modules["torch_npu"]
        return f"CANN {_cann_version()}, torch_npu {npu.__version__}, torch {torch.__version__}"

    def details(self) -> dict[str, str]:
        found = diagnose()
        order = "first the replay, then its update" if self.replay_first else "update, then replay"
        return {
            "CANN": found.toolkit or "libraries found, but set_env.sh was not sourced",
            f"{AUTOLOAD}": "1: 'import torch' loads torch_npu" if found.autoload else "0",
            "updates": f"{order}; stuck after {self.channel.timeout:g} s",
            "streams": f"graphs hold {self.budget.held} of at most {self.budget.limit}",
            "attention": f"npu_fused_infer_attention_score, version {self.attention_version}",
        }

    def lost_reason(self, error: BaseException) -> str | None:
        return lost_reason(error)

    def is_unjoined(self, error: BaseException) -> bool:
        return error_code(error) == UNJOINED

    def slot_attention(
        self, *, slots: int, rows: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> FusedSlotAttention | None:
        if dtype not in DTYPES or head_dim not in HEAD_DIMS or heads % kv_heads:
            return None
        rows = -(-rows // BLOCK) * BLOCK
        return FusedSlotAttention(slots, rows, version=self.attention_version, device=self._device)

    def count_nodes(self, native: Any) -> int | None:
        """Return the number of tasks in an ended capture, or None where the driver cannot tell.

        The budget learns from it how many streams the graph holds.
        """
        streams = dumped_streams(native, self._native_class)
        if streams is None:
            return None
        self.budget.take(native, len(set(streams)))
        return len(streams)

    def drain(self) -> None:
        """Wait until torch_npu's launch thread has handed everything so far to the driver.

        The update stream has no queue, so its waits must not overtake records that are queued.
        """
        # Asking for the driver's handle of a stream does that.
        _ = self.namespace.current_stream(self._device).npu_stream

    def shortage(self, error: BaseException) -> str | None:
        return self.budget.shortage(error) if means(error, NO_RESOURCE) else None

    def begin_native(self, native: Any, pool: TorchPool, mode: str) -> None:
        self.budget.require()
        try:
            super().begin_native(native, pool, mode)
        except BaseException:
            self._undo_begin(pool)
            raise
        self.budget.take(native)

    def _undo_begin(self, pool: TorchPool) -> None:
        """Undo what a refused begin of a capture leaves behind in torch_npu's allocators."""
        try:
            self.native_module._npu_endAllocateToPool(self._device.index, pool.handle)
        except Exception:
            return  # It was refused before it touched the allocators.
        self.release_pool(pool)
        # The allocator of pinned memory has no such call: it would refuse this handle for ever.
        pool.renew(None)

    def release_pool(self, pool: TorchPool) -> None:
        """Take back one use of the pool's memory."""
        self.native_module._npu_releasePool(self._device.index, pool.handle)

    def retire(self, pool: NpuPool, native: Any, regions: TaskGroups | None) -> None:
        """Destroy a captured graph now, or once its last replay is over."""

        def give_back() -> None:
            self.budget.give_back(native)
            if regions is not None:
                self.events.give_back(regions.free_events())

        self._burials.retire(native, pool.fence, give_back)
        self.free_buried()

    def bury_memory(self, owners: list[Any]) -> None:
        """Drop ``owners`` of a pool's memory, the last one first, now or when that is allowed."""
        self._burials.bury(owners)
        self.free_buried()

    def free_buried(self) -> None:
        """Free what was retired or buried and may go now; nothing while a capture is under way."""
        if not self._burials or self.held_here or self.channel.on_thread():
            return
        if not self._capture_lock.acquire(blocking=False):
            return
        try:
            if self.channel.order.acquire(blocking=False):
                try:
                    self._burials.free(may_wait=self.channel.quiet)
                finally:
                    self.channel.order.release()
        finally:
            self._capture_lock.release()

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        self.free_buried()  # Graphs that were closed hold streams which a capture may need.
        try:
            with super().exclusive():
                yield
        finally:
            self.free_buried()

    @property
    def native_module(self) -> Any:
        """The compiled module of torch_npu."""
        return sys.modules["torch_npu"]._C

    def _make_current_stream_id(self) -> Callable[[], int]:
        index = self._device.index
        current = self.native_module._npu_getCurrentStream
        return lambda: int(current(index)[0])

    def synchronize(self) -> None:
        """Wait until all work of the device is done.

        Raises:
            UpdateError: a replay waited longer than ``update_timeout`` for an event whose record
                was lost. The device is free again and the graph is dirty.
        """
        for regions in self.channel.settle():
            self.channel.unwatch(regions)
            if isinstance(regions.failure, UpdateError):
                raise regions.failure
        super().synchronize()
        self.free_buried()

    def bind_worker(self, index: int) -> None:
        super().bind_worker(index)
        self._bind()


def _import_torch_npu() -> None:
    found = diagnose()
    if found.problems:
        raise BackendUnavailableError(f"backend 'npu' cannot be used: {found}")
    old = os.environ.get(AUTOLOAD)
    try:
        importlib.import_module("torch_npu")
    except Exception as error:
        raise BackendUnavailableError(
            f"importing torch_npu failed ({error}); {found}. Check that CANN's set_env.sh was "
            f"sourced and that its version is one that this torch_npu supports."
        ) from error
    finally:
        # torch_npu changes it for the whole process while it is imported.
        if old is not None:
            os.environ[AUTOLOAD] = old


def _cann_version() -> str:
    with contextlib.suppress(Exception):
        utils = importlib.import_module("torch_npu.npu.utils")
        return str(utils.get_cann_version())
    return "unknown"


def make_backend() -> NpuBackend:
    """Return the Ascend backend or raise BackendUnavailableError with the way to fix it."""
    return NpuBackend()
