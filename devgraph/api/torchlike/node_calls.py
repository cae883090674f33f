"""The node calls of a driver, bound by ctypes: one table, one binding for every vendor.

Drivers whose captures are graphs of nodes give their calls the same names behind a prefix and
nearly the same arguments. What one of them has besides, or otherwise, is in its own room.
Whatever is built on them calls plain functions on raw handles.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Hashable, Mapping, Sequence
from ctypes import addressof, c_int, c_size_t, c_uint64
from typing import Any, ClassVar, NamedTuple, NoReturn

from devgraph.api.errors import DeviceGraphError, ResourceError

KERNEL, MEMCPY, MEMSET, EMPTY = "kernel", "memcpy", "memset", "empty"

UPDATABLE = (KERNEL, MEMCPY, MEMSET)
"""Kinds of nodes whose parameters can be replaced."""


class RuntimeCallError(DeviceGraphError):
    """A driver call failed; the message has the vendor's code and text."""

    def __init__(self, message: str, error_code: int) -> None:
        super().__init__(message)
        self.error_code = error_code


class DriverMemoryError(RuntimeCallError, ResourceError):
    """A driver call failed for want of memory."""


class Update(NamedTuple):
    """New parameters for one node. A tuple, because a recording makes hundreds."""

    node: int
    """The captured graph's node."""
    kind: str
    params: Any
    """As the driver gave them; they point into the recording's own graph, which must live."""
    source: int
    """The node they were read from."""
    exact: bool
    """Whether an existing executable takes them; else only a new one does."""


Capture = tuple[int, int, list[int]]
"""A capture in progress as one of its streams sees it: id, graph, and the nodes that the stream
goes on from."""

Edges = tuple[Sequence[int], Sequence[int], Sequence[Hashable]]
"""The edges of a graph as three sequences of one length: the node where each begins, the node where
it ends, and its kind, which is only compared."""


Read = Callable[[str, Any, int], tuple[Any, bool, bool] | None]
"""Called with a kind, what an executable's node of that kind keeps for ever, and a node; returns
the node's parameters, whether that executable's node takes them, and whether they point to host
memory, or None for a node of another kind."""

Arguments = tuple[Any, ...]
"""The kinds of a call's arguments; every call returns an error code, 0 for success."""

_P = ctypes.c_void_p
"""A handle, an address, or where the call writes to."""

BRIEF: Mapping[str, Arguments] = {
    "StreamIsCapturing": (_P, _P),
    "StreamGetCaptureInfo": (_P,) * 6,
    "GraphGetNodes": (_P,) * 3,
    "GraphGetEdges": (_P,) * 4,
    "GraphNodeGetType": (_P, _P),
    "GraphNodeFindInClone": (_P,) * 3,
    "GraphKernelNodeGetParams": (_P, _P),
    "GraphKernelNodeSetParams": (_P, _P),
    "GraphKernelNodeCopyAttributes": (_P, _P),
    "GraphExecKernelNodeSetParams": (_P,) * 3,
    "GraphMemcpyNodeGetParams": (_P, _P),
    "GraphMemcpyNodeSetParams": (_P, _P),
    "GraphExecMemcpyNodeSetParams": (_P,) * 3,
    "GraphMemsetNodeGetParams": (_P, _P),
    "GraphMemsetNodeSetParams": (_P, _P),
    "GraphExecMemsetNodeSetParams": (_P,) * 3,
}
"""Calls that are shorter than it takes to give the interpreter's lock up, and keep it: another
thread that got it in between would have it for milliseconds."""

WAITING: Mapping[str, Arguments] = {
    "StreamBeginCapture": (_P, c_int),
    "StreamEndCapture": (_P, _P),
    "GraphClone": (_P, _P),
    "GraphDestroy": (_P,),
    "GraphInstantiateWithFlags": (_P, _P, c_uint64),
    "GraphLaunch": (_P, _P),
    "GraphExecDestroy": (_P,),
}
"""Calls that take long or may wait for the device; other threads run meanwhile."""


def structure(name: str, **fields: Any) -> Any:
    """Return the ctypes structure that a driver's header calls ``name``."""
    return type(name, (ctypes.Structure,), {"_fields_": tuple(fields.items())})


KINDS = (
    *(KERNEL, MEMCPY, MEMSET, "host", "graph", "empty", "wait_event", "event_record"),
    *("ext_semas_signal", "ext_semas_wait", "mem_alloc", "mem_free"),
)
"""The values of a node's type, in this order."""

_GETTERS = {kind: f"Graph{kind.title()}NodeGetParams" for kind in (KERNEL, MEMCPY, MEMSET)}

THREAD_LOCAL = 1
"""The capture mode in which other threads may do what they like."""

_OUT_OF_MEMORY = 2
"""The error code of every driver here."""

_NOT_CAPTURING, _ACTIVE = 0, 1
"""Capture states of a stream; others mean a capture that was invalidated."""


class NodeRuntime:
    """A driver's graph calls. Handles are plain ints; a failed call raises ``RuntimeCallError``.

    A vendor sets the attributes below and implements ``fixed``, ``judge`` and ``error_text``, and
    ``looping`` for loops.

    Args:
        brief: the library as ``ctypes.PyDLL`` loads it.
        waiting: the same as ``ctypes.CDLL`` loads it.
    """

    prefix: ClassVar[str]
    """What the names of all calls begin with."""
    suffixes: ClassVar[Mapping[str, str]] = {}
    """What the library's names of some calls end with, besides."""
    calls: ClassVar[Mapping[str, Arguments]] = {}
    """Brief calls that the driver has besides the tables, or with other arguments."""
    structures: ClassVar[Mapping[str, type[Any]]]
    """The ctypes structure of the parameters of each kind of node."""
    instantiate_flags: ClassVar[int]
    """Those with which torch makes its own executables: others would run other priorities, or
    keep the memory that a graph allocates."""

    def __init__(self, brief: Any, waiting: Any) -> None:
        self._functions: dict[str, Any] = {}
        for library, calls in ((brief, {**BRIEF, **self.calls}), (waiting, WAITING)):
            for name, arguments in calls.items():
                function = getattr(library, self._symbol(name), None)
                if function is not None:
                    function.argtypes = arguments
                    self._functions[name] = function
        known = {**BRIEF, **self.calls, **WAITING}
        self.missing = frozenset(map(self._symbol, known.keys() - self._functions.keys()))
        """The functions that the library lacks."""
        self.kinds = dict(enumerate(KINDS))
        """What the values of a node's type mean."""
        self._info_words = len(known["StreamGetCaptureInfo"]) - 1
        self._edge_columns = len(known["GraphGetEdges"]) - 2

    def _symbol(self, name: str) -> str:
        return self.prefix + name + self.suffixes.get(name, "")

    # Calls by name.

    def function(self, name: str) -> Callable[..., int]:
        """Return a call that returns its error code."""
        found: Callable[..., int] = self._functions[name]
        return found

    def call(self, name: str, *args: Any) -> None:
        """Make a call; an address given for a result is written to.

        Raises:
            RuntimeCallError: it failed.
        """
        error = self._functions[name](*args)
        if error:
            self.failed(error, name, *args)

    def made(self, name: str, *args: Any) -> int:
        """Make a call that writes a handle to its first argument, and return that."""
        handle = c_uint64()
        self.call(name, addressof(handle), *args)
        return handle.value

    def failed(self, error: int, name: str, *args: Any) -> None:
        """Raise the error of a call, or make it again if it can succeed now.

        Raises:
            RuntimeCallError: it failed for good.
        """
        if self.recovers():
            error = self._functions[name](*args)
        if error:
            self.refuse(error, name)

    def refuse(self, error: int, name: str) -> NoReturn:
        """Raise the error of a call."""
        kind = DriverMemoryError if error == _OUT_OF_MEMORY else RuntimeCallError
        raise kind(f"{self.prefix}{name} failed ({error}: {self.error_text(error)})", error)

    # What a vendor may add.

    def error_text(self, error: int) -> str:
        """Return the driver's words for an error code."""
        raise NotImplementedError

    def recovers(self) -> bool:
        """Whether a call that failed lacked something which it now has."""
        return False

    def fixed(self, kind: str, node: int, params: Any) -> Any:
        """Return what an executable's node keeps for ever."""
        raise NotImplementedError

    def judge(self, kind: str, fixed: Any, node: int, params: Any) -> tuple[Any, bool, bool]:
        """Return the parameters of ``node``, whether an executable's node of which ``fixed`` is
        fixed takes them, and whether they point to host memory."""
        raise NotImplementedError

    def arguments(self, kind: str, params: Any) -> tuple[Any, ...]:
        """Return what setting the parameters of a node takes behind the node."""
        return (addressof(params),)

    def context(self) -> tuple[Any, ...]:
        """Return what writing a copy or a fill into an executable takes at the end."""
        return ()

    def looping(
        self, stream: int, body: int, going: int, prepare: Callable[[], None]
    ) -> contextlib.AbstractContextManager[Callable[[], int]]:
        """Record what the block launches on the stream ``body`` as a loop in the capture on
        ``stream``, repeated while the byte at the address ``going`` is not zero.

        Args:
            prepare: called while ``body`` captures nothing, and may allocate.

        Yields what counts, behind the block, the nodes of the body.
        """
        raise NotImplementedError

    def copy_attributes(self, source: int, target: int) -> None:
        """Give a kernel node the launch attributes of another."""
        self.call("GraphKernelNodeCopyAttributes", source, target)

    # Captures in progress.

    def capturing(self, streams: Sequence[int]) -> list[int]:
        """Return those of ``streams`` that are part of a capture, be it an invalidated one."""
        found, state = [], c_int()
        where = addressof(state)  # an int converts twice as fast as a reference
        for stream in streams:
            self.call("StreamIsCapturing", stream, where)
            if state.value != _NOT_CAPTURING:
                found.append(stream)
        return found

    def capture_of(self, stream: int) -> Capture | None:
        """Return the capture that ``stream`` is part of, or None if it is part of no valid one."""
        # What the call writes, each to a word: state (an int, in the lower half), id, graph,
        # nodes, where they have any the kinds of their edges, number of nodes.
        words = (c_uint64 * self._info_words)()
        at = addressof(words)
        self.call("StreamGetCaptureInfo", stream, *range(at, at + ctypes.sizeof(words), 8))
        if words[0] != _ACTIVE:
            return None
        count = words[-1]
        nodes = (c_uint64 * count).from_address(words[3])[:] if count else []
        return words[1], words[2], nodes

    def begin_capture(self, stream: int) -> None:
        """Begin a thread-local capture on ``stream`` that torch does not know of."""
        self.call("StreamBeginCapture", stream, THREAD_LOCAL)

    def end_capture(self, stream: int) -> int:
        """End the capture on ``stream`` and return its graph, which the caller owns."""
        graph = c_uint64()
        self.call("StreamEndCapture", stream, addressof(graph))
        return graph.value

    # Graphs.

    def count(self, graph: int) -> int:
        """Return the number of nodes."""
        count = c_size_t()
        self.call("GraphGetNodes", graph, None, addressof(count))
        return count.value

    def nodes(self, graph: int) -> list[int]:
        """Return all nodes, in the order in which they were captured."""
        count = c_size_t(self.count(graph))
        if not count.value:
            return []  # no driver takes an array without room
        found = (c_uint64 * count.value)()
        self.call("GraphGetNodes", graph, found, addressof(count))
        return found[:]  # a slice is four times as fast as list()

    def edges(self, graph: int) -> Edges:
        """Return every edge, in three columns."""
        count, none = c_size_t(), (None,) * self._edge_columns
        self.call("GraphGetEdges", graph, *none, addressof(count))
        if not count.value:
            return [], [], []
        columns = [(c_uint64 * count.value)() for _ in range(3)]
        self.call("GraphGetEdges", graph, *columns[: self._edge_columns], addressof(count))
        sources, targets, kinds = columns
        return sources[:], targets[:], kinds[:]

    def destroy(self, graph: int) -> None:
        """Free a graph."""
        self.call("GraphDestroy", graph)

    # Nodes.

    def kind(self, node: int) -> str:
        """Return the kind: one of ``UPDATABLE``, "empty", or the vendor's word for another."""
        value = c_int()
        self.call("GraphNodeGetType", node, addressof(value))
        return self.kinds.get(value.value) or f"type-{value.value}"

    def params(self, kind: str, node: int) -> Any:
        """Return the parameters of a node of a kind in ``UPDATABLE``."""
        params = self.structures[kind]()
        self.call(_GETTERS[kind], node, addressof(params))
        return params

    def reader(self) -> Read:
        """Return a function that reads nodes, for one thread."""
        # A recording reads hundreds of nodes, with no more than their calls.
        functions, structures, kinds = self._functions, self.structures, self.kinds
        ask, value, judge = functions["GraphNodeGetType"], c_int(), self.judge
        where = addressof(value)

        def read(kind: str, fixed: Any, node: int) -> tuple[Any, bool, bool] | None:
            if error := ask(node, where):
                self.failed(error, "GraphNodeGetType", node, where)
            if kinds.get(value.value) != kind:
                return None
            params, name = structures[kind](), _GETTERS[kind]
            if error := functions[name](node, addressof(params)):
                self.failed(error, name, node, addressof(params))
            return judge(kind, fixed, node, params)

        return read

    def clone(self, graph: int, updates: Sequence[Update]) -> int:
        """Return a copy of ``graph`` with new parameters; the caller owns it."""
        self.context()  # to set a node's kernel without one can end the process
        copy = self.made("GraphClone", graph)
        try:
            for update in updates:
                node, kind = self.made("GraphNodeFindInClone", update.node, copy), update.kind
                if kind == KERNEL and not update.exact:
                    self._relaunch(node, update)
                else:
                    args = self.arguments(kind, update.params)
                    self.call(f"Graph{kind.title()}NodeSetParams", node, *args)
        except BaseException:
            self.destroy(copy)
            raise
        return copy

    def _relaunch(self, node: int, update: Update) -> None:
        """Give a node the kernel of ``update`` with its launch attributes, which an executable
        that exists cannot take.

        A node refuses attributes that do not fit the kernel which it holds, and a kernel that does
        not fit the attributes: one order or the other passes.
        """
        params = addressof(update.params)
        try:
            self.call("GraphKernelNodeSetParams", node, params)
            self.copy_attributes(update.source, node)
        except RuntimeCallError:
            self.copy_attributes(update.source, node)
            self.call("GraphKernelNodeSetParams", node, params)

    # Executables.

    def write(self, updates: Sequence[Update], executable: int) -> None:
        """Write parameters into an executable of the captured graph; seen by later launches.

        If it fails, the executable holds a part of them.
        """
        set_kernel, context = self._functions["GraphExecKernelNodeSetParams"], self.context()
        for node, kind, params, _, _ in updates:
            if kind != KERNEL:
                args = (*self.arguments(kind, params), *context)
                self.call(f"GraphExec{kind.title()}NodeSetParams", executable, node, *args)
            elif error := set_kernel(executable, node, at := addressof(params)):
                self.failed(error, "GraphExecKernelNodeSetParams", executable, node, at)

    def instantiate(self, graph: int) -> int:
        """Return an executable of ``graph``, made as torch makes its own."""
        return self.made("GraphInstantiateWithFlags", graph, self.instantiate_flags)

    def destroy_executable(self, executable: int) -> None:
        """Free an executable, once it is no longer in flight."""
        self.call("GraphExecDestroy", executable)

    def launcher(self, executable: int, current_stream: Callable[[], int]) -> Callable[[], None]:
        """Return a callable that launches ``executable`` on the current stream."""
        launch, failed = self._functions["GraphLaunch"], self.failed

        def run() -> None:
            if error := launch(executable, current_stream()):
                failed(error, "GraphLaunch", executable, current_stream())

        return run

    def bound(self, executable: int, stream: int) -> Callable[[], None]:
        """Return a callable that launches ``executable`` on ``stream``."""
        launch, failed = self._functions["GraphLaunch"], self.failed

        def run() -> None:
            if error := launch(executable, stream):
                failed(error, "GraphLaunch", executable, stream)

        return run
