"""The runtime and driver calls that torch does not expose, through cuda-python where installed."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from devgraph.api.torchlike.nodes import Read, RuntimeCallError, Update
from devgraph.cuda.library import Library

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
        library: the calls that do not go through them.
    """

    def __init__(self, cudart: Any, driver: Any, library: Library) -> None:
        self._cudart = cudart
        self._driver = driver
        flags = cudart.cudaGraphInstantiateFlags
        # torch's own flags: another set would run other priorities and keep graph allocations.
        self._instantiate_flags = int(flags.cudaGraphInstantiateFlagAutoFreeOnLaunch) | int(
            flags.cudaGraphInstantiateFlagUseNodePriority
        )
        prefix = "CU_GRAPH_NODE_TYPE_"
        self._kinds = {
            int(kind): kind.name.removeprefix(prefix).lower() for kind in driver.CUgraphNodeType
        }
        self._host_memory = driver.CUmemorytype.CU_MEMORYTYPE_HOST
        self._any_memory = driver.CUmemorytype.CU_MEMORYTYPE_UNIFIED
        self._library = library
        self.capture_of, self.capturing = library.capture_of, library.capturing
        self.count, self.nodes, self.edges = library.count, library.nodes, library.edges

    @staticmethod
    def find() -> Runtime | None:
        """Return the runtime; None if cuda-python is not installed (``devgraph[cuda]``) or the
        driver is older than CUDA 12.3."""
        try:
            from cuda.bindings import driver, runtime
        except ImportError:
            logger.info("cuda-python is not installed: no region update and no node counts")
            return None
        try:
            library = Library.find()
        except (OSError, AttributeError) as error:
            logger.warning("no region update and no node counts: upgrade the driver (%s)", error)
            return None
        return Runtime(runtime, driver, library)

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

    def begin_capture(self, stream: int) -> None:
        """Begin a thread-local capture on ``stream`` that torch does not know of."""
        mode = self._cudart.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self.call("cudaStreamBeginCapture", stream, mode)

    def end_capture(self, stream: int) -> int:
        """End the capture on ``stream`` and return its graph, which the caller owns."""
        return int(self.call("cudaStreamEndCapture", stream))

    # Graphs.

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

    def params(self, kind: str, node: int) -> Any:
        """Return the parameters of a node; pointers in them belong to the node's graph."""
        if kind == _KERNEL:
            return self._library.kernel(node)
        return self.drive(f"cuGraph{kind.title()}NodeGetParams", node)

    def fixed(self, kind: str, node: int, params: Any) -> Any:
        """Return what an executable's node keeps for ever: of a kernel its function and launch
        attributes, of a copy the kinds of memory, of a fill the geometry."""
        if kind == _KERNEL:
            library = self._library
            return library.function(params), library.cluster(node), library.cooperates(node)
        if kind == _MEMCPY:
            return int(params.srcMemoryType), int(params.dstMemoryType)
        return params.elementSize, params.width, params.height

    def reader(self) -> Read:
        """Return a function that reads nodes, for one thread.

        An executable takes copies and fills of one dimension only, and no other cluster size or
        cooperation than it has (cuGraphExecKernelNodeSetParams).
        """
        library = self._library
        launch_of, function_of = library.launches(), library.function

        def read(kind: str, fixed: Any, node: int) -> tuple[Any, bool, bool] | None:
            try:
                if kind != _KERNEL:
                    return self._read(kind, fixed, node)
                params, cluster = launch_of(node)
            except RuntimeCallError:
                if self.kind(node) != kind:
                    return None
                raise
            # Whether it cooperates belongs to the function, the size of clusters to the call.
            exact = cluster == fixed[1] and (
                function_of(params) == fixed[0] or library.cooperates(node) == fixed[2]
            )
            return params, exact, False

        return read

    def _read(self, kind: str, fixed: Any, node: int) -> tuple[Any, bool, bool]:
        """Read a copy or a fill."""
        params = self.params(kind, node)
        same = self.fixed(kind, node, params) == fixed
        if kind == _MEMSET:
            return params, same and params.height <= 1, False
        return params, same and params.Height <= 1 and params.Depth <= 1, self._uses_host(params)

    def _uses_host(self, params: Any) -> bool:
        """Whether a copy reads or writes host memory."""
        return self._is_host(params.srcMemoryType, params.srcDevice) or self._is_host(
            params.dstMemoryType, params.dstDevice
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

        Launch attributes (cluster size, cooperation), which an executable that exists cannot take,
        are copied where they differ.
        """
        copy = int(self.call("cudaGraphClone", graph))
        try:
            with self._in_context():
                for update in updates:
                    node = int(self.call("cudaGraphNodeFindInClone", update.node, copy))
                    if update.kind != _KERNEL:
                        self.drive(
                            f"cuGraph{update.kind.title()}NodeSetParams", node, update.params
                        )
                    elif update.exact:
                        self._library.set_kernel(node, update.params)
                    else:
                        self._relaunch(node, update)
        except BaseException:
            self.destroy(copy)
            raise
        return copy

    def _relaunch(self, node: int, update: Update) -> None:
        """Give a node the kernel of ``update`` with its launch attributes.

        A node refuses attributes that do not fit the kernel which it holds, and a kernel that does
        not fit the attributes: one order or the other passes.
        """
        set_kernel = self._library.set_kernel
        try:
            set_kernel(node, update.params)
            self.drive("cuGraphKernelNodeCopyAttributes", node, update.source)
        except RuntimeCallError:
            self.drive("cuGraphKernelNodeCopyAttributes", node, update.source)
            set_kernel(node, update.params)

    # Executables.

    def write(self, updates: Sequence[Update], executable: int) -> None:
        """Write parameters into an executable of the captured graph; seen by later launches.

        Raises:
            RuntimeCallError: the driver refused; the executable holds a part of them.
        """
        update_kernel = self._library.update_kernel
        with self._in_context() as context:
            for node, kind, params, _, _ in updates:
                if kind == _KERNEL:
                    update_kernel(executable, node, params)
                else:
                    name = f"cuGraphExec{kind.title()}NodeSetParams"
                    self.drive(name, executable, node, params, context)

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

    def bound_launch(self, executable: int, stream: int) -> tuple[Callable[..., Any], Any, Any]:
        """Return function, arguments and keyword arguments of a launch on ``stream``; it returns
        a tuple of the error code."""
        executable = self._cudart.cudaGraphExec_t(init_value=executable)
        stream = self._cudart.cudaStream_t(init_value=stream)
        return self._cudart.cudaGraphLaunch, (executable, stream), {}

    def launcher(self, executable: int, current_stream: Callable[[], int]) -> Callable[[], None]:
        """Return a callable that launches ``executable`` on the current stream."""
        launch = self._cudart.cudaGraphLaunch
        handle = self._cudart.cudaGraphExec_t(init_value=executable)

        def run() -> None:
            (error,) = launch(handle, current_stream())
            if error:
                _fail("cudaGraphLaunch", error)

        return run
