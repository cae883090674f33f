"""The Ascend backend, which implements the DeviceGraph contract over torch.npu.NPUGraph."""

from __future__ import annotations

from devgraph.npu.backend import NpuBackend

__all__ = ["NpuBackend"]
