"""What the ROCm device tests build with; importing it skips the module without such a backend."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import devgraph as dg
from devgraph.api.policy.budget import UpdateBudget

__all__ = ["KEEP_ALL", "backend", "check", "graph_of", "library", "randn", "record", "replayed"]

try:
    dg.get_backend("rocm")
except dg.BackendError as reason:
    pytest.skip(
        f"needs the backend 'rocm': AMD hardware, or an NVIDIA GPU with -p tests.sim.hip.plugin "
        f"({reason})",
        allow_module_level=True,
    )
KEEP_ALL = UpdateBudget(misses=10**6)
"""Every new key is recorded at once."""


@pytest.fixture(name="be")
def backend() -> Iterator[Any]:
    """The ROCm backend; a test may leave neither a capture nor a device error behind."""
    found = dg.get_backend("rocm")
    yield found
    assert not dg.is_capturing()
    found.synchronize()


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return noise on the device."""
    return torch.randn(*shape, device=dg.get_backend("rocm").device, dtype=dtype)


def check(cap: dg.Captured, fn: Callable[..., Any], *args: Any, **host: Any) -> None:
    """Fail unless a replay with new data in ``args[0]`` equals ``fn`` run eagerly, bit for bit."""
    args[0].copy_(torch.randn(args[0].shape))
    want = fn(*args, **host).clone()
    cap.outputs.fill_(float("nan"))
    got = cap.replay(**host)
    cap.pool.backend.synchronize()
    assert torch.equal(got, want), f"differs from eager with {host}"


def record(be: Any, body: Callable[[], Any], **host: Any) -> tuple[Any, Any]:
    """Capture ``body`` with the raw calls, after running it once."""
    body()
    be.synchronize()
    graph = be.make_graph()
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


def library(be: Any) -> Any:
    """Return the bound libamdhip64 for calls of its own that a region makes."""
    found = ctypes.CDLL(be.runtime.path)
    found.hipMemsetAsync.argtypes = (
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_size_t,
        ctypes.c_void_p,
    )
    return found
