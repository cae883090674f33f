"""Captured steps and their outputs, for any engine."""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from devgraph.api import trees
from devgraph.api.backend import Backend, new_graph
from devgraph.api.capture import Captured, capture
from devgraph.api.errors import CapabilityError
from devgraph.api.graph import DeviceGraph
from devgraph.api.marks.scopes import GraphScope
from devgraph.api.pool import Pool
from devgraph.api.results import ResultCheck
from devgraph.api.session import Session, session
from devgraph.integrations.engine.ledger import ModeCount


class CapturedStep:
    """A captured step in target of a graph of the engine."""

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
        self._count.replays += 1
        self.launch()

    def reset(self) -> None:
        """Free the graph. The output must not be read afterwards."""
        self.output = None
        self.launch = self.graph.replay  # raises StateError
        self.graph.close()


def addresses(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[Hashable, list[int]]:
    """Return the addresses of tensors in each argument, by position or name of the argument."""
    named: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
    found = {name: [tensor.data_ptr() for tensor in tensors(arg)] for name, arg in named.items()}
    return {name: each for name, each in found.items() if each}


engine_session = functools.partial(session, may_autocast=False)
"""``session`` for engines, which run without autocast.

Compiled functions check whether autocast caches casts. If this setting changed after the warm-up,
the compiler would run again in the capture and fail.
"""


@contextmanager
def recorded(
    backend: Backend,
    pool: Pool,
    count: ModeCount,
    *,
    within: AbstractContextManager[Session] | None = None,
) -> Iterator[DeviceGraph]:
    """Capture the block into one graph, and count the capture.

    If the block contains no device work, a replay does nothing. If the block raises, the graph is
    discarded.
    """
    started = time.perf_counter()
    graph = new_graph(backend, pool)
    scope = GraphScope(graph)
    with within or engine_session(pool) as held, held.recording(scope):
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
    """Capture ``body`` under a policy. Later captures may reuse the memory of the result.

    ``warmup`` eager runs precede the capture, in addition to warm-up runs by the engine.
    """
    started = time.perf_counter()

    def step(*args: Any, **kwargs: Any) -> Any:
        return weak(pool, body(*args, **kwargs))

    captured = capture(
        step, *args, kwargs=kwargs, policy=policy, backend=backend, warmup=warmup, pool=pool
    )
    count.captured(captured, time.perf_counter() - started)
    return captured


def mapped(change: Callable[[Tensor], Any], output: Any) -> Any:
    """Return a copy of ``output`` with ``change`` applied to each tensor.

    Containers of ``trees.children_of`` and objects with a dictionary ``tensors`` are copied.
    """

    def leaf(node: Any) -> Any:
        if isinstance(node, Tensor):
            return change(node)
        if isinstance(getattr(node, "tensors", None), dict):
            node = copy.copy(node)
            node.tensors = mapped(change, node.tensors)
        return node

    return trees.mapped(leaf, output)


def tensors(output: Any) -> list[Tensor]:
    """Return the tensors of ``output`` in the order of ``mapped``."""
    found: list[Tensor] = []

    def take(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    mapped(take, output)
    return found


def weak(pool: Pool, output: Any) -> Any:
    """Return ``output`` with device tensors replaced by tensors that do not own their memory."""
    kind = pool.backend.device.type

    def bare(tensor: Tensor) -> Tensor:
        ours = tensor.device.type == kind and tensor.numel()
        return pool.bare(tensor) if ours else tensor

    return mapped(bare, output)


class SharedOutputs:
    """Output buffers shared by all shapes of a phase, whose graphs replay one at a time."""

    def __init__(self) -> None:
        self._buffers: dict[Hashable, Tensor] = {}

    def views(self, output: Any, *, rows: int | None, capacity: int | None) -> list[Tensor]:
        """Return views of the first ``rows`` of the buffers (None: all), one per ``output`` tensor.

        A new buffer has ``capacity`` rows, if given, or else the rows of the first captured shape.
        Therefore, capture the largest shape first.
        """
        found = []
        for index, tensor in enumerate(tensors(output)):
            if tensor.dim() == 0:
                found.append(torch.empty_like(tensor))
                continue
            count = len(tensor) if rows is None else rows
            # Each tensor needs its own buffer, because all are alive at the same time.
            key = (index, tensor.shape[1:], tensor.dtype, tensor.device)
            buffer = self._buffers.get(key)
            if buffer is None or len(buffer) < count:
                buffer = tensor.new_empty((max(count, capacity or 0), *tensor.shape[1:]))
                self._buffers[key] = buffer
            found.append(buffer[:count])
        return found

    def clear(self) -> None:
        """Drop the buffers. Existing views keep the memory alive."""
        self._buffers.clear()


def copy_into(targets: list[Tensor], output: Any) -> Any:
    """Copy the tensors of ``output`` into ``targets``; return ``output`` with these targets."""
    step = ResultCheck(
        "the step",
        before="at warm-up it returned",
        error=CapabilityError,
        remedy="The result of a step may depend only on the captured shape.",
    )
    results = tensors(output)
    step.structure(f"{len(results)} tensors", f"{len(targets)} tensors")
    # ``targets`` contain only valid rows, but ``output`` may have more rows.
    valid = [t if t.dim() == 0 else t[: len(p)] for t, p in zip(results, targets, strict=True)]
    for tensor, target in zip(valid, targets, strict=True):
        step.layout(tensor, target, strides=False)
    pairs = zip(targets, valid, strict=True)

    def fill(_: Tensor) -> Tensor:
        target, tensor = next(pairs)
        target.copy_(tensor)
        return target

    return mapped(fill, output)
