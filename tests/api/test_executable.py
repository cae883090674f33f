"""What a graph launches, and how it is swapped."""

from __future__ import annotations

import pytest
import torch

import devgraph as dg
from devgraph.api.executable import Call, Executable, Finding
from devgraph.api.session import session


class Counting(Finding[dg.DeviceGraph]):
    """Finds nothing out but how often it was asked."""

    def __init__(self, graph: dg.DeviceGraph, then: Executable) -> None:
        super().__init__(graph)
        self.then = then
        self.error: BaseException | None = None
        self.asked = 0

    def find(self) -> Executable:
        self.asked += 1
        if self.error is not None:
            raise self.error
        return self.then


@pytest.fixture
def graph() -> dg.DeviceGraph:
    backend = dg.get_backend("cpu")
    x, graph = torch.ones(4), backend.make_graph()
    with backend.capture_context(graph):
        x + 1
    return graph


def test_replay_launches_what_was_put_to_use_last(graph: dg.DeviceGraph) -> None:
    launched: list[str] = []
    replay = graph.replay
    for name in ("first", "second"):
        graph.use(Call(lambda name=name: launched.append(name)))
        replay()
        graph.bound()()
    assert launched == ["first", "first", "second", "second"]


def test_finding_replaces_itself_once_and_voids_what_was_bound(graph: dg.DeviceGraph) -> None:
    launched: list[int] = []
    finding = Counting(graph, Call(lambda: launched.append(1)))
    graph.use(finding)
    epoch = graph.pool.epoch
    for _ in range(3):
        graph.replay()
    assert finding.asked == 1 and len(launched) == 2
    assert graph.pool.epoch > epoch


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
def test_finding_that_raises_stays_for_the_next_launch(
    graph: dg.DeviceGraph, error: BaseException
) -> None:
    finding = Counting(graph, Call(lambda: None))
    finding.error = error
    graph.use(finding)
    with pytest.raises(type(error)):
        graph.replay()
    finding.error = None
    graph.replay()
    graph.replay()
    assert finding.asked == 2


@pytest.mark.parametrize("leave", ["expire", "reset", "close"])
def test_graph_that_is_not_ready_launches_nothing(graph: dg.DeviceGraph, leave: str) -> None:
    launched: list[int] = []
    graph.use(Call(lambda: launched.append(1)))
    epoch = graph.pool.epoch
    getattr(graph, leave)()
    with pytest.raises(dg.StateError):
        graph.replay()
    assert not launched
    assert graph.pool.epoch > epoch


def test_graph_without_work_replays_nothing() -> None:
    graph = dg.get_backend("cpu").make_graph()
    with session(graph.pool) as recording:
        recording.begin(graph)
        recording.end(allow_empty=True)
    graph.replay()
    graph.bound()()
