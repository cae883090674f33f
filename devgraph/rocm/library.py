"""libamdhip64 by ctypes: the library that torch has mapped, and the functions taken from it."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import re
from collections.abc import Callable
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint, c_ulonglong, c_void_p
from pathlib import Path
from typing import Any, NoReturn

from devgraph.api.errors import BackendUnavailableError
from devgraph.api.torchlike.nodes import RuntimeCallError
from devgraph.rocm.layouts import KernelNodeParams, MemcpyParams, MemsetParams, Version

__all__ = ["Library", "mapped_library"]

logger = logging.getLogger(__name__)

_NAME = re.compile(r"/libamdhip64[^/]*\.so[.\d]*$")

_P = c_void_p
_OUT = POINTER(c_void_p)
_COUNT = POINTER(c_size_t)

# Every function that devgraph calls, with its arguments; all return hipError_t, except the two
# that return text. Read from hip/hip_runtime_api.h.
_REQUIRED: dict[str, tuple[Any, ...]] = {
    "hipRuntimeGetVersion": (POINTER(c_int),),
    "hipGetErrorName": (c_int,),
    "hipGetErrorString": (c_int,),
    "hipGetLastError": (),
    "hipStreamBeginCapture": (_P, c_int),
    "hipStreamEndCapture": (_P, _OUT),
    "hipStreamIsCapturing": (_P, POINTER(c_int)),
    "hipStreamGetCaptureInfo_v2": (_P, POINTER(c_int), POINTER(c_ulonglong), _OUT, _OUT, _COUNT),
    "hipGraphGetNodes": (_P, _P, _COUNT),
    "hipGraphGetEdges": (_P, _P, _P, _COUNT),
    "hipGraphNodeGetType": (_P, POINTER(c_uint)),
    "hipGraphClone": (_OUT, _P),
    "hipGraphNodeFindInClone": (_OUT, _P, _P),
    "hipGraphDestroy": (_P,),
    "hipGraphInstantiateWithFlags": (_OUT, _P, c_ulonglong),
    "hipGraphLaunch": (_P, _P),
    "hipGraphExecDestroy": (_P,),
    "hipGraphKernelNodeGetParams": (_P, POINTER(KernelNodeParams)),
    "hipGraphKernelNodeSetParams": (_P, POINTER(KernelNodeParams)),
    "hipGraphExecKernelNodeSetParams": (_P, _P, POINTER(KernelNodeParams)),
    "hipGraphMemcpyNodeGetParams": (_P, POINTER(MemcpyParams)),
    "hipGraphMemcpyNodeSetParams1D": (_P, _P, _P, c_size_t, c_int),
    "hipGraphExecMemcpyNodeSetParams1D": (_P, _P, _P, _P, c_size_t, c_int),
    "hipGraphMemsetNodeGetParams": (_P, POINTER(MemsetParams)),
    "hipGraphMemsetNodeSetParams": (_P, POINTER(MemsetParams)),
    "hipGraphExecMemsetNodeSetParams": (_P, _P, POINTER(MemsetParams)),
}

# Absent in release 5.2 and present by 6.4: without them the first launch is slower, and launch
# attributes of a kernel stay those of the capture.
_OPTIONAL: dict[str, tuple[Any, ...]] = {
    "hipGraphUpload": (_P, _P),
    "hipGraphKernelNodeCopyAttributes": (_P, _P),
}

_TEXT = ("hipGetErrorName", "hipGetErrorString")


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


class Library:
    """The bound functions, called by name; an error code raises ``RuntimeCallError``.

    Args:
        path: the library to bind.

    Raises:
        BackendUnavailableError: the library lacks functions that devgraph cannot do without.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._handle = ctypes.CDLL(path)
        missing = [name for name in _REQUIRED if not self._bind(name, _REQUIRED[name])]
        if missing:
            raise BackendUnavailableError(
                f"{path} lacks {', '.join(missing)}: this HIP runtime is too old for graph "
                f"updates. Install a ROCm build of torch that brings a newer one (devgraph is "
                f"written against HIP 5.2 to 7)."
            )
        self.missing = frozenset(n for n in _OPTIONAL if not self._bind(n, _OPTIONAL[n]))
        if self.missing:
            logger.info("%s has no %s; doing without", path, ", ".join(sorted(self.missing)))
        number = c_int()
        self.call("hipRuntimeGetVersion", number)
        self.version = Version.decode(number.value)

    @staticmethod
    def find() -> Library:
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
        return Library(path)

    def _bind(self, name: str, arguments: tuple[Any, ...]) -> bool:
        function = getattr(self._handle, name, None)
        if function is None:
            return False
        function.argtypes = arguments
        function.restype = c_char_p if name in _TEXT else c_int
        setattr(self, name, function)
        return True

    def has(self, name: str) -> bool:
        """Whether an optional function exists in this runtime."""
        return name not in self.missing

    def function(self, name: str) -> Callable[..., int]:
        """Return the bare function, which returns an error code."""
        found: Callable[..., int] = getattr(self, name)
        return found

    def call(self, name: str, *args: Any) -> None:
        """Call a function; ctypes objects given for pointers are filled.

        Raises:
            RuntimeCallError: it returned an error.
        """
        error = getattr(self, name)(*args)
        if error:
            self.fail(name, error)

    def fail(self, name: str, error: int) -> NoReturn:
        """Raise the error of a function, and clear it so that torch does not find it later."""
        self.function("hipGetLastError")()
        title, text = (self._text(source, error) for source in _TEXT)
        raise RuntimeCallError(f"{name} failed ({error}: {title}, {text})", error)

    def _text(self, source: str, error: int) -> str:
        found: bytes | None = getattr(self, source)(error)
        return (found or b"unknown").decode(errors="replace")
