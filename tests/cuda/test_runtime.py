"""CUDA's own calls over a driver that exists only here: no device is needed."""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_uint32, c_uint64
from typing import Any

import pytest

from devgraph.api.torchlike.node_calls import RuntimeCallError, Update
from devgraph.cuda import runtime as cuda_runtime
from devgraph.cuda.runtime import CopyParams, FillParams, KernelParams, LaunchConfig, Runtime
from tests.support.stub_driver import GRAPH, StubDriver

CONTEXT = 77
DEVICE, UNIFIED, HOST = 2, 4, 1
"""CUmemorytype"""


class Driver(StubDriver):
    """The stub with what CUDA's driver has besides."""

    def __init__(self) -> None:
        super().__init__()
        self.launch: dict[int, dict[str, Any]] = {}
        self.pinned: set[int] = set()
        self.context = CONTEXT
        self.needs_context = False
        self.mode = 1

    def kernel(self, function: int, kernel: int = 0, **launch: Any) -> int:
        node = self.node("kernel", KernelParams(func=function, kern=kernel))
        self.launch[node] = launch
        return node

    def note(self, *what: Any) -> int:
        return 201 if self.needs_context and not self.context else super().note(*what)

    def GraphBatchMemOpNodeSetParams(self, node: int, params: int) -> int:
        return self.note("set operations", node)

    def StreamBatchMemOp(self, stream: int, count: int, ops: int, flags: int) -> int:
        return self.note("operations", stream, count)

    def MemsetD32Async(self, address: int, value: int, count: int, stream: int) -> int:
        return self.note("memset", address, value, count, stream)

    def StreamCreate(self, stream: int, flags: int) -> int:
        return self.note("stream", flags)

    def StreamDestroy(self, stream: int) -> int:
        return self.note("destroy stream", stream)

    def GraphKernelNodeGetAttribute(self, node: int, which: int, value: int) -> int:
        launch = self.launch[node]
        if which in launch.get("unknown", ()):
            return 1
        name = {4: "cluster", 11: "preferred", 2: "cooperative"}[which]
        ctypes.memset(value, 0, 64)
        words = launch.get(name, ())
        (c_uint32 * len(words)).from_address(value)[:] = words
        return 0

    def PointerGetAttribute(self, value: int, which: int, address: int) -> int:
        assert which == 2, "the kind of memory"
        c_int.from_address(value).value = HOST if address in self.pinned else DEVICE
        return int(address == 2**64 - 1)  # memory that the driver never saw

    def CtxGetCurrent(self, context: int) -> int:
        c_uint64.from_address(context).value = self.context
        return 0

    def ModuleLoadData(self, module: int, text: int) -> int:
        c_uint64.from_address(module).value = 5
        return self.note("load", self.mode)

    def ModuleGetFunction(self, function: int, module: int, name: int) -> int:
        c_uint64.from_address(function).value = 10 * module
        return 0

    def ThreadExchangeStreamCaptureMode(self, mode: int) -> int:
        found = c_int.from_address(mode)
        self.mode, found.value = found.value, self.mode
        return 0

    def LaunchKernelEx(self, config: int, function: int, params: int, extra: None) -> int:
        found = LaunchConfig.from_address(config)
        assert (*found.grid, *found.block, found.shared_bytes) == (1, 1, 1, 1, 1, 1, 0)
        where = (c_uint64 * 2).from_address(params)
        values = [c_uint64.from_address(one).value for one in where]
        return self.note("launch", function, found.stream, *values)

    def GraphConditionalHandleCreate(
        self, handle: int, graph: int, context: int, first: int, flags: int
    ) -> int:
        assert (context, first, flags) == (self.context, 0, 0)
        c_uint64.from_address(handle).value = 33
        return self.note("handle", graph)

    def GraphAddNode(self, node: int, graph: int, before: int, count: int, params: int) -> int:
        self._bodies = c_uint64(GRAPH)
        c_uint64.from_address(node).value = 44
        # At the offsets of the driver's header: type, handle, kind, size, bodies, context.
        kind, handle = c_int.from_address(params).value, c_uint64.from_address(params + 16).value
        loop = (c_int * 2).from_address(params + 24)[:]
        c_uint64.from_address(params + 32).value = ctypes.addressof(self._bodies)
        assert c_uint64.from_address(params + 40).value == self.context
        came = (c_uint64 * count).from_address(before)[:]
        return self.note("node", graph, came, kind, handle, loop)

    def StreamUpdateCaptureDependencies(
        self, stream: int, nodes: int, count: int, flags: int
    ) -> int:
        return self.note("go on", stream, (c_uint64 * count).from_address(nodes)[:], flags)

    def StreamBeginCaptureToGraph(
        self, stream: int, graph: int, before: None, kinds: None, count: int, mode: int
    ) -> int:
        return self.note("begin", stream, graph, mode)

    def GetErrorName(self, error: int, text: int) -> int:
        self._text = ctypes.create_string_buffer(b"CUDA_ERROR_INVALID_VALUE")
        c_uint64.from_address(text).value = ctypes.addressof(self._text)
        return 0


@pytest.fixture
def driver() -> Driver:
    return Driver()


@pytest.fixture
def runtime(driver: Driver) -> Runtime:
    def enter() -> None:
        driver.context = CONTEXT + 1

    library = driver.library(Runtime)
    return Runtime(library, library, enter)


def test_driver_without_the_calls_leaves_the_backend_without_updates(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, driver: Driver
) -> None:
    library = driver.library(Runtime)
    del library.cuGraphGetEdges_v2
    for loader in ("PyDLL", "CDLL"):
        monkeypatch.setattr(cuda_runtime.ctypes, loader, lambda name: library)
    assert Runtime.find(lambda: None) is None
    assert "upgrade the driver (libcuda.so.1 lacks cuGraphGetEdges_v2)" in caplog.text


KERNEL = 2**47 + 9


def update(kind: str, node: int, exact: bool = True) -> Update:
    """Return an update whose parameters begin with a number: ``KERNEL``, 2 or 3."""
    params: Any = KernelParams(func=KERNEL)
    if kind != "kernel":
        params = CopyParams() if kind == "memcpy" else FillParams(dst=3)
    if kind == "memcpy":
        c_uint64.from_buffer(params).value = 2
    return Update(node, kind, params, node + 70, exact)


def test_edges_have_their_nodes_and_their_kind(driver: Driver, runtime: Runtime) -> None:
    assert runtime.edges(GRAPH) == ([], [], [])
    # From port, to port and type: the second edge lets its target start early (programmatic).
    early = int.from_bytes(b"\1\0\1", "little")
    driver.edges = [(2**47 + 1, 2**47 + 2, 0), (2**47 + 2, 7, early)]
    assert runtime.edges(GRAPH) == ([2**47 + 1, 2**47 + 2], [2**47 + 2, 7], [0, early])
    with pytest.raises(RuntimeCallError, match=r"cuGraphGetEdges failed \(1: "):
        runtime.edges(GRAPH + 1)


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
    params = runtime.params("kernel", wide)
    assert runtime.judge("kernel", fixed, wide, params)[1] is False


def fixed_of(runtime: Runtime, kind: str, node: int) -> Any:
    return runtime.fixed(kind, node, runtime.params(kind, node))


def is_exact(runtime: Runtime, kind: str, fixed: Any, node: int) -> bool:
    found = runtime.reader()(kind, fixed, node)
    assert found is not None
    return found[1]


def fill(driver: Driver, width: int, height: int = 1) -> int:
    return driver.node("memset", FillParams(elementSize=1, width=width, height=height))


def copy(
    driver: Driver, source: int, target: int, height: int = 1, src: int = 10, dst: int = 20
) -> int:
    params = CopyParams(height=height, depth=1)
    params.src.memoryType, params.dst.memoryType = source, target
    params.src.device, params.dst.device = src, dst
    return driver.node("memcpy", params)


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
    assert runtime.kind(driver.node("batch", None)) == "type-99"


@pytest.mark.parametrize(
    ("source", "target", "at", "host"),
    [
        (DEVICE, DEVICE, {}, False),
        (HOST, DEVICE, {}, True),
        (DEVICE, HOST, {}, True),
        (UNIFIED, UNIFIED, {}, False),
        (UNIFIED, DEVICE, {"src": 55}, True),
        (DEVICE, UNIFIED, {"dst": 2**64 - 1}, True),
    ],
)
def test_host_memory_is_found_behind_any_kind_of_address(
    driver: Driver, runtime: Runtime, source: int, target: int, at: dict[str, int], host: bool
) -> None:
    driver.pinned.add(55)
    node = copy(driver, source, target, **at)
    found = runtime.reader()("memcpy", fixed_of(runtime, "memcpy", node), node)
    assert found is not None
    assert found[2] is host


def test_every_update_is_written_with_the_context_where_it_is_wanted(
    driver: Driver, runtime: Runtime
) -> None:
    runtime.write([update("kernel", 1), update("memcpy", 2), update("memset", 3)], 9)
    assert driver.calls == [
        ("kernel", 9, 1, KERNEL),
        ("memcpy", 9, 2, 2, CONTEXT),
        ("memset", 9, 3, 3, CONTEXT),
    ]


def test_thread_without_a_context_gets_that_of_its_device(driver: Driver, runtime: Runtime) -> None:
    driver.context = 0
    runtime.write([update("memset", 3)], 9)
    assert driver.calls == [("memset", 9, 3, 3, CONTEXT + 1)]
    driver.needs_context = True
    for call in (
        runtime.bound(9, 6),
        runtime.launcher(9, lambda: 6),
        lambda: runtime.destroy_executable(9),
    ):
        driver.context = 0
        call()
        assert driver.context == CONTEXT + 1
    assert [call[0] for call in driver.calls[1:]] == ["launch", "launch", "destroy executable"]


def test_attributes_of_another_kernel_are_copied_to_the_node(
    driver: Driver, runtime: Runtime
) -> None:
    runtime.clone(GRAPH, [update("kernel", 3, exact=False)])
    assert driver.calls == [("set kernel", 503, KERNEL), ("copy attributes", 503, 73)]


def test_executable_is_made_with_the_flags_of_torch(driver: Driver, runtime: Runtime) -> None:
    runtime.instantiate(GRAPH)
    assert driver.calls == [("instantiate", GRAPH, 9)], "frees at launch, priorities of nodes"


def test_failed_call_raises_with_the_name_and_the_code(runtime: Runtime) -> None:
    with pytest.raises(
        RuntimeCallError, match=r"cuGraphDestroy failed \(1: CUDA_ERROR_INVALID_VALUE\)"
    ) as caught:
        runtime.destroy(0)
    assert caught.value.error_code == 1


def test_loop_is_a_node_whose_body_says_whether_it_is_repeated(
    driver: Driver, runtime: Runtime
) -> None:
    driver.captured = [1, 2, 3]
    with runtime.looping(1, 9, 0x1000, lambda: driver.calls.append(driver.mode)) as count:
        driver.note("body")
    assert count() == 3
    before = [2**47 + 1, 7]  # what the capture of stream 1 goes on from
    assert driver.calls == [
        2,
        ("load", 2),
        ("handle", GRAPH),
        ("launch", 50, 1, 33, 0x1000),
        ("node", GRAPH, before, 13, 33, [1, 1]),
        ("go on", 1, [44], 1),
        ("begin", 9, GRAPH, 1),
        ("body",),
        ("launch", 50, 9, 33, 0x1000),
        ("end", 9),
    ]
    assert driver.mode == 1, "a capture mode that is not the thread's own"


def test_loop_whose_body_fails_leaves_its_stream_without_a_capture(
    driver: Driver, runtime: Runtime
) -> None:
    with pytest.raises(KeyError), runtime.looping(1, 9, 0x1000, lambda: None):
        raise KeyError("the body")
    assert driver.calls[-1] == ("end", 9)
