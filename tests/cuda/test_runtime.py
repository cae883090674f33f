"""The CUDA room's calls over a driver that exists only here: no device is needed."""

from __future__ import annotations

import ctypes
import enum
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from devgraph.api.torchlike.nodes import RuntimeCallError, Update
from devgraph.cuda.library import Library
from devgraph.cuda.runtime import Runtime


class Kind(enum.IntEnum):
    CU_GRAPH_NODE_TYPE_KERNEL = 0
    CU_GRAPH_NODE_TYPE_MEMCPY = 1
    CU_GRAPH_NODE_TYPE_MEMSET = 2
    CU_GRAPH_NODE_TYPE_HOST = 3


class Memory(enum.IntEnum):
    CU_MEMORYTYPE_HOST = 1
    CU_MEMORYTYPE_DEVICE = 2
    CU_MEMORYTYPE_UNIFIED = 4


CONTEXT = 77
GRAPH = 2**46 + 5


class Driver:
    """What the room calls of ``cuda.bindings.driver``; nodes are made by ``kernel``."""

    CUgraphNodeType = Kind
    CUmemorytype = Memory
    CUpointer_attribute = SimpleNamespace(CU_POINTER_ATTRIBUTE_MEMORY_TYPE="memory type")

    def __init__(self) -> None:
        self.nodes: dict[int, tuple[Kind, Any]] = {}
        self.launch: dict[int, dict[str, Any]] = {}
        self.edges: list[tuple[int, int, bytes]] = []
        self.pinned: set[int] = set()
        self.context = CONTEXT
        self.calls: list[tuple[Any, ...]] = []
        self.refuse = 0
        self.captured = 0
        self.set_calls = 0

    def kernel(self, function: int, kernel: int = 0, **launch: Any) -> int:
        params = (function, *range(100, 106), kernel, CONTEXT)
        node = self.node(Kind.CU_GRAPH_NODE_TYPE_KERNEL, params)
        self.launch[node] = launch
        return node

    def node(self, kind: Kind, params: Any) -> int:
        node = len(self.nodes)
        self.nodes[node] = kind, params
        return node

    def cuPointerGetAttribute(self, which: str, address: int) -> tuple[int, int]:
        if address < 0:
            return 1, 0  # memory that the driver never saw
        return 0, 1 if address in self.pinned else 2

    def cuCtxGetCurrent(self) -> tuple[int, int]:
        return 0, self.context

    def set(self, kind: str, *args: Any) -> tuple[int]:
        self.set_calls += 1
        if self.set_calls == self.refuse:
            return (1,)
        self.calls.append((kind, *args))
        return (0,)

    def cuGraphExecMemcpyNodeSetParams(self, *args: Any) -> tuple[int]:
        return self.set("memcpy", *args)

    def cuGraphExecMemsetNodeSetParams(self, *args: Any) -> tuple[int]:
        return self.set("memset", *args)

    def cuGraphMemcpyNodeSetParams(self, *args: Any) -> tuple[int]:
        return self.set("set memcpy", *args)

    def cuGraphMemsetNodeSetParams(self, *args: Any) -> tuple[int]:
        return self.set("set memset", *args)

    def cuGraphKernelNodeCopyAttributes(self, target: int, source: int) -> tuple[int]:
        return self.set("copy attributes", target, source)

    def _params(self, kind: Kind, node: int) -> tuple[int, Any]:
        found, params = self.nodes[node]
        return (0, params) if found is kind else (1, None)

    def cuGraphMemcpyNodeGetParams(self, node: int) -> tuple[int, Any]:
        return self._params(Kind.CU_GRAPH_NODE_TYPE_MEMCPY, node)

    def cuGraphMemsetNodeGetParams(self, node: int) -> tuple[int, Any]:
        return self._params(Kind.CU_GRAPH_NODE_TYPE_MEMSET, node)

    def cuGraphNodeGetType(self, node: int) -> tuple[int, Kind]:
        return 0, self.nodes[node][0]


def c_function(*arguments: Any) -> Any:
    """Return the decorator for what C calls with ``arguments``."""
    return ctypes.CFUNCTYPE(ctypes.c_int, *arguments)


POINTER = ctypes.c_void_p


def library(driver: Driver) -> Library:
    """The calls of the driver's library, as C functions."""

    @c_function(*[POINTER] * 5)
    def get_edges(graph: int, sources: int, targets: int, kinds: int, count: int) -> int:
        if graph != GRAPH:
            return 1
        ctypes.c_size_t.from_address(count).value = len(driver.edges)
        for column, where in enumerate((sources, targets)):
            if where:
                words = (ctypes.c_void_p * len(driver.edges)).from_address(where)
                words[:] = [edge[column] for edge in driver.edges]
        if kinds:
            data = b"".join(edge[2] for edge in driver.edges)
            ctypes.memmove(kinds, data, len(data))
        return 0

    @c_function(POINTER, ctypes.c_int, POINTER)
    def get_attribute(node: int, which: int, value: int) -> int:
        launch = driver.launch[node or 0]
        if which in launch.get("unknown", ()):
            return 1
        name = {4: "cluster", 11: "preferred", 2: "cooperative"}[which]
        ctypes.memset(value, 0, 64)
        words = launch.get(name, ())
        (ctypes.c_uint32 * len(words)).from_address(value)[:] = words
        return 0

    def ask(stream: int | None, status: int) -> int:
        # 1: an active capture; 2: one that was invalidated; 3: an error of the query.
        if stream == 3:
            return 1
        ctypes.c_int.from_address(status).value = stream or 0
        return 0

    last = (ctypes.c_void_p * 2)(2**47 + 1, 7)  # the driver's own memory

    @c_function(*[POINTER] * 7)
    def get_capture(
        stream: int | None, status: int, capture: int, graph: int, nodes: int, _: int, count: int
    ) -> int:
        if error := ask(stream, status):
            return error
        if stream == 1:
            ctypes.c_uint64.from_address(capture).value = 2**63 + 3
            ctypes.c_void_p.from_address(graph).value = GRAPH
            ctypes.c_void_p.from_address(nodes).value = ctypes.addressof(last)
            ctypes.c_size_t.from_address(count).value = 2
        return 0

    @c_function(*[POINTER] * 3)
    def get_nodes(graph: int, nodes: int | None, count: int) -> int:
        if graph != GRAPH:
            return 1
        if nodes is not None:
            if not driver.captured:
                return 1
            room = ctypes.c_size_t.from_address(count).value
            (ctypes.c_uint64 * room).from_address(nodes)[:] = [2**47 + n for n in range(room)]
        ctypes.c_size_t.from_address(count).value = driver.captured
        return 0

    texts = {1: ctypes.create_string_buffer(b"CUDA_ERROR_INVALID_VALUE")}

    @c_function(ctypes.c_int, POINTER)
    def get_error_name(error: int, text: int) -> int:
        ctypes.c_void_p.from_address(text).value = ctypes.addressof(texts[error])
        return 0

    @c_function(*[POINTER] * 2)
    def get_kernel(node: int | None, params: int) -> int:
        kind, words = driver.nodes[node or 0]
        if kind is not Kind.CU_GRAPH_NODE_TYPE_KERNEL:
            return 1
        (ctypes.c_uint64 * 9).from_address(params)[:] = words
        return 0

    def words(params: int) -> tuple[int, ...]:
        return tuple((ctypes.c_uint64 * 9).from_address(params))

    @c_function(*[POINTER] * 2)
    def set_kernel(node: int, params: int) -> int:
        return driver.set("set kernel", node, words(params))[0]

    @c_function(*[POINTER] * 3)
    def update_kernel(executable: int, node: int, params: int) -> int:
        return driver.set("kernel", executable, node, words(params))[0]

    return Library(
        SimpleNamespace(
            cuGraphGetEdges_v2=get_edges,
            cuGraphGetNodes=get_nodes,
            cuGraphKernelNodeGetParams_v2=get_kernel,
            cuGraphKernelNodeSetParams_v2=set_kernel,
            cuGraphExecKernelNodeSetParams_v2=update_kernel,
            cuGraphKernelNodeGetAttribute=get_attribute,
            cuGetErrorName=get_error_name,
            cuStreamIsCapturing=c_function(*[POINTER] * 2)(ask),
            cuStreamGetCaptureInfo_v3=get_capture,
        )
    )


class Cudart:
    """What it calls of ``cuda.bindings.runtime``."""

    cudaGraphInstantiateFlags = SimpleNamespace(
        cudaGraphInstantiateFlagAutoFreeOnLaunch=1, cudaGraphInstantiateFlagUseNodePriority=8
    )

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def cudaGraphClone(self, graph: int) -> tuple[int, int]:
        return 0, graph + 1000

    def cudaGraphNodeFindInClone(self, node: int, copy: int) -> tuple[int, int]:
        return (0, node + 500) if copy == GRAPH + 1000 else (1, 0)

    def cudaGraphDestroy(self, graph: int) -> tuple[int]:
        self._driver.calls.append(("destroy", graph))
        return (0,) if graph else (1,)

    def cudaGetDevice(self) -> tuple[int, int]:
        return 0, 3

    def cudaSetDevice(self, device: int) -> tuple[int]:
        self._driver.context = CONTEXT + device
        return (0,)


@pytest.fixture
def driver() -> Driver:
    return Driver()


@pytest.fixture
def runtime(driver: Driver) -> Runtime:
    return Runtime(Cudart(driver), driver, library(driver))


def test_driver_without_the_calls_leaves_the_backend_without_updates(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bindings = SimpleNamespace(driver=SimpleNamespace(), runtime=SimpleNamespace())
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)

    def missing() -> Library:
        raise AttributeError("undefined symbol: cuGraphGetEdges_v2")

    monkeypatch.setattr(Library, "find", missing)
    assert Runtime.find() is None
    assert "upgrade the driver (undefined symbol: cuGraphGetEdges_v2)" in caplog.text


KERNEL = (2**47 + 9, *range(2, 10))


def update(kind: str, node: int, params: Any = "params", exact: bool = True) -> Update:
    """Return an update; the parameters of a kernel are always ``KERNEL``."""
    if kind == "kernel":
        params = (ctypes.c_uint64 * 9)(*KERNEL)
    return Update(node, kind, params, node + 70, exact)


def test_failed_call_raises_with_the_name_and_the_code(runtime: Runtime) -> None:
    runtime.destroy(5)
    with pytest.raises(RuntimeCallError, match=r"cudaGraphDestroy failed \(1") as caught:
        runtime.destroy(0)
    assert caught.value.error_code == 1


def test_nodes_are_counted_and_listed_in_order(driver: Driver, runtime: Runtime) -> None:
    assert (runtime.count(GRAPH), runtime.nodes(GRAPH)) == (0, [])
    driver.captured = 3
    assert runtime.count(GRAPH) == 3
    assert runtime.nodes(GRAPH) == [2**47, 2**47 + 1, 2**47 + 2]
    for ask in runtime.count, runtime.nodes:
        with pytest.raises(
            RuntimeCallError, match=r"cuGraphGetNodes failed \(1: CUDA_ERROR_INVALID_VALUE\)"
        ) as caught:
            ask(GRAPH + 1)
        assert caught.value.error_code == 1


def test_edges_have_their_nodes_and_their_kind(driver: Driver, runtime: Runtime) -> None:
    assert runtime.edges(GRAPH) == ([], [], [])
    # From port, to port and type: the second edge lets its target start early (programmatic).
    driver.edges = [(2**47 + 1, 2**47 + 2, bytes(8)), (2**47 + 2, 7, b"\1\0\1" + bytes(5))]
    sources, targets, kinds = runtime.edges(GRAPH)
    assert sources == [2**47 + 1, 2**47 + 2]
    assert targets == [2**47 + 2, 7]
    assert kinds == [0, int.from_bytes(b"\1\0\1", "little")]
    with pytest.raises(RuntimeCallError, match=r"cuGraphGetEdges failed \(1: "):
        runtime.edges(GRAPH + 1)


def test_only_an_active_capture_counts_as_one(runtime: Runtime) -> None:
    assert runtime.capturing((0, 1, 2, 3, 1)) == [1, 1]
    assert runtime.capture_of(1) == (2**63 + 3, GRAPH, [2**47 + 1, 7])
    assert runtime.capture_of(0) is runtime.capture_of(2) is None
    with pytest.raises(RuntimeCallError, match=r"cuStreamGetCaptureInfo failed \(1: "):
        runtime.capture_of(3)
    assert runtime.capturing((1, 3)) == [1], "an error does not read as what was asked before"


@pytest.mark.parametrize(
    ("known", "new", "exact"),
    [
        ({}, {}, True),
        ({}, {"cluster": (2, 1, 1)}, False),
        ({"cluster": (2, 1, 1)}, {"cluster": (2, 1, 1)}, True),
        ({"cluster": (2, 1, 1)}, {"cluster": (4, 1, 1)}, False),
        ({"cluster": (1, 1, 1)}, {}, True),
        ({"cooperative": (1,)}, {"cooperative": (1,)}, True),
        ({"cluster": (2, 1, 1)}, {}, False),
        (
            {"cluster": (2, 1, 1), "preferred": (4, 1, 1)},
            {"cluster": (2, 1, 1), "preferred": (2, 1, 1)},
            False,
        ),
        ({"unknown": (4,)}, {}, True),
        ({"cluster": (2, 1, 1), "unknown": (11,)}, {"cluster": (2, 1, 1)}, False),
    ],
)
def test_same_kernel_launched_in_another_way_needs_a_new_executable(
    driver: Driver, runtime: Runtime, known: dict[str, Any], new: dict[str, Any], exact: bool
) -> None:
    fixed = fixed_of(runtime, "kernel", driver.kernel(40, **known))
    assert is_exact(runtime, "kernel", fixed, driver.kernel(40, **new)) is exact


def test_another_kernel_is_taken_unless_it_cooperates_or_clusters(
    driver: Driver, runtime: Runtime
) -> None:
    fixed = fixed_of(runtime, "kernel", driver.kernel(40))
    assert is_exact(runtime, "kernel", fixed, driver.kernel(41))
    assert not is_exact(runtime, "kernel", fixed, driver.kernel(41, cooperative=(1,)))
    assert not is_exact(runtime, "kernel", fixed, driver.kernel(41, cluster=(1, 2, 1)))
    of_library = fixed_of(runtime, "kernel", driver.kernel(0, 42, cooperative=(1,)))
    assert is_exact(runtime, "kernel", of_library, driver.kernel(0, 42))
    assert not is_exact(runtime, "kernel", of_library, driver.kernel(0, 43))


def test_reader_tells_each_node_by_itself(driver: Driver, runtime: Runtime) -> None:
    plain, wide = driver.kernel(40), driver.kernel(40, cluster=(2, 1, 1))
    unknown = driver.kernel(40, unknown=(4,))
    fixed = fixed_of(runtime, "kernel", plain)
    read = runtime.reader()
    found = [read("kernel", fixed, node) for node in (plain, wide, unknown, wide, plain)]
    assert [bool(got and got[1]) for got in found] == [True, False, True, False, True]
    assert len({id(got[0]) for got in found if got}) == 5  # parameters of their own


def fixed_of(runtime: Runtime, kind: str, node: int) -> Any:
    return runtime.fixed(kind, node, runtime.params(kind, node))


def is_exact(runtime: Runtime, kind: str, fixed: Any, node: int) -> bool:
    found = runtime.reader()(kind, fixed, node)
    assert found is not None
    return found[1]


def fill(driver: Driver, width: int, height: int = 1) -> int:
    params = SimpleNamespace(elementSize=1, width=width, height=height)
    return driver.node(Kind.CU_GRAPH_NODE_TYPE_MEMSET, params)


def copy(driver: Driver, source: Memory, target: Memory, height: int = 1, **addresses: int) -> int:
    at = {"srcDevice": 10, "dstDevice": 20, **addresses}
    params = SimpleNamespace(
        srcMemoryType=source, dstMemoryType=target, Height=height, Depth=1, **at
    )
    return driver.node(Kind.CU_GRAPH_NODE_TYPE_MEMCPY, params)


DEVICE, UNIFIED, HOST = (
    Memory.CU_MEMORYTYPE_DEVICE,
    Memory.CU_MEMORYTYPE_UNIFIED,
    Memory.CU_MEMORYTYPE_HOST,
)


def test_executable_takes_fills_and_copies_of_one_dimension_only(
    driver: Driver, runtime: Runtime
) -> None:
    known = fixed_of(runtime, "memset", fill(driver, 8))
    assert is_exact(runtime, "memset", known, fill(driver, 8))
    assert not is_exact(runtime, "memset", known, fill(driver, 9))
    flat = fixed_of(runtime, "memset", fill(driver, 8, height=2))
    assert not is_exact(runtime, "memset", flat, fill(driver, 8, height=2))
    known = fixed_of(runtime, "memcpy", copy(driver, DEVICE, DEVICE))
    assert is_exact(runtime, "memcpy", known, copy(driver, DEVICE, DEVICE))
    assert not is_exact(runtime, "memcpy", known, copy(driver, DEVICE, DEVICE, height=4))
    assert not is_exact(runtime, "memcpy", known, copy(driver, DEVICE, UNIFIED))


def test_node_of_another_kind_is_told_and_one_that_cannot_be_read_raises(
    driver: Driver, runtime: Runtime
) -> None:
    assert runtime.reader()("kernel", None, fill(driver, 8)) is None
    with pytest.raises(RuntimeCallError, match="cuGraphMemsetNodeGetParams failed"):
        runtime.params("memset", driver.kernel(40))
    with pytest.raises(RuntimeCallError, match="cuGraphKernelNodeGetParams failed"):
        runtime.params("kernel", fill(driver, 8))


@pytest.mark.parametrize(
    ("source", "target", "at", "host"),
    [
        (DEVICE, DEVICE, {}, False),
        (HOST, DEVICE, {}, True),
        (DEVICE, HOST, {}, True),
        (UNIFIED, UNIFIED, {}, False),
        (UNIFIED, DEVICE, {"srcDevice": 55}, True),
        (DEVICE, UNIFIED, {"dstDevice": -1}, True),
    ],
)
def test_host_memory_is_found_behind_any_kind_of_address(
    driver: Driver,
    runtime: Runtime,
    source: Memory,
    target: Memory,
    at: dict[str, int],
    host: bool,
) -> None:
    driver.pinned.add(55)
    node = copy(driver, source, target, **at)
    found = runtime.reader()("memcpy", fixed_of(runtime, "memcpy", node), node)
    assert found is not None
    assert found[2] is host


def test_every_update_is_written_with_the_context_where_it_is_wanted(
    driver: Driver, runtime: Runtime
) -> None:
    runtime.write([update("kernel", 1), update("memcpy", 2, "b"), update("memset", 3, "c")], 9)
    assert driver.calls == [
        ("kernel", 9, 1, KERNEL),
        ("memcpy", 9, 2, "b", CONTEXT),
        ("memset", 9, 3, "c", CONTEXT),
    ]


def test_thread_without_a_context_gets_that_of_its_device(driver: Driver, runtime: Runtime) -> None:
    driver.context = 0
    runtime.write([update("memset", 3)], 9)
    assert driver.calls == [("memset", 9, 3, "params", CONTEXT + 3)]


def test_refused_update_names_the_call(driver: Driver, runtime: Runtime) -> None:
    driver.refuse = 2
    updates = [update("kernel", 1), update("memset", 2), update("kernel", 3)]
    with pytest.raises(RuntimeCallError, match="cuGraphExecMemsetNodeSetParams failed"):
        runtime.write(updates, 9)
    assert len(driver.calls) == 1
    driver.refuse = driver.set_calls + 3
    with pytest.raises(RuntimeCallError, match="cuGraphExecKernelNodeSetParams failed"):
        runtime.write(updates, 9)
    assert len(driver.calls) == 3


def test_copy_of_a_graph_has_the_new_parameters(driver: Driver, runtime: Runtime) -> None:
    updates = [update("kernel", 1), update("memset", 2), update("kernel", 3, exact=False)]
    assert runtime.clone(GRAPH, updates) == GRAPH + 1000
    kernel, fill, launched, attributes = driver.calls
    assert kernel == ("set kernel", 501, KERNEL) and launched == ("set kernel", 503, KERNEL)
    assert fill == ("set memset", 502, "params")
    assert attributes == ("copy attributes", 503, 73)


def test_kernel_that_does_not_fit_the_attributes_gets_those_first(
    driver: Driver, runtime: Runtime
) -> None:
    driver.refuse = 1
    runtime.clone(GRAPH, [update("kernel", 3, exact=False)])
    assert [call[0] for call in driver.calls] == ["copy attributes", "set kernel"]
    driver.refuse = driver.set_calls + 1
    with pytest.raises(RuntimeCallError, match="cuGraphMemsetNodeSetParams failed"):
        runtime.clone(GRAPH, [update("memset", 3)])
    assert driver.calls[-1] == ("destroy", GRAPH + 1000)
