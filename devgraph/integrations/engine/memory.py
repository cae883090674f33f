"""Graph memory by the engine's own pool handles."""

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
    """One pool per handle of the engine; the backend is made at the first capture.

    The engine names graph memory by opaque handles and swaps them, as in its memory profiling. A
    pool lives as long as somebody who was given it.

    Args:
        device_type: gives torch's name of the engine's device; empty if it does not know.
        backend: the backend to use; None for the one of ``device_type``.
    """

    def __init__(self, device_type: Callable[[], str], backend: str | None = None) -> None:
        self._device_type = device_type
        self._name = backend
        self.made: Backend | None = None
        """The backend, or None before the first capture."""
        self.limits: tuple[float, ...] = ()
        """Budgets for what the graphs of a pool launch, of which the lowest holds; see
        ``Pool.limit``."""
        self.releasable = False
        """Whether pools that are made from now on can be released, where the backend has such."""
        # By handle and releasable: of two engines of a process one may sleep while the other runs.
        self._pools: weakref.WeakValueDictionary[Hashable, Pool] = weakref.WeakValueDictionary()

    @property
    def backend(self) -> Backend:
        """The backend of the engine's device.

        Raises:
            BackendUnavailableError: there is none; says which device was asked for.
        """
        if self.made is None:
            found = get_backend(self._name or "auto")
            kind = self._device_type()
            if kind and found.device.type != kind:
                raise BackendUnavailableError(
                    f"the engine runs on {kind!r} and the backend {found.name!r} captures on "
                    f"{found.device.type!r}. Run 'devgraph doctor' for what is missing, or name "
                    f"the backend: install(backend=...)."
                )
            self.made = found
        return self.made

    def pool(self, handle: Hashable) -> Pool:
        """Return the pool that stands for ``handle``, a new one if nobody holds one."""
        key = handle, self.releasable
        pool = self._pools.get(key)
        if pool is None:
            pool = self._made_pool()
            self._pools[key] = pool
        return pool

    def _made_pool(self) -> Pool:
        able = self.backend.capabilities.releasable_memory
        if self.releasable and not able:
            logger.warning(
                "backend %s cannot give the memory of graphs back while the engine sleeps: they "
                "keep it",
                self.backend.name,
            )
        pool = own_pool(self.backend, None, releasable=self.releasable and able)
        for limit in self.limits:
            pool.limit(limit)
        return pool

    def shared(self, handle: Hashable | None) -> tuple[Pool, Hashable]:
        """Return a pool for an engine that hands one handle around, and the handle to hand around.

        What the engine captures by itself, and what it looks for in graph memory, then lies in the
        same pool as what is captured here.

        Args:
            handle: what the engine has now; None for new memory.
        """
        pool = self._made_pool() if handle is None else self.pool(handle)
        own: Hashable = getattr(pool, "handle", None) or handle or object()
        self._pools[own, self.releasable] = pool
        return pool, own

    @property
    def bytes(self) -> int:
        """Device memory of all pools in use."""
        return sum(pool.bytes for pool in self._alive)

    @property
    def _alive(self) -> set[Pool]:
        # The references at once: another thread may make a pool meanwhile.
        return {pool for ref in self._pools.valuerefs() if (pool := ref()) is not None}

    def release(self) -> None:
        """Give back the memory of graphs, of the pools that can, until ``restore``; replays raise
        ExecutableError meanwhile. Idempotent; see ``Pool.release``."""
        before = self.bytes
        for pool in self._alive:
            if pool.releasable:
                pool.release()
        logger.info("the device has %d MiB of graph memory back", (before - self.bytes) >> 20)

    def restore(self) -> None:
        """Take memory for what ``release`` gave back. Idempotent.

        Raises:
            ResourceError: there is not enough; nothing is lost, and it may be tried again.
        """
        for pool in self._alive:
            pool.restore()

    def settle(self) -> None:
        """Give freed memory back to the device before a capture, so that what the engine then
        measures is what the graphs take.

        Garbage is the engine's to collect, once before all captures: a collection walks its whole
        heap, which takes longer than a capture.
        """
        self.backend.synchronize()
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()
