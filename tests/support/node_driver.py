"""A ``NodeRuntime`` that exists only here, whose graphs are lists of nodes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import attrs

from devgraph.api.torchlike.node_calls import Edges, Read, Update
from devgraph.api.torchlike.recording import RegionPattern

__all__ = ["Driver", "Node", "kernel", "pattern_of"]


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


def pattern_of(driver: Driver, graph: int, *spans: tuple[str, int, int]) -> RegionPattern:
    nodes = driver.nodes(graph)
    return RegionPattern(driver, graph, [(name, nodes[a:b]) for name, a, b in spans])
