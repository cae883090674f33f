"""``prove`` of a runner: its graphs against eager, on data that no capture saw."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch.utils import _pytree as pytree

from devgraph.api.prove import compare, compare_near, require_cases
from devgraph.runners.batch import Batch
from devgraph.runners.decision import GraphKey
from devgraph.runners.entries import Entry
from devgraph.runners.inputs import fill_with_pad
from devgraph.runners.parts import Parts, eager_batch, static_batch
from devgraph.runners.slots import InputSlot, Size

__all__ = ["Hooks", "RunnerReport", "prove_runner"]


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


@attrs.frozen(kw_only=True)
class Hooks:
    """What a runner lends to its proof."""

    eager: Callable[[Batch], Any]
    """The whole step, run eagerly."""
    step_for: Callable[[GraphKey, Size], Any]
    """Returns the bound step that replays a graph for a real size."""
    finish: Callable[[Any, Any, Mapping[str, Any]], Any]
    """Returns the whole step's outputs from such a step, its graph's outputs and host values."""
    real_size: Callable[[Entry, int, int], Size]
    """Returns the real size of a batch with so many rows, from an entry and a number to vary by."""


class _Proof:
    def __init__(
        self,
        parts: Parts,
        hooks: Hooks,
        host: Mapping[str, Any] | None,
        rtol: float | None,
        atol: float | None,
    ) -> None:
        self._parts = parts
        self._hooks = hooks
        self._host = host
        self._rtol, self._atol = rtol, atol
        self._generator = torch.Generator().manual_seed(0)
        self.failures: list[str] = []

    def case(self, entry: Entry, rows: int, index: int) -> None:
        parts, hooks = self._parts, self._hooks
        real = hooks.real_size(entry, rows, index)
        inputs = {n: self._data(slot, real) for n, slot in parts.arena.slots.items()}
        given = self._host if self._host is not None else parts.host.at_capture(real)
        step = hooks.step_for(entry.key, real)
        padded_host = parts.host.resolve(given, real, entry.size)
        real_host = parts.host.resolve(given, real, real)
        rng = parts.backend.get_rng_state()
        where = f"bucket {entry.key}, {real.requests} requests, {real.tokens} tokens"

        def begin() -> None:
            parts.backend.set_rng_state(rng)
            if parts.options.reset_state is not None:
                parts.options.reset_state()
            step.load(inputs)
            step.enter(parts.live)

        begin()
        write = parts.store.writer(entry.key.variant, entry.size)
        views = parts.arena.views(entry.size, parts.graph_slots)
        write(parts.step(static_batch(parts, entry, views, padded_host)))
        padded = _copied(hooks.finish(step, step.outputs(), real_host))

        begin()
        parts.store.poison(parts.backend.poison)
        step.replay(**padded_host)
        replayed = _copied(hooks.finish(step, step.outputs(), real_host))
        assert entry.captured is not None
        same = self._exact if entry.captured.exact else self._close
        same(f"{where}: replay against eager on the padded batch", padded, replayed)

        begin()
        self._poison_padding(entry, real)
        step.replay(**padded_host)
        poisoned = _copied(hooks.finish(step, step.outputs(), real_host))
        self._exact(f"{where}: padding filled with NaN", replayed, poisoned)

        begin()
        views = parts.arena.eager_views(inputs, real)
        with eager_batch(parts, views, real, host=real_host, variant=entry.options) as batch:
            eager = hooks.eager(batch)
        self._close(f"{where}: replay against eager", eager, replayed)

    def _data(self, slot: InputSlot, real: Size) -> torch.Tensor:
        shape = slot.shape(real)
        device = self._parts.arena.device
        if slot.sample is not None:
            return slot.sample(shape, self._generator).to(device=device, dtype=slot.dtype)
        if slot.dtype.is_floating_point or slot.dtype.is_complex:
            kind = torch.complex64 if slot.dtype.is_complex else torch.float32
            noise = torch.randn(shape, generator=self._generator, dtype=kind)
            return noise.to(device=device, dtype=slot.dtype)
        data = torch.empty(shape, dtype=slot.dtype, device=device)
        fill_with_pad(data, slot)
        return data

    def _poison_padding(self, entry: Entry, real: Size) -> None:
        parts = self._parts
        for name, view in parts.arena.views(entry.size, parts.graph_slots).items():
            slot = parts.arena.slots[name]
            if slot.axis is not None and slot.dtype.is_floating_point:
                rows = slot.shape(real)[slot.axis]
                view.narrow(slot.axis, rows, view.shape[slot.axis] - rows).fill_(float("nan"))

    def _exact(self, what: str, expected: Any, got: Any) -> None:
        for path, want, have in _pairs(expected, got):
            message = compare(want, have)
            if message:
                self.failures.append(f"{what}: output {path} {message}")

    def _close(self, what: str, expected: Any, got: Any) -> None:
        for path, want, have in _pairs(expected, got):
            text = compare_near(want, have, self._rtol, self._atol)
            if text:
                self.failures.append(f"{what}: output {path}: {text}")


def _copied(tree: Any) -> Any:
    return pytree.tree_map(lambda t: t.clone() if isinstance(t, torch.Tensor) else t, tree)


def _pairs(expected: Any, got: Any) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    left, _ = pytree.tree_flatten_with_path(expected)
    right = pytree.tree_leaves(got)
    return [
        (pytree.keystr(path) or "(the tensor itself)", want, have)
        for (path, want), have in zip(left, right, strict=True)
        if isinstance(want, torch.Tensor)
    ]


def rows_to_try(entry: Entry, buckets: Sequence[int], max_padding: float, cases: int) -> list[int]:
    """Return row counts that this bucket serves: the bucket itself, the fewest, and between."""
    bucket = entry.key.bucket
    below = max((size for size in buckets if size < bucket), default=0)
    fewest = max(below + 1, -int(-bucket // max_padding))
    picks = [bucket, fewest]
    picks += [fewest + (bucket - fewest) * k // cases for k in range(1, cases)]
    return list(dict.fromkeys(picks))[:cases]


def prove_runner(
    parts: Parts,
    hooks: Hooks,
    *,
    cases: int,
    host_args: Mapping[str, Any] | None,
    rtol: float | None,
    atol: float | None,
) -> RunnerReport:
    """Implement ``Runner.prove``."""
    require_cases(cases)
    proof = _Proof(parts, hooks, host_args, rtol, atol)
    count = 0
    rng = parts.backend.get_rng_state()
    with torch.no_grad():
        for entry in parts.entries.captured:
            for rows in rows_to_try(entry, parts.entries.buckets, parts.config.max_padding, cases):
                proof.case(entry, rows, count)
                count += 1
    parts.backend.set_rng_state(rng)
    if parts.options.reset_state is not None:
        parts.options.reset_state()
    fixed = tuple(
        name
        for name, slot in parts.arena.slots.items()
        if slot.sample is None and not slot.dtype.is_floating_point and not slot.dtype.is_complex
    )
    return RunnerReport(cases=count, failures=tuple(proof.failures), fixed_slots=fixed)
