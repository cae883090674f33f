"""Captured steps of an engine; knows nothing of which engine it is."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from devgraph.api.backend import Backend
from devgraph.api.capture import Captured, capture
from devgraph.api.graph import DeviceGraph
from devgraph.api.marks.scopes import GraphScope
from devgraph.api.pool import Pool
from devgraph.api.session import Session, session
from devgraph.integrations.engine.ledger import ModeCount
from devgraph.integrations.engine.memory import weak
from devgraph.integrations.engine.outputs import tensors


class CapturedStep:
    """One captured step, where an engine keeps graphs of its own kind.

    Args:
        graph: what was captured.
        count: counts the replays.
        output: what the engine hands out after a replay.

    Attributes:
        launch: replays once on the current stream, for a caller that counts.
        inputs: the addresses of each input; None where they need no check, or no further one.
    """

    __slots__ = ("_count", "graph", "inputs", "launch", "output")

    def __init__(self, graph: DeviceGraph | Captured, count: ModeCount, output: Any = None) -> None:
        self.graph = graph
        self.launch: Callable[[], Any] = (
            graph.bound() if isinstance(graph, DeviceGraph) else graph.replay
        )
        self.output = output
        self.inputs: dict[Hashable, list[int]] | None = None
        self._count = count

    def replay(self) -> None:
        """Replay once on the current stream."""
        self._count.replays += 1
        self.launch()

    def reset(self) -> None:
        """Free the graph; its output must not be read any more."""
        self.output = None
        self.launch = self.graph.replay  # which says that it is closed
        self.graph.close()


def addresses(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[Hashable, list[int]]:
    """Return the addresses of the tensors in each argument that has some, by position or name."""
    named: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
    found = {name: [tensor.data_ptr() for tensor in tensors(arg)] for name, arg in named.items()}
    return {name: each for name, each in found.items() if each}


@contextmanager
def recorded(
    backend: Backend,
    pool: Pool,
    count: ModeCount,
    *,
    within: AbstractContextManager[Session] | None = None,
) -> Iterator[DeviceGraph]:
    """Capture the block into one graph, and count it.

    A block without device work gives a graph whose replay does nothing. On an exception nothing is
    left behind.

    Args:
        within: the session that records it; one of its own by default.
    """
    started = time.perf_counter()
    graph = backend.make_graph(pool)
    graph.names_side_streams = False  # an engine captures a thousand graphs, of code that it knows
    scope = GraphScope(graph)
    with within or session(pool) as held, held.recording(scope):
        held.begin(graph)
        yield graph
        held.end(allow_empty=True)
    count.captured(graph, time.perf_counter() - started)


def capture_under(
    policy: str,
    backend: Backend,
    pool: Pool,
    count: ModeCount,
    body: Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    warmup: int = 0,
) -> Captured:
    """Capture ``body`` as the policy does, with what its marks mean there; its result's memory is
    free for later captures.

    Args:
        warmup: eager runs before, beyond those of the engine.
    """
    started = time.perf_counter()

    def step(*args: Any, **kwargs: Any) -> Any:
        return weak(pool, body(*args, **kwargs))

    captured = capture(
        step, *args, kwargs=kwargs, policy=policy, backend=backend, warmup=warmup, pool=pool
    )
    count.captured(captured, time.perf_counter() - started)
    return captured
