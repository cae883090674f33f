"""Captured steps of an engine and their outputs; knows nothing of which engine it is."""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from devgraph.api.backend import Backend
from devgraph.api.capture import Captured, capture
from devgraph.api.errors import CapabilityError
from devgraph.api.graph import DeviceGraph
from devgraph.api.marks.scopes import GraphScope
from devgraph.api.pool import Pool
from devgraph.api.session import Session, session
from devgraph.integrations.engine.ledger import ModeCount


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


def mapped(change: Callable[[Tensor], Any], output: Any) -> Any:
    """Return ``output`` with every tensor replaced by what ``change`` returns for it.

    Takes what an engine's step returns: a tensor, a list, tuple or dictionary of them, a
    dataclass, an object with a dictionary ``tensors``; anything else is handed back. Containers
    are new; ``output`` is not changed.
    """
    if isinstance(output, Tensor):
        return change(output)
    if isinstance(output, list):
        return [mapped(change, item) for item in output]
    if isinstance(output, tuple):
        items = [mapped(change, item) for item in output]
        return type(output)(*items) if hasattr(output, "_fields") else tuple(items)
    if isinstance(output, dict):
        filled = copy.copy(output)  # of its own class, which may have attributes
        for name, item in output.items():
            filled[name] = mapped(change, item)
        return filled
    names = _attributes(output)
    if not names:
        return output
    changed = copy.copy(output)
    for name in names:
        # Not setattr: a dataclass may be frozen.
        object.__setattr__(changed, name, mapped(change, getattr(output, name)))
    return changed


def _attributes(output: Any) -> list[str]:
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        return [each.name for each in dataclasses.fields(output) if hasattr(output, each.name)]
    return ["tensors"] if isinstance(getattr(output, "tensors", None), dict) else []


def tensors(output: Any) -> list[Tensor]:
    """Return the tensors of ``output`` in the order in which ``mapped`` visits them."""
    found: list[Tensor] = []

    def take(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    mapped(take, output)
    return found


def weak(pool: Pool, output: Any) -> Any:
    """Return ``output`` with every tensor of the pool's device replaced by one that does not keep
    its memory."""
    kind = pool.backend.device.type

    def bare(tensor: Tensor) -> Tensor:
        ours = tensor.device.type == kind and tensor.numel()
        return pool.bare(tensor) if ours else tensor

    return mapped(bare, output)


class SharedOutputs:
    """One set of buffers for the outputs of all shapes of a phase, which replay one at a time."""

    def __init__(self) -> None:
        self._buffers: dict[Hashable, Tensor] = {}

    def places(self, output: Any, *, rows: int | None, capacity: int | None) -> list[Tensor]:
        """Return where the tensors of outputs like ``output`` go: views of the leading rows.

        The buffers are those of the largest shape so far, so that capturing largest first makes
        one set.

        Args:
            rows: how many rows of each tensor count; None for all.
            capacity: how many rows a new buffer has; None for as many as ``rows``.
        """
        found = []
        for index, tensor in enumerate(tensors(output)):
            if tensor.dim() == 0:
                found.append(torch.empty_like(tensor))
                continue
            count = len(tensor) if rows is None else rows
            # A buffer for each place in the output, because those of one output live together.
            key = (index, tensor.shape[1:], tensor.dtype, tensor.device)
            buffer = self._buffers.get(key)
            if buffer is None or len(buffer) < count:
                buffer = tensor.new_empty((max(count, capacity or 0), *tensor.shape[1:]))
                self._buffers[key] = buffer
            found.append(buffer[:count])
        return found

    def clear(self) -> None:
        """Let the buffers go; views of them keep theirs."""
        self._buffers.clear()


def copy_into(places: list[Tensor], output: Any) -> Any:
    """Copy every tensor of ``output`` to its place; return ``output`` with the places in it.

    Raises:
        CapabilityError: the output has another structure than the one that the places are for.
    """
    found = tensors(output)
    layouts, wanted = [_layout(tensor) for tensor in found], [_layout(place) for place in places]
    # A place has the rows that count; there may be more of them, and one is never repeated.
    if layouts != wanted or any(map(_shorter, found, places)):
        raise CapabilityError(
            f"the step returned {[(t.dtype, tuple(t.shape)) for t in found]} when it was captured "
            f"and {[(p.dtype, tuple(p.shape)) for p in places]} when it was warmed up; what a step "
            f"returns must depend on nothing but the captured shape."
        )
    left = iter(places)

    def fill(tensor: Tensor) -> Tensor:
        place = next(left)
        place.copy_(tensor if tensor.dim() == 0 else tensor[: len(place)])
        return place

    return mapped(fill, output)


def _shorter(tensor: Tensor, place: Tensor) -> bool:
    return tensor.dim() > 0 and len(tensor) < len(place)


def _layout(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...]]:
    return tensor.dtype, tuple(tensor.shape[1:])
