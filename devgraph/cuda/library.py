"""Calls of the driver's library that do not go through cuda-python."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from devgraph.api.torchlike.nodes import Capture, Edges, RuntimeCallError

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
    "cuGetErrorName": (ctypes.c_int, _POINTER),
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
        driver: the driver's library, or what has its functions.

    Raises:
        AttributeError: the driver lacks one of them.
    """

    def __init__(self, driver: Any) -> None:
        for name, arguments in _CALLS.items():
            getattr(driver, name).argtypes = arguments
        self._get_edges = driver.cuGraphGetEdges_v2
        self._get_nodes = driver.cuGraphGetNodes
        self._get_kernel = driver.cuGraphKernelNodeGetParams_v2
        self._set_kernel = driver.cuGraphKernelNodeSetParams_v2
        self._update_kernel = driver.cuGraphExecKernelNodeSetParams_v2
        self._get_attribute = driver.cuGraphKernelNodeGetAttribute
        self._get_error_name = driver.cuGetErrorName
        self._is_capturing = driver.cuStreamIsCapturing
        self._get_capture = driver.cuStreamGetCaptureInfo_v3

    @classmethod
    def find(cls) -> Library:
        """Return the calls of the driver that the process uses already.

        Raises:
            OSError: there is no driver.
            AttributeError: it is too old.
        """
        # PyDLL keeps the interpreter's lock: a call is shorter than it takes to give that up, and
        # another thread that got it in between would keep it for milliseconds.
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
        # What the call writes to, each in a word: status (an int, in the lower half), id, graph,
        # dependencies, edge data (some captures are refused without), number of dependencies.
        words = (ctypes.c_uint64 * 6)()
        at = ctypes.addressof(words)
        error = self._get_capture(stream, *range(at, at + ctypes.sizeof(words), 8))
        if error:
            self._fail("cuStreamGetCaptureInfo", error)
        status, capture, graph, address, _, count = words
        if status != _CAPTURE_ACTIVE:
            return None
        dependencies = (ctypes.c_uint64 * count).from_address(address) if count else ()
        return capture, graph, list(dependencies)

    def count(self, graph: int) -> int:
        """Return the number of nodes.

        Raises:
            RuntimeCallError: the call failed.
        """
        count = ctypes.c_size_t()
        error = self._get_nodes(graph, None, ctypes.addressof(count))
        if error:
            self._fail("cuGraphGetNodes", error)
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
        error = self._get_nodes(graph, found, ctypes.addressof(count))
        if error:
            self._fail("cuGraphGetNodes", error)
        return found[:]  # a slice is four times as fast as list()

    def edges(self, graph: int) -> Edges:
        """Return every edge; a kind is the bytes of CUgraphEdgeData as one number, 0 for a plain
        dependency.

        Raises:
            RuntimeCallError: the call failed.
        """
        count = ctypes.c_size_t()
        error = self._get_edges(graph, None, None, None, ctypes.byref(count))
        if error:
            self._fail("cuGraphGetEdges", error)
        if not count.value:
            return [], [], []
        columns = [(ctypes.c_uint64 * count.value)() for _ in range(3)]
        error = self._get_edges(graph, *columns, ctypes.byref(count))
        if error:
            self._fail("cuGraphGetEdges", error)
        sources, targets, kinds = columns
        return sources[:], targets[:], kinds[:]

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
            self._fail("cuGraphKernelNodeGetParams", error)
        return params

    def launches(self) -> Callable[[int], tuple[ctypes.Array[ctypes.c_uint64], Any]]:
        """Return a function, for one thread, that returns what ``kernel`` and ``cluster`` return of
        a kernel node; a recording calls it hundreds of times.

        Raises (the function):
            RuntimeCallError: it is another kind of node.
        """
        kernel, ask, value = self.kernel, self._get_attribute, _Value()
        where, first = ctypes.addressof(value), ctypes.c_uint64.from_buffer(value)

        def launch_of(node: int) -> tuple[ctypes.Array[ctypes.c_uint64], Any]:
            params = kernel(node)
            plain = ask(node, _CLUSTER, where) or not first.value  # not set reads as zeros
            return params, None if plain else self.cluster(node)

        return launch_of

    def set_kernel(self, node: int, params: ctypes.Array[ctypes.c_uint64]) -> None:
        """Give a node of a graph the parameters ``params``, which ``kernel`` returned.

        Raises:
            RuntimeCallError: the driver refuses them.
        """
        error = self._set_kernel(node, ctypes.addressof(params))
        if error:
            self._fail("cuGraphKernelNodeSetParams", error)

    def update_kernel(
        self, executable: int, node: int, params: ctypes.Array[ctypes.c_uint64]
    ) -> None:
        """Write ``params`` into an executable of the graph that has ``node``.

        Raises:
            RuntimeCallError: the driver refuses them.
        """
        error = self._update_kernel(executable, node, ctypes.addressof(params))
        if error:
            self._fail("cuGraphExecKernelNodeSetParams", error)

    @staticmethod
    def function(params: ctypes.Array[ctypes.c_uint64]) -> int:
        """Return what a kernel node runs: the driver gives a function, or a kernel of a library."""
        return params[0] or params[7]

    def _fail(self, name: str, error: int) -> NoReturn:
        text = ctypes.c_char_p()
        self._get_error_name(error, ctypes.addressof(text))
        known = (text.value or b"unknown").decode()
        raise RuntimeCallError(f"{name} failed ({error}: {known})", error)
