"""Recordings: the parameters of a graph's region nodes for one key, paired with the graph's own."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple, NoReturn

import attrs

from devgraph.api.errors import UpdateError, UpdateTopologyError
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
"""Host memory that the driver keeps for a recorded node (docs/benchmarks.md)."""

_EXECUTABLE_BYTES = 104 * 1024
"""Device memory of an executable, however few nodes it has (101 to 109 KiB in segments of three
models) ..."""

_DEVICE_BYTES_PER_NODE = 3100
"""... and of each node: 3020, 3080 and 3270 bytes in decode graphs of three models, and 2700 in
small elementwise kernels (one H200, docs/costs.md). What the driver reports free does not tell it:
making an executable also loads kernels, and takes what earlier ones left."""


def executable_bytes(nodes: int) -> int:
    """Return what an executable of ``nodes`` nodes takes."""
    return _EXECUTABLE_BYTES + nodes * _DEVICE_BYTES_PER_NODE


def free_executable(runtime: NodeRuntime, executable: int) -> None:
    """Free an executable; safe while it is in flight."""
    try:
        runtime.destroy_executable(executable)
    except RuntimeCallError as error:
        logger.warning("an executable was not freed: %s", error)


class RawGraph:
    """A graph of the driver that lives as long as this object: what was captured, or regions that
    were captured again, of which recordings read their parameters."""

    def __init__(self, runtime: NodeRuntime, graph: int) -> None:
        self._runtime = runtime
        self.graph = graph

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self._runtime.destroy(self.graph)


class _Node(NamedTuple):
    """One node of the captured graph, with what an executable's node keeps for ever."""

    node: int
    kind: str
    fixed: Any


@attrs.frozen
class _Region:
    name: str
    nodes: tuple[_Node, ...]
    edges: frozenset[tuple[int, int, Hashable]]
    """Between its nodes, by position."""


class RegionPattern:
    """What the regions of a captured graph are made of: the pattern of every recording.

    Args:
        graph: the captured graph.
        regions: name and nodes of each region, in capture order.

    Raises:
        UpdateError: a region holds a kind of node that cannot be updated.
    """

    def __init__(
        self, runtime: NodeRuntime, graph: int, regions: Sequence[tuple[str, Sequence[int]]]
    ) -> None:
        self._runtime = runtime
        self._right: object = None
        inner = _inner(runtime.edges(graph), [nodes for _, nodes in regions])
        self.regions = [
            _Region(name, tuple(self._describe(name, node) for node in nodes), edges)
            for (name, nodes), edges in zip(regions, inner, strict=True)
        ]

    def match(self, graph: int, bounds: Sequence[int]) -> list[Update]:
        """Pair the nodes of ``graph``, into which the regions were captured again, with those of
        the pattern; read their parameters.

        Args:
            bounds: for each region, how many nodes ``graph`` had after it.

        Raises:
            UpdateTopologyError: another number, kind or order of nodes.
            UpdateError: a node uses host memory.
        """
        nodes = self._runtime.nodes(graph)
        spans, start = [], 0
        for number, (known, stop) in enumerate(zip(self.regions, bounds, strict=True)):
            spans.append(nodes[start:stop])
            if stop - start != len(known.nodes):
                raise UpdateTopologyError(
                    f"region {known.name} (number {number}) needs {stop - start} nodes for these "
                    f"host arguments and had {len(known.nodes)} at capture. Reduce the argument "
                    f"to values that run the same kernels, or capture with policy='full' through "
                    f"dg.capture, which makes a copy for the other topology."
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
        for known, source in zip(region.nodes, span, strict=True):
            node, kind, fixed = known
            if kind == EMPTY:
                if self._runtime.kind(source) != EMPTY:
                    self._refuse_shape(number, span)
                continue
            found = read(kind, fixed, source)
            if found is None:
                self._refuse_shape(number, span)
            params, exact, host = found
            if host:
                raise UpdateError(
                    f"region {region.name} copies from or to host memory. The copy would run at "
                    f"every replay, long after the recording that owns that memory. Pass the "
                    f"values as host arguments, or copy them into a device tensor before the step."
                )
            updates.append(Update(node, kind, params, source, exact))

    def _check_edges(
        self, graph: int, nodes: Sequence[int], spans: Sequence[Sequence[int]]
    ) -> None:
        """Raise UpdateTopologyError where a region has other edges."""
        position_of = dict(zip(nodes, range(len(nodes)), strict=True)).__getitem__
        sources, targets, kinds = edges = self._runtime.edges(graph)
        # Two captures of the same regions list nodes and edges alike: what was found right once
        # need not be taken apart again.
        whole = list(map(position_of, sources)), list(map(position_of, targets)), kinds
        if whole == self._right:
            return
        for number, inner in enumerate(_inner(edges, spans)):
            if inner != self.regions[number].edges:
                self._refuse_shape(number, spans[number])
        self._right = whole

    def _refuse_shape(self, number: int, span: Sequence[int]) -> NoReturn:
        known = self.regions[number]
        raise UpdateTopologyError(
            f"region {known.name} (number {number}) needs other kinds of nodes or another "
            f"order for these host arguments than at capture "
            f"({', '.join(map(self._runtime.kind, span))}, was "
            f"{', '.join(node.kind for node in known.nodes)})."
        )

    def _describe(self, name: str, node: int) -> _Node:
        runtime = self._runtime
        kind = runtime.kind(node)
        if kind == EMPTY:
            return _Node(node, kind, None)
        if kind not in UPDATABLE:
            raise UpdateError(
                f"region {name} holds a {kind} node, which cannot be updated; capture it with "
                f"policy='breakable', or take that call out of the region."
            )
        return _Node(node, kind, runtime.fixed(kind, node, runtime.params(kind, node)))


def _inner(
    edges: Edges, spans: Sequence[Sequence[int]]
) -> list[frozenset[tuple[int, int, Hashable]]]:
    """Return the edges between the nodes of each span, by position."""
    place = {
        node: (region, position)
        for region, span in enumerate(spans)
        for position, node in enumerate(span)
    }
    inner: list[list[tuple[int, int, Hashable]]] = [[] for _ in spans]
    for source, target, what in zip(*edges, strict=True):
        tail, head = place.get(source), place.get(target)
        if tail is not None and head is not None and tail[0] == head[0]:
            inner[tail[0]].append((tail[1], head[1], what))
    return list(map(frozenset, inner))


class NodeRecording(Recording):
    """All region parameters of one graph for one key.

    At first they are written into the graph's own executable when the key is used. A key that is
    used again gets an executable of its own (``build``), which costs memory and no update.

    Args:
        nodes: number of nodes in the whole graph.
        scratch: owns the memory that ``updates`` point to.
        number: which recording of the graph this is.
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
        """What an executable of its own would take."""
        self.updates = updates
        self._scratch: RawGraph | None = scratch
        self.exact = all(update.exact for update in updates)
        """Whether the graph's own executable can take the parameters."""
        self.uses = 0
        """Times that it was written or launched since it last lost its executable."""
        self.executable = 0
        self.direct: Executable | None = None
        """What launches the executable of its own, if there is one."""

    @property
    def bytes(self) -> int:
        own = self.executable_bytes if self.executable else 0
        return own + _HOST_BYTES_PER_NODE * len(self.updates)

    def build(self, graph: int) -> None:
        """Make an executable of its own from the captured graph."""
        self.shrink()  # what an interrupt left
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
