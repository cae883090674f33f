"""The CUDA room: torch.cuda.CUDAGraph behind the DeviceGraph contract."""

from __future__ import annotations

from devgraph.cuda.backend import CudaBackend

__all__ = ["CudaBackend"]
