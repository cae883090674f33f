"""The ROCm backend, which implements the DeviceGraph contract over a ROCm build of torch."""

from __future__ import annotations

from devgraph.rocm.backend import RocmBackend

__all__ = ["RocmBackend"]
