"""Calls of the driver's library that do not go through cuda-python."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import Any

from devgraph.api.nodes import Capture, RuntimeCallError

__all__ = ["Library"]

_Value = ctypes.c_uint32 * 32
"""CUlaunchAttributeValue, a union of 64 bytes, with room for a larger one."""

_KernelParams = ctypes.c_uint64 * 9
"""CUDA_KERNEL_NODE_PARAMS as words: the function is the first, the kernel of a library the eighth.

A recording keeps hundreds: one object each, where cuda-python makes four and the garbage collector
walks them all."""

_COOPERATIVE, _CLUSTER, _PREFERRED_CLUSTER = 2, 4, 11
"""CU_LAUNCH_ATTRIBUTE_COOPERATIVE, _CLUSTER_DIMENSION and _PREFERRED_CLUSTER_DIMENSION"""

_CAPTURE_ACTIVE = 1
"""CU_STREAM_CAPTURE_STATUS_ACTIVE"""

_POINTER = ctypes.c_void_p
_CALLS = {
    "cuGraphGetEdges_v2": (_POINTER,) * 5,
    "cuGraphGetNodes": (_POINTER,) * 3,
    "cuGraphKernelNodeGetParams_v2": (_POINTER,) * 2,
    "cuGraphKernelNodeSetParams_v2": (_POINTER,) * 2,
    "cuGraphExecKernelNodeSetParams_v2": (_POINTER,) * 3,
    "cuGraphKernelNodeGetAttribute": (_POINTER, ctypes.c_int, _POINTER),
    "cuStreamIsCapturing": (_POINTER,) * 2,
    "cuStreamGetCaptureInfo_v3": (_POINTER,) * 7,
}


class Library:
    """Calls that cuda-python makes wrongly, or slowly where there are many of them.

    The edge data that its ``cudaGraphGetEdges`` returns lies in memory which it has freed
    (NVIDIA/cuda-python issue 1804; mended in May 2026). For a launch attribute it makes an object
    for each member of the union, and reading the parameters of a node and its attributes took 3.4
    us (one H200). Whether a stream captures is asked of every stream at the end of every capture.

    Args:
        library: the driver's library, or what has its functions.

    Raises:
        AttributeError: the driver lacks one of them.
    """

    def __init__(self, library: Any) -> None:
        for name, arguments in _CALLS.items():
            getattr(library, name).argtypes = arguments
        self._get_edges = library.cuGraphGetEdges_v2
        self._get_nodes = library.cuGraphGetNodes
        self._get_kernel = library.cuGraphKernelNodeGetParams_v2
        self._set_kernel = library.cuGraphKernelNodeSetParams_v2
        self._update_kernel = library.cuGraphExecKernelNodeSetParams_v2
        self._get_attribute = library.cuGraphKernelNodeGetAttribute
        self._is_capturing = library.cuStreamIsCapturing
        self._get_capture = library.cuStreamGetCaptureInfo_v3

    @classmethod
    def find(cls) -> Library:
        """Return the library that the process uses already."""
        return cls(ctypes.PyDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1"))

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

    def count(self, graph: int) -> int:
        """Return the number of nodes.

        Raises:
            RuntimeCallError: the call failed.
        """
        count = ctypes.c_size_t()
        error = self._get_nodes(graph, None, ctypes.addressof(count))
        if error:
            self._check("cuGraphGetNodes", error)
        return count.value

    def nodes(self, graph: int) -> list[int]:
        """Return all nodes, in the order in which they were captured.

        Raises:
            RuntimeCallError: the call failed.
        """
        count = ctypes.c_size_t(self.count(graph))
        if not count.value:
            return []  # the driver takes no array without room
        found = (ctypes.c_uint64 * count.value)()
        self._check("cuGraphGetNodes", self._get_nodes(graph, found, ctypes.addressof(count)))
        return list(found)

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

    def cluster(self, node: int) -> tuple[list[int], list[int] | None] | None:
        """Return the sizes of the clusters that a kernel node is launched in, asked for and
        preferred (None where the driver knows no such); None for no clusters."""
        value = _Value()
        where = ctypes.addressof(value)
        if self._get_attribute(node, _CLUSTER, where):
            return None
        # Not set reads as zeros, one block per cluster is the same.
        if value[0] <= 1 and value[1] <= 1 and value[2] <= 1:
            return None
        size = value[:3]
        unknown = self._get_attribute(node, _PREFERRED_CLUSTER, where)
        return size, None if unknown else value[:3]

    def cooperates(self, node: int) -> bool:
        """Whether the blocks of a kernel node's launch may wait for each other."""
        value = _Value()
        unknown = self._get_attribute(node, _COOPERATIVE, ctypes.addressof(value))
        return not unknown and bool(value[0])

    def kernel(self, node: int) -> ctypes.Array[ctypes.c_uint64]:
        """Return the parameters of a kernel node as words; pointers in them belong to its graph.

        Raises:
            RuntimeCallError: it is another kind of node.
        """
        params = _KernelParams()
        error = self._get_kernel(node, ctypes.addressof(params))
        if error:
            self._check("cuGraphKernelNodeGetParams", error)
        return params

    def set_kernel(self, node: int, params: ctypes.Array[ctypes.c_uint64]) -> None:
        """Give a node of a graph the parameters ``params``, which ``kernel`` returned.

        Raises:
            RuntimeCallError: the driver refuses them.
        """
        self._check("cuGraphKernelNodeSetParams", self._set_kernel(node, params))

    def update_kernel(
        self, executable: int, node: int, params: ctypes.Array[ctypes.c_uint64]
    ) -> None:
        """Write ``params`` into an executable of the graph that has ``node``.

        Raises:
            RuntimeCallError: the driver refuses them.
        """
        error = self._update_kernel(executable, node, ctypes.addressof(params))
        if error:
            self._check("cuGraphExecKernelNodeSetParams", error)

    @staticmethod
    def _check(name: str, error: int) -> None:
        if error:
            raise RuntimeCallError(f"{name} failed ({error})", error)
