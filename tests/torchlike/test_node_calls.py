"""The table of node calls, bound for a vendor of whom nothing else is known."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes import c_uint64
from typing import Any, ClassVar

import pytest

from devgraph.api.torchlike.node_calls import NodeRuntime, RuntimeCallError, Update
from tests.support.stub_driver import GRAPH, StubDriver


class Params(ctypes.Structure):
    """The parameters of every kind of node."""

    _fields_ = (("value", c_uint64), ("size", c_uint64))


class AcmeCalls(NodeRuntime):
    """The driver of that vendor."""

    prefix = "acme"
    suffixes: ClassVar[Mapping[str, str]] = {"GraphClone": "_v9"}
    structures: ClassVar[Mapping[str, type[Any]]] = dict.fromkeys(
        ("kernel", "memcpy", "memset"), Params
    )
    instantiate_flags = 4

    def error_text(self, error: int) -> str:
        return f"ACME {error}"

    def fixed(self, kind: str, node: int, params: Any) -> Any:
        return params.size

    def judge(self, kind: str, fixed: Any, node: int, params: Any) -> tuple[Any, bool, bool]:
        return params, params.size == fixed, kind == "memcpy"


@pytest.fixture
def driver() -> StubDriver:
    return StubDriver()


@pytest.fixture
def runtime(driver: StubDriver) -> AcmeCalls:
    library = driver.library(AcmeCalls)
    return AcmeCalls(library, library)


def update(kind: str, node: int, exact: bool = True) -> Update:
    return Update(node, kind, Params(100 + node), node + 70, exact)


def test_functions_are_found_by_their_names_and_missing_ones_told(driver: StubDriver) -> None:
    library = driver.library(AcmeCalls)
    assert AcmeCalls(library, library).missing == frozenset()
    del library.acmeGraphClone_v9
    assert AcmeCalls(library, library).missing == {"acmeGraphClone_v9"}


def test_failed_call_raises_with_the_name_and_the_code(runtime: AcmeCalls) -> None:
    runtime.destroy(5)
    with pytest.raises(RuntimeCallError, match=r"acmeGraphDestroy failed \(1: ACME 1\)") as caught:
        runtime.destroy(0)
    assert caught.value.error_code == 1


def test_nodes_are_counted_and_listed_in_order(driver: StubDriver, runtime: AcmeCalls) -> None:
    assert (runtime.count(GRAPH), runtime.nodes(GRAPH)) == (0, [])
    driver.captured = [2**47, 2**47 + 1, 5]
    assert runtime.count(GRAPH) == 3
    assert runtime.nodes(GRAPH) == driver.captured
    for ask in runtime.count, runtime.nodes:
        with pytest.raises(RuntimeCallError, match=r"acmeGraphGetNodes failed"):
            ask(GRAPH + 1)


def test_edges_have_their_nodes(driver: StubDriver, runtime: AcmeCalls) -> None:
    assert runtime.edges(GRAPH) == ([], [], [])
    driver.edges = [(2**47 + 1, 2**47 + 2), (2**47 + 2, 7)]
    assert runtime.edges(GRAPH) == ([2**47 + 1, 2**47 + 2], [2**47 + 2, 7], [0, 0])


def test_captures_are_told_by_their_streams(runtime: AcmeCalls) -> None:
    assert runtime.capturing((0, 1, 2, 0, 1)) == [1, 2, 1], "an invalidated one is one as well"
    assert runtime.capture_of(1) == (2**63 + 3, GRAPH, [2**47 + 1, 7])
    assert runtime.capture_of(0) is runtime.capture_of(2) is None
    with pytest.raises(RuntimeCallError, match=r"acmeStreamGetCaptureInfo failed \(1: "):
        runtime.capture_of(3)
    with pytest.raises(RuntimeCallError, match=r"acmeStreamIsCapturing failed \(1: "):
        runtime.capturing((1, 3))


def test_capture_is_begun_ended_and_made_an_executable_as_torch_does(
    driver: StubDriver, runtime: AcmeCalls
) -> None:
    runtime.begin_capture(5)
    assert runtime.end_capture(5) == GRAPH
    executable = runtime.instantiate(GRAPH)
    runtime.launcher(executable, lambda: 6)()
    runtime.bound(executable, 7)()
    runtime.destroy_executable(executable)
    assert driver.calls == [
        ("begin", 5, 1),  # thread-local
        ("end", 5),
        ("instantiate", GRAPH, 4),
        ("launch", executable, 6),
        ("launch", executable, 7),
        ("destroy executable", executable),
    ]


@pytest.mark.parametrize("bound", [False, True])
def test_refused_launch_raises_its_error(
    driver: StubDriver, runtime: AcmeCalls, bound: bool
) -> None:
    launch = runtime.bound(9, 6) if bound else runtime.launcher(9, lambda: 6)
    driver.refuse = 1
    with pytest.raises(RuntimeCallError, match="acmeGraphLaunch failed"):
        launch()
    launch()


def test_reader_tells_kind_parameters_and_fit_of_a_node(
    driver: StubDriver, runtime: AcmeCalls
) -> None:
    node, copy = driver.node("kernel", Params(5, 8)), driver.node("memcpy", Params(6, 8))
    read = runtime.reader()
    found = read("kernel", 8, node)
    assert found is not None
    assert (found[0].value, *found[1:]) == (5, True, False)
    assert read("kernel", 9, node)[1] is False  # type: ignore[index]
    assert read("memcpy", 8, copy)[2] is True  # type: ignore[index]
    assert read("kernel", 8, copy) is None
    assert runtime.kind(driver.node("batch", None)) == "type-99"
    with pytest.raises(RuntimeCallError, match="acmeGraphMemcpyNodeGetParams failed"):
        runtime.params("memcpy", node)


def test_every_update_is_written(driver: StubDriver, runtime: AcmeCalls) -> None:
    updates = [update("kernel", 1), update("memset", 2), update("kernel", 3)]
    runtime.write(updates, 9)
    assert driver.calls == [("kernel", 9, 1, 101), ("memset", 9, 2, 102), ("kernel", 9, 3, 103)]
    for refused, kind in ((2, "Memset"), (3, "Kernel")):
        driver.calls.clear()
        driver.refuse = refused
        with pytest.raises(RuntimeCallError, match=f"acmeGraphExec{kind}NodeSetParams failed"):
            runtime.write(updates, 9)
        assert len(driver.calls) == refused - 1


def test_copy_of_a_graph_has_the_new_parameters(driver: StubDriver, runtime: AcmeCalls) -> None:
    updates = [update("kernel", 1), update("memset", 2), update("memcpy", 4)]
    updates.append(update("kernel", 3, exact=False))
    assert runtime.clone(GRAPH, updates) == GRAPH + 1000
    assert driver.calls == [
        ("set kernel", 501, 101),
        ("set memset", 502, 102),
        ("set memcpy", 504, 104),
        ("set kernel", 503, 103),
        ("copy attributes", 73, 503),
    ]


def test_kernel_that_does_not_fit_the_attributes_gets_those_first(
    driver: StubDriver, runtime: AcmeCalls
) -> None:
    driver.refuse = 1
    runtime.clone(GRAPH, [update("kernel", 3, exact=False)])
    assert [call[0] for call in driver.calls] == ["copy attributes", "set kernel"]
    driver.refuse = 1
    with pytest.raises(RuntimeCallError, match="acmeGraphMemsetNodeSetParams failed"):
        runtime.clone(GRAPH, [update("memset", 3)])
    assert driver.calls[-1] == ("destroy", GRAPH + 1000)
