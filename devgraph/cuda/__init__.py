"""The CUDA room: torch.cuda.CUDAGraph behind the DeviceGraph contract."""

from __future__ import annotations

from devgraph.cuda.backend import CudaBackend, make_backend, recover_pace

__all__ = ["CudaBackend", "make_backend", "recover_pace"]
