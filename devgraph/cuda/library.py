"""Calls of the driver's library that do not go through cuda-python."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence

from devgraph.api.nodes import Capture, RuntimeCallError

__all__ = ["Library"]

_Value = ctypes.c_uint32 * 32
"""CUlaunchAttributeValue, a union of 64 bytes, with room for a larger one."""

_CAPTURE_ACTIVE = 1
"""CU_STREAM_CAPTURE_STATUS_ACTIVE"""


class Library:
    """Calls that cuda-python makes wrongly or slowly.

    The edge data that its ``cudaGraphGetEdges`` returns lies in memory which it has freed
    (NVIDIA/cuda-python issue 1804; mended in May 2026). For a launch attribute it makes an object
    for each member of the union, which took 2.4 us of a recording's 8 for each node (one H200).
    Whether a stream captures is asked of every stream at the end of every capture.

    Args:
        get_edges: the driver's ``cuGraphGetEdges_v2``.
        get_attribute: its ``cuGraphKernelNodeGetAttribute``.
        is_capturing: its ``cuStreamIsCapturing``.
        get_capture: its ``cuStreamGetCaptureInfo_v3``.
    """

    def __init__(
        self,
        get_edges: Callable[..., int],
        get_attribute: Callable[..., int],
        is_capturing: Callable[..., int],
        get_capture: Callable[..., int],
    ) -> None:
        self._get_edges = get_edges
        self._get_attribute = get_attribute
        self._is_capturing = is_capturing
        self._get_capture = get_capture

    @classmethod
    def find(cls) -> Library:
        """Return the library that the process uses already."""
        library = ctypes.PyDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
        pointer = ctypes.c_void_p
        get_edges = library.cuGraphGetEdges_v2
        get_edges.argtypes = [pointer] * 5
        get_attribute = library.cuGraphKernelNodeGetAttribute
        get_attribute.argtypes = [pointer, ctypes.c_int, pointer]
        is_capturing = library.cuStreamIsCapturing
        is_capturing.argtypes = [pointer, pointer]
        get_capture = library.cuStreamGetCaptureInfo_v3
        get_capture.argtypes = [pointer] * 7
        return cls(get_edges, get_attribute, is_capturing, get_capture)

    def capturing(self, streams: Sequence[int]) -> list[int]:
        """Return those of ``streams`` that are part of an active capture; one that the driver does
        not answer for is not."""
        ask, status = self._is_capturing, ctypes.c_int()
        where = ctypes.addressof(status)  # an int converts twice as fast as a reference
        return [s for s in streams if not ask(s, where) and status.value == _CAPTURE_ACTIVE]

    def capture_of(self, stream: int) -> Capture | None:
        """Return the active capture that ``stream`` is part of, or None.

        Raises:
            RuntimeCallError: the call failed.
        """
        # Status, id, graph, nodes, edge data, number of nodes.
        words = (ctypes.c_uint64 * 6)()
        at = ctypes.addressof(words)
        error = self._get_capture(stream, *range(at, at + 48, 8))
        self._check("cuStreamGetCaptureInfo", error)
        status, capture, graph, nodes, _, count = words
        if status != _CAPTURE_ACTIVE:
            return None
        last = (ctypes.c_uint64 * count).from_address(nodes) if count else ()
        return capture, graph, list(last)

    def edges(self, graph: int) -> list[tuple[int, int, int]]:
        """Return every edge as (from, to, kind); a kind is the bytes of CUgraphEdgeData as one
        number, 0 for a plain dependency.

        Raises:
            RuntimeCallError: the call failed.
        """
        count = ctypes.c_size_t()
        error = self._get_edges(graph, None, None, None, ctypes.byref(count))
        self._check("cuGraphGetEdges", error)
        if not count.value:
            return []
        columns = [(ctypes.c_uint64 * count.value)() for _ in range(3)]
        error = self._get_edges(graph, *columns, ctypes.byref(count))
        self._check("cuGraphGetEdges", error)
        sources, targets, kinds = columns
        return list(zip(sources, targets, kinds, strict=True))

    def attribute(self, node: int, which: int) -> list[int] | None:
        """Return the first three words of a kernel's launch attribute: a size, or a flag and what
        follows it; None if the driver does not know the attribute."""
        value = _Value()
        return None if self._get_attribute(node, which, value) else value[:3]

    @staticmethod
    def _check(name: str, error: int) -> None:
        if error:
            raise RuntimeCallError(f"{name} failed ({error})", error)
