"""The CUDA backend, which implements the DeviceGraph contract over torch.cuda.CUDAGraph."""

from __future__ import annotations

from devgraph.cuda.backend import CudaBackend

__all__ = ["CudaBackend"]
