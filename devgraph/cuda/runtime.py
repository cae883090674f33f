"""CUDA's graph calls, where they differ from the table for all vendors (``node_calls``)."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from ctypes import addressof, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any, ClassVar

from devgraph.api.torchlike.node_calls import (
    BRIEF,
    KERNEL,
    MEMCPY,
    MEMSET,
    THREAD_LOCAL,
    Arguments,
    NodeRuntime,
    Read,
    RuntimeCallError,
    structure,
)

logger = logging.getLogger(__name__)

_LaunchAttribute = c_uint * 32
"""CUlaunchAttributeValue, a union of 64 bytes, with spare room for newer drivers."""

_COOPERATIVE, _CLUSTER, _PREFERRED_CLUSTER = 2, 4, 11
"""CU_LAUNCH_ATTRIBUTE_COOPERATIVE, _CLUSTER_DIMENSION and _PREFERRED_CLUSTER_DIMENSION."""

_HOST_MEMORY, _ANY_MEMORY = 1, 4
"""CU_MEMORYTYPE_HOST and CU_MEMORYTYPE_UNIFIED."""

_MEMORY_TYPE = 2  # CU_POINTER_ATTRIBUTE_MEMORY_TYPE

_SET_GOING = b""".version 6.4
.target sm_70
.address_size 64
.extern .func cudaGraphSetConditional(.param .b64 handle, .param .b32 value);
.visible .entry set_going(.param .u64 handle, .param .u64 going)
{
    .reg .b32 %value;
    .reg .b64 %handle, %going;
    .param .b64 first;
    .param .b32 second;
    ld.param.u64 %handle, [handle];
    ld.param.u64 %going, [going];
    cvta.to.global.u64 %going, %going;
    ld.global.u8 %value, [%going];
    st.param.b64 [first], %handle;
    st.param.b32 [second], %value;
    call.uni cudaGraphSetConditional, (first, second);
    ret;
}
"""

_CONDITIONAL, _WHILE = 13, 1
"""CU_GRAPH_NODE_TYPE_CONDITIONAL and CU_GRAPH_COND_TYPE_WHILE."""

_BATCH_MEM_OP = 12  # CU_GRAPH_NODE_TYPE_BATCH_MEM_OP

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED

_SET_DEPENDENCIES = 1  # CU_STREAM_SET_CAPTURE_DEPENDENCIES


LaunchConfig = structure(
    "CUlaunchConfig",
    grid=c_uint * 3,
    block=c_uint * 3,
    shared_bytes=c_uint,
    stream=c_void_p,
    attributes=c_void_p,
    attribute_count=c_uint,
)
_ConditionalParams = structure(
    "CUgraphNodeParams of a conditional node",
    type=c_int,
    reserved0=c_int * 3,
    handle=c_uint64,
    kind=c_int,
    size=c_uint,
    bodies=c_void_p,
    context=c_void_p,
    reserved1=c_uint64 * 26,
)
KernelParams = structure(
    "CUDA_KERNEL_NODE_PARAMS_v2",
    func=c_void_p,
    grid=c_uint * 3,
    block=c_uint * 3,
    sharedMemBytes=c_uint,
    kernelParams=c_void_p,
    extra=c_void_p,
    kern=c_void_p,
    ctx=c_void_p,
)
_CopySide = structure(
    "one side of CUDA_MEMCPY3D_v2",
    xyzLOD=c_size_t * 4,
    memoryType=c_int,
    host=c_void_p,
    device=c_uint64,
    array=c_void_p,
    reserved=c_void_p,
    pitch=c_size_t,
    height=c_size_t,
)
CopyParams = structure(
    "CUDA_MEMCPY3D_v2",
    src=_CopySide,
    dst=_CopySide,
    width=c_size_t,
    height=c_size_t,
    depth=c_size_t,
)
FillParams = structure(
    "CUDA_MEMSET_NODE_PARAMS_v1",
    dst=c_uint64,
    pitch=c_size_t,
    value=c_uint,
    elementSize=c_uint,
    width=c_size_t,
    height=c_size_t,
)


class Runtime(NodeRuntime):
    """The graph calls of the CUDA driver.

    CUDA's runtime library cannot always return the parameters of kernels that were loaded through
    the driver (Triton, cuBLAS), so this class calls the driver. Driver calls need a current
    context. The first call of a new thread fails, because it has none; ``recovers`` then sets one.
    """

    prefix = "cu"
    suffixes: ClassVar[Mapping[str, str]] = {
        "GraphExecKernelNodeSetParams": "_v2",
        "GraphGetEdges": "_v2",
        "GraphKernelNodeGetParams": "_v2",
        "GraphKernelNodeSetParams": "_v2",
        "StreamBeginCapture": "_v2",
        "StreamGetCaptureInfo": "_v3",
        "StreamBatchMemOp": "_v2",
        "StreamDestroy": "_v2",
    }
    calls: ClassVar[Mapping[str, Arguments]] = {
        # Use the versions with edge data, because older versions fail for some captures.
        "StreamGetCaptureInfo": (c_void_p,) * 7,
        "GraphGetEdges": (c_void_p,) * 5,
        "GraphExecMemcpyNodeSetParams": (*BRIEF["GraphExecMemcpyNodeSetParams"], c_void_p),
        "GraphExecMemsetNodeSetParams": (*BRIEF["GraphExecMemsetNodeSetParams"], c_void_p),
        "GraphKernelNodeGetAttribute": (c_void_p, c_int, c_void_p),
        "PointerGetAttribute": (c_void_p, c_int, c_uint64),
        "CtxGetCurrent": (c_void_p,),
        "GetErrorName": (c_int, c_void_p),
        "ModuleLoadData": (c_void_p, c_void_p),
        "ModuleGetFunction": (c_void_p, c_void_p, c_void_p),
        "LaunchKernelEx": (c_void_p, c_void_p, c_void_p, c_void_p),
        "ThreadExchangeStreamCaptureMode": (c_void_p,),
        "StreamUpdateCaptureDependencies": (c_void_p, c_void_p, c_size_t, c_uint),
        "StreamBeginCaptureToGraph": (*(c_void_p,) * 4, c_size_t, c_int),
        "GraphConditionalHandleCreate": (c_void_p, c_void_p, c_void_p, c_uint, c_uint),
        "GraphAddNode": (c_void_p, c_void_p, c_void_p, c_size_t, c_void_p),
        "GraphBatchMemOpNodeSetParams": (c_void_p, c_void_p),
    }
    # These calls release the GIL: they may block on a full queue until another thread opens a gate.
    waiting_calls: ClassVar[Mapping[str, Arguments]] = {
        "StreamBatchMemOp": (c_void_p, c_uint, c_void_p, c_uint),
        "MemsetD32Async": (c_uint64, c_uint, c_size_t, c_void_p),
        "StreamCreate": (c_void_p, c_uint),
        "StreamDestroy": (c_void_p,),
    }
    structures: ClassVar[Mapping[str, type[Any]]] = {
        KERNEL: KernelParams,
        MEMCPY: CopyParams,
        MEMSET: FillParams,
    }
    instantiate_flags = 1 | 8  # AUTO_FREE_ON_LAUNCH, USE_NODE_PRIORITY

    def __init__(self, brief: Any, waiting: Any, enter: Callable[[], object]) -> None:
        super().__init__(brief, waiting)
        self._enter = enter
        self._set_going = 0
        self.kinds[_BATCH_MEM_OP] = "batch_mem_op"

    @staticmethod
    def find(enter: Callable[[], object]) -> Runtime | None:
        """Return the driver's calls, or None without a driver of CUDA 12.3 or newer."""
        name = "nvcuda.dll" if os.name == "nt" else "libcuda.so.1"
        try:
            runtime = Runtime(ctypes.PyDLL(name), ctypes.CDLL(name), enter)
        except OSError as error:
            reason = str(error)
        else:
            if not runtime.missing:
                return runtime
            reason = f"{name} lacks {', '.join(sorted(runtime.missing))}"
        logger.warning("no region updates and no node counts: upgrade the driver (%s)", reason)
        return None

    def error_text(self, error: int) -> str:
        text = ctypes.c_char_p()
        self.function("GetErrorName")(error, addressof(text))
        return (text.value or b"unknown").decode()

    def recovers(self) -> bool:
        context = c_uint64()
        if self.function("CtxGetCurrent")(addressof(context)) or context.value:
            return False
        self._enter()
        return True

    def context(self) -> tuple[int]:
        context = self.make("CtxGetCurrent")
        if not context:
            self._enter()
            context = self.make("CtxGetCurrent")
        return (context,)

    def kernel(self, text: bytes, name: bytes) -> int:
        """Load PTX code and return its kernel ``name``."""
        source, entry = ctypes.create_string_buffer(text), ctypes.create_string_buffer(name)
        module = self.make("ModuleLoadData", addressof(source))
        return self.make("ModuleGetFunction", module, addressof(entry))

    @contextlib.contextmanager
    def looping(
        self, stream: int, body: int, going: int, prepare: Callable[[], None]
    ) -> Iterator[Callable[[], int]]:
        with self._relaxed():
            prepare()
            if not self._set_going:
                self._set_going = self.kernel(_SET_GOING, b"set_going")
        graph, (context,) = self._captured(stream)[0], self.context()
        handle = self.make("GraphConditionalHandleCreate", graph, context, 0, 0)
        self._launch_set_going(stream, handle, going)
        last_nodes = self._captured(stream)[1]
        node = _ConditionalParams(
            type=_CONDITIONAL, handle=handle, kind=_WHILE, size=1, context=context
        )
        dependencies = (c_uint64 * len(last_nodes))(*last_nodes)
        added = self.make(
            "GraphAddNode", graph, addressof(dependencies), len(last_nodes), addressof(node)
        )
        loop = c_uint64(added)
        self.call("StreamUpdateCaptureDependencies", stream, addressof(loop), 1, _SET_DEPENDENCIES)
        inner = c_uint64.from_address(node.bodies).value
        self.call("StreamBeginCaptureToGraph", body, inner, None, None, 0, THREAD_LOCAL)
        try:
            yield lambda: self.count(inner)
            self._launch_set_going(body, handle, going)
        except BaseException:
            with contextlib.suppress(RuntimeCallError):
                self.end_capture(body)
            raise
        self.end_capture(body)

    @contextlib.contextmanager
    def _relaxed(self) -> Iterator[None]:
        """Allow this thread to allocate memory and load modules in the block, during a capture."""
        mode = c_int(_RELAXED)
        self.call("ThreadExchangeStreamCaptureMode", addressof(mode))
        try:
            yield
        finally:
            self.call("ThreadExchangeStreamCaptureMode", addressof(mode))

    def _captured(self, stream: int) -> tuple[int, list[int]]:
        """Return the graph that ``stream`` captures, and the dependencies of its next node."""
        capture = self.capture_of(stream)
        assert capture is not None, "a loop outside of a capture"
        return capture[1:]

    def _launch_set_going(self, stream: int, handle: int, going: int) -> None:
        """Launch a kernel that sets the condition behind ``handle`` to the byte at ``going``."""
        config = LaunchConfig((1, 1, 1), (1, 1, 1), 0, stream)
        values = c_uint64(handle), c_uint64(going)
        arguments = (c_void_p * 2)(*map(addressof, values))
        self.call("LaunchKernelEx", addressof(config), self._set_going, addressof(arguments), None)

    def copy_attributes(self, source: int, target: int) -> None:
        super().copy_attributes(target, source)  # The driver takes the target first.

    # The following methods check whether an executable accepts new parameters.

    def fixed(self, kind: str, node: int, params: Any) -> Any:
        if kind == KERNEL:
            return _function(params), self._cluster(node), self._cooperates(node)
        if kind == MEMCPY:
            return params.src.memoryType, params.dst.memoryType
        return params.elementSize, params.width, params.height

    def judge(self, kind: str, fixed: Any, node: int, params: Any) -> tuple[Any, bool, bool]:
        if kind == KERNEL:
            return params, self._takes_kernel(fixed, node, params, self._cluster(node)), False
        # The driver can update only 1-D copies and fills (cuGraphExecMemcpyNodeSetParams).
        flat = params.height <= 1 and (kind == MEMSET or params.depth <= 1)
        host = kind == MEMCPY and (self._is_host(params.src) or self._is_host(params.dst))
        return params, flat and self.fixed(kind, node, params) == fixed, host

    def _takes_kernel(self, fixed: Any, node: int, params: Any, cluster: Any) -> bool:
        # An update must not change cooperation or cluster size (cuGraphExecKernelNodeSetParams).
        # Cooperation belongs to the function, and the cluster size belongs to the launch.
        function, captured_cluster, cooperates = fixed
        same = _function(params) == function or self._cooperates(node) == cooperates
        return same and bool(cluster == captured_cluster)

    def reader(self) -> Read:
        read_any = super().reader()
        get = self.function("GraphKernelNodeGetParams")
        get_attribute = self.function("GraphKernelNodeGetAttribute")
        value = _LaunchAttribute()
        address, first = addressof(value), c_uint64.from_buffer(value)

        def read(kind: str, fixed: Any, node: int) -> tuple[Any, bool, bool] | None:
            # The fast path for kernels skips the queries of the kind and of unset cluster sizes.
            params = KernelParams()
            if kind != KERNEL or get(node, addressof(params)):
                return read_any(kind, fixed, node)
            unset = get_attribute(node, _CLUSTER, address) or not first.value
            cluster = None if unset else self._cluster(node)
            return params, self._takes_kernel(fixed, node, params, cluster), False

        return read

    def _cluster(self, node: int) -> tuple[list[int], list[int] | None] | None:
        """Return the required and the preferred cluster size, or None if there are no clusters.

        The preferred size is None if the driver does not support it.
        """
        get_attribute, value = self.function("GraphKernelNodeGetAttribute"), _LaunchAttribute()
        address = addressof(value)
        if get_attribute(node, _CLUSTER, address):
            return None
        # The driver returns an unset size as zeros, which is equivalent to one block per cluster.
        if value[0] <= 1 and value[1] <= 1 and value[2] <= 1:
            return None
        size = value[:3]
        unknown = get_attribute(node, _PREFERRED_CLUSTER, address)
        return size, None if unknown else value[:3]

    def _cooperates(self, node: int) -> bool:
        value = _LaunchAttribute()
        unknown = self.function("GraphKernelNodeGetAttribute")(node, _COOPERATIVE, addressof(value))
        return not unknown and bool(value[0])

    def _is_host(self, side: Any) -> bool:
        if side.memoryType != _ANY_MEMORY:
            return bool(side.memoryType == _HOST_MEMORY)
        kind = c_int()
        error = self.function("PointerGetAttribute")(addressof(kind), _MEMORY_TYPE, side.device)
        # The driver knows all device addresses, so an unknown address is pageable host memory.
        return bool(error) or kind.value == _HOST_MEMORY


def _function(params: Any) -> Any:
    """Return the handle of the function or of the library kernel that a kernel node runs."""
    return params.func or params.kern
