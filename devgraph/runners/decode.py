"""DecodeRunner: steps in which every request has the same number of tokens.

``Loop`` takes several of them in one launch. The graph of a bucket repeats the step while a request
runs, where the device can; elsewhere it holds the steps one after another. ``batch.running`` says
on the device which requests take a step; all others are padding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import attrs
import torch
from torch.utils import _pytree as pytree

from devgraph.api.errors import CaptureError, ConfigError, ConfigTypeError, InputError, brief, whole
from devgraph.api.marks.scopes import Repeat, repeater
from devgraph.runners.batch import Batch
from devgraph.runners.buckets import ByRequests
from devgraph.runners.decisions import Variant, canonical_variant
from devgraph.runners.options import Options, RunnerOptions, check_functions
from devgraph.runners.outputs import slots_by_leaf
from devgraph.runners.ranks import several_ranks
from devgraph.runners.runner import Runner
from devgraph.runners.slots import (
    ROW_PER_REQUEST,
    InputSlot,
    OutputSlot,
    Pad,
    check_slots,
    pad_rows,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

_RUNNING = InputSlot("running", ("requests",), torch.bool, pad=Pad.zero(), real=True)
"""Which requests take a step."""

_HELD = InputSlot(
    "held",
    ("requests",),
    torch.bool,
    pad=Pad.zero(),
    real=False,
    sample=lambda shape, _: torch.ones(shape, dtype=torch.bool),
)
"""True in a proof: what it left at pad values (rows of a cache) stays there, whatever ``advance``
makes of it, because a proof must not write real state."""

_SLOTS = (_RUNNING, _HELD)
"""What a loop adds to the slots of the engine."""

_MOST_SEEN = 4096
"""Kinds of batches whose layouts are kept: a batch that runs eagerly may be of any variant."""


class LoopResult(NamedTuple):
    """What a run of several steps returns: tensors on the device, valid until the next run."""

    outputs: Any
    """What the steps returned, each tensor stacked to ``[steps, rows, ...]``. Where a request took
    no step its rows hold zeros; a tensor without rows does where no request took one."""
    steps: torch.Tensor
    """How many steps were taken: those of the request that took most of them. An int64 scalar."""
    taken: torch.Tensor
    """How many steps each request took, int64 ``[requests]``."""


_for_tensors = functools.partial(pytree.tree_map_only, torch.Tensor)


@attrs.frozen(kw_only=True)
class Loop:
    """Several decode steps in one launch, as ``DecodeRunner(loop=...)`` takes it.

    A run then equals ``steps`` runs of one step each, between which ``advance`` made the next
    inputs and requests that are done were left out.

    Args:
        steps: how many, at least 1.
        advance: ``advance(batch, outputs)`` is called after every step, the last one included, with
            what the step returned. It writes the next step's inputs into ``batch.<slot>``, on the
            device and for all rows: those of requests that do not go on are padded again behind it.
            What else it writes (bound tensors) it guards by ``batch.running``.
        done: ``done(batch, outputs)`` is called after ``advance`` and returns a bool tensor
            ``[requests]``: which requests take no further step. None: every request takes all.

    Host arguments keep their values in all steps of a launch, so what grows (lengths) is advanced
    on the device, and a host argument is a bound that holds for the last step too. ``prepare``
    plans once for all of them.

    A graph may hold one step, which the device repeats. So what one step hands to the next lies in
    tensors that were made before the launch, never in Python objects.

    Raises:
        ConfigError: not at least one step. ``ConfigTypeError`` where something is no function.
    """

    steps: int
    advance: Callable[[Batch, Any], object]
    done: Callable[[Batch, Any], torch.Tensor] | None = None

    def __attrs_post_init__(self) -> None:
        whole("steps of a loop", self.steps, 1, ConfigError)
        for name in ("advance", "done"):
            given = getattr(self, name)
            if not callable(given) and (name == "advance" or given is not None):
                raise ConfigTypeError(f"{name} of a loop must be a function: {brief(given)}")

    def around(
        self,
        forward: Callable[[Batch], Any],
        slots: Mapping[str, InputSlot],
        outputs: Any,
        *,
        ranks: bool,
    ) -> Callable[[Batch], LoopResult]:
        """Return all steps as one.

        Args:
            forward: one step.
            slots: the input slots, ``_SLOTS`` among them.
            outputs: the output slots of one step.
            ranks: whether other ranks take the same steps.
        """
        check_functions(forward)

        given = [slot for slot in slots.values() if slot.real is None]
        seen: dict[tuple[int, int, Variant], Any] = {}
        """The layout of what a step returned, by requests, tokens and variant of the batch."""

        def looped(batch: Batch) -> LoopResult:
            if batch.width is None:
                raise InputError(
                    "a loop of decode steps needs the same number of tokens for every request of a "
                    "batch; split the batch by width"
                )
            width, tensors = batch.width, {name: getattr(batch, name) for name in slots}

            def step() -> tuple[torch.Tensor, Any]:
                running = batch.running.clone()
                result = forward(batch)
                found = _masked(result, outputs, running, width)
                self.advance(batch, result)
                if self.done is not None:
                    batch.running.logical_and_(self._done(batch, result).logical_not())
                for name, tensor in tensors.items():
                    if getattr(batch, name) is not tensor:
                        raise InputError(
                            f"advance of a loop writes into the tensors of the batch, and "
                            f"batch.{name} is another tensor now: use batch.{name}.copy_(...)"
                        )
                moving = batch.running.logical_and(batch.held.logical_not())
                for slot in given:
                    going = moving if slot.fixed_in_proofs else batch.running
                    if slot.axis is not None:
                        real = _rows(going, slot.row_dim, width)
                        pad_rows(getattr(batch, slot.name), slot.pad, slot.axis, real)
                return running, found

            # Collectives hang where the device of one rank ends its loop before the others.
            why = "ranks" if ranks or several_ranks() else ""
            kind = None
            if not torch.compiler.is_compiling():  # which unrolls the loop
                kind = batch.requests, batch.tokens, canonical_variant(batch.variant)
            if kind is not None and (repeat := repeater(why)) is not None:
                if kind not in seen:
                    raise CaptureError(f"a loop of {kind[0]} requests was never run: warm it up.")
                return _repeated(step, self.steps, batch.running, repeat, seen[kind])
            alive, found = zip(*(step() for _ in range(self.steps)), strict=True)
            if kind is not None:
                if len(seen) >= _MOST_SEEN:
                    del seen[next(iter(seen))]
                layout = functools.partial(torch.empty_like, device="meta")
                seen[kind] = _for_tensors(layout, found[0])
            went = torch.stack(alive)
            return LoopResult(pytree.tree_map(_stacked, *found), went.any(1).sum(), went.sum(0))

        return looped

    def _done(self, batch: Batch, result: Any) -> torch.Tensor:
        assert self.done is not None
        found = self.done(batch, result)
        if (
            not isinstance(found, torch.Tensor)
            or found.dtype is not torch.bool
            or found.shape != batch.running.shape
        ):
            raise ConfigTypeError(
                f"done of a loop must return a bool tensor with an entry for each of "
                f"{batch.requests} requests, got {brief(found)}"
            )
        return found


def _looped_outputs(outputs: Any) -> LoopResult:
    """Return the output slots of a loop, from those of one step."""
    stacked = pytree.tree_map(lambda slot: attrs.evolve(slot, dim=slot.dim + 1), outputs)
    return LoopResult._make((stacked, OutputSlot(rows=None), ROW_PER_REQUEST))


def _masked(result: Any, outputs: Any, running: torch.Tensor, width: int) -> Any:
    """Return what a step returned, zero where no request of ``running`` has its rows."""
    leaves, spec = pytree.tree_flatten(result)
    kept = []
    for leaf, slot in zip(leaves, slots_by_leaf(outputs, result), strict=True):
        if isinstance(leaf, torch.Tensor):
            rows = _rows(running, slot.rows, width)
            shape = [1] * leaf.dim()
            if rows.dim() and slot.dim < leaf.dim() and leaf.shape[slot.dim] == rows.shape[0]:
                shape[slot.dim] = rows.shape[0]
            elif rows.dim():  # of another size than declared, which the output buffers refuse
                rows = running.any()
            leaf = leaf.masked_fill(rows.logical_not().view(shape), 0)
        kept.append(leaf)
    return pytree.tree_unflatten(kept, spec)


def _rows(running: torch.Tensor, dim: str | None, width: int) -> torch.Tensor:
    """Return which rows along ``dim`` are of requests in ``running``; a scalar for no such dim.

    Offsets (``"requests+1"``) are real up to the last request of ``running``: the tokens of
    requests that are done before it stay where they are, as padding.
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
    """Return what ``most`` steps return, where a replay repeats the step while a request runs.

    Args:
        like: tensors of the layout of what a step returns.
    """
    taken = torch.zeros_like(running, dtype=torch.int64)
    at = taken.new_zeros(1)
    going = running.any()
    rows = _for_tensors(
        lambda one: torch.zeros(most, *one.shape, dtype=one.dtype, device=at.device), like
    )

    def turn() -> None:
        ran, found = step()
        for into, leaf in zip(*map(pytree.tree_leaves, (rows, found)), strict=True):
            if isinstance(leaf, torch.Tensor):
                into.index_copy_(0, at, leaf[None])
        taken.add_(ran)
        at.add_(1)
        going.copy_((at[0] < most).logical_and(running.any()))

    repeat(turn, going)
    return LoopResult(rows, taken.max(), taken)


def _stacked(*steps: Any) -> Any:
    return torch.stack(steps) if isinstance(steps[0], torch.Tensor) else steps[0]


class DecodeRunner(Runner):
    """Runs decode steps: ``requests`` requests of ``width`` tokens each, in a graph per bucket.

    Buckets count requests. A graph of bucket b sees b requests and b * width tokens in every
    slot; rows beyond the real ones hold the slots' pad values.

    Args:
        forward: the step; receives a ``Batch`` and returns tensors. It must leave state alone in
            padded rows, and may be called any number of times on pad values alone.
        inputs: the input slots.
        outputs: an ``OutputSlot`` for all returned tensors, or a tree of them as returned.
        max_requests: the most requests of a step.
        loop: take several steps in one launch, see ``Loop``; ``run`` then returns a ``LoopResult``,
            and the batch has one slot more, ``running``.
        **options: see ``Options``: variants, host_args, config, backend, pool, group, name, strict,
            debug, bound, weights_epoch, reset_state, prepare, share, idle_dummy, ...

    Raises:
        ConfigError: something in the declaration cannot work.
        CapabilityError: the policy is not available.
    """

    def __init__(
        self,
        forward: Callable[[Batch], Any],
        inputs: Sequence[InputSlot],
        *,
        outputs: Any = ROW_PER_REQUEST,
        max_requests: int,
        loop: Loop | None = None,
        **options: Unpack[RunnerOptions],
    ) -> None:
        capacity = whole("max_requests", max_requests, 1, ConfigError)
        if loop is not None and not isinstance(loop, Loop):
            raise ConfigTypeError(f"loop of a decode runner must be a dg.Loop, got {brief(loop)}")
        slots = check_slots(inputs, _SLOTS if loop else ())
        step = forward
        if loop is not None:
            step = loop.around(forward, slots, outputs, ranks=options.get("group") is not None)
            outputs = _looped_outputs(outputs)
        super().__init__(
            slots=slots,
            function=step,
            outputs=outputs,
            options=Options.of("decode", capacity, options),
            capacity=capacity,
            counting=ByRequests("decode", capacity, None),
            steps_per_launch=loop.steps if loop else 1,
        )
