"""HIP's own struct layouts and enum values, by version of the runtime.

Read from the public header ``hip/hip_runtime_api.h`` of releases 5.2 to 6.3 and of the current
source; ``tests/rocm/test_layouts.py`` compares them with an installed header by compiling against
it. They are not CUDA's: fields come in another order.
"""

from __future__ import annotations

from ctypes import c_size_t, c_uint, c_uint32, c_void_p

import attrs

from devgraph.api.torchlike.node_calls import KINDS, MEMCPY, structure

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


Dim3 = structure("dim3", x=c_uint32, y=c_uint32, z=c_uint32)
KernelNodeParams = structure(
    "hipKernelNodeParams",
    blockDim=Dim3,
    extra=c_void_p,
    func=c_void_p,
    gridDim=Dim3,
    kernelParams=c_void_p,
    sharedMemBytes=c_uint,
)
MemsetParams = structure(
    "hipMemsetParams",
    dst=c_void_p,
    elementSize=c_uint,
    height=c_size_t,
    pitch=c_size_t,
    value=c_uint,
    width=c_size_t,
)
_Position = structure("hipPos", x=c_size_t, y=c_size_t, z=c_size_t)
_PitchedPointer = structure(
    "hipPitchedPtr", ptr=c_void_p, pitch=c_size_t, xsize=c_size_t, ysize=c_size_t
)
_Extent = structure("hipExtent", width=c_size_t, height=c_size_t, depth=c_size_t)
MemcpyParams = structure(
    "hipMemcpy3DParms",
    srcArray=c_void_p,
    srcPos=_Position,
    srcPtr=_PitchedPointer,
    dstArray=c_void_p,
    dstPos=_Position,
    dstPtr=_PitchedPointer,
    extent=_Extent,
    kind=c_uint,
)
