"""The Ascend room: torch.npu.NPUGraph behind the DeviceGraph contract."""

from __future__ import annotations

from devgraph.npu.backend import NpuBackend, make_backend
from devgraph.npu.host import Diagnosis, diagnose

__all__ = ["Diagnosis", "NpuBackend", "diagnose", "make_backend"]
