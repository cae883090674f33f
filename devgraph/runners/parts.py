"""What a runner is made of, and the static batch that one of its graphs sees."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import torch

from devgraph.api.backend import Backend
from devgraph.api.config.model import PhaseConfig
from devgraph.api.pool import Pool
from devgraph.runners.batch import Batch, Live, end_batch
from devgraph.runners.entries import Entries, Entry
from devgraph.runners.host import HostArgs
from devgraph.runners.inputs import InputArena
from devgraph.runners.outputs import OutputStore
from devgraph.runners.ranks import Solo
from devgraph.runners.settings import Options
from devgraph.runners.slots import Size
from devgraph.runners.stats import Counters

__all__ = ["Parts", "StaticBatch", "eager_batch"]


@attrs.frozen(kw_only=True)
class Parts:
    """What a runner is made of; shared with the code that captures, plans and proves for it."""

    backend: Backend
    pool: Pool
    ranks: Solo
    config: PhaseConfig
    options: Options
    step: Callable[[Batch], Any]
    """What one graph does."""
    arena: InputArena
    run_slots: frozenset[str]
    """Slots that belong to the run and not to the graph."""
    store: OutputStore
    host: HostArgs
    live: Live
    entries: Entries
    counters: Counters

    @property
    def graph_slots(self) -> frozenset[str]:
        """Slots whose tensors are in the graphs."""
        return frozenset(self.arena.slots) - self.run_slots


class StaticBatch:
    """The views of one graph; its slots hold pad values from here on.

    Slots of the run hold one request on pad values meanwhile.
    """

    def __init__(self, parts: Parts, entry: Entry) -> None:
        self._parts = parts
        self._entry = entry
        self._views = parts.arena.views(entry.size, parts.graph_slots)
        run = Size(1, entry.size.tokens)
        self._run_size = run if parts.run_slots else entry.size
        self._run_views = parts.arena.views(run, parts.run_slots)
        self._fill = parts.arena.filler({**self._views, **self._run_views})
        self.refill()

    def refill(self) -> None:
        """Put pad values into every slot that the graph or its eager bodies can see."""
        self._fill()
        live = self._parts.live
        live.size, live.tensors = self._run_size, self._run_views

    def batch(self, host: Mapping[str, Any]) -> Batch:
        """Return the batch that the step receives."""
        return static_batch(self._parts, self._entry, self._views, host)


def static_batch(
    parts: Parts, entry: Entry, views: Mapping[str, Any], host: Mapping[str, Any]
) -> Batch:
    """Return a batch over the views of one graph."""
    return Batch(
        views,
        entry.size,
        host=host,
        variant=entry.options,
        live=parts.live,
        live_names=parts.run_slots,
    )


@contextlib.contextmanager
def eager_batch(
    parts: Parts,
    tensors: Mapping[str, torch.Tensor],
    size: Size,
    *,
    host: Mapping[str, Any],
    variant: Mapping[str, Any],
) -> Iterator[Batch]:
    """Lend a batch to a step that runs eagerly; it is over when the step is.

    Slots of the run are read as in a graph: whatever batch a step kept, they are the current ones.
    """
    live = parts.live
    live.size, live.tensors = size, {name: tensors[name] for name in parts.run_slots}
    batch = Batch(
        {name: tensor for name, tensor in tensors.items() if name not in parts.run_slots},
        size,
        host=host,
        variant=variant,
        live=live if parts.run_slots else None,
        live_names=parts.run_slots,
    )
    try:
        yield batch
    finally:
        end_batch(batch)
