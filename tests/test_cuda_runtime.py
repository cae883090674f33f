"""The CUDA room's calls over a driver that exists only here: no device is needed."""

from __future__ import annotations

import enum
from types import SimpleNamespace
from typing import Any

import pytest

from devgraph.api.nodes import RuntimeCallError, Update
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


ATTRIBUTES = SimpleNamespace(
    CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION="cluster",
    CU_LAUNCH_ATTRIBUTE_PREFERRED_CLUSTER_DIMENSION="preferred",
    CU_LAUNCH_ATTRIBUTE_COOPERATIVE="cooperative",
)

CONTEXT = 77


def _dim(size: tuple[int, int, int]) -> Any:
    return SimpleNamespace(**dict(zip("xyz", size, strict=True)))


class Driver:
    """What the room calls of ``cuda.bindings.driver``; nodes are made by ``kernel``."""

    CUgraphNodeType = Kind
    CUmemorytype = Memory
    CUkernelNodeAttrID = ATTRIBUTES
    CUpointer_attribute = SimpleNamespace(CU_POINTER_ATTRIBUTE_MEMORY_TYPE="memory type")

    def __init__(self) -> None:
        self.launch: dict[int, dict[str, Any]] = {}
        self.pinned: set[int] = set()
        self.context = CONTEXT
        self.calls: list[tuple[Any, ...]] = []
        self.refuse = 0
        self._setter_calls = 0

    def kernel(self, node: int, function: int, **launch: Any) -> Any:
        self.launch[node] = launch
        return SimpleNamespace(func=function, kern=0)

    def cuGraphKernelNodeGetAttribute(self, node: int, which: str) -> tuple[int, Any]:
        launch = self.launch[node]
        return 0, SimpleNamespace(
            clusterDim=_dim(launch.get("cluster", (0, 0, 0))),
            preferredClusterDim=_dim((0, 0, 0)),
            cooperative=launch.get("cooperative", 0),
        )

    def cuPointerGetAttribute(self, which: str, address: int) -> tuple[int, int]:
        if address < 0:
            return 1, 0  # memory that the driver never saw
        return 0, 1 if address in self.pinned else 2

    def cuCtxGetCurrent(self) -> tuple[int, int]:
        return 0, self.context

    def CUgraphExec(self, init_value: int) -> int:
        return init_value

    def _set(self, kind: str, *args: Any) -> tuple[int]:
        self._setter_calls += 1
        if self._setter_calls == self.refuse:
            return (1,)
        self.calls.append((kind, *args))
        return (0,)

    def cuGraphExecKernelNodeSetParams(self, *args: Any) -> tuple[int]:
        return self._set("kernel", *args)

    def cuGraphExecMemcpyNodeSetParams(self, *args: Any) -> tuple[int]:
        return self._set("memcpy", *args)

    def cuGraphExecMemsetNodeSetParams(self, *args: Any) -> tuple[int]:
        return self._set("memset", *args)

    cuGraphKernelNodeGetParams = cuGraphMemcpyNodeGetParams = cuGraphMemsetNodeGetParams = None


class Cudart:
    """What it calls of ``cuda.bindings.runtime``."""

    cudaStreamCaptureStatus = SimpleNamespace(cudaStreamCaptureStatusActive=1)
    cudaGraphInstantiateFlags = SimpleNamespace(
        cudaGraphInstantiateFlagAutoFreeOnLaunch=1, cudaGraphInstantiateFlagUseNodePriority=8
    )

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def cudaStreamIsCapturing(self, stream: int) -> tuple[int, Any]:
        return (0, stream) if stream < 3 else (900, None)

    def cudaGraphDestroy(self, graph: int) -> tuple[int]:
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
    return Runtime(Cudart(driver), driver)


def update(kind: str, node: int, params: Any = "params") -> Update:
    return Update(node, kind, params, node, True)


def test_failed_call_raises_with_the_name_and_the_code(runtime: Runtime) -> None:
    runtime.destroy(5)
    with pytest.raises(RuntimeCallError, match=r"cudaGraphDestroy failed \(1") as caught:
        runtime.destroy(0)
    assert caught.value.error_code == 1


def test_only_an_active_capture_counts_as_one(runtime: Runtime) -> None:
    # 2: a capture that was invalidated; 3: an error of the query.
    assert [runtime.is_capturing(stream) for stream in (0, 1, 2, 3)] == [False, True, False, False]


@pytest.mark.parametrize(
    ("known", "new", "exact"),
    [
        ({}, {}, True),
        ({}, {"cluster": (2, 1, 1)}, False),
        ({"cluster": (2, 1, 1)}, {"cluster": (2, 1, 1)}, True),
        ({"cluster": (2, 1, 1)}, {"cluster": (4, 1, 1)}, False),
        ({"cluster": (1, 1, 1)}, {}, True),
        ({"cooperative": 1}, {"cooperative": 1}, True),
        ({"cluster": (2, 1, 1)}, {}, False),
    ],
)
def test_same_kernel_launched_in_another_way_needs_a_new_executable(
    driver: Driver, runtime: Runtime, known: dict[str, Any], new: dict[str, Any], exact: bool
) -> None:
    fixed = runtime.fixed("kernel", 1, driver.kernel(1, 40, **known))
    assert runtime.is_exact("kernel", fixed, 2, driver.kernel(2, 40, **new)) is exact


def test_another_kernel_is_taken_unless_it_cooperates_or_clusters(
    driver: Driver, runtime: Runtime
) -> None:
    fixed = runtime.fixed("kernel", 1, driver.kernel(1, 40))
    assert runtime.is_exact("kernel", fixed, 2, driver.kernel(2, 41))
    assert not runtime.is_exact("kernel", fixed, 3, driver.kernel(3, 41, cooperative=1))
    assert not runtime.is_exact("kernel", fixed, 4, driver.kernel(4, 41, cluster=(1, 2, 1)))


def fill(width: int, height: int = 1) -> Any:
    return SimpleNamespace(elementSize=1, width=width, height=height)


def copy(source: Memory, target: Memory, height: int = 1, **addresses: int) -> Any:
    at = {"srcDevice": 10, "dstDevice": 20, **addresses}
    return SimpleNamespace(srcMemoryType=source, dstMemoryType=target, Height=height, Depth=1, **at)


DEVICE, UNIFIED, HOST = (
    Memory.CU_MEMORYTYPE_DEVICE,
    Memory.CU_MEMORYTYPE_UNIFIED,
    Memory.CU_MEMORYTYPE_HOST,
)


def test_executable_takes_fills_and_copies_of_one_dimension_only(runtime: Runtime) -> None:
    known = runtime.fixed("memset", 1, fill(8))
    assert runtime.is_exact("memset", known, 2, fill(8))
    assert not runtime.is_exact("memset", known, 2, fill(9))
    flat = runtime.fixed("memset", 1, fill(8, height=2))
    assert not runtime.is_exact("memset", flat, 2, fill(8, height=2))
    known = runtime.fixed("memcpy", 1, copy(DEVICE, DEVICE))
    assert runtime.is_exact("memcpy", known, 2, copy(DEVICE, DEVICE))
    assert not runtime.is_exact("memcpy", known, 2, copy(DEVICE, DEVICE, height=4))
    assert not runtime.is_exact("memcpy", known, 2, copy(DEVICE, UNIFIED))


def test_host_memory_is_found_behind_any_kind_of_address(driver: Driver, runtime: Runtime) -> None:
    assert not runtime.uses_host("memcpy", copy(DEVICE, DEVICE))
    assert runtime.uses_host("memcpy", copy(HOST, DEVICE))
    assert runtime.uses_host("memcpy", copy(DEVICE, HOST))
    assert not runtime.uses_host("memcpy", copy(UNIFIED, UNIFIED))
    driver.pinned.add(10)
    assert runtime.uses_host("memcpy", copy(UNIFIED, DEVICE))
    assert runtime.uses_host("memcpy", copy(DEVICE, UNIFIED, dstDevice=-1))
    assert not runtime.uses_host("kernel", object())


def test_every_update_is_written_with_the_context_where_it_is_wanted(
    driver: Driver, runtime: Runtime
) -> None:
    runtime.write([update("kernel", 1, "a"), update("memcpy", 2, "b"), update("memset", 3, "c")], 9)
    assert driver.calls == [
        ("kernel", 9, 1, "a"),
        ("memcpy", 9, 2, "b", CONTEXT),
        ("memset", 9, 3, "c", CONTEXT),
    ]


def test_thread_without_a_context_gets_that_of_its_device(driver: Driver, runtime: Runtime) -> None:
    driver.context = 0
    runtime.write([update("memset", 3)], 9)
    assert driver.calls == [("memset", 9, 3, "params", CONTEXT + 3)]


def test_refused_update_names_the_kind_of_node(driver: Driver, runtime: Runtime) -> None:
    driver.refuse = 2
    with pytest.raises(RuntimeCallError, match="updating a memset node failed"):
        runtime.write([update("kernel", 1), update("memset", 2), update("kernel", 3)], 9)
    assert len(driver.calls) == 1
