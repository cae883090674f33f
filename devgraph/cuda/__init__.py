"""The CUDA room: torch.cuda.CUDAGraph behind the DeviceGraph contract."""

from __future__ import annotations

from devgraph.cuda.backend import CudaBackend, recover_pace

__all__ = ["CudaBackend", "recover_pace"]
