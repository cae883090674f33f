"""Recordings: the parameters of a graph's region nodes for one key."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple, NoReturn

import attrs

from devgraph.api.errors import UpdateError, UpdateTopologyError, counted
from devgraph.api.executable import Executable, Recording
from devgraph.api.torchlike.node_calls import (
    EMPTY,
    UPDATABLE,
    Edges,
    NodeRuntime,
    Read,
    RuntimeCallError,
    Update,
)

logger = logging.getLogger(__name__)

_HOST_BYTES_PER_NODE = 2048
"""Host memory that the driver uses per recorded node (docs/benchmarks.md)."""

_EXECUTABLE_BYTES = 104 * 1024
"""Device memory of an executable without its nodes (101 to 109 KiB in graphs of three models)."""

_DEVICE_BYTES_PER_NODE = 3100
"""Device memory per node of an executable: 3020, 3080 and 3270 bytes in decode graphs of three
models, and 2700 in graphs of small elementwise kernels (one H200). It cannot be measured at run
time: instantiation also loads kernels, and reuses memory of earlier executables."""


def executable_bytes(nodes: int) -> int:
    """Return the estimated device memory of an executable with ``nodes`` nodes."""
    return _EXECUTABLE_BYTES + nodes * _DEVICE_BYTES_PER_NODE


def free_executable(runtime: NodeRuntime, executable: int) -> None:
    """Free an executable, even if a launch of it is in flight."""
    try:
        runtime.destroy_executable(executable)
    except RuntimeCallError as error:
        logger.warning("an executable was not freed: %s", error)


class RawGraph:
    """The owner of a driver's graph: the captured graph, or the regions of a recording."""

    def __init__(self, runtime: NodeRuntime, graph: int) -> None:
        self._runtime = runtime
        self.graph = graph

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self._runtime.destroy(self.graph)


class _Node(NamedTuple):
    node: int
    kind: str
    fixed: Any  # properties that an update of an executable cannot change


@attrs.frozen
class _Region:
    name: str
    nodes: tuple[_Node, ...]
    edges: frozenset[tuple[int, int, Hashable]]  # edges between nodes of the region, by position


class RegionPattern:
    """The nodes and edges of a captured graph's regions. Every recording must match them."""

    def __init__(
        self, runtime: NodeRuntime, graph: int, regions: Sequence[tuple[str, Sequence[int]]]
    ) -> None:
        self._runtime = runtime
        self._checked_edges: object = None
        inner = _inner(runtime.edges(graph), [nodes for _, nodes in regions])
        self.regions = [
            _Region(name, tuple(self._describe(name, node) for node in nodes), edges)
            for (name, nodes), edges in zip(regions, inner, strict=True)
        ]

    def match(self, graph: int, bounds: Sequence[int]) -> list[Update]:
        """Pair the nodes of ``graph`` with the nodes of the pattern; return the new parameters.

        ``bounds`` lists the number of nodes after each region.
        """
        nodes = self._runtime.nodes(graph)
        spans, start = [], 0
        for number, (region, stop) in enumerate(zip(self.regions, bounds, strict=True)):
            spans.append(nodes[start:stop])
            if stop - start != len(region.nodes):
                raise UpdateTopologyError(
                    f"region {region.name} (number {number}) needs "
                    f"{counted(stop - start, 'node')} for these host arguments but had "
                    f"{len(region.nodes)} at capture. Reduce the argument to values that run the "
                    f"same kernels, or use dg.capture with policy='full', which captures a copy "
                    f"for the other topology."
                )
            start = stop
        self._check_edges(graph, nodes, spans)
        read = self._runtime.reader()
        updates: list[Update] = []
        for number, span in enumerate(spans):
            self._pair(number, span, read, updates)
        return updates

    def _pair(self, number: int, span: Sequence[int], read: Read, updates: list[Update]) -> None:
        region = self.regions[number]
        for (node, kind, fixed), source in zip(region.nodes, span, strict=True):
            if kind == EMPTY:
                if self._runtime.kind(source) != EMPTY:
                    self._refuse_shape(number, span)
                continue
            reading = read(kind, fixed, source)
            if reading is None:
                self._refuse_shape(number, span)
            params, exact, host = reading
            if host:
                raise UpdateError(
                    f"region {region.name} copies from or to host memory. The copy would run at "
                    f"every replay, when that memory may have been freed or reused. Pass the "
                    f"values as host arguments, or copy them into a device tensor before the step."
                )
            updates.append(Update(node, kind, params, source, exact))

    def _check_edges(
        self, graph: int, nodes: Sequence[int], spans: Sequence[Sequence[int]]
    ) -> None:
        """Raise UpdateTopologyError if the edges of a region differ from the pattern."""
        position_of = dict(zip(nodes, range(len(nodes)), strict=True)).__getitem__
        sources, targets, kinds = edges = self._runtime.edges(graph)
        # Captures of the same regions usually list nodes and edges in the same order. If so, all
        # edges equal the last checked edges.
        positions = list(map(position_of, sources)), list(map(position_of, targets)), kinds
        if positions == self._checked_edges:
            return
        for number, inner in enumerate(_inner(edges, spans)):
            if inner != self.regions[number].edges:
                self._refuse_shape(number, spans[number])
        self._checked_edges = positions

    def _refuse_shape(self, number: int, span: Sequence[int]) -> NoReturn:
        region = self.regions[number]
        raise UpdateTopologyError(
            f"region {region.name} (number {number}) needs different kinds of nodes or a "
            f"different order for these host arguments than at capture "
            f"({', '.join(map(self._runtime.kind, span))}, was "
            f"{', '.join(node.kind for node in region.nodes)})."
        )

    def _describe(self, name: str, node: int) -> _Node:
        runtime = self._runtime
        kind = runtime.kind(node)
        if kind == EMPTY:
            return _Node(node, kind, None)
        if kind not in UPDATABLE:
            raise UpdateError(
                f"region {name} contains a {kind} node, which cannot be updated; capture with "
                f"policy='breakable', or move the call that adds this node out of the region."
            )
        return _Node(node, kind, runtime.fixed(kind, node, runtime.params(kind, node)))


def _inner(
    edges: Edges, spans: Sequence[Sequence[int]]
) -> list[frozenset[tuple[int, int, Hashable]]]:
    """Return the edges within each span, with nodes as positions in the span."""
    place = {
        node: (region, position)
        for region, span in enumerate(spans)
        for position, node in enumerate(span)
    }
    inner: list[list[tuple[int, int, Hashable]]] = [[] for _ in spans]
    for source, target, kind in zip(*edges, strict=True):
        tail, head = place.get(source), place.get(target)
        if tail is not None and head is not None and tail[0] == head[0]:
            inner[tail[0]].append((tail[1], head[1], kind))
    return list(map(frozenset, inner))


class NodeRecording(Recording):
    """All region parameters of one graph for one key.

    At the first uses of the key, the parameters are written into the graph's own executable, if
    this executable accepts them. Later uses launch a separate executable (``build``), which costs
    memory but needs no update.
    """

    def __init__(
        self,
        runtime: NodeRuntime,
        nodes: int,
        updates: Sequence[Update],
        scratch: RawGraph,
        number: int,
    ) -> None:
        self.number = number
        self._runtime = runtime
        self.executable_bytes = executable_bytes(nodes)
        """Device memory of a separate executable in bytes."""
        self.updates = updates
        self._scratch: RawGraph | None = scratch
        self.fits_own = all(update.exact for update in updates)
        """Whether the graph's own executable accepts the parameters."""
        self.uses = 0
        """Number of uses since the recording last lost its executable."""
        self.executable = 0
        self.direct: Executable | None = None
        """Launch target of the separate executable, or None if there is none."""

    @property
    def bytes(self) -> int:
        own = self.executable_bytes if self.executable else 0
        return own + _HOST_BYTES_PER_NODE * len(self.updates)

    def build(self, graph: int) -> None:
        """Create a separate executable from the captured graph."""
        self.shrink()  # frees an executable that an interrupt left
        runtime, updates = self._runtime, self.updates
        changed = RawGraph(runtime, runtime.clone(graph, updates)) if updates else None
        self.executable = runtime.instantiate(changed.graph if changed else graph)

    def shrink(self) -> None:
        executable, self.executable = self.executable, 0
        self.direct = None
        self.uses = 0
        if executable:
            free_executable(self._runtime, executable)

    def close(self) -> None:
        self.shrink()
        self.updates, self._scratch = (), None
