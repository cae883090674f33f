"""The runtime and driver calls that torch does not expose, through cuda-python where installed."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from devgraph.api.nodes import RuntimeCallError, Update

__all__ = ["Runtime"]

logger = logging.getLogger(__name__)

_KERNEL, _MEMCPY, _MEMSET = "kernel", "memcpy", "memset"


def _fail(name: str, error: Any) -> NoReturn:
    raise RuntimeCallError(f"{name} failed ({int(error)}: {error!s})", int(error))


class Runtime:
    """A ``NodeRuntime`` over ``cuda.bindings``.

    Node parameters go through the driver's functions: the runtime's getter can fail for kernels
    that the driver loaded (Triton, cuBLAS).

    Args:
        cudart: the module ``cuda.bindings.runtime``.
        driver: the module ``cuda.bindings.driver``.
    """

    def __init__(self, cudart: Any, driver: Any) -> None:
        self._cudart = cudart
        self._driver = driver
        self._active = cudart.cudaStreamCaptureStatus.cudaStreamCaptureStatusActive
        self._is_capturing = cudart.cudaStreamIsCapturing
        flags = cudart.cudaGraphInstantiateFlags
        # torch's own flags: another set would run other priorities and keep graph allocations.
        self._instantiate_flags = int(flags.cudaGraphInstantiateFlagAutoFreeOnLaunch) | int(
            flags.cudaGraphInstantiateFlagUseNodePriority
        )
        prefix = "CU_GRAPH_NODE_TYPE_"
        self._kinds = {
            int(kind): kind.name.removeprefix(prefix).lower() for kind in driver.CUgraphNodeType
        }
        self._getters = {
            _KERNEL: driver.cuGraphKernelNodeGetParams,
            _MEMCPY: driver.cuGraphMemcpyNodeGetParams,
            _MEMSET: driver.cuGraphMemsetNodeGetParams,
        }
        self._host_memory = driver.CUmemorytype.CU_MEMORYTYPE_HOST
        self._any_memory = driver.CUmemorytype.CU_MEMORYTYPE_UNIFIED
        self._attributes = _attribute_readers(driver)

    @staticmethod
    def find() -> Runtime | None:
        """Return the runtime, or None if cuda-python is not installed (``devgraph[cuda]``)."""
        try:
            from cuda.bindings import driver, runtime
        except ImportError:
            logger.info("cuda-python is not installed: no region update and no node counts")
            return None
        return Runtime(runtime, driver)

    def call(self, name: str, *args: Any) -> Any:
        """Call a runtime function; return its result without the error code.

        Raises:
            RuntimeCallError: the call failed.
        """
        error, *result = getattr(self._cudart, name)(*args)
        if error:
            _fail(name, error)
        return result[0] if len(result) == 1 else tuple(result)

    def drive(self, name: str, *args: Any) -> Any:
        """Call a driver function; otherwise like ``call``."""
        error, *result = getattr(self._driver, name)(*args)
        if error:
            _fail(name, error)
        return result[0] if len(result) == 1 else tuple(result)

    # Captures in progress.

    def capture_of(self, stream: int) -> tuple[int, int, list[int]] | None:
        """Return id, graph and last nodes of the capture that ``stream`` is part of, or None."""
        status, capture_id, graph, last, *_ = self.call("cudaStreamGetCaptureInfo", stream)
        if status != self._active:
            return None
        return int(capture_id), int(graph), [int(node) for node in last or ()]

    def is_capturing(self, stream: int) -> bool:
        """Whether ``stream`` is part of a capture."""
        # Asked of every stream at the end of every capture: an error reads as None here.
        return bool(self._is_capturing(stream)[1] == self._active)

    def begin_capture(self, stream: int) -> None:
        """Begin a thread-local capture on ``stream`` that torch does not know of."""
        mode = self._cudart.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self.call("cudaStreamBeginCapture", stream, mode)

    def end_capture(self, stream: int) -> int:
        """End the capture on ``stream`` and return its graph, which the caller owns."""
        return int(self.call("cudaStreamEndCapture", stream))

    # Graphs.

    def count(self, graph: int) -> int:
        """Return the number of nodes."""
        return int(self.call("cudaGraphGetNodes", graph, 0)[-1])

    def nodes(self, graph: int) -> list[int]:
        """Return all nodes, in the order in which they were captured."""
        count = self.count(graph)
        if not count:
            return []
        return [int(node) for node in self.call("cudaGraphGetNodes", graph, count)[0]]

    def edges(self, graph: int) -> list[tuple[int, int, Any]]:
        """Return every edge as (from, to, (type, from port, to port))."""
        count = int(self.call("cudaGraphGetEdges", graph, 0)[-1])
        if not count:
            return []
        sources, targets, data, _ = self.call("cudaGraphGetEdges", graph, count)
        return [
            (int(source), int(target), (int(kind.type), int(kind.from_port), int(kind.to_port)))
            for source, target, kind in zip(sources, targets, data, strict=True)
        ]

    def destroy(self, graph: int) -> None:
        """Free a graph."""
        self.call("cudaGraphDestroy", graph)

    # Nodes.

    def kind(self, node: int) -> str:
        """Return the kind of a node by name."""
        error, kind = self._driver.cuGraphNodeGetType(node)
        if error:
            _fail("cuGraphNodeGetType", error)
        return self._kinds.get(int(kind)) or f"type-{int(kind)}"

    def handle(self, node: int) -> Any:
        """Return ``node`` as a handle object, which calls take faster than an int."""
        return self._driver.CUgraphNode(init_value=node)

    def params(self, kind: str, node: int) -> Any:
        """Return the parameters of a node; pointers in them belong to the node's graph."""
        error, params = self._getters[kind](node)
        if error:
            _fail(f"reading a {kind} node", error)
        return params

    def fixed(self, kind: str, node: int, params: Any) -> Any:
        """Return what an executable's node keeps for ever: of a kernel its function and launch
        attributes, of a copy the kinds of memory, of a fill the geometry."""
        if kind == _KERNEL:
            return _function(params), self._launch_attributes(node)
        if kind == _MEMCPY:
            return int(params.srcMemoryType), int(params.dstMemoryType)
        return params.elementSize, params.width, params.height

    def is_exact(self, kind: str, fixed: Any, node: int, params: Any) -> bool:
        """Whether an executable's node with ``fixed`` takes the parameters of ``node``.

        It takes copies and fills of one dimension only, and no other cluster size, cooperation or
        priority than it has (cuGraphExecKernelNodeSetParams).
        """
        if kind == _KERNEL:
            function, attributes = fixed
            if _function(params) != function or any(attributes[1:]):
                return bool(self._launch_attributes(node) == attributes)
            # The same function on the same stream: only the size of clusters is the call's choice.
            return bool(self._attribute(node, *self._attributes[0]) == attributes[0])
        if self.fixed(kind, node, params) != fixed:
            return False
        if kind == _MEMCPY:
            return bool(params.Height <= 1 and params.Depth <= 1)
        return bool(params.height <= 1)

    def uses_host(self, kind: str, params: Any) -> bool:
        """Whether the node reads or writes host memory."""
        return kind == _MEMCPY and (
            self._is_host(params.srcMemoryType, params.srcDevice)
            or self._is_host(params.dstMemoryType, params.dstDevice)
        )

    def _is_host(self, memory: Any, address: Any) -> bool:
        if memory != self._any_memory:
            return bool(memory == self._host_memory)
        which = self._driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
        error, found = self._driver.cuPointerGetAttribute(which, address)
        # The driver knows every address on a device; others are pageable memory of the host.
        return bool(error) or int(found) == int(self._host_memory)

    def clone(self, graph: int, updates: Sequence[Update]) -> int:
        """Return a copy of ``graph`` with new parameters; the caller owns it.

        Launch attributes (cluster size, cooperation) are copied as well, which an executable that
        exists cannot take.
        """
        copy = int(self.call("cudaGraphClone", graph))
        try:
            with self._in_context():
                for update in updates:
                    node = self.call("cudaGraphNodeFindInClone", update.node, copy)
                    self._set(node, update)
        except BaseException:
            self.destroy(copy)
            raise
        return copy

    def _set(self, node: Any, update: Update) -> None:
        if update.kind == _KERNEL:
            self.drive("cuGraphKernelNodeCopyAttributes", node, update.source)
            self.drive("cuGraphKernelNodeSetParams", node, update.params)
        elif update.kind == _MEMCPY:
            self.drive("cuGraphMemcpyNodeSetParams", node, update.params)
        else:
            self.drive("cuGraphMemsetNodeSetParams", node, update.params)

    def _launch_attributes(self, node: int) -> tuple[Any, ...]:
        return tuple(self._attribute(node, which, read) for which, read in self._attributes)

    def _attribute(self, node: int, which: Any, read: Callable[[Any], Any]) -> Any:
        error, value = self._driver.cuGraphKernelNodeGetAttribute(node, which)
        return None if error else read(value)

    # Executables.

    def write(self, updates: Sequence[Update], executable: int) -> None:
        """Write parameters into an executable of the captured graph; seen by later launches.

        Raises:
            RuntimeCallError: the driver refused; the executable holds a part of them.
        """
        driver = self._driver
        target = driver.CUgraphExec(init_value=executable)
        set_kernel = driver.cuGraphExecKernelNodeSetParams
        others = {
            _MEMCPY: driver.cuGraphExecMemcpyNodeSetParams,
            _MEMSET: driver.cuGraphExecMemsetNodeSetParams,
        }
        with self._in_context() as context:
            for update in updates:
                if update.kind == _KERNEL:
                    (error,) = set_kernel(target, update.node, update.params)
                else:
                    (error,) = others[update.kind](target, update.node, update.params, context)
                if error:
                    _fail(f"updating a {update.kind} node", error)

    @contextlib.contextmanager
    def _in_context(self) -> Iterator[Any]:
        """Yield the context of this thread's device; a thread that is new to CUDA gets it now."""
        context = self.drive("cuCtxGetCurrent")
        if not int(context):
            self.call("cudaSetDevice", self.call("cudaGetDevice"))
            context = self.drive("cuCtxGetCurrent")
        yield context

    def instantiate(self, graph: int, stream: int) -> int:
        """Return an executable of ``graph``, made as torch makes its own and uploaded."""
        executable = int(self.call("cudaGraphInstantiate", graph, self._instantiate_flags))
        self.upload(executable, stream)
        return executable

    def upload(self, executable: int, stream: int) -> None:
        """Copy an executable graph to the device now, so that the first launch is like any."""
        self.call("cudaGraphUpload", executable, stream)

    def destroy_executable(self, executable: int) -> None:
        """Free an executable; one in flight is freed when it completes (cuGraphExecDestroy)."""
        self.call("cudaGraphExecDestroy", executable)

    def launcher(self, executable: int, current_stream: Callable[[], int]) -> Callable[[], None]:
        """Return a callable that launches ``executable`` on the current stream."""
        launch = self._cudart.cudaGraphLaunch
        handle = self._cudart.cudaGraphExec_t(init_value=executable)

        def run() -> None:
            (error,) = launch(handle, current_stream())
            if error:
                _fail("cudaGraphLaunch", error)

        return run


def _function(params: Any) -> tuple[int, int]:
    """Return what a kernel node runs: the driver gives a function or a kernel of a library."""
    return int(params.func), int(params.kern)


def _attribute_readers(driver: Any) -> list[tuple[Any, Callable[[Any], Any]]]:
    """Return (attribute, how to read it), the cluster size first; false values are the defaults."""
    known = driver.CUkernelNodeAttrID

    def size(dim: Any) -> tuple[int, int, int] | None:
        # Not set reads as zeros, one block per cluster is the same.
        extent = (int(dim.x), int(dim.y), int(dim.z))
        return None if max(extent) <= 1 else extent

    readers: list[tuple[str, Callable[[Any], Any]]] = [
        ("CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION", lambda value: size(value.clusterDim)),
        (
            "CU_LAUNCH_ATTRIBUTE_PREFERRED_CLUSTER_DIMENSION",
            lambda value: size(value.preferredClusterDim),
        ),
        ("CU_LAUNCH_ATTRIBUTE_COOPERATIVE", lambda value: bool(value.cooperative)),
        ("CU_LAUNCH_ATTRIBUTE_PRIORITY", lambda value: int(value.priority)),
    ]
    return [(getattr(known, name), read) for name, read in readers if hasattr(known, name)]
