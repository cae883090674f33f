"""What the graph layer did, by mode: the numbers behind ``stats()``."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

from devgraph.api.capture import Captured
from devgraph.api.graph import DeviceGraph
from devgraph.integrations.engine.memory import GraphMemory


class EagerReason:
    """Why a call ran without a graph; the keys of ``stats()["modes"][mode]["eager"]``."""

    NO_CONTEXT = "no_forward_context"
    """Outside the engine's step, for example an encoder."""
    MODE_NONE = "mode_none"
    """The engine dispatched no graph: warm-up, profiling, or a batch that none fits."""
    OTHER_MODE = "other_mode"
    """The engine dispatched another mode, whose wrapper takes over inside or outside this one."""
    INPUT_MOVED = "input_moved"
    """An input lies at another address than at capture: a replay would read the old one."""
    TOO_LARGE = "over_largest_size"
    """The batch has more tokens than the largest captured size."""
    NO_MATCH = "no_matching_graph"
    """No captured size fits the batch's requests and tokens."""
    NOT_CAPTURED = "not_captured_yet"
    """The engine has not captured yet."""


class ModeCount:
    """Counters of one mode; plain attributes, because the hot path adds to them."""

    __slots__ = ("_graphs", "captures", "eager", "replays", "seconds")

    def __init__(self) -> None:
        self.captures = 0
        self.replays = 0
        self.seconds = 0.0
        self.eager: Counter[str] = Counter()
        self._graphs: weakref.WeakSet[Any] = weakref.WeakSet()

    def captured(self, graph: DeviceGraph | Captured, seconds: float) -> None:
        """Count one capture and follow its graph for as long as it lives."""
        self.captures += 1
        self.seconds += seconds
        self._graphs.add(graph)

    def as_dict(self) -> dict[str, Any]:
        """Return the counters; ``graphs``, ``segments``, ``bytes`` and ``updates``, which is what
        new keys of regions took, are those of live graphs."""
        updates: Counter[str] = Counter()
        for graph in self._graphs:
            updates.update(getattr(graph, "stats", dict)())
        infos = [info for graph in self._graphs if (info := graph.info()).state == "ready"]
        return {
            "captures": self.captures,
            "replays": self.replays,
            "eager": dict(self.eager),
            "updates": dict(updates),
            "graphs": len(infos),
            **{n: sum(getattr(i, n) for i in infos) for n in ("segments", "regions", "bytes")},
            "capture_seconds": self.seconds,
        }


class Ledger:
    """What the graph layer of an engine did: its memory, and the counters of the engine's modes.

    Args:
        memory: the layer's graph memory.
        modes: names of the modes that the engine has.
    """

    def __init__(self, memory: GraphMemory, *modes: str) -> None:
        self._memory = memory
        self._modes = {name: ModeCount() for name in modes}

    def of(self, mode: str) -> ModeCount:
        """Return the counters of ``mode``."""
        return self._modes[mode]

    def as_dict(self) -> dict[str, Any]:
        """Return backend, counters by mode and the bytes of graph memory."""
        backend = self._memory.made
        return {
            "backend": None if backend is None else backend.name,
            "modes": {name: count.as_dict() for name, count in self._modes.items()},
            "pool_bytes": self._memory.bytes,
        }
