"""One graph step, bound: what replaying a graph for a batch of one real size needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from devgraph.runners.batch import Live
from devgraph.runners.entries import Entry
from devgraph.runners.load import CopyPlan
from devgraph.runners.outputs import OutputViews
from devgraph.runners.parts import Parts
from devgraph.runners.slots import Size

__all__ = ["GraphStep"]


class GraphStep:
    """Everything is looked up here once, so that a run looks nothing up.

    Attributes:
        load: copies and pads the inputs.
        replay: replays the graph.
        outputs: returns the views of the real rows.
        tensors: every slot at its real size, for a tail.
        run_tensors: those of them that belong to the run, for eager bodies.
    """

    __slots__ = (
        "entry",
        "load",
        "outputs",
        "padded",
        "real",
        "replay",
        "rows",
        "run_tensors",
        "tensors",
    )

    def __init__(self, parts: Parts, entry: Entry, real: Size, rows: int) -> None:
        assert entry.captured is not None
        self.entry = entry
        self.real = real
        self.padded = entry.size
        self.rows = rows
        self.run_tensors: Mapping[str, torch.Tensor] = parts.arena.run_views(real, parts.run_slots)
        self.load: Callable[[Mapping[str, Any]], None] = CopyPlan(
            parts.arena, real, entry.size, self.run_tensors
        ).load
        self.replay: Callable[..., Any] = entry.captured.replay
        self.outputs: OutputViews = parts.store.views(entry.key.variant, entry.size, real)
        self.tensors: Mapping[str, torch.Tensor] = {
            **parts.arena.views(real, parts.graph_slots),
            **self.run_tensors,
        }

    def enter(self, live: Live) -> None:
        """Make this run the one that eager bodies of the graph see."""
        live.size, live.tensors = self.real, self.run_tensors
