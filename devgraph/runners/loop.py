"""Loop: several decode steps in one launch.

If the device supports loops in a graph, the graph repeats the step while any request runs.
Otherwise the loop is unrolled into the graph. ``batch.running``, a mask on the device, marks
the requests that take a step; all other rows are padding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import attrs
import torch
from torch.utils import _pytree as pytree

from devgraph.api.errors import CaptureError, ConfigError, ConfigTypeError, InputError, brief, whole
from devgraph.api.marks.gates import turns
from devgraph.api.marks.scopes import Repeat, repeater
from devgraph.api.process import several_ranks
from devgraph.runners.batch import Batch
from devgraph.runners.decisions import Variant, canonical_variant
from devgraph.runners.outputs import slots_by_leaf
from devgraph.runners.slots import ROW_PER_REQUEST, InputSlot, OutputSlot, Pad, pad_rows

_RUNNING = InputSlot("running", ("requests",), torch.bool, pad=Pad.zero(), real=True)
"""The slot that marks the requests that take a step."""

_HELD = InputSlot(
    "held",
    ("requests",),
    torch.bool,
    pad=Pad.zero(),
    real=False,
    sample=lambda shape, _: torch.ones(shape, dtype=torch.bool),
)
"""A slot that is true only in proofs. Slots that a proof leaves at pad values (cache rows) are then
padded again after each ``advance``, because a proof must not write real state."""

LOOP_SLOTS = (_RUNNING, _HELD)
"""Input slots that a loop adds to the engine's slots."""

_MAX_LAYOUTS = 4096
"""Maximum number of cached output layouts. Eager batches may have any variant."""


class LoopResult(NamedTuple):
    """The result of several steps: tensors on the device, valid until the next run."""

    outputs: Any
    """The outputs of the steps, each tensor stacked to ``[steps, rows, ...]``. Rows of a request
    are zero in steps that the request did not take. Tensors without rows are zero in steps that no
    request took."""
    steps: torch.Tensor
    """Largest number of steps of any request, an int64 scalar."""
    taken: torch.Tensor
    """Number of steps that each request took, int64 ``[requests]``."""


_for_tensors = functools.partial(pytree.tree_map_only, torch.Tensor)


@attrs.frozen(kw_only=True)
class Loop:
    """Several decode steps in one launch, for ``DecodeRunner(loop=...)``.

    One run replaces ``steps`` runs of one step each. After each step, ``advance`` writes the inputs
    of the next step, and ``done`` removes finished requests.

    Args:
        steps: number of steps, at least 1.
        advance: ``advance(batch, outputs)`` is called after every step, including the last, with
            the outputs of the step. It writes the inputs of the next step into
            ``batch.<slot>``, on the device and for all rows. Rows of finished requests are padded
            again afterwards. Mask other writes (to bound tensors) with ``batch.running``.
        done: ``done(batch, outputs)`` is called after ``advance`` and returns a bool tensor
            ``[requests]``, true for finished requests. Without it, every request takes all steps.

    Host arguments, including those of ``prepare``, apply to all steps of a launch. Keep values that
    grow (lengths) on the device, and pass upper bounds for the last step as host arguments. Steps
    must pass values to later steps in tensors that exist before the launch, not in Python objects,
    because the graph may contain a single step that the device repeats.

    Raises:
        ConfigError: ``steps`` is below 1.
        ConfigTypeError: ``advance`` or ``done`` is not a function.
    """

    steps: int
    advance: Callable[[Batch, Any], object]
    done: Callable[[Batch, Any], torch.Tensor] | None = None

    def __attrs_post_init__(self) -> None:
        whole("steps of a loop", self.steps, 1, ConfigError)
        for name in ("advance", "done"):
            function = getattr(self, name)
            if not callable(function) and (name == "advance" or function is not None):
                raise ConfigTypeError(f"{name} of a loop must be a function: {brief(function)}")

    def around(
        self,
        forward: Callable[[Batch], Any],
        slots: Mapping[str, InputSlot],
        outputs: Any,
        *,
        ranks: bool,
    ) -> Callable[[Batch], LoopResult]:
        """Return a callable that runs all steps; ``ranks`` means that other ranks run them too."""
        engine_slots = [slot for slot in slots.values() if slot.real is None]
        layouts: dict[tuple[int, int, Variant], Any] = {}
        """Layout of a step's outputs, by requests, tokens and variant of the batch."""

        def looped(batch: Batch) -> LoopResult:
            if batch.width is None:
                raise InputError(
                    "a loop of decode steps needs an equal number of tokens for every request of a "
                    "batch; split the batch by width"
                )
            width, tensors = batch.width, {name: getattr(batch, name) for name in slots}

            def step() -> tuple[torch.Tensor, Any]:
                running = batch.running.clone()
                result = forward(batch)
                masked = _masked(result, outputs, running, width)
                self.advance(batch, result)
                if self.done is not None:
                    batch.running.logical_and_(self._done(batch, result).logical_not())
                _require_tensors(batch, tensors)
                _pad_finished(batch, engine_slots, width)
                return running, masked

            # Collectives would hang if one rank ended its loop on the device before the others.
            why = "ranks" if ranks or several_ranks() else ""
            kind = None
            if not torch.compiler.is_compiling():  # Compilation unrolls the loop.
                kind = batch.requests, batch.tokens, canonical_variant(batch.variant)
            if kind is not None and (repeat := repeater(why)) is not None:
                if kind not in layouts:
                    raise CaptureError(
                        f"the loop has not run with the bucket {kind[0]}; run it once before the "
                        f"capture."
                    )
                return _repeated(step, self.steps, batch.running, repeat, layouts[kind])
            each = range(self.steps) if kind is None else turns(self.steps)
            running, results = zip(*(step() for _ in each), strict=True)
            if kind is not None:
                if len(layouts) >= _MAX_LAYOUTS:
                    del layouts[next(iter(layouts))]
                layout = functools.partial(torch.empty_like, device="meta")
                layouts[kind] = _for_tensors(layout, results[0])
            taken = torch.stack(running)
            stacked = pytree.tree_map(_stacked, *results)
            return LoopResult(stacked, taken.any(1).sum(), taken.sum(0))

        return looped

    def _done(self, batch: Batch, result: Any) -> torch.Tensor:
        assert self.done is not None
        finished = self.done(batch, result)
        if (
            not isinstance(finished, torch.Tensor)
            or finished.dtype is not torch.bool
            or finished.shape != batch.running.shape
        ):
            raise ConfigTypeError(
                f"done of a loop must return a bool tensor with one entry for each request "
                f"({batch.requests}), got {brief(finished)}"
            )
        return finished


def looped_outputs(outputs: Any) -> LoopResult:
    """Return the output slots of a loop, given the output slots of one step."""
    stacked = pytree.tree_map(lambda slot: attrs.evolve(slot, dim=slot.dim + 1), outputs)
    return LoopResult._make((stacked, OutputSlot(rows=None), ROW_PER_REQUEST))


def _require_tensors(batch: Batch, tensors: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        if getattr(batch, name) is not tensor:
            raise InputError(
                f"advance of a loop must write into the tensors of the batch, but it replaced "
                f"batch.{name}; use batch.{name}.copy_(...)"
            )


def _pad_finished(batch: Batch, slots: Sequence[InputSlot], width: int) -> None:
    """Write pad values into the rows of requests that do not take the next step."""
    moving = batch.running.logical_and(batch.held.logical_not())
    for slot in slots:
        requests = moving if slot.fixed_in_proofs else batch.running
        if slot.axis is not None:
            real = _rows(requests, slot.row_dim, width)
            pad_rows(getattr(batch, slot.name), slot.pad, slot.axis, real)


def _masked(result: Any, outputs: Any, running: torch.Tensor, width: int) -> Any:
    """Return the outputs of a step, with zeros in rows of requests that are not ``running``."""
    leaves, spec = pytree.tree_flatten(result)
    kept = []
    for leaf, slot in zip(leaves, slots_by_leaf(outputs, result), strict=True):
        if isinstance(leaf, torch.Tensor):
            rows = _rows(running, slot.rows, width)
            shape = [1] * leaf.dim()
            if rows.dim() and slot.dim < leaf.dim() and leaf.shape[slot.dim] == rows.shape[0]:
                shape[slot.dim] = rows.shape[0]
            elif rows.dim():  # The output buffers will reject this shape.
                rows = running.any()
            leaf = leaf.masked_fill(rows.logical_not().view(shape), 0)
        kept.append(leaf)
    return pytree.tree_unflatten(kept, spec)


def _rows(running: torch.Tensor, dim: str | None, width: int) -> torch.Tensor:
    """Return a mask of the rows along ``dim`` that belong to ``running`` requests.

    The mask is a scalar if ``dim`` is None. All offsets (``"requests+1"``) up to the last running
    request are real, because tokens of earlier finished requests remain as padding.
    """
    if dim == "requests":
        return running
    if dim == "tokens":
        return running.repeat_interleave(width) if width > 1 else running
    if dim == "requests+1":
        followed = running.flip(0).cumsum(0).flip(0) > 0
        return torch.cat([followed.new_ones(1), followed])
    return running.any()


def _repeated(
    step: Callable[[], tuple[torch.Tensor, Any]],
    most: int,
    running: torch.Tensor,
    repeat: Repeat,
    like: Any,
) -> LoopResult:
    """Return the result of a device loop that repeats ``step`` while a request runs."""
    taken = torch.zeros_like(running, dtype=torch.int64)
    at = taken.new_zeros(1)
    going = running.any()
    rows = _for_tensors(
        lambda leaf: torch.zeros(most, *leaf.shape, dtype=leaf.dtype, device=at.device), like
    )

    def turn() -> None:
        ran, result = step()
        for into, leaf in zip(*map(pytree.tree_leaves, (rows, result)), strict=True):
            if isinstance(leaf, torch.Tensor):
                into.index_copy_(0, at, leaf[None])
        taken.add_(ran)
        at.add_(1)
        going.copy_((at[0] < most).logical_and(running.any()))

    repeat(turn, going)
    return LoopResult(rows, taken.max(), taken)


def _stacked(*steps: Any) -> Any:
    return torch.stack(steps) if isinstance(steps[0], torch.Tensor) else steps[0]
