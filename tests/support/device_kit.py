"""What the tests of a device build with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import devgraph as dg
from devgraph.api.policy.job import UpdateBudget

__all__ = ["KEEP_ALL", "check", "graph_of", "on", "record", "replayed"]

KEEP_ALL = UpdateBudget(misses=10**6)
"""Every new key is recorded at once."""


def on(name: str) -> tuple[Any, Callable[..., torch.Tensor]]:
    """Return the fixture ``be``, the backend ``name``, and what makes noise on its device.

    A module that calls it is skipped where there is no such backend.
    """
    try:
        dg.get_backend(name)
    except dg.BackendError as reason:
        pytest.skip(f"needs the backend {name!r} ({reason})", allow_module_level=True)

    @pytest.fixture(name="be")
    def backend() -> Iterator[Any]:
        """The backend; a test may leave neither a capture nor a device error behind."""
        found = dg.get_backend(name)
        yield found
        assert not dg.is_capturing()
        found.synchronize()

    def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        # A worker of pytest-xdist binds the backend to its own device after this import.
        return torch.randn(*shape, device=dg.get_backend(name).device, dtype=dtype)

    return backend, randn


def check(cap: dg.Captured, fn: Callable[..., Any], *args: Any, **host: Any) -> None:
    """Fail unless a replay with new data in ``args[0]`` equals ``fn`` run eagerly, bit for bit.

    ``fn`` may write the other arguments, to the same values every time.
    """
    args[0].copy_(torch.randn(args[0].shape))
    want = [t.clone() for t in pytree.tree_leaves(fn(*args, **host))]
    for held in pytree.tree_leaves(cap.outputs):
        if held.data_ptr() != args[0].data_ptr():
            held.fill_(float("nan"))
    got = pytree.tree_leaves(cap.replay(**host))
    cap.pool.backend.synchronize()
    for ours, theirs in zip(got, want, strict=True):
        assert torch.equal(ours, theirs), f"differs from eager with {host}"


def record(
    be: Any, body: Callable[[], Any], pool: Any = None, **host: Any
) -> tuple[dg.DeviceGraph, Any]:
    """Capture ``body`` with the raw calls, after running it once."""
    body()
    be.synchronize()
    graph = be.make_graph(pool)
    with be.capture_context(graph, host_args=host):
        out = body()
    return graph, out


def replayed(graph: dg.DeviceGraph, out: torch.Tensor) -> torch.Tensor:
    """Replay and return a copy of what it wrote to ``out``."""
    out.fill_(float("nan"))
    graph.replay()
    graph.backend.synchronize()
    return out.clone()


def graph_of(cap: dg.Captured) -> Any:
    """Return the first graph of a capture."""
    return next(s for s in cap.segments if isinstance(s, dg.DeviceGraph))
