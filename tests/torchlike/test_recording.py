"""Recordings, and what executables take, over a driver that exists only here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

import devgraph as dg
from devgraph.api.torchlike.recording import NodeRecording, RawGraph
from tests.support.node_driver import Driver, Node, kernel, pattern_of


@pytest.fixture
def driver() -> Driver:
    return Driver()


def recording_of(driver: Driver, graph: int, values: Sequence[Any]) -> NodeRecording:
    pattern = pattern_of(driver, graph, ("attend", 0, len(driver.nodes(graph))))
    scratch = driver.graph(*(kernel(v) for v in values))
    updates = pattern.match(scratch, [len(values)])
    nodes = len(driver.nodes(graph))
    return NodeRecording(driver, nodes, updates, RawGraph(driver, scratch), 1)


def test_recording_is_written_or_built_and_charges_for_what_it_holds(driver: Driver) -> None:
    graph = driver.graph(kernel(0), kernel(1))
    own = driver.instantiate(graph)
    recording = recording_of(driver, graph, ["a", "b"])
    driver.write(recording.updates, own)
    assert list(driver.executables[own].values()) == ["a", "b"]
    without = recording.bytes
    recording.build(graph)
    assert recording.bytes == without + recording.executable_bytes
    assert sorted(driver.executables[recording.executable].values()) == ["a", "b"]
    assert [driver.all[n].params for n in driver.nodes(graph)] == [0, 1], "the graph is as captured"
    recording.uses = 5
    recording.shrink()
    assert recording.bytes == without
    assert (recording.executable, recording.uses) == (0, 0)
    assert list(driver.executables) == [own]


def test_closed_recording_frees_its_scratch_graph(driver: Driver) -> None:
    recording = recording_of(driver, driver.graph(kernel(0)), ["a"])
    assert not driver.destroyed
    recording.close()
    assert len(driver.destroyed) == 1


def test_nodes_pair_by_position_whatever_is_between_the_regions(driver: Driver) -> None:
    graph = driver.graph(*(kernel(i) for i in range(7)))
    nodes = driver.nodes(graph)
    pattern = pattern_of(driver, graph, ("first", 1, 3), ("second", 5, 6))
    scratch = driver.graph(kernel("a"), kernel("b"), kernel("c"))
    found = [(u.node, u.params, u.exact) for u in pattern.match(scratch, [2, 3])]
    assert found == [(nodes[1], "a", True), (nodes[2], "b", True), (nodes[5], "c", True)]


def test_other_number_kind_or_order_of_nodes_is_another_topology(driver: Driver) -> None:
    graph = driver.graph(kernel(0), kernel(1), Node("memset", 2))
    pattern = pattern_of(driver, graph, ("attend", 0, 3))
    for other, says in (
        (driver.graph(kernel(0), kernel(1)), "needs 2 nodes .* had 3"),
        (driver.graph(kernel(0), kernel(1), kernel(2)), "kernel, kernel, kernel, was .*memset"),
        (
            driver.graph(kernel(0), kernel(1), Node("memset", 2), edges=[(0, 1), (0, 2)]),
            "different order",
        ),
    ):
        with pytest.raises(dg.UpdateTopologyError, match=says) as caught:
            pattern.match(other, [len(driver.nodes(other))])
        assert "attend" in str(caught.value)


def test_kernel_that_only_a_new_executable_takes_is_not_exact(driver: Driver) -> None:
    graph = driver.graph(kernel(0, fixed="cluster 1"), kernel(1))
    pattern = pattern_of(driver, graph, ("attend", 0, 2))
    found = pattern.match(driver.graph(kernel(5, fixed="cluster 2"), kernel(6)), [2])
    assert [update.exact for update in found] == [False, True]


def test_kind_that_cannot_be_updated_and_copies_of_host_memory_are_refused(driver: Driver) -> None:
    with pytest.raises(dg.UpdateError, match="reader contains a host node"):
        pattern_of(driver, driver.graph(kernel(0), Node("host", 1)), ("reader", 0, 2))
    graph = driver.graph(Node("memcpy", "device"))
    pattern = pattern_of(driver, graph, ("reader", 0, 1))
    with pytest.raises(dg.UpdateError, match="reader copies from or to host memory"):
        pattern.match(driver.graph(Node("memcpy", "pageable", host=True)), [1])


def test_empty_nodes_are_paired_and_never_written(driver: Driver) -> None:
    graph = driver.graph(kernel(0), Node("empty", None), kernel(1))
    pattern = pattern_of(driver, graph, ("join", 0, 3))
    scratch = driver.graph(kernel(7), Node("empty", None), kernel(8))
    found = pattern.match(scratch, [3])
    assert [update.params for update in found] == [7, 8]
    for wrong in ((kernel(7), kernel(8), kernel(9)), (kernel(7), kernel(8), Node("empty", None))):
        with pytest.raises(dg.UpdateTopologyError, match="join"):
            pattern.match(driver.graph(*wrong), [3])


def test_regions_that_were_right_once_are_still_compared(driver: Driver) -> None:
    graph = driver.graph(kernel(0), kernel(1), kernel(2))
    pattern = pattern_of(driver, graph, ("first", 0, 2), ("second", 2, 3))
    for _ in range(2):
        pattern.match(driver.graph(kernel(5), kernel(6), kernel(7)), [2, 3])
    with pytest.raises(dg.UpdateTopologyError, match="different order"):
        pattern.match(driver.graph(*(kernel(i) for i in range(3)), edges=[(0, 2)]), [2, 3])
    with pytest.raises(dg.UpdateTopologyError, match="kernel, memset, was kernel, kernel"):
        other = driver.graph(kernel(5), Node("memset", 6), kernel(7))
        pattern.match(other, [2, 3])
    assert len(pattern.match(driver.graph(*(kernel(i) for i in range(3))), [2, 3])) == 3
