"""One graph step, bound: what replaying a graph for a batch of one real size needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from devgraph.runners.batch import Live
from devgraph.runners.entries import Entry
from devgraph.runners.inputs import CopyPlan
from devgraph.runners.outputs import OutputViews
from devgraph.runners.rounds import Parts
from devgraph.runners.slots import Size

__all__ = ["GraphStep"]


class GraphStep:
    """Everything is looked up here once, so that a run looks nothing up.

    Attributes:
        load: copies and pads the inputs.
        replay: replays the graph.
        outputs: returns the views of the real rows.
        tensors: every slot at its real size, for a tail.
    """

    __slots__ = (
        "_run_tensors",
        "entry",
        "load",
        "outputs",
        "real",
        "replay",
        "rows",
        "tensors",
    )

    def __init__(self, parts: Parts, entry: Entry, real: Size, rows: int) -> None:
        assert entry.captured is not None
        self.entry = entry
        self.real = real
        self.rows = rows
        self.load: Callable[[Mapping[str, Any]], None] = CopyPlan(
            parts.arena, real, entry.size, parts.run_slots
        ).load
        self.replay: Callable[..., Any] = entry.captured.replay
        self.outputs: OutputViews = parts.store.views(entry.key.variant, entry.size, real)
        self.tensors: Mapping[str, torch.Tensor] = parts.arena.views(real)
        self._run_tensors: Mapping[str, torch.Tensor] = {
            name: self.tensors[name] for name in parts.run_slots
        }

    def enter(self, live: Live) -> None:
        """Make this run the one that eager bodies of the graph see."""
        live.size = self.real
        live.tensors = self._run_tensors
