"""Recordings, and what executables take, over a driver that exists only here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from devgraph.api.torchlike.recording import NodeRecording, RawGraph
from tests.support.node_driver import Driver, kernel, pattern_of


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
