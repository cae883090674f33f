"""The ROCm room: torch.cuda of a ROCm build and libamdhip64 behind the DeviceGraph contract."""

from __future__ import annotations

from devgraph.rocm.backend import RocmBackend

__all__ = ["RocmBackend"]
