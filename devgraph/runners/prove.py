"""``prove`` of a runner: its graphs against eager, on data that no capture saw."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch.utils import _pytree as pytree

from devgraph.api.backend import poison
from devgraph.api.prove import compare, randomize
from devgraph.runners.graphs import BucketGraph, Graphs
from devgraph.runners.outputs import copied
from devgraph.runners.slots import InputSlot, Size
from devgraph.runners.step import GraphStep, StaticBatch, Step

_Compare = Callable[[torch.Tensor, torch.Tensor], str]


@attrs.frozen(kw_only=True)
class RunnerReport:
    """The outcome of a runner's ``prove``."""

    cases: int
    """Batches that were compared."""
    failures: tuple[str, ...]
    fixed_slots: tuple[str, ...]
    """Slots whose data was not varied, because they declare no ``sample``."""

    @property
    def ok(self) -> bool:
        """Whether at least one batch ran and none differed."""
        return self.cases > 0 and not self.failures

    def __str__(self) -> str:
        note = f"; not varied: {', '.join(self.fixed_slots)}" if self.fixed_slots else ""
        if self.ok:
            return f"{self.cases} batches: graphs equal eager{note}"
        if not self.cases:
            return "nothing was compared: no bucket is captured (see plan() for the reasons)"
        return "\n".join([f"{len(self.failures)} differences{note}:", *self.failures])


class Proof:
    """Compares graphs with eager, by ``near`` within tolerance; see ``Runner.prove``."""

    def __init__(self, step: Step, host: Mapping[str, Any] | None, near: _Compare) -> None:
        self._step = step
        self._host = host
        self._near = near
        self._generator = torch.Generator().manual_seed(0)
        self._failures: list[str] = []

    def of(
        self,
        graphs: Graphs,
        cases: int,
        implied: Callable[[Size], Mapping[str, torch.Tensor]] | None,
    ) -> RunnerReport:
        """Compare each captured graph with eager.

        Args:
            implied: the inputs of a batch of that real size that belong together; others are drawn.
        """
        step, count, varied = self._step, 0, set[str]()
        most = step.options.config.max_padding
        with step.trial():
            for graph in graphs.captured:
                for rows in _rows_to_try(graph, graphs.buckets, most, cases):
                    size = graphs.counting.some(rows, graph.options, count)
                    together = implied(size) if implied else {}
                    self._case(graph, size, together)
                    count, varied = count + 1, varied | together.keys()
        slots = step.inputs.slots.items()
        fixed = tuple(n for n, slot in slots if slot.fixed_in_proofs and n not in varied)
        return RunnerReport(cases=count, failures=tuple(self._failures), fixed_slots=fixed)

    def _case(self, graph: BucketGraph, real: Size, implied: Mapping[str, torch.Tensor]) -> None:
        step, backend = self._step, self._step.backend
        drawn = {n: self._data(slot, real) for n, slot in step.inputs.given.items()}
        inputs = {**drawn, **implied}
        marks = {
            name: self._data(slot, real)
            for name, slot in step.inputs.slots.items()
            if slot.real is not None and slot.sample is not None
        }
        given = self._host if self._host is not None else step.host.at_capture(real)
        padded_host = step.host.resolve(given, real, graph.size)
        real_host = step.host.resolve(given, real, real)
        rng = backend.get_rng_state()
        where = f"bucket {graph.key}, {real.requests} requests, {real.tokens} tokens"
        static = StaticBatch(step, graph)
        bound = GraphStep(step, graph, real, 0)

        def begin() -> None:
            backend.set_rng_state(rng)
            step.reset_state()
            bound.load(inputs)
            mark(step.inputs.views(real))

        def mark(views: Mapping[str, torch.Tensor]) -> None:
            for name, data in marks.items():
                views[name].copy_(data)

        begin()
        write = step.outputs.writer(graph.key.variant, graph.size)
        write(step.function(static.batch(static.prepared(padded_host))))
        padded = copied(bound.result(given))

        begin()
        step.outputs.poison(poison)
        bound.replay(padded_host)
        replayed = copied(bound.result(given))
        assert graph.captured is not None
        how = compare if graph.captured.exact else self._near
        self._same(f"{where}: replay against eager on the padded batch", padded, replayed, how)

        begin()
        self._poison_padding(graph, real)
        bound.replay(padded_host)
        poisoned = copied(bound.result(given))
        self._same(f"{where}: padding filled with NaN", replayed, poisoned)

        begin()
        views = step.inputs.eager_views(inputs, real)
        mark(views)
        eager = step.call_eagerly(step.whole, views, real, real_host, graph.options)
        self._same(f"{where}: replay against eager", eager, replayed, self._near)

    def _data(self, slot: InputSlot, real: Size) -> torch.Tensor:
        shape = slot.shape(real)
        device = self._step.inputs.device
        if slot.sample is not None:
            with torch.device("cpu"):  # where the generator is
                drawn = slot.sample(shape, self._generator)
            return drawn.to(device=device, dtype=slot.dtype)
        data = torch.full(shape, slot.pad.value, dtype=slot.dtype, device=device)
        if slot.dtype.is_floating_point or slot.dtype.is_complex:
            randomize(data, self._generator)
        return data

    def _poison_padding(self, graph: BucketGraph, real: Size) -> None:
        inputs = self._step.inputs
        for name, view in inputs.views(graph.size, inputs.graph_slots).items():
            slot = inputs.slots[name]
            if slot.axis is not None and slot.dtype.is_floating_point:
                rows = slot.shape(real)[slot.axis]
                view.narrow(slot.axis, rows, view.shape[slot.axis] - rows).fill_(float("nan"))

    def _same(self, what: str, expected: Any, got: Any, compare: _Compare = compare) -> None:
        left, _ = pytree.tree_flatten_with_path(expected)
        for (path, want), have in zip(left, pytree.tree_leaves(got), strict=True):
            message = compare(want, have) if isinstance(want, torch.Tensor) else ""
            if message:
                where = pytree.keystr(path) or "(the tensor itself)"
                self._failures.append(f"{what}: output {where} {message}")


def _rows_to_try(graph: BucketGraph, buckets: Sequence[int], most: float, cases: int) -> list[int]:
    """Return row counts that this bucket serves: the bucket itself, the fewest, and between. A
    batch may be padded to ``most`` times its rows."""
    bucket = graph.key.bucket
    below = max((size for size in buckets if size < bucket), default=0)
    fewest = max(below + 1, -int(-bucket // most))
    picks = [bucket, fewest]
    picks += [fewest + (bucket - fewest) * k // cases for k in range(1, cases)]
    return list(dict.fromkeys(picks))[:cases]
