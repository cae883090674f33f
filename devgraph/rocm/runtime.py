"""HIP's graph calls, where they differ from the table for all vendors (``node_calls``)."""

from __future__ import annotations

import contextlib
import ctypes
import re
from collections.abc import Mapping
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint, c_uint32, c_void_p
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, NoReturn

from devgraph.api.errors import BackendUnavailableError, UpdateTopologyError
from devgraph.api.torchlike.node_calls import (
    KERNEL,
    KINDS,
    MEMCPY,
    MEMSET,
    Arguments,
    NodeRuntime,
    structure,
)

_NAME = re.compile(r"/libamdhip64[^/]*\.so[.\d]*$")

_COPY_ATTRIBUTES = "hipGraphKernelNodeCopyAttributes"
"""A function that HIP 6.4 has, but HIP 5.2 lacks. Without this function, updated kernels keep the
launch attributes from capture."""

GATE_CALLS = frozenset({"hipStreamWaitValue32", "hipStreamWriteValue32"})
"""Functions for gates inside graphs. Without these functions, gate marks cause breaks."""

_TEXT = ("GetErrorName", "GetErrorString")

_HOST_COPIES = frozenset({0, 1, 2})
"""Values of hipMemcpyKind that denote a read or a write of host memory."""

_COPY_KINDS = frozenset({0, 1, 2, 3, 4, 1024})  # all values of hipMemcpyKind in headers up to HIP 7


class Version(NamedTuple):
    """Version of the HIP runtime."""

    major: int
    minor: int
    patch: int = 0

    @staticmethod
    def decode(number: int) -> Version:
        return Version(number // 10_000_000, number // 100_000 % 100, number % 100_000)

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}.{self.patch}"

    @property
    def kinds(self) -> dict[int, str]:
        """Node kinds by value of ``hipGraphNodeType``."""
        if self < Version(5, 3):  # Values start at 1, and 1-D copies have type 9.
            return {**dict(enumerate(KINDS, 1)), 9: MEMCPY}
        return dict(enumerate(KINDS))

    @property
    def reports_unsafe_calls(self) -> bool:
        """Whether calls that are forbidden in a capture raise an error."""
        return self >= Version(7, 14)


# These structures match ``hip/hip_runtime_api.h`` of releases 5.2 to 6.3 and of the current source.
# A test compares them with an installed header. Their fields are ordered differently than CUDA's.
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


def mapped_library(maps: Path = Path("/proc/self/maps")) -> str | None:
    """Return the path of the libamdhip64 that is mapped into this process, or None.

    Loading the library by name could load a second copy, which has separate streams and graphs.
    """
    with contextlib.suppress(OSError), open(maps, encoding="utf-8") as lines:
        for line in lines:
            path = line.split(maxsplit=5)[-1].strip()
            if _NAME.search(path):
                return path
    return None


class Runtime(NodeRuntime):
    """The graph calls of libamdhip64.

    Nodes are written one at a time, by calls that report errors. ``hipGraphExecUpdate`` is not
    used: up to HIP 7.14, it returns success although the executable keeps old packets
    (ROCm/rocm-systems pull request 10714), and it takes quadratic time in the number of nodes
    (11069). ``hipGraphUpload`` is not used, because it has no effect.
    """

    prefix = "hip"
    suffixes: ClassVar[Mapping[str, str]] = {
        "StreamGetCaptureInfo": "_v2",
        # Of a captured copy, HIP reliably reports only the addresses.
        "GraphMemcpyNodeSetParams": "1D",
        "GraphExecMemcpyNodeSetParams": "1D",
    }
    calls: ClassVar[Mapping[str, Arguments]] = {
        "GraphMemcpyNodeSetParams": (c_void_p, c_void_p, c_void_p, c_size_t, c_int),
        "GraphExecMemcpyNodeSetParams": (c_void_p, c_void_p, c_void_p, c_void_p, c_size_t, c_int),
        "RuntimeGetVersion": (POINTER(c_int),),
        "GetErrorName": (c_int,),
        "GetErrorString": (c_int,),
        "GetLastError": (),
    }
    waiting_calls: ClassVar[Mapping[str, Arguments]] = {
        "StreamWaitValue32": (c_void_p, c_void_p, c_uint32, c_uint, c_uint32),
        "StreamWriteValue32": (c_void_p, c_void_p, c_uint32, c_uint),
        "MemsetD32Async": (c_void_p, c_int, c_size_t, c_void_p),
        "StreamCreateWithFlags": (c_void_p, c_uint),
        "StreamSynchronize": (c_void_p,),
        "StreamDestroy": (c_void_p,),
    }
    structures: ClassVar[Mapping[str, type[Any]]] = {
        KERNEL: KernelNodeParams,
        MEMCPY: MemcpyParams,
        MEMSET: MemsetParams,
    }
    instantiate_flags = 1  # hipGraphInstantiateFlagAutoFreeOnLaunch, as in torch

    def __init__(self, path: str) -> None:
        self.path = path
        super().__init__(ctypes.PyDLL(path), ctypes.CDLL(path))
        if required := self.missing - {_COPY_ATTRIBUTES} - GATE_CALLS:
            raise BackendUnavailableError(
                f"{path} lacks {', '.join(sorted(required))}, so this HIP runtime is too old for "
                f"graph updates. Install a ROCm build of torch with a newer runtime (devgraph "
                f"supports HIP 5.2 to 7)."
            )
        for name in _TEXT:
            self._functions[name].restype = c_char_p
        number = c_int()
        self.call("RuntimeGetVersion", number)
        self.version = Version.decode(number.value)
        self.kinds = self.version.kinds
        self.reports_copies = True
        """Whether the runtime reports the addresses of captured copies; set by ``Verification``.
        Before HIP 7, the reported addresses are uninitialized memory."""

    @staticmethod
    def find() -> Runtime:
        """Return the runtime that torch uses."""
        path = mapped_library()
        if path is None:
            raise BackendUnavailableError(
                "torch is a ROCm build, but no libamdhip64 is mapped into this process, so the "
                "libraries of torch are incomplete. Reinstall the ROCm build of torch."
            )
        return Runtime(path)

    def refuse(self, error: int, name: str) -> NoReturn:
        self.function("GetLastError")()  # Otherwise, torch would raise the error later.
        super().refuse(error, name)

    def error_text(self, error: int) -> str:
        texts: list[Any] = [self.function(source)(error) or b"unknown" for source in _TEXT]
        return ", ".join(text.decode(errors="replace") for text in texts)

    def fixed(self, kind: str, node: int, params: Any) -> Any:
        if kind == KERNEL:
            return params.func
        if kind == MEMCPY:
            self._require_reported(params)
            return params.kind
        return params.elementSize, params.width, params.height, params.pitch

    def judge(self, kind: str, fixed: Any, node: int, params: Any) -> tuple[Any, bool, bool]:
        same = self.fixed(kind, node, params) == fixed
        return params, same, kind == MEMCPY and params.kind in _HOST_COPIES

    def _require_reported(self, params: Any) -> None:
        """Raise UpdateTopologyError if the runtime does not report the parameters of a copy."""
        if not self.reports_copies:
            raise UpdateTopologyError(
                f"a region copies memory, but this HIP runtime ({self.version}) does not report "
                f"the addresses of a captured copy, so the copy cannot be updated. Write into an "
                f"argument of the region with a kernel (index_copy_, or an operation with out=), "
                f"because returned tensors are copied too, or use policy='breakable'."
            )
        # A flat copy is one range of bytes. HIP does not fill in the positions of such a copy.
        flat = (
            params.kind in _COPY_KINDS
            and (params.extent.height, params.extent.depth) == (1, 1)
            and not (params.srcArray or params.dstArray)
        )
        if not flat:
            raise UpdateTopologyError(
                "a region contains a multidimensional memory copy, whose parameters HIP does not "
                "report reliably. Write with a kernel instead (index_copy_, or an operation with "
                "out=), or use policy='breakable'."
            )

    def arguments(self, kind: str, params: Any) -> tuple[Any, ...]:
        if kind == MEMCPY:
            return params.dstPtr.ptr, params.srcPtr.ptr, params.extent.width, params.kind
        return super().arguments(kind, params)

    def copy_attributes(self, source: int, target: int) -> None:
        if _COPY_ATTRIBUTES not in self.missing:
            super().copy_attributes(source, target)
