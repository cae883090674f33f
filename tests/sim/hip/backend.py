"""Backends "rocm" over the two stand-ins: the product's own class with another library under it."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch

from devgraph.api.backend import Backend
from devgraph.api.pool import Pool
from devgraph.api.torchlike.base import TorchBackend
from devgraph.rocm.backend import RocmBackend
from devgraph.rocm.runtime import Runtime
from tests.sim.hip.build import build
from tests.sim.hip.device import Device, Recorder
from tests.sim.hip.fake import Fake

__all__ = ["FakeBackend", "ShimBackend"]


class FakeBackend(RocmBackend):
    """The ROCm backend on the fake library.

    Memory belongs to torch's CPU allocator, so that pools share none, and host reads pass
    unnoticed unless the guard refuses them.
    """

    def __init__(self, fake: Fake) -> None:
        Backend.__init__(self)
        self.fake = fake
        self.namespace: Any = Device(fake)
        self._device = torch.device("cpu")
        self._capture_stream = None
        self.current_stream_id = self._make_current_stream_id()
        counted = {name: fake.get(name) for name in ("instantiated", "launches", "destroyed_execs")}
        self.attach(Runtime(fake.path))
        fake.set(**counted)  # tests count graphs of their own, not that of the probe for gates
        # Compiled code would run past the mode that records operations, and memory is the CPU's.
        self.capabilities = attrs.evolve(self.capabilities, piecewise=False, shared_pool=False)

    def check_available(self) -> None:
        pass

    def _make_current_stream_id(self) -> Callable[[], int]:
        namespace = self.namespace
        return lambda: int(namespace.current.cuda_stream)

    @contextlib.contextmanager
    def side_stream(self, pool: Pool, stream: Any = None) -> Iterator[None]:
        with Recorder(self.namespace), super().side_stream(pool, stream):
            yield

    def is_current(self) -> bool:
        return True

    def bind_worker(self, index: int) -> None:
        """Do nothing: every worker has a fake of its own."""

    def prepare_stream(self) -> None:
        pass

    def is_device_memory(self, tensor: torch.Tensor) -> bool:
        return True

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def hold(self, tensor: torch.Tensor, stream: Any) -> None:
        """Do nothing: memory is freed on the host."""


class ShimBackend(RocmBackend):
    """The ROCm backend on an NVIDIA GPU: torch's CUDA build, and the shim as libamdhip64."""

    def __init__(self) -> None:
        self.shim = ctypes.CDLL(str(build("shim")))  # mapped, where the product looks for it
        super().__init__()

    def check_available(self) -> None:
        TorchBackend.check_available(self)
