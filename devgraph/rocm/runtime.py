"""HIP's node calls: what libamdhip64 has of its own beside the table that vendors share."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import re
from collections.abc import Mapping
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_void_p
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from devgraph.api.errors import BackendUnavailableError, UpdateTopologyError
from devgraph.api.torchlike.node_calls import KERNEL, MEMCPY, MEMSET, Arguments, NodeRuntime
from devgraph.rocm.layouts import (
    COPY_KINDS,
    HOST_COPIES,
    INSTANTIATE_AUTO_FREE,
    KernelNodeParams,
    MemcpyParams,
    MemsetParams,
    Version,
)

logger = logging.getLogger(__name__)

_NAME = re.compile(r"/libamdhip64[^/]*\.so[.\d]*$")

_COPY_ATTRIBUTES = "hipGraphKernelNodeCopyAttributes"
"""Absent in release 5.2 and present by 6.4: without it the launch attributes of a kernel stay those
of the capture."""

_TEXT = ("GetErrorName", "GetErrorString")


def mapped_library(maps: Path = Path("/proc/self/maps")) -> str | None:
    """Return the path of the libamdhip64 that is mapped into this process, or None.

    A second copy of the runtime, found by name, would have streams and graphs of its own.
    """
    with contextlib.suppress(OSError), open(maps, encoding="utf-8") as lines:
        for line in lines:
            path = line.split(maxsplit=5)[-1].strip()
            if _NAME.search(path):
                return path
    return None


class Runtime(NodeRuntime):
    """The node calls of libamdhip64.

    ``hipGraphExecUpdate`` is never called: in releases up to 7.14 it answers success while the
    executable keeps old packets (ROCm/rocm-systems pull request 10714), and its time grows with the
    square of the nodes (11069). Nodes are written one at a time, where errors are reported. Nor is
    ``hipGraphUpload``, which does nothing where it is supported.

    Args:
        path: the library to bind.

    Raises:
        BackendUnavailableError: the library lacks functions that devgraph cannot do without.
    """

    prefix = "hip"
    suffixes: ClassVar[Mapping[str, str]] = {
        "StreamGetCaptureInfo": "_v2",
        # The addresses of a captured copy are all that is reported reliably.
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
    structures: ClassVar[Mapping[str, type[Any]]] = {
        KERNEL: KernelNodeParams,
        MEMCPY: MemcpyParams,
        MEMSET: MemsetParams,
    }
    instantiate_flags = INSTANTIATE_AUTO_FREE

    def __init__(self, path: str) -> None:
        self.path = path
        super().__init__(ctypes.PyDLL(path), ctypes.CDLL(path))
        if required := self.missing - {_COPY_ATTRIBUTES}:
            raise BackendUnavailableError(
                f"{path} lacks {', '.join(sorted(required))}: this HIP runtime is too old for "
                f"graph updates. Install a ROCm build of torch that brings a newer one (devgraph "
                f"is written against HIP 5.2 to 7)."
            )
        if self.missing:
            logger.info("%s has no %s; doing without", path, ", ".join(self.missing))
        for name in _TEXT:
            self._functions[name].restype = c_char_p
        number = c_int()
        self.call("RuntimeGetVersion", number)
        self.version = Version.decode(number.value)
        self.kinds = self.version.kinds
        self.reports_copies = True
        """Whether a captured copy tells its addresses; see ``verification``."""

    @staticmethod
    def find() -> Runtime:
        """Return the runtime that torch uses.

        Raises:
            BackendUnavailableError: no libamdhip64 is mapped into this process.
        """
        path = mapped_library()
        if path is None:
            raise BackendUnavailableError(
                "no libamdhip64 is mapped into this process, although torch is a ROCm build: its "
                "libraries are incomplete. Reinstall the ROCm build of torch."
            )
        return Runtime(path)

    def refuse(self, error: int, name: str) -> NoReturn:
        self.function("GetLastError")()  # else torch would find it later
        super().refuse(error, name)

    def error_text(self, error: int) -> str:
        found: list[Any] = [self.function(source)(error) or b"unknown" for source in _TEXT]
        return ", ".join(text.decode(errors="replace") for text in found)

    def params(self, kind: str, node: int) -> Any:
        """Return the parameters of a node; pointers in them belong to the node's graph.

        Raises:
            UpdateTopologyError: this runtime does not report the parameters of this copy.
        """
        params = super().params(kind, node)
        if kind == MEMCPY:
            self._require_reported(params)
        return params

    def fixed(self, kind: str, node: int, params: Any) -> Any:
        if kind == KERNEL:
            return params.func
        if kind == MEMCPY:
            return params.kind
        return params.elementSize, params.width, params.height, params.pitch

    def judge(self, kind: str, fixed: Any, node: int, params: Any) -> tuple[Any, bool, bool]:
        if kind == KERNEL:
            return params, params.func == fixed, False
        if kind == MEMCPY:
            self._require_reported(params)
            return params, params.kind == fixed, params.kind in HOST_COPIES
        return params, self.fixed(kind, node, params) == fixed, False

    def _require_reported(self, params: Any) -> None:
        """Refuse the parameters of a copy that this runtime does not report."""
        if not self.reports_copies:
            raise UpdateTopologyError(
                f"a region copies memory, and this HIP runtime ({self.version}) does not report "
                f"the addresses of a captured copy, so that it cannot be updated. Write with a "
                f"kernel instead (index_copy_, or an operation with out=) and into a tensor that "
                f"the region is given, for a tensor that it returns is copied as well; or use "
                f"policy='breakable'."
            )
        # One run of bytes, for which positions are not filled in.
        flat = (
            params.kind in COPY_KINDS
            and (params.extent.height, params.extent.depth) == (1, 1)
            and not (params.srcArray or params.dstArray)
        )
        if not flat:
            raise UpdateTopologyError(
                "a region copies memory of several dimensions, whose parameters HIP does not "
                "report reliably. Write with a kernel instead (index_copy_, or an operation with "
                "out=), or use policy='breakable'."
            )

    def arguments(self, kind: str, params: Any) -> tuple[Any, ...]:
        if kind == MEMCPY:
            return params.dstPtr.ptr, params.srcPtr.ptr, params.extent.width, params.kind
        return super().arguments(kind, params)

    def copy_attributes(self, source: int, target: int) -> None:
        if not self.missing:
            super().copy_attributes(source, target)
