"""Side streams that a capture left unjoined, over a driver that exists only here."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from devgraph.api.torchlike.guards import SideStreams
from devgraph.api.torchlike.node_calls import Edges
from tests.support.node_driver import Driver, kernel


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


def test_streams_that_hold_unjoined_work_are_named_and_joined_ones_are_not() -> None:
    driver = Driver()
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
