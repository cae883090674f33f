"""pytest plugin: the third-party example over a mock of ``torch.xpu``.

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

from devgraph.api.pool import Pool
from devgraph.api.registry import register
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


def make() -> Any:
    """Return the example's backend over the mock."""
    if str(EXAMPLE) not in sys.path:
        sys.path.insert(0, str(EXAMPLE))
    module: Any = __import__("devgraph_xpu")
    device = Device(Fake())

    class MockedXpuBackend(module.XpuBackend):  # type: ignore[misc, name-defined]
        """The example's class; tensors are the CPU's and operations are recorded by the fake."""

        def __init__(self) -> None:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(torch, "xpu", _Xpu(device))
                super().__init__()
            self._device = torch.device("cpu")

        @contextlib.contextmanager
        def side_stream(self, pool: Pool, stream: Any = None) -> Iterator[None]:
            with Recorder(device), super().side_stream(pool, stream):
                yield

    return MockedXpuBackend()


def pytest_configure(config: pytest.Config) -> None:
    register("xpu", make)
