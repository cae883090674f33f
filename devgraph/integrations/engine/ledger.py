"""Counters of an engine's graph layer by mode, and their publication."""

from __future__ import annotations

import atexit
import json
import logging
import os
import tempfile
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from devgraph.api.capture import Captured
from devgraph.api.environment import STATS_VARIABLE
from devgraph.api.errors import counted, format_bytes
from devgraph.api.graph import DeviceGraph
from devgraph.integrations.engine.memory import GraphMemory
from devgraph.runners.report import Page

logger = logging.getLogger(__name__)

PERIOD_S = 10.0
"""Maximum age in seconds of the file with the counters while graphs replay.

Reading the counters of a few thousand segments blocks the interpreter, and therefore all steps, for
about 10 ms.
"""

_COUNTERS = (
    ("captures", "captures_total", "counter", "Graphs captured."),
    ("replays", "graph_steps_total", "counter", "Replays."),
    ("capture_seconds", "capture_seconds_total", "counter", "Time spent capturing."),
    ("graphs", "graphs", "gauge", "Graphs that can be replayed."),
    ("segments", "segments", "gauge", "Segments of these graphs."),
    ("bytes", "graph_bytes", "gauge", "Device memory of the graphs."),
)


class EagerReason:
    """Reasons for calls without a graph: the keys of ``stats()["modes"][mode]["eager"]``."""

    NO_CONTEXT = "no_forward_context"
    """The call is outside the engine's step, for example in an encoder."""
    MODE_NONE = "mode_none"
    """The engine dispatched no graph: warm-up, profiling, or a batch that fits no graph."""
    OTHER_MODE = "other_mode"
    """The engine dispatched a mode that another wrapper handles."""
    INPUT_MOVED = "input_moved"
    """An input has moved since the capture, so a replay would read the old address."""
    TOO_LARGE = "over_largest_size"
    """The batch has more tokens than the largest captured size."""
    NO_MATCH = "no_matching_graph"
    """No captured size fits the numbers of requests and tokens in the batch."""
    VERIFY_FAILED = "verify_failed"
    """The check at start dropped the graph, because its results differ from eager."""
    NOT_CAPTURED = "not_captured_yet"
    """The engine has not captured its graphs yet."""


class ModeCount:
    """Counters of one mode, as plain attributes to keep the hot path fast."""

    __slots__ = ("_graphs", "_lock", "captures", "eager", "replays", "seconds")

    def __init__(self) -> None:
        self.captures = 0
        self.replays = 0
        self.seconds = 0.0
        self.eager: Counter[str] = Counter()
        self._graphs: weakref.WeakSet[Any] = weakref.WeakSet()
        self._lock = threading.Lock()

    def captured(self, graph: DeviceGraph | Captured, seconds: float) -> None:
        """Count a capture, and keep a weak reference to its graph."""
        self.captures += 1
        self.seconds += seconds
        with self._lock:
            self._graphs.add(graph)

    def as_dict(self) -> dict[str, Any]:
        """Return the counters.

        ``graphs``, ``segments``, ``bytes`` and ``updates`` cover only live graphs. ``updates``
        contains the counters of ``Captured.stats``.
        """
        with self._lock:
            graphs = list(self._graphs)
        updates: Counter[str] = Counter()
        for graph in graphs:
            updates.update(getattr(graph, "stats", dict)())
        infos = [info for graph in graphs if (info := graph.info()).state == "ready"]
        return {
            "captures": self.captures,
            "replays": self.replays,
            "eager": dict(self.eager),
            "updates": dict(updates),
            "graphs": len(infos),
            **{n: sum(getattr(i, n) for i in infos) for n in ("segments", "regions", "bytes")},
            "capture_seconds": self.seconds,
        }


def totals(
    memory: GraphMemory, counts: Mapping[str, ModeCount], checks: Mapping[str, int]
) -> dict[str, Any]:
    """Return the backend's name, counters by mode, bytes of graph memory, and ``checks``."""
    return {
        **checks,
        "backend": None if memory.backend_in_use is None else memory.backend_in_use.name,
        "modes": {name: count.as_dict() for name, count in counts.items()},
        "pool_bytes": memory.bytes,
    }


class Publisher:
    """A logger of the counters after captures, which can also write them to a file.

    The file ``DEVGRAPH_STATS_FILE`` is replaced atomically after captures, at exit, and every ten
    seconds while counters change, so that it survives a killed process. Its format is Prometheus
    text if the name ends in ".prom", otherwise JSON. "{pid}" in the name stands for the process ID.
    """

    def __init__(self, engine: str, stats: Callable[[], dict[str, Any]]) -> None:
        self._engine = engine
        self._stats = stats
        self._written: dict[str, Any] | None = None
        self._started = False
        name = os.environ.get(STATS_VARIABLE)
        self._path = Path(name.replace("{pid}", str(os.getpid()))) if name else None

    def captured(self) -> None:
        """Log the counters after captures, and write the file."""
        logger.info("%s", summary(self._engine, self._stats()))
        if self._path is None:
            return
        self.write()
        if not self._started:
            self._started = True
            threading.Thread(target=self._keep, name="devgraph-stats", daemon=True).start()
            atexit.register(self.write)

    def _keep(self) -> None:
        pause = threading.Event()
        while not pause.wait(PERIOD_S):
            self.write()

    def write(self) -> None:
        """Write the file if a counter has changed. On failure, log a warning once."""
        stats = self._stats()
        if self._path is None or stats == self._written:
            return
        text = (
            prometheus(self._engine, stats)
            if self._path.suffix == ".prom"
            else json.dumps({"engine": self._engine, "pid": os.getpid(), **stats}, indent=1) + "\n"
        )
        try:
            _replace(self._path, text)
        except OSError as error:
            logger.warning("%s=%s cannot be written: %s", STATS_VARIABLE, self._path, error)
            self._path = None
        self._written = stats


def _replace(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as own:
        temporary = Path(own) / path.name
        temporary.write_text(text)
        temporary.chmod(0o644)  # Metrics collectors may run as another user.
        temporary.replace(path)


def summary(engine: str, stats: Mapping[str, Any]) -> str:
    """Return a one-line summary of ``stats``."""
    modes = ", ".join(
        f"{name} {counted(count['graphs'], 'graph')} ({counted(count['segments'], 'segment')}, "
        f"{counted(count['replays'], 'replay')}, {count['capture_seconds']:.1f} s)"
        for name, count in stats["modes"].items()
        if count["captures"]
    )
    memory = format_bytes(stats["pool_bytes"])
    return f"devgraph in {engine} on {stats['backend']}: {modes or 'no graphs'}; {memory} of memory"


def prometheus(engine: str, stats: Mapping[str, Any]) -> str:
    """Return ``stats`` as Prometheus text with the labels engine, backend and mode."""
    page = Page({"engine": engine, "backend": stats["backend"] or "none"})
    for key, name, kind, text in _COUNTERS:
        page.metric(name, kind, text)
        for mode, count in stats["modes"].items():
            page.sample(name, count[key], mode=mode)
    for key, name, text in (
        ("eager", "eager_steps_total", "Calls outside a graph, by reason."),
        ("updates", "updates_total", "Replays of graphs with regions, by kind of update."),
    ):
        page.metric(name, "counter", text)
        for mode, count in stats["modes"].items():
            for reason, calls in sorted(count[key].items()):
                page.sample(name, calls, mode=mode, reason=reason)
    for name, text in (
        ("checks", "Replays compared with eager."),
        ("failed_checks", "Graphs that the check at start dropped."),
    ):
        page.metric(f"{name}_total", "counter", text, stats[name])
    page.metric("pool_bytes", "gauge", "Device memory of the graph pools.", stats["pool_bytes"])
    return page.text()
