"""Recordings, and what executables take, over a driver that exists only here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from devgraph.api.torchlike.recording import Executables, NodeRecording, RawGraph, RegionUpdate
from tests.support.node_driver import Driver, kernel, pattern_of


@pytest.fixture
def driver() -> Driver:
    return Driver()


class Memory:
    """Free device memory that a test moves."""

    def __init__(self) -> None:
        self.free = 10**9


def recording_of(
    driver: Driver, graph: int, executables: Executables, values: Sequence[Any]
) -> NodeRecording:
    pattern = pattern_of(driver, graph, ("attend", 0, len(driver.nodes(graph))))
    scratch = driver.graph(*(kernel(v) for v in values))
    (updates,) = pattern.match([0], scratch, [len(values)])
    part = RegionUpdate((), updates, RawGraph(driver, scratch))
    nodes = len(driver.nodes(graph))
    return NodeRecording(executables, nodes, {None: part}, 1)


def test_recording_is_written_or_built_and_charges_for_what_it_holds(driver: Driver) -> None:
    graph = driver.graph(kernel(0), kernel(1))
    own = driver.instantiate(graph)
    recording = recording_of(driver, graph, Executables(driver, lambda: 10**9), ["a", "b"])
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
    first = recording_of(driver, graph, Executables(driver, lambda: 10**9), ["a"])
    (part,) = first.parts.values()
    scratch = part.scratch.graph
    second = NodeRecording(Executables(driver, lambda: 10**9), 1, first.parts, 2)
    del part
    first.close()
    assert scratch not in driver.destroyed
    second.close()
    assert scratch in driver.destroyed


def test_what_executables_take_is_learned_once_there_are_enough(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory()
    executables = Executables(driver, lambda: memory.free)
    guess = executables.bytes_of(1000)
    taken = 2 << 20

    def instantiate(graph: int) -> int:
        memory.free -= taken
        return 7

    monkeypatch.setattr(driver, "instantiate", instantiate)
    monkeypatch.setattr(driver, "destroy_executable", lambda executable: None)
    assert executables.make(1, 1000) == 7
    assert executables.bytes_of(1000) == guess
    for _ in range(4):
        executables.make(1, 1000)
    assert executables.bytes_of(5000) == pytest.approx(5 * (2 << 20), rel=0.01)
    executables.free(7, 5000)
    taken = 0
    executables.make(1, 1000)  # the driver reuses what was given back
    assert executables.bytes_of(5000) == pytest.approx(5 * (2 << 20), rel=0.01)
