"""pytest plugin: the third-party example over a mock of ``torch.xpu``, and the same mock as torch's
accelerator, under the backend of that name.

The mock is the namespace of the fake libamdhip64 with the names and signatures of torch.xpu: it
has no default stream, and captures have no error mode. Tensors are CPU tensors. It shows that the
example fits the contract, and nothing about Intel's devices.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from devgraph.api import registry
from devgraph.api.pool import Pool
from devgraph.api.registry import register
from devgraph.api.torchlike.accelerator import AcceleratorBackend
from tests.sim.hip.device import Device, Recorder
from tests.sim.hip.fake import Fake

__all__ = ["EXAMPLE", "make", "pytest_configure"]

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "thirdparty_backend"


class _Graph:
    """torch.xpu.XPUGraph's calls, as torch 2.13 has them."""

    def __init__(self, native: Any) -> None:
        self._native = native

    def capture_begin(self, pool: Any = None) -> None:
        self._native.capture_begin(pool=pool)

    def capture_end(self) -> None:
        self._native.capture_end()

    def replay(self) -> None:
        self._native.replay()

    def reset(self) -> None:
        self._native.reset()


class _Xpu:
    """The mock of the module ``torch.xpu``."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def __getattr__(self, name: str) -> Any:
        if name == "default_stream":
            raise AttributeError("module 'torch.xpu' has no attribute 'default_stream'")
        return getattr(self._device, name)

    def is_available(self) -> bool:
        return True

    def XPUGraph(self) -> _Graph:
        return _Graph(self._device.CUDAGraph())


class _AcceleratorGraph(_Graph):
    """torch.accelerator.Graph's calls, as torch 2.13 has them."""

    _device: Device

    def __init__(self) -> None:
        super().__init__(self._device.CUDAGraph())
        self.graph_pool: Any = None
        self.capture_error_mode = "default"

    def capture_begin(self) -> None:  # type: ignore[override]
        super().capture_begin(pool=self.graph_pool)


def make() -> Any:
    """Return the example's backend over the mock."""
    if str(EXAMPLE) not in sys.path:
        sys.path.insert(0, str(EXAMPLE))
    module: Any = __import__("devgraph_xpu")
    return _mocked(module.XpuBackend, Device(Fake()))


def make_accelerator() -> Any:
    """Return the backend of torch's accelerator over the mock; torch's graph stays the mock's."""
    device = Device(Fake())
    graph = type("Graph", (_AcceleratorGraph,), {"_device": device})
    torch.accelerator.Graph = graph  # type: ignore[attr-defined, misc]
    with pytest.MonkeyPatch.context() as patch:
        found = torch.device("xpu")
        patch.setattr(torch.accelerator, "current_accelerator", lambda **_: found)
        patch.setattr(registry, "names", lambda: ["cuda", "cpu"])
        return _mocked(AcceleratorBackend, device)


def _mocked(base: Any, device: Device) -> Any:
    class Mocked(base):  # type: ignore[misc]
        """``base``; tensors are the CPU's and operations are recorded by the fake."""

        def __init__(self) -> None:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(torch, "xpu", _Xpu(device))
                super().__init__()
            self._device = torch.device("cpu")

        @contextlib.contextmanager
        def side_stream(self, pool: Pool, stream: Any = None) -> Iterator[None]:
            with Recorder(device), super().side_stream(pool, stream):
                yield

    return Mocked()


def pytest_configure(config: pytest.Config) -> None:
    register("xpu", make)
    register("accelerator", make_accelerator, replace=True)
