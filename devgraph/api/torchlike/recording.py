"""Recordings: the parameters of a graph's region nodes for one key."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence

from devgraph.api.executable import Executable, Recording
from devgraph.api.torchlike.node_calls import NodeRuntime, RuntimeCallError, Update

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
    were captured again, of which recordings read their parameters.

    Args:
        graph: the driver's handle.
    """

    def __init__(self, runtime: NodeRuntime, graph: int) -> None:
        self._runtime = runtime
        self.graph = graph

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self._runtime.destroy(self.graph)


class NodeRecording(Recording):
    """All region parameters of one graph for one key.

    At first they are written into the graph's own executable when the key is used. A key that is
    used again gets an executable of its own (``build``), which costs memory and no update.

    Args:
        nodes: number of nodes in the whole graph.
        updates: the parameters.
        scratch: owns the memory that they point to.
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
        self._nodes = nodes
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

    @property
    def executable_bytes(self) -> int:
        """What an executable of its own would take."""
        return executable_bytes(self._nodes)

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
