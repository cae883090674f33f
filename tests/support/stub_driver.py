"""A driver's library that exists only in Python: graphs as lists of nodes, calls as C functions."""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_size_t, c_uint64
from types import SimpleNamespace
from typing import Any

from devgraph.api.torchlike.node_calls import BRIEF, WAITING, NodeRuntime

__all__ = ["GRAPH", "KINDS", "REFUSED", "StubDriver"]

GRAPH = 2**46 + 5
"""The one graph, whose copy is 1000 further on, as the nodes of the copy are 500 further on."""

KINDS = {"kernel": 0, "memcpy": 1, "memset": 2, "host": 3}

REFUSED = 1


class StubDriver:
    """The calls of the table that vendors share, each a method; a vendor's own are in subclasses.

    Addresses that a call writes to arrive as ints, handles too, and None for a null.
    """

    def __init__(self) -> None:
        self.nodes: dict[int, tuple[str, Any]] = {}
        self.edges: list[tuple[int, ...]] = []
        self.captured: list[int] = []
        self.calls: list[tuple[Any, ...]] = []
        """Every parameter that was set, and what was made and destroyed."""
        self.refuse = 0
        """Which of the next calls that write is refused."""

    def library(self, calls: type[NodeRuntime]) -> Any:
        """Return the functions that ``calls`` binds, those that this driver has."""
        found: dict[str, Any] = {}
        tables = BRIEF, calls.calls, WAITING, calls.waiting_calls
        for name, arguments in [call for table in tables for call in table.items()]:
            method = getattr(self, name, None)
            if method is not None:
                make = ctypes.CFUNCTYPE(c_int, *arguments)
                found[calls.prefix + name + calls.suffixes.get(name, "")] = make(method)
        return SimpleNamespace(**found)

    def node(self, kind: str, params: Any) -> int:
        """Return a new node."""
        node = 2**47 + len(self.nodes)
        self.nodes[node] = kind, params
        return node

    def note(self, *what: Any) -> int:
        """Remember a call, or refuse it."""
        self.refuse -= 1
        if self.refuse == 0:
            return REFUSED
        self.calls.append(what)
        return 0

    # Captures. Streams are named by their state: 1 captures, 2 did, 3 cannot be asked.

    def StreamIsCapturing(self, stream: int | None, state: int) -> int:
        if stream == 3:
            return REFUSED
        c_int.from_address(state).value = stream or 0
        return 0

    def StreamGetCaptureInfo(self, stream: int | None, state: int, *words: int) -> int:
        if stream == 1:
            self._last = (c_uint64 * 2)(2**47 + 1, 7)  # the driver's own memory
            values = (2**63 + 3, GRAPH, ctypes.addressof(self._last))
            for at, value in zip(words, values, strict=False):
                c_uint64.from_address(at).value = value
            c_size_t.from_address(words[-1]).value = 2
        return self.StreamIsCapturing(stream, state)

    def StreamBeginCapture(self, stream: int, mode: int) -> int:
        return self.note("begin", stream, mode)

    def StreamEndCapture(self, stream: int, graph: int) -> int:
        c_uint64.from_address(graph).value = GRAPH
        return self.note("end", stream)

    # Graphs.

    def GraphGetNodes(self, graph: int, nodes: int | None, count: int) -> int:
        if graph != GRAPH or (nodes is not None and not self.captured):
            return REFUSED
        return _fill([self.captured], [nodes], count)

    def GraphGetEdges(self, graph: int, *arrays: int) -> int:
        if graph != GRAPH:
            return REFUSED
        columns = list(zip(*self.edges, strict=True)) or [()] * (len(arrays) - 1)
        return _fill(columns, arrays[:-1], arrays[-1])

    def GraphClone(self, copy: int, graph: int) -> int:
        c_uint64.from_address(copy).value = graph + 1000
        return 0

    def GraphNodeFindInClone(self, found: int, node: int, copy: int) -> int:
        c_uint64.from_address(found).value = node + 500
        return 0 if copy == GRAPH + 1000 else REFUSED

    def GraphDestroy(self, graph: int | None) -> int:
        return self.note("destroy", graph) if graph else REFUSED

    # Nodes.

    def GraphNodeGetType(self, node: int, kind: int) -> int:
        c_int.from_address(kind).value = KINDS.get(self.nodes[node][0], 99)
        return 0

    def _get(self, kind: str, node: int, where: int) -> int:
        found, params = self.nodes[node]
        if found != kind:
            return REFUSED
        ctypes.memmove(where, ctypes.addressof(params), ctypes.sizeof(params))
        return 0

    def GraphKernelNodeGetParams(self, node: int, where: int) -> int:
        return self._get("kernel", node, where)

    def GraphMemcpyNodeGetParams(self, node: int, where: int) -> int:
        return self._get("memcpy", node, where)

    def GraphMemsetNodeGetParams(self, node: int, where: int) -> int:
        return self._get("memset", node, where)

    def GraphKernelNodeSetParams(self, node: int, params: int) -> int:
        return self.note("set kernel", node, c_uint64.from_address(params).value)

    def GraphMemcpyNodeSetParams(self, node: int, params: int) -> int:
        return self.note("set memcpy", node, c_uint64.from_address(params).value)

    def GraphMemsetNodeSetParams(self, node: int, params: int) -> int:
        return self.note("set memset", node, c_uint64.from_address(params).value)

    def GraphKernelNodeCopyAttributes(self, one: int, other: int) -> int:
        return self.note("copy attributes", one, other)

    # Executables.

    def GraphInstantiateWithFlags(self, executable: int, graph: int, flags: int) -> int:
        c_uint64.from_address(executable).value = graph + 2000
        return self.note("instantiate", graph, flags)

    def GraphExecDestroy(self, executable: int) -> int:
        return self.note("destroy executable", executable)

    def GraphLaunch(self, executable: int, stream: int | None) -> int:
        return self.note("launch", executable, stream)

    def GraphExecKernelNodeSetParams(self, executable: int, node: int, params: int) -> int:
        return self.note("kernel", executable, node, c_uint64.from_address(params).value)

    def GraphExecMemcpyNodeSetParams(
        self, executable: int, node: int, params: int, *more: int
    ) -> int:
        return self.note("memcpy", executable, node, c_uint64.from_address(params).value, *more)

    def GraphExecMemsetNodeSetParams(
        self, executable: int, node: int, params: int, *more: int
    ) -> int:
        return self.note("memset", executable, node, c_uint64.from_address(params).value, *more)


def _fill(columns: Any, arrays: Any, count: int) -> int:
    """Answer a call that is first asked for a number, and then for so many values."""
    size = c_size_t.from_address(count)
    for values, where in zip(columns, arrays, strict=True):
        if where:
            (c_uint64 * size.value).from_address(where)[:] = values
    size.value = len(columns[0])
    return 0
