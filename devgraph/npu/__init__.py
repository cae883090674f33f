"""The Ascend room: torch.npu.NPUGraph behind the DeviceGraph contract."""

from __future__ import annotations

from devgraph.npu.backend import NpuBackend

__all__ = ["NpuBackend"]
