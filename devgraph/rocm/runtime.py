"""HIP's graph calls on raw handles: what ``devgraph.api.torchlike.nodes`` needs of a driver."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterable, Sequence
from ctypes import byref, c_int, c_size_t, c_uint, c_ulonglong, c_void_p
from typing import Any

from devgraph.api.errors import UpdateTopologyError
from devgraph.api.torchlike.nodes import Capture, Edges, Read, RuntimeCallError, Update
from devgraph.rocm.layouts import (
    CAPTURE_ACTIVE,
    CAPTURE_NONE,
    CAPTURE_THREAD_LOCAL,
    COPY_KINDS,
    HOST_COPIES,
    INSTANTIATE_AUTO_FREE,
    KernelNodeParams,
    Kind,
    MemcpyParams,
    MemsetParams,
)
from devgraph.rocm.library import Library

__all__ = ["Runtime"]

_GETTERS: dict[str, tuple[str, type[ctypes.Structure]]] = {
    "kernel": ("hipGraphKernelNodeGetParams", KernelNodeParams),
    "memcpy": ("hipGraphMemcpyNodeGetParams", MemcpyParams),
    "memset": ("hipGraphMemsetNodeGetParams", MemsetParams),
}


class Runtime:
    """A ``NodeRuntime`` over libamdhip64.

    ``hipGraphExecUpdate`` is never called: in releases up to 7.14 it answers success while the
    executable keeps old packets (ROCm/rocm-systems pull request 10714), and its time grows with the
    square of the nodes (11069). Nodes are written one at a time, where errors are reported.
    """

    def __init__(self, library: Library) -> None:
        self._library = library
        self.version = library.version
        self.reports_copies = True
        """Whether a captured copy tells its addresses; found out by ``probe`` of the backend."""
        self._setters = {
            "kernel": library.function("hipGraphExecKernelNodeSetParams"),
            "memcpy": library.function("hipGraphExecMemcpyNodeSetParams1D"),
            "memset": library.function("hipGraphExecMemsetNodeSetParams"),
        }

    # Captures in progress.

    def capture_of(self, stream: int) -> Capture | None:
        """Return the capture that ``stream`` is part of, or None."""
        status, capture, graph = c_int(), c_ulonglong(), c_void_p()
        last, count = c_void_p(), c_size_t()
        self._library.call(
            "hipStreamGetCaptureInfo_v2", stream, status, capture, graph, last, count
        )
        if status.value != CAPTURE_ACTIVE:
            return None
        ends = (c_void_p * count.value).from_address(last.value) if last.value else ()
        return capture.value, graph.value or 0, _handles(ends)

    def status(self, stream: int) -> int:
        """Return the hipStreamCaptureStatus of ``stream``."""
        status = c_int()
        self._library.call("hipStreamIsCapturing", stream, status)
        return status.value

    def capturing(self, streams: Sequence[int]) -> list[int]:
        """Return those of ``streams`` that are part of a capture, an invalidated one included."""
        return [stream for stream in streams if self.status(stream) != CAPTURE_NONE]

    def begin_capture(self, stream: int) -> None:
        """Begin a thread-local capture on ``stream`` that torch does not know of."""
        self._library.call("hipStreamBeginCapture", stream, CAPTURE_THREAD_LOCAL)

    def end_capture(self, stream: int) -> int:
        """End the capture on ``stream`` and return its graph, which the caller owns."""
        graph = c_void_p()
        self._library.call("hipStreamEndCapture", stream, graph)
        return graph.value or 0

    # Graphs.

    def count(self, graph: int) -> int:
        """Return the number of nodes."""
        count = c_size_t()
        self._library.call("hipGraphGetNodes", graph, None, count)
        return count.value

    def nodes(self, graph: int) -> list[int]:
        """Return all nodes, in the order in which they were captured."""
        count = c_size_t(self.count(graph))
        if not count.value:
            return []
        found = (c_void_p * count.value)()
        self._library.call("hipGraphGetNodes", graph, found, count)
        return _handles(found)

    def edges(self, graph: int) -> Edges:
        """Return every edge; all are of kind None, because HIP has one kind."""
        count = c_size_t()
        self._library.call("hipGraphGetEdges", graph, None, None, count)
        if not count.value:
            return [], [], []
        sources, targets = (c_void_p * count.value)(), (c_void_p * count.value)()
        self._library.call("hipGraphGetEdges", graph, sources, targets, count)
        return _handles(sources), _handles(targets), [None] * count.value

    def destroy(self, graph: int) -> None:
        """Free a graph."""
        self._library.call("hipGraphDestroy", graph)

    # Nodes.

    def kind(self, node: int) -> str:
        """Return the kind of a node by name."""
        value = c_uint()
        self._library.call("hipGraphNodeGetType", node, value)
        kind = self.version.kind(value.value)
        return kind.value if kind is not Kind.OTHER else f"type-{value.value}"

    def params(self, kind: str, node: int) -> Any:
        """Return the parameters of a node; pointers in them belong to the node's graph.

        Raises:
            UpdateTopologyError: this runtime does not report the parameters of this copy.
        """
        if kind == "memcpy" and not self.reports_copies:
            raise UpdateTopologyError(
                f"a region copies memory, and this HIP runtime ({self.version}) does not report "
                f"the addresses of a captured copy, so that it cannot be updated. Write with a "
                f"kernel instead (index_copy_, or an operation with out=) and into a tensor that "
                f"the region is given, for a tensor that it returns is copied as well; or use "
                f"policy='breakable'."
            )
        name, structure = _GETTERS[kind]
        params = structure()
        self._library.call(name, node, byref(params))
        if kind == "memcpy" and not self._is_flat(params):
            raise UpdateTopologyError(
                "a region copies memory of several dimensions, whose parameters HIP does not "
                "report reliably. Write with a kernel instead (index_copy_, or an operation with "
                "out=), or use policy='breakable'."
            )
        return params

    def fixed(self, kind: str, node: int, params: Any) -> Any:
        """Return what an executable's node keeps for ever."""
        if kind == "kernel":
            return params.func
        if kind == "memcpy":
            return params.kind
        return params.elementSize, params.width, params.height, params.pitch

    def reader(self) -> Read:
        """Return a function that reads nodes."""
        return self._read

    def _read(self, kind: str, fixed: Any, node: int) -> tuple[Any, bool, bool] | None:
        if self.kind(node) != kind:
            return None
        params = self.params(kind, node)
        on_host = kind == "memcpy" and params.kind in HOST_COPIES
        return params, bool(self.fixed(kind, node, params) == fixed), on_host

    @staticmethod
    def _is_flat(params: Any) -> bool:
        """Whether ``params`` describe one run of bytes; positions are not filled in for those."""
        return (
            params.kind in COPY_KINDS
            and (params.extent.height, params.extent.depth) == (1, 1)
            and not (params.srcArray or params.dstArray)
        )

    def clone(self, graph: int, updates: Sequence[Update]) -> int:
        """Return a copy of ``graph`` with new parameters; the caller owns it."""
        copy = c_void_p()
        self._library.call("hipGraphClone", copy, graph)
        made = copy.value or 0
        try:
            for update in updates:
                node = c_void_p()
                self._library.call("hipGraphNodeFindInClone", node, update.node, made)
                self._set(node.value or 0, update)
        except BaseException:
            self.destroy(made)
            raise
        return made

    def _set(self, node: int, update: Update) -> None:
        call, params = self._library.call, update.params
        if update.kind == "memcpy":
            call("hipGraphMemcpyNodeSetParams1D", node, *self._flat(params))
        elif update.kind == "memset":
            call("hipGraphMemsetNodeSetParams", node, byref(params))
        elif update.exact or not self._library.has("hipGraphKernelNodeCopyAttributes"):
            call("hipGraphKernelNodeSetParams", node, byref(params))
        else:
            self._change_kernel(node, update)

    def _change_kernel(self, node: int, update: Update) -> None:
        """Give a node another kernel and the launch attributes of that one."""
        call, params = self._library.call, byref(update.params)
        # Attributes have to fit the kernel that the node holds, and the kernel those attributes:
        # which of the two goes first depends on both.
        try:
            call("hipGraphKernelNodeSetParams", node, params)
            call("hipGraphKernelNodeCopyAttributes", update.source, node)
        except RuntimeCallError:
            call("hipGraphKernelNodeCopyAttributes", update.source, node)
            call("hipGraphKernelNodeSetParams", node, params)

    @staticmethod
    def _flat(params: Any) -> tuple[int, int, int, int]:
        return params.dstPtr.ptr, params.srcPtr.ptr, params.extent.width, params.kind

    # Executables.

    def write(self, updates: Sequence[Update], executable: int) -> None:
        """Write parameters into an executable of the captured graph; seen by later launches.

        Raises:
            RuntimeCallError: the runtime refused; the executable holds a part of them.
        """
        for update in updates:
            setter = self._setters[update.kind]
            if update.kind == "memcpy":
                error = setter(executable, update.node, *self._flat(update.params))
            else:
                error = setter(executable, update.node, byref(update.params))
            if error:
                self._library.fail(f"updating a {update.kind} node", error)

    def instantiate(self, graph: int, stream: int) -> int:
        """Return an executable of ``graph``, made as torch makes its own and uploaded."""
        executable = c_void_p()
        self._library.call("hipGraphInstantiateWithFlags", executable, graph, INSTANTIATE_AUTO_FREE)
        made = executable.value or 0
        self.upload(made, stream)
        return made

    def upload(self, executable: int, stream: int) -> None:
        """Copy an executable to the device now, where the runtime has a call for it."""
        if self._library.has("hipGraphUpload"):
            self._library.call("hipGraphUpload", executable, stream)

    def destroy_executable(self, executable: int) -> None:
        """Free an executable; from 6.2 on the runtime itself waits until it is not in flight."""
        self._library.call("hipGraphExecDestroy", executable)

    def bound_launch(self, executable: int, stream: int) -> tuple[Callable[..., Any], Any, Any]:
        """Return function, arguments and keyword arguments of a launch on ``stream``."""
        return self.launcher(executable, lambda: stream), (), {}

    def launcher(self, executable: int, current_stream: Callable[[], int]) -> Callable[[], None]:
        """Return a callable that launches ``executable`` on the current stream."""
        launch = functools.partial(self._library.function("hipGraphLaunch"), c_void_p(executable))
        fail = self._library.fail

        def run() -> None:
            error = launch(current_stream())
            if error:
                fail("hipGraphLaunch", error)

        return run


def _handles(found: Iterable[int | None]) -> list[int]:
    """Return the nodes that the runtime wrote into an array; ctypes reads a null as None."""
    return [int(node or 0) for node in found]
