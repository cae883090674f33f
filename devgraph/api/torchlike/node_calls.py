"""Graph calls of a driver on raw handles, bound by ctypes.

All drivers with graphs of nodes have the same calls, with different prefixes and almost equal
arguments. Therefore one table serves all of them, and each vendor's package adds the differences.
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
    """A failed driver call; the message contains the vendor's code and text."""

    def __init__(self, message: str, error_code: int) -> None:
        super().__init__(message)
        self.error_code = error_code


class DriverMemoryError(RuntimeCallError, ResourceError):
    """A driver call that failed because of insufficient memory."""


class Update(NamedTuple):
    """New parameters for one node. It is a tuple for speed: a recording has hundreds of them."""

    node: int
    """The node of the captured graph."""
    kind: str
    params: Any
    """Parameters as the driver returned them. They point into the graph of ``source``, which must
    stay alive."""
    source: int
    """The node from which the parameters were read."""
    exact: bool
    """Whether an existing executable accepts the parameters; if not, a new executable is needed."""


Capture = tuple[int, int, list[int]]
"""A capture in progress on a stream: id, graph, and the nodes on which the stream's next work will
depend."""

Edges = tuple[Sequence[int], Sequence[int], Sequence[Hashable]]
"""The edges of a graph as three sequences of equal length: source nodes, target nodes, and opaque
kinds that can be compared."""


Read = Callable[[str, Any, int], tuple[Any, bool, bool] | None]
"""A function that reads a node, given a kind and the fixed properties of a node of an executable.

It returns the parameters, whether the executable's node accepts them, and whether they point to
host memory. It returns None if the node has another kind."""

Arguments = tuple[Any, ...]
"""The ctypes types of a call's arguments. Every call returns an error code; 0 is success."""

_P = ctypes.c_void_p  # a handle, an address, or a pointer to a result

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
"""Short calls, which keep the GIL. Releasing the GIL would take longer than the call, and another
thread could then keep it for milliseconds."""

WAITING: Mapping[str, Arguments] = {
    "StreamBeginCapture": (_P, c_int),
    "StreamEndCapture": (_P, _P),
    "GraphClone": (_P, _P),
    "GraphDestroy": (_P,),
    "GraphInstantiateWithFlags": (_P, _P, c_uint64),
    "GraphLaunch": (_P, _P),
    "GraphExecDestroy": (_P,),
}
"""Calls that are slow or may wait for the device, and therefore release the GIL."""


def structure(name: str, **fields: Any) -> Any:
    """Return a ctypes structure; ``name`` is its name in the driver's header."""
    return type(name, (ctypes.Structure,), {"_fields_": tuple(fields.items())})


KINDS = (
    *(KERNEL, MEMCPY, MEMSET, "host", "graph", "empty", "wait_event", "event_record"),
    *("ext_semas_signal", "ext_semas_wait", "mem_alloc", "mem_free"),
)
"""Kinds of nodes in the order of the driver's values for node types."""

_GETTERS = {kind: f"Graph{kind.title()}NodeGetParams" for kind in (KERNEL, MEMCPY, MEMSET)}

THREAD_LOCAL = 1
"""The capture mode that does not restrict other threads."""

_OUT_OF_MEMORY = 2  # error code for insufficient memory in all drivers

_NOT_CAPTURING, _ACTIVE = 0, 1
"""Capture states of a stream. The only other state is an invalidated capture."""


class NodeRuntime:
    """A driver's graph calls. Handles are ints, and a failed call raises ``RuntimeCallError``.

    A vendor sets the class attributes and implements ``fixed``, ``judge`` and ``error_text``, and
    for loops also ``looping``.

    Args:
        brief: the library as loaded by ``ctypes.PyDLL``, which keeps the GIL.
        waiting: the library as loaded by ``ctypes.CDLL``, which releases the GIL.
    """

    prefix: ClassVar[str]
    """Prefix of the driver's functions, before the name of the call."""
    suffixes: ClassVar[Mapping[str, str]] = {}
    """Suffixes of some of the driver's functions, by call."""
    calls: ClassVar[Mapping[str, Arguments]] = {}
    """Further short calls, and short calls whose arguments differ from ``BRIEF``."""
    waiting_calls: ClassVar[Mapping[str, Arguments]] = {}
    """Further calls that may wait, and calls whose arguments differ from ``WAITING``."""
    structures: ClassVar[Mapping[str, type[Any]]]
    """The ctypes structure of the parameters of each kind of node."""
    instantiate_flags: ClassVar[int]
    """The flags with which torch instantiates graphs. They determine whether nodes have
    priorities, and whether a launch frees memory that the graph allocated."""

    def __init__(self, brief: Any, waiting: Any) -> None:
        self._functions: dict[str, Any] = {}
        long_calls = {**WAITING, **self.waiting_calls}
        for library, calls in ((brief, {**BRIEF, **self.calls}), (waiting, long_calls)):
            for name, arguments in calls.items():
                function = getattr(library, self._symbol(name), None)
                if function is not None:
                    function.argtypes = arguments
                    self._functions[name] = function
        all_calls = {**BRIEF, **self.calls, **long_calls}
        self.missing = frozenset(map(self._symbol, all_calls.keys() - self._functions.keys()))
        """The functions that the library lacks."""
        self.kinds = dict(enumerate(KINDS))
        """Kinds of nodes by the driver's value of the node type."""
        self._info_words = len(all_calls["StreamGetCaptureInfo"]) - 1
        self._edge_columns = len(all_calls["GraphGetEdges"]) - 2

    def _symbol(self, name: str) -> str:
        return self.prefix + name + self.suffixes.get(name, "")

    # Calls by name.

    def function(self, name: str) -> Callable[..., int]:
        """Return the driver's function for a call. It returns an error code."""
        function: Callable[..., int] = self._functions[name]
        return function

    def call(self, name: str, *args: Any) -> None:
        """Make a call, which may write results to addresses in ``args``."""
        error = self._functions[name](*args)
        if error:
            self.failed(error, name, *args)

    def make(self, name: str, *args: Any) -> int:
        """Make a call that writes a handle to its first argument, and return the handle."""
        handle = c_uint64()
        self.call(name, addressof(handle), *args)
        return handle.value

    def failed(self, error: int, name: str, *args: Any) -> None:
        """Repeat a failed call if ``recovers``; raise its error if it still fails."""
        if self.recovers():
            error = self._functions[name](*args)
        if error:
            self.refuse(error, name)

    def refuse(self, error: int, name: str) -> NoReturn:
        kind = DriverMemoryError if error == _OUT_OF_MEMORY else RuntimeCallError
        raise kind(f"{self.prefix}{name} failed ({error}: {self.error_text(error)})", error)

    # Methods that a vendor implements or overrides.

    def error_text(self, error: int) -> str:
        """Return the driver's text for an error code."""
        raise NotImplementedError

    def recovers(self) -> bool:
        """Try to remove the cause of a failed call, and return whether to repeat the call."""
        return False

    def fixed(self, kind: str, node: int, params: Any) -> Any:
        """Return the properties of a node that an update of an executable cannot change."""
        raise NotImplementedError

    def judge(self, kind: str, fixed: Any, node: int, params: Any) -> tuple[Any, bool, bool]:
        """Return the parameters of ``node`` and two booleans, as ``Read`` describes."""
        raise NotImplementedError

    def arguments(self, kind: str, params: Any) -> tuple[Any, ...]:
        """Return the arguments that follow the node in a call that sets its parameters."""
        return (addressof(params),)

    def context(self) -> tuple[Any, ...]:
        """Make the driver's context current, and return it as the last arguments of some calls."""
        return ()

    def looping(
        self, stream: int, body: int, going: int, prepare: Callable[[], None]
    ) -> contextlib.AbstractContextManager[Callable[[], int]]:
        """Record the launches of the block on stream ``body`` as a loop in a capture on ``stream``.

        Replays repeat the loop while the byte at the address ``going`` is not zero. ``prepare`` is
        called before the capture on ``body`` begins, so it may allocate. Yields a callable that
        returns the body's number of nodes after the block.
        """
        raise NotImplementedError

    def copy_attributes(self, source: int, target: int) -> None:
        """Copy the launch attributes of kernel node ``source`` to ``target``."""
        self.call("GraphKernelNodeCopyAttributes", source, target)

    # Captures in progress.

    def capturing(self, streams: Sequence[int]) -> list[int]:
        """Return the members of ``streams`` that are part of a capture, valid or not."""
        capturing, state = [], c_int()
        address = addressof(state)  # an int converts twice as fast as a reference
        for stream in streams:
            self.call("StreamIsCapturing", stream, address)
            if state.value != _NOT_CAPTURING:
                capturing.append(stream)
        return capturing

    def capture_of(self, stream: int) -> Capture | None:
        """Return the valid capture to which ``stream`` belongs, or None."""
        # The driver writes one word per result: state (an int in the lower half), id, graph, nodes,
        # edge kinds (only on drivers with edge data), number of nodes.
        words = (c_uint64 * self._info_words)()
        at = addressof(words)
        self.call("StreamGetCaptureInfo", stream, *range(at, at + ctypes.sizeof(words), 8))
        if words[0] != _ACTIVE:
            return None
        count = words[-1]
        nodes = (c_uint64 * count).from_address(words[3])[:] if count else []
        return words[1], words[2], nodes

    def begin_capture(self, stream: int) -> None:
        """Begin a thread-local capture on ``stream`` without torch."""
        self.call("StreamBeginCapture", stream, THREAD_LOCAL)

    def end_capture(self, stream: int) -> int:
        """End the capture on ``stream`` and return its graph, which the caller owns."""
        graph = c_uint64()
        self.call("StreamEndCapture", stream, addressof(graph))
        return graph.value

    # Graphs.

    def count(self, graph: int) -> int:
        count = c_size_t()
        self.call("GraphGetNodes", graph, None, addressof(count))
        return count.value

    def nodes(self, graph: int) -> list[int]:
        """Return all nodes in capture order."""
        count = c_size_t(self.count(graph))
        if not count.value:
            return []  # drivers refuse an empty array
        nodes = (c_uint64 * count.value)()
        self.call("GraphGetNodes", graph, nodes, addressof(count))
        return nodes[:]  # a slice is 4x faster than list()

    def edges(self, graph: int) -> Edges:
        count, none = c_size_t(), (None,) * self._edge_columns
        self.call("GraphGetEdges", graph, *none, addressof(count))
        if not count.value:
            return [], [], []
        columns = [(c_uint64 * count.value)() for _ in range(3)]
        self.call("GraphGetEdges", graph, *columns[: self._edge_columns], addressof(count))
        sources, targets, kinds = columns
        return sources[:], targets[:], kinds[:]

    def destroy(self, graph: int) -> None:
        self.call("GraphDestroy", graph)

    # Nodes.

    def kind(self, node: int) -> str:
        """Return the kind of a node: a member of ``UPDATABLE``, "empty", or another name."""
        value = c_int()
        self.call("GraphNodeGetType", node, addressof(value))
        return self.kinds.get(value.value) or f"type-{value.value}"

    def params(self, kind: str, node: int) -> Any:
        """Return the parameters of a node whose kind is in ``UPDATABLE``."""
        params = self.structures[kind]()
        self.call(_GETTERS[kind], node, addressof(params))
        return params

    def reader(self) -> Read:
        """Return a fast function that reads nodes, for use by one thread."""
        functions, structures, kinds = self._functions, self.structures, self.kinds
        get_type, value, judge = functions["GraphNodeGetType"], c_int(), self.judge
        address = addressof(value)

        def read(kind: str, fixed: Any, node: int) -> tuple[Any, bool, bool] | None:
            if error := get_type(node, address):
                self.failed(error, "GraphNodeGetType", node, address)
            if kinds.get(value.value) != kind:
                return None
            params, name = structures[kind](), _GETTERS[kind]
            if error := functions[name](node, addressof(params)):
                self.failed(error, name, node, addressof(params))
            return judge(kind, fixed, node, params)

        return read

    def clone(self, graph: int, updates: Sequence[Update]) -> int:
        """Return a copy of ``graph`` with new parameters; the caller owns the copy."""
        self.context()  # without a driver context, setting a node's kernel can crash the process
        copy = self.make("GraphClone", graph)
        try:
            for update in updates:
                node, kind = self.make("GraphNodeFindInClone", update.node, copy), update.kind
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
        """Set the kernel and the launch attributes of a graph's node.

        A node refuses attributes that do not suit its current kernel, and a kernel that does not
        suit its current attributes. Therefore both orders are tried.
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
        """Write parameters into an executable of the captured graph, for all later launches.

        After a failure, some nodes of the executable have the new parameters.
        """
        set_kernel, context = self._functions["GraphExecKernelNodeSetParams"], self.context()
        for node, kind, params, _, _ in updates:
            if kind != KERNEL:
                args = (*self.arguments(kind, params), *context)
                self.call(f"GraphExec{kind.title()}NodeSetParams", executable, node, *args)
            elif error := set_kernel(executable, node, at := addressof(params)):
                self.failed(error, "GraphExecKernelNodeSetParams", executable, node, at)

    def instantiate(self, graph: int) -> int:
        """Create an executable of ``graph`` with torch's flags."""
        return self.make("GraphInstantiateWithFlags", graph, self.instantiate_flags)

    def destroy_executable(self, executable: int) -> None:
        """Free an executable; while a launch is in flight, the driver defers the release."""
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
