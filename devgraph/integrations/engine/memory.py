"""Pools of graph memory, by pool handle of the engine."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Hashable

import torch

from devgraph.api.backend import Backend, own_pool
from devgraph.api.errors import BackendUnavailableError
from devgraph.api.pool import Pool
from devgraph.api.registry import get_backend

logger = logging.getLogger(__name__)


class GraphMemory:
    """A mapping from the engine's pool handles to pools. The backend is created on demand.

    The engine identifies graph memory by opaque handles, and switches handles while it profiles
    memory, for example. A pool lives as long as a graph or the engine refers to it.
    """

    def __init__(self, device_type: Callable[[], str], backend: str | None = None) -> None:
        self._device_type = device_type
        self._name = backend
        self.backend_in_use: Backend | None = None
        """The backend, or None before ``backend`` is read for the first time."""
        self.limits: tuple[float, ...] = ()
        """Executable budgets of each pool. The lowest budget applies; see ``Pool.limit``."""
        self.releasable = False
        """Whether new pools are releasable, on backends that support this."""
        # Keyed by (handle, releasable), because only some engines of a process may use sleep mode.
        self._pools: weakref.WeakValueDictionary[Hashable, Pool] = weakref.WeakValueDictionary()

    @property
    def backend(self) -> Backend:
        if self.backend_in_use is None:
            backend = get_backend(self._name or "auto")
            kind = self._device_type()
            if kind and backend.device.type != kind:
                raise BackendUnavailableError(
                    f"the engine runs on {kind!r}, but the backend {backend.name!r} captures on "
                    f"{backend.device.type!r}. Run 'devgraph doctor' to find missing packages, or "
                    f"name the backend: install(backend=...)."
                )
            self.backend_in_use = backend
        return self.backend_in_use

    def pool(self, handle: Hashable) -> Pool:
        """Return the pool of ``handle``, which is created if it does not exist."""
        key = handle, self.releasable
        pool = self._pools.get(key)
        if pool is None:
            pool = self._make_pool()
            self._pools[key] = pool
        return pool

    def _make_pool(self) -> Pool:
        able = self.backend.capabilities.releasable_memory
        if self.releasable and not able:
            logger.warning(
                "backend %s cannot release graph memory while the engine sleeps", self.backend.name
            )
        pool = own_pool(self.backend, None, releasable=self.releasable and able)
        for limit in self.limits:
            pool.limit(limit)
        return pool

    def shared(self, handle: Hashable | None) -> tuple[Pool, Hashable]:
        """Return the pool of all graphs and its handle, for an engine with a single handle.

        Graphs that the engine captures itself then share this pool.
        """
        pool = self._make_pool() if handle is None else self.pool(handle)
        own: Hashable = getattr(pool, "handle", None) or handle or object()
        self._pools[own, self.releasable] = pool
        return pool, own

    @property
    def bytes(self) -> int:
        """Bytes of device memory in all pools."""
        return sum(pool.bytes for pool in self._alive)

    @property
    def _alive(self) -> set[Pool]:
        # valuerefs() is a copy, because another thread may create a pool.
        return {pool for ref in self._pools.valuerefs() if (pool := ref()) is not None}

    def release(self) -> None:
        """Release the memory of all releasable pools until ``restore``. Idempotent."""
        before = self.bytes
        for pool in self._alive:
            if pool.releasable:
                pool.release()
        logger.info("released %d MiB of graph memory", (before - self.bytes) >> 20)

    def restore(self) -> None:
        """Map released memory again. Idempotent."""
        for pool in self._alive:
            pool.restore()

    def settle(self) -> None:
        """Return freed memory to the device, so that the engine measures only the memory of graphs.

        The garbage collector is not called, because a collection takes longer than a capture. The
        engine collects once, before all captures.
        """
        self.backend.synchronize()
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()
