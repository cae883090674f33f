"""The Ascend backend, which implements the contract of DeviceGraph over torch.npu.NPUGraph."""

from __future__ import annotations

from devgraph.npu.backend import NpuBackend

__all__ = ["NpuBackend"]
