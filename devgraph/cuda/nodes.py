"""Region nodes of a captured graph, and how the nodes of a new recording pair with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs

from devgraph.api.errors import UpdateError, UpdateTopologyError
from devgraph.cuda.runtime import Runtime, RuntimeCallError

__all__ = ["Template", "Update"]


@attrs.frozen
class _Shape:
    """The kinds of a region's nodes, and the edges between them by position."""

    kinds: tuple[int, ...]
    edges: frozenset[tuple[int, int, tuple[int, int, int]]]


@attrs.frozen
class _Node:
    """One node of the captured graph, with what an executable's node keeps for ever."""

    handle: Any
    kind: int
    fixed: Any
    """Of a kernel: function and launch attributes. Of a copy or fill: its geometry."""


@attrs.frozen
class _Region:
    name: str
    shape: _Shape
    nodes: tuple[_Node, ...]


@attrs.define
class Update:
    """New parameters for one node."""

    node: Any
    """The node of the captured graph."""
    kind: int
    params: Any
    """As the driver gave them; they point into the recording's own graph, which must live."""
    source: int
    """The node they were read from."""
    exact: bool
    """Whether an existing executable takes them; else only a new one does."""


class Template:
    """What the regions of a captured graph are made of: the pattern of every recording.

    Args:
        graph: the captured graph.
        regions: name and nodes of each region, in capture order.

    Raises:
        UpdateError: a region holds a kind of node that cannot be updated.
    """

    def __init__(
        self, runtime: Runtime, graph: int, regions: Sequence[tuple[str, Sequence[int]]]
    ) -> None:
        self._runtime = runtime
        self._kinds = runtime.driver.CUgraphNodeType
        self._kernel = int(self._kinds.CU_GRAPH_NODE_TYPE_KERNEL)
        self._memcpy = int(self._kinds.CU_GRAPH_NODE_TYPE_MEMCPY)
        self._memset = int(self._kinds.CU_GRAPH_NODE_TYPE_MEMSET)
        self._empty = int(self._kinds.CU_GRAPH_NODE_TYPE_EMPTY)
        self._getters = {
            self._kernel: runtime.driver.cuGraphKernelNodeGetParams,
            self._memcpy: runtime.driver.cuGraphMemcpyNodeGetParams,
            self._memset: runtime.driver.cuGraphMemsetNodeGetParams,
        }
        self._host_memory = runtime.driver.CUmemorytype.CU_MEMORYTYPE_HOST
        self._attributes = _attribute_readers(runtime.driver)
        self._context = runtime.drive("cuCtxGetCurrent")
        shapes = self._shapes(graph, [nodes for _, nodes in regions])
        self.regions = [
            _Region(name, shape, self._describe(name, shape, nodes))
            for (name, nodes), shape in zip(regions, shapes, strict=True)
        ]

    @property
    def node_count(self) -> int:
        """Number of nodes in all regions."""
        return sum(len(region.nodes) for region in self.regions)

    def match(
        self, picks: Sequence[int], graph: int, bounds: Sequence[int]
    ) -> list[tuple[Update, ...]]:
        """Pair the nodes of ``graph`` with those of the regions ``picks``; read their parameters.

        Args:
            picks: positions of the regions that were captured into ``graph``, in that order.
            bounds: for each of them, how many nodes ``graph`` had after it.

        Returns:
            the updates of each pick.

        Raises:
            UpdateTopologyError: another number, kind or order of nodes.
            UpdateError: a node uses host memory.
        """
        nodes = self._runtime.nodes(graph)
        spans, start = [], 0
        for pick, stop in zip(picks, bounds, strict=True):
            spans.append(nodes[start:stop])
            known = self.regions[pick]
            if stop - start != len(known.nodes):
                raise UpdateTopologyError(
                    f"region {known.name} (number {pick}) needs {stop - start} nodes for these "
                    f"host arguments and had {len(known.nodes)} at capture. Reduce the argument "
                    f"to values that run the same kernels, or capture with policy='full' through "
                    f"dg.capture, which makes a copy for the other topology."
                )
            start = stop
        shapes = self._shapes(graph, spans)
        for pick, shape in zip(picks, shapes, strict=True):
            if shape != self.regions[pick].shape:
                raise UpdateTopologyError(
                    f"region {self.regions[pick].name} (number {pick}) needs other kinds of nodes "
                    f"or another order for these host arguments than at capture "
                    f"({self._names(shape.kinds)}, was "
                    f"{self._names(self.regions[pick].shape.kinds)})."
                )
        return [
            tuple(
                self._pair(region.name, known, source)
                for known, source in zip(region.nodes, span, strict=True)
                if known.kind != self._empty
            )
            for region, span in ((self.regions[p], s) for p, s in zip(picks, spans, strict=True))
        ]

    def write(self, updates: Sequence[Update], executable: int) -> None:
        """Write parameters into an executable of the captured graph; seen by later launches.

        Raises:
            RuntimeCallError: the driver refused; the executable holds a part of them.
        """
        driver = self._runtime.driver
        target = driver.CUgraphExec(init_value=executable)
        set_kernel = driver.cuGraphExecKernelNodeSetParams
        set_copy = driver.cuGraphExecMemcpyNodeSetParams
        set_fill = driver.cuGraphExecMemsetNodeSetParams
        kernel, memcpy, context = self._kernel, self._memcpy, self._context
        # A thread that has called nothing but this has no context yet.
        self._runtime.drive("cuCtxPushCurrent", context)
        try:
            for update in updates:
                if update.kind == kernel:
                    (error,) = set_kernel(target, update.node, update.params)
                elif update.kind == memcpy:
                    (error,) = set_copy(target, update.node, update.params, context)
                else:
                    (error,) = set_fill(target, update.node, update.params, context)
                if error:
                    raise RuntimeCallError(
                        f"updating a {self._names([update.kind])} node failed "
                        f"({int(error)}: {error!s})",
                        int(error),
                    )
        finally:
            self._runtime.drive("cuCtxPopCurrent")

    def clone(self, graph: int, updates: Sequence[Update]) -> int:
        """Return a copy of the captured graph with new parameters; the caller owns it.

        Launch attributes (cluster size, cooperative) are copied as well, which an executable that
        exists cannot take.
        """
        runtime = self._runtime
        copy = runtime.clone(graph)
        runtime.drive("cuCtxPushCurrent", self._context)
        try:
            for update in updates:
                node = runtime.find_in_clone(update.node, copy)
                if update.kind == self._kernel:
                    runtime.drive("cuGraphKernelNodeCopyAttributes", node, update.source)
                    runtime.drive("cuGraphKernelNodeSetParams", node, update.params)
                elif update.kind == self._memcpy:
                    runtime.drive("cuGraphMemcpyNodeSetParams", node, update.params)
                else:
                    runtime.drive("cuGraphMemsetNodeSetParams", node, update.params)
        except BaseException:
            runtime.destroy(copy)
            raise
        finally:
            runtime.drive("cuCtxPopCurrent")
        return copy

    # Reading.

    def _shapes(self, graph: int, spans: Sequence[Sequence[int]]) -> list[_Shape]:
        place = {
            node: (region, position)
            for region, span in enumerate(spans)
            for position, node in enumerate(span)
        }
        inner: list[list[tuple[int, int, tuple[int, int, int]]]] = [[] for _ in spans]
        for source, target, kind in self._runtime.edges(graph):
            tail, head = place.get(source), place.get(target)
            if tail is not None and head is not None and tail[0] == head[0]:
                inner[tail[0]].append((tail[1], head[1], kind))
        get_type = self._runtime.driver.cuGraphNodeGetType
        return [
            _Shape(tuple(int(get_type(node)[1]) for node in span), frozenset(edges))
            for span, edges in zip(spans, inner, strict=True)
        ]

    def _params(self, kind: int, node: Any) -> Any:
        error, params = self._getters[kind](node)
        if error:
            raise RuntimeCallError(
                f"reading a {self._names([kind])} node failed ({int(error)}: {error!s})",
                int(error),
            )
        return params

    def _describe(self, name: str, shape: _Shape, nodes: Sequence[int]) -> tuple[_Node, ...]:
        described = []
        for kind, node in zip(shape.kinds, nodes, strict=True):
            handle = self._runtime.driver.CUgraphNode(init_value=node)
            if kind == self._empty:
                described.append(_Node(handle, kind, None))
                continue
            if kind not in self._getters:
                raise UpdateError(
                    f"region {name} holds a {self._names([kind])} node, which cannot be updated; "
                    f"capture it with policy='breakable', or take that call out of the region."
                )
            params = self._params(kind, node)
            described.append(_Node(handle, kind, self._fixed(kind, node, params)))
        return tuple(described)

    def _pair(self, name: str, known: _Node, source: int) -> Update:
        kind = known.kind
        params = self._params(kind, source)
        if kind == self._kernel:
            function, attributes = known.fixed
            # Launch attributes belong to the function, except where clusters or cooperation say
            # that the call chose them.
            plain = int(params.func) == function and not any(attributes[:-1])
            exact = plain or self._launch_attributes(source) == attributes
        else:
            if kind == self._memcpy and self._uses_host(params):
                raise UpdateError(
                    f"region {name} copies from or to host memory. The copy would run at every "
                    f"replay, long after the recording that owns that memory. Pass the values as "
                    f"host arguments, or copy them into a device tensor before the step."
                )
            exact = self._fixed(kind, source, params) == known.fixed and self._flat(kind, params)
        return Update(known.handle, kind, params, source, exact)

    def _fixed(self, kind: int, node: int, params: Any) -> Any:
        if kind == self._kernel:
            return int(params.func), self._launch_attributes(node)
        if kind == self._memcpy:
            return int(params.srcMemoryType), int(params.dstMemoryType)
        return params.elementSize, params.width, params.height, params.pitch

    def _flat(self, kind: int, params: Any) -> bool:
        """Whether an executable's node takes these: it copies one-dimensional memory only."""
        return kind != self._memcpy or (params.Height <= 1 and params.Depth <= 1)

    def _uses_host(self, params: Any) -> bool:
        return self._host_memory in (params.srcMemoryType, params.dstMemoryType)

    def _launch_attributes(self, node: int) -> tuple[Any, ...]:
        get = self._runtime.driver.cuGraphKernelNodeGetAttribute
        values = []
        for attribute, read in self._attributes:
            error, value = get(node, attribute)
            values.append(None if error else read(value))
        return tuple(values)

    def _names(self, kinds: Sequence[int]) -> str:
        return ", ".join(
            str(self._kinds(kind).name).removeprefix("CU_GRAPH_NODE_TYPE_").lower()
            for kind in kinds
        )


def _attribute_readers(driver: Any) -> list[tuple[Any, Any]]:
    """Return (attribute, how to read it); false values are the defaults, the priority is last."""
    known = driver.CUkernelNodeAttrID

    def size(dim: Any) -> tuple[int, int, int] | None:
        # Not set reads as zeros, one block per cluster is the same.
        extent = (int(dim.x), int(dim.y), int(dim.z))
        return None if max(extent) <= 1 else extent

    readers: list[tuple[str, Callable[[Any], Any]]] = [
        ("CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION", lambda value: size(value.clusterDim))
    ]
    if hasattr(known, "CU_LAUNCH_ATTRIBUTE_PREFERRED_CLUSTER_DIMENSION"):
        readers.append(
            (
                "CU_LAUNCH_ATTRIBUTE_PREFERRED_CLUSTER_DIMENSION",
                lambda value: size(value.preferredClusterDim),
            )
        )
    readers.append(("CU_LAUNCH_ATTRIBUTE_COOPERATIVE", lambda value: bool(value.cooperative)))
    readers.append(("CU_LAUNCH_ATTRIBUTE_PRIORITY", lambda value: int(value.priority)))
    return [(getattr(known, name), read) for name, read in readers]
