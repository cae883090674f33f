"""Region nodes and recordings over a driver that exists only here."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import pytest

import devgraph as dg
from devgraph.api.torchlike.guards import SideStreams
from devgraph.api.torchlike.nodes import Edges, Read, RegionPattern, Update
from devgraph.api.torchlike.recording import ExecutableMeter, NodeRecording, RegionUpdate, Scratch


@attrs.define
class Node:
    kind: str
    params: Any
    fixed: Any = 0
    host: bool = False


class Driver:
    """A ``NodeRuntime`` whose graphs are lists of nodes, chained unless edges are given."""

    def __init__(self) -> None:
        self.all: dict[int, Node] = {}
        self.graphs: dict[int, list[int]] = {}
        self.links: dict[int, Edges] = {}
        self.executables: dict[int, dict[int, Any]] = {}
        self.destroyed: list[int] = []
        self._next = 100

    def new(self) -> int:
        self._next += 1
        return self._next

    def graph(self, *nodes: Node, edges: Sequence[tuple[int, int]] | None = None) -> int:
        handles = [self.new() for _ in nodes]
        self.all.update(zip(handles, nodes, strict=True))
        graph = self.new()
        self.graphs[graph] = handles
        pairs = itertools.pairwise(range(len(nodes))) if edges is None else edges
        ends = [(handles[a], handles[b]) for a, b in pairs]
        self.links[graph] = ([a for a, _ in ends], [b for _, b in ends], [None] * len(ends))
        return graph

    def nodes(self, graph: int) -> list[int]:
        return list(self.graphs[graph])

    def edges(self, graph: int) -> Edges:
        return self.links[graph]

    def kind(self, node: int) -> str:
        return self.all[node].kind

    def params(self, kind: str, node: int) -> Any:
        return self.all[node].params

    def fixed(self, kind: str, node: int, params: Any) -> Any:
        return self.all[node].fixed

    def reader(self) -> Read:
        return self._read

    def _read(self, kind: str, fixed: Any, node: int) -> tuple[Any, bool, bool] | None:
        found = self.all[node]
        return (found.params, found.fixed == fixed, found.host) if found.kind == kind else None

    def clone(self, graph: int, updates: Sequence[Update]) -> int:
        changed = {update.node: update.params for update in updates}
        copies = [
            Node(self.all[n].kind, changed.get(n, self.all[n].params)) for n in self.graphs[graph]
        ]
        return self.graph(*copies)

    def instantiate(self, graph: int) -> int:
        executable = self.new()
        self.executables[executable] = {n: self.all[n].params for n in self.graphs[graph]}
        return executable

    def write(self, updates: Sequence[Update], executable: int) -> None:
        self.executables[executable].update({u.node: u.params for u in updates})

    def destroy(self, graph: int) -> None:
        self.destroyed.append(graph)

    def destroy_executable(self, executable: int) -> None:
        del self.executables[executable]


def kernel(params: Any, fixed: Any = 0) -> Node:
    return Node("kernel", params, fixed)


@pytest.fixture
def driver() -> Driver:
    return Driver()


def pattern_of(driver: Driver, graph: int, *spans: tuple[str, int, int]) -> RegionPattern:
    nodes = driver.nodes(graph)
    return RegionPattern(driver, graph, [(name, nodes[a:b]) for name, a, b in spans])


def test_nodes_pair_by_position_whatever_is_between_the_regions(driver: Driver) -> None:
    graph = driver.graph(*(kernel(i) for i in range(7)))
    nodes = driver.nodes(graph)
    pattern = pattern_of(driver, graph, ("first", 1, 3), ("second", 5, 6))
    scratch = driver.graph(kernel("a"), kernel("b"), kernel("c"))
    first, second = pattern.match([0, 1], scratch, [2, 3])
    assert [(u.node, u.params) for u in first] == [(nodes[1], "a"), (nodes[2], "b")]
    assert [(u.node, u.params) for u in second] == [(nodes[5], "c")]
    (only,) = pattern.match([1], driver.graph(kernel("d")), [1])
    assert [(u.node, u.params, u.exact) for u in only] == [(nodes[5], "d", True)]


def test_other_number_kind_or_order_of_nodes_is_another_topology(driver: Driver) -> None:
    graph = driver.graph(kernel(0), kernel(1), Node("memset", 2))
    pattern = pattern_of(driver, graph, ("attend", 0, 3))
    for other, says in (
        (driver.graph(kernel(0), kernel(1)), "needs 2 nodes .* had 3"),
        (driver.graph(kernel(0), kernel(1), kernel(2)), "kernel, kernel, kernel, was .*memset"),
        (
            driver.graph(kernel(0), kernel(1), Node("memset", 2), edges=[(0, 1), (0, 2)]),
            "another order",
        ),
    ):
        with pytest.raises(dg.UpdateTopologyError, match=says) as caught:
            pattern.match([0], other, [len(driver.nodes(other))])
        assert "attend" in str(caught.value)


def test_kernel_that_only_a_new_executable_takes_is_not_exact(driver: Driver) -> None:
    graph = driver.graph(kernel(0, fixed="cluster 1"), kernel(1))
    pattern = pattern_of(driver, graph, ("attend", 0, 2))
    (found,) = pattern.match([0], driver.graph(kernel(5, fixed="cluster 2"), kernel(6)), [2])
    assert [update.exact for update in found] == [False, True]


def test_kind_that_cannot_be_updated_and_copies_of_host_memory_are_refused(driver: Driver) -> None:
    with pytest.raises(dg.UpdateError, match="reader holds a host node"):
        pattern_of(driver, driver.graph(kernel(0), Node("host", 1)), ("reader", 0, 2))
    graph = driver.graph(Node("memcpy", "device"))
    pattern = pattern_of(driver, graph, ("reader", 0, 1))
    with pytest.raises(dg.UpdateError, match="reader copies from or to host memory"):
        pattern.match([0], driver.graph(Node("memcpy", "pageable", host=True)), [1])


def test_empty_nodes_are_paired_and_never_written(driver: Driver) -> None:
    graph = driver.graph(kernel(0), Node("empty", None), kernel(1))
    pattern = pattern_of(driver, graph, ("join", 0, 3))
    scratch = driver.graph(kernel(7), Node("empty", None), kernel(8))
    (found,) = pattern.match([0], scratch, [3])
    assert [update.params for update in found] == [7, 8]
    for wrong in ((kernel(7), kernel(8), kernel(9)), (kernel(7), kernel(8), Node("empty", None))):
        with pytest.raises(dg.UpdateTopologyError, match="join"):
            pattern.match([0], driver.graph(*wrong), [3])


def test_regions_that_were_right_once_are_still_compared(driver: Driver) -> None:
    graph = driver.graph(kernel(0), kernel(1), kernel(2))
    pattern = pattern_of(driver, graph, ("first", 0, 2), ("second", 2, 3))
    for _ in range(2):
        pattern.match([0, 1], driver.graph(kernel(5), kernel(6), kernel(7)), [2, 3])
    with pytest.raises(dg.UpdateTopologyError, match="another order"):
        pattern.match([0, 1], driver.graph(*(kernel(i) for i in range(3)), edges=[(0, 2)]), [2, 3])
    with pytest.raises(dg.UpdateTopologyError, match="kernel, memset, was kernel, kernel"):
        other = driver.graph(kernel(5), Node("memset", 6), kernel(7))
        pattern.match([0, 1], other, [2, 3])
    assert len(pattern.match([0, 1], driver.graph(*(kernel(i) for i in range(3))), [2, 3])) == 2


class Memory:
    """Free device memory that a test moves."""

    def __init__(self) -> None:
        self.free = 10**9


def recording_of(
    driver: Driver, graph: int, meter: ExecutableMeter, values: Sequence[Any]
) -> NodeRecording:
    pattern = pattern_of(driver, graph, ("attend", 0, len(driver.nodes(graph))))
    scratch = driver.graph(*(kernel(v) for v in values))
    (updates,) = pattern.match([0], scratch, [len(values)])
    part = RegionUpdate({}, updates, Scratch(driver, scratch))
    nodes = len(driver.nodes(graph))
    return NodeRecording(driver, meter, nodes, {None: part}, 1)


def test_recording_is_written_or_built_and_charges_for_what_it_holds(driver: Driver) -> None:
    graph = driver.graph(kernel(0), kernel(1))
    own = driver.instantiate(graph)
    recording = recording_of(driver, graph, ExecutableMeter(lambda: 10**9), ["a", "b"])
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


def test_closed_recording_frees_its_scratch_graph_with_the_last_that_shares_it(
    driver: Driver,
) -> None:
    graph = driver.graph(kernel(0))
    first = recording_of(driver, graph, ExecutableMeter(lambda: 10**9), ["a"])
    (part,) = first.parts.values()
    scratch = part.scratch.graph
    second = NodeRecording(driver, ExecutableMeter(lambda: 10**9), 1, first.parts, 2)
    del part
    first.close()
    assert scratch not in driver.destroyed
    second.close()
    assert scratch in driver.destroyed


def test_meter_learns_what_executables_take_once_there_are_enough(driver: Driver) -> None:
    memory = Memory()
    meter = ExecutableMeter(lambda: memory.free)
    guess = meter.bytes_of(1000)

    def make(taken: int) -> Callable[[], int]:
        def run() -> int:
            memory.free -= taken
            return 7

        return run

    assert meter.measured(make(2 << 20), 1000) == 7
    assert meter.bytes_of(1000) == guess
    for _ in range(4):
        meter.measured(make(2 << 20), 1000)
    assert meter.bytes_of(5000) == pytest.approx(5 * (2 << 20), rel=0.01)
    meter.freed(5000)
    meter.measured(make(0), 1000)  # the driver reuses what was given back
    assert meter.bytes_of(5000) == pytest.approx(5 * (2 << 20), rel=0.01)


class Forks:
    """The capture of stream 1, with what each other stream of the process holds of it."""

    def __init__(self, driver: Driver, graph: int, last: dict[int, list[int]]) -> None:
        self._driver, self._graph, self._last = driver, graph, last

    def capturing(self, streams: Sequence[int]) -> list[int]:
        return [stream for stream in streams if stream in self._last]

    def capture_of(self, stream: int) -> tuple[int, int, list[int]] | None:
        return (1, self._graph, self._last[stream]) if stream in self._last else None

    def nodes(self, graph: int) -> list[int]:
        return self._driver.nodes(graph)

    def edges(self, graph: int) -> Edges:
        return self._driver.edges(graph)


def test_streams_that_hold_unjoined_work_are_named_and_joined_ones_are_not(driver: Driver) -> None:
    graph = driver.graph(*(kernel(i) for i in range(4)), edges=[(0, 1), (1, 3), (0, 2)])
    a, joined, loose, end = driver.nodes(graph)
    forks = {1: [end], 2: [loose], 3: [joined]}

    def unjoined(forks: dict[int, list[int]]) -> list[int]:
        handed_out = itertools.cycle((1, 2, 3))
        streams = SideStreams(
            Forks(driver, graph, forks), lambda priority: next(handed_out), lambda stream: stream
        )
        return streams.unjoined(1, (1, graph, [end]))

    assert unjoined(forks) == [2]
    assert unjoined({1: [end]}) == []
    assert unjoined({1: [end], 3: [a]}) == [3], "a fork without work, when no other is found"
