"""HIP's own struct layouts and enum values, by version of the runtime.

Read from the public header ``hip/hip_runtime_api.h`` of releases 5.2 to 6.3 and of the current
source; ``tests/rocm/test_layouts.py`` compares them with an installed header by compiling against
it. They are not CUDA's: fields come in another order.
"""

from __future__ import annotations

import ctypes

import attrs

from devgraph.api.torchlike.node_calls import KINDS
from devgraph.api.torchlike.nodes import MEMCPY

INSTANTIATE_AUTO_FREE = 1
"""hipGraphInstantiateFlagAutoFreeOnLaunch: the one flag that torch instantiates with."""

HOST_COPIES = frozenset({0, 1, 2})
"""hipMemcpyKind of copies that read or write host memory by declaration."""

COPY_KINDS = frozenset({0, 1, 2, 3, 4, 1024})
"""Every hipMemcpyKind that headers up to 7 define."""


@attrs.frozen(order=True)
class Version:
    """Version of the HIP runtime, as ``hipRuntimeGetVersion`` encodes it."""

    major: int
    minor: int
    patch: int = 0

    @staticmethod
    def decode(number: int) -> Version:
        """Return the version that ``number`` (major * 10^7 + minor * 10^5 + patch) stands for."""
        return Version(number // 10_000_000, number // 100_000 % 100, number % 100_000)

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}.{self.patch}"

    @property
    def first_kind(self) -> int:
        """Value of ``hipGraphNodeTypeKernel``: 1 up to release 5.2, 0 from 5.3 on."""
        return 1 if self < Version(5, 3) else 0

    @property
    def kinds(self) -> dict[int, str]:
        """What the values of ``hipGraphNodeType`` mean."""
        kinds = dict(enumerate(KINDS, self.first_kind))
        if self.first_kind:
            # 5.2 gives one-dimensional copies a type of their own; later releases do not.
            kinds[9] = MEMCPY
        return kinds

    @property
    def reports_unsafe_calls(self) -> bool:
        """Whether a call that a capture does not allow raises; before 7.14 it goes unnoticed."""
        return self >= Version(7, 14)


class Dim3(ctypes.Structure):
    """dim3"""

    _fields_ = (("x", ctypes.c_uint32), ("y", ctypes.c_uint32), ("z", ctypes.c_uint32))


class KernelNodeParams(ctypes.Structure):
    """hipKernelNodeParams"""

    _fields_ = (
        ("blockDim", Dim3),
        ("extra", ctypes.c_void_p),
        ("func", ctypes.c_void_p),
        ("gridDim", Dim3),
        ("kernelParams", ctypes.c_void_p),
        ("sharedMemBytes", ctypes.c_uint),
    )


class MemsetParams(ctypes.Structure):
    """hipMemsetParams"""

    _fields_ = (
        ("dst", ctypes.c_void_p),
        ("elementSize", ctypes.c_uint),
        ("height", ctypes.c_size_t),
        ("pitch", ctypes.c_size_t),
        ("value", ctypes.c_uint),
        ("width", ctypes.c_size_t),
    )


class _Position(ctypes.Structure):
    _fields_ = (("x", ctypes.c_size_t), ("y", ctypes.c_size_t), ("z", ctypes.c_size_t))


class _PitchedPointer(ctypes.Structure):
    _fields_ = (
        ("ptr", ctypes.c_void_p),
        ("pitch", ctypes.c_size_t),
        ("xsize", ctypes.c_size_t),
        ("ysize", ctypes.c_size_t),
    )


class _Extent(ctypes.Structure):
    _fields_ = (("width", ctypes.c_size_t), ("height", ctypes.c_size_t), ("depth", ctypes.c_size_t))


class MemcpyParams(ctypes.Structure):
    """hipMemcpy3DParms"""

    _fields_ = (
        ("srcArray", ctypes.c_void_p),
        ("srcPos", _Position),
        ("srcPtr", _PitchedPointer),
        ("dstArray", ctypes.c_void_p),
        ("dstPos", _Position),
        ("dstPtr", _PitchedPointer),
        ("extent", _Extent),
        ("kind", ctypes.c_uint),
    )
