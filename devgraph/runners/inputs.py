"""Input data: validated, copied into static buffers and padded, in a few grouped launches.

What a run of a given size has to do (shapes to expect, views to write, templates to pad with) is
worked out once and kept as a ``CopyPlan``; ``CopyPlan.load`` is the hot path.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from devgraph.api.backend import Backend
from devgraph.api.buffers import StaticBuffers
from devgraph.api.errors import InputError, InputTypeError, did_you_mean
from devgraph.runners.lease import LeasedTensor, released
from devgraph.runners.slots import InputSlot, Pad, Size

__all__ = ["CopyPlan", "InputArena", "fill_with_pad"]

TEMPLATE_BYTES = 2**20
"""Largest pad template: below it padding costs memory once and no launch of its own, because the
template joins the grouped copy; above it the rows are filled in place."""


class InputArena:
    """The static buffers of a runner's input slots.

    Args:
        slots: input slots by name.
        largest: the batch size that every slot must be able to hold.
        backend: whose device the buffers are on.
    """

    def __init__(self, slots: Mapping[str, InputSlot], largest: Size, backend: Backend) -> None:
        self.slots = dict(slots)
        self.largest = largest
        self._backend = backend
        self.buffers = StaticBuffers(
            {name: (slot.shape(largest), slot.dtype) for name, slot in slots.items()},
            device=backend.device,
        )
        self.device = self.buffers.device
        self._templates: dict[tuple[torch.dtype, str], torch.Tensor] = {}

    def views(self, size: Size, names: frozenset[str] | None = None) -> dict[str, torch.Tensor]:
        """Return the static view of each slot (of ``names`` only) for a batch of ``size``."""
        return {
            name: self.buffers.view(name, slot.shape(size))
            for name, slot in self.slots.items()
            if names is None or name in names
        }

    def fill(self, size: Size, names: frozenset[str] | None = None) -> None:
        """Put pad values into every row of each slot (of ``names`` only)."""
        with torch.no_grad():
            for name, view in self.views(size, names).items():
                fill_with_pad(view, self.slots[name])

    def template(self, slot: InputSlot) -> torch.Tensor | None:
        """Return a flat tensor of the slot's constant pad value, or None if it would be large."""
        needed = math.prod(slot.shape(self.largest))
        if needed * slot.dtype.itemsize > TEMPLATE_BYTES:
            return None
        key = (slot.dtype, repr(slot.pad.value))
        found = self._templates.get(key)
        if found is None or found.numel() < needed:
            with torch.inference_mode(False):
                found = torch.full((needed,), slot.pad.value, dtype=slot.dtype, device=self.device)
            self._templates[key] = found
        return found

    def extent(self, inputs: Mapping[str, Any], name: str) -> int:
        """Return how many rows the input of slot ``name`` has along its named dimension.

        Raises as ``admit``, for this one input.
        """
        slot = self.slots[name]
        value = self._checked_mapping(inputs)[name]
        if not isinstance(value, torch.Tensor):
            raise InputTypeError(f"input {name!r} must be a tensor, got {_kind(value)}")
        assert slot.axis is not None
        if value.dim() != len(slot.dims):
            raise InputError(
                f"input {name!r} has shape {tuple(value.shape)}; expected {len(slot.dims)} "
                f"dimensions, {slot.dims}"
            )
        return int(value.shape[slot.axis])

    def admit(self, inputs: Mapping[str, Any], real: Size) -> list[torch.Tensor]:
        """Return the inputs in slot order as plain tensors on the device, checked.

        Host tensors are brought to the device through pinned memory, tensors that lie in the
        static buffers are copied first, and autograd history is left behind.

        Raises:
            InputError: the inputs are no mapping of exactly the declared slots, or one has
                another shape, dtype, layout or device than declared for this batch; the message
                names it. ``InputTypeError`` where it is no tensor.
        """
        self._checked_mapping(inputs)
        return [self._admit_one(slot, inputs[name], real) for name, slot in self.slots.items()]

    def _checked_mapping(self, inputs: Any) -> Mapping[str, Any]:
        if not isinstance(inputs, Mapping):
            raise InputTypeError(
                f"inputs must be a mapping of slot names to tensors, got {type(inputs).__name__}"
            )
        missing = [name for name in self.slots if name not in inputs]
        if missing:
            raise InputError(
                f"missing input{'s' if len(missing) > 1 else ''} {', '.join(missing)}; the runner "
                f"has the slots {', '.join(self.slots)}"
            )
        for name in inputs:
            if name not in self.slots:
                raise InputError(f"unknown input {name!r}. {did_you_mean(str(name), self.slots)}")
        checked: Mapping[str, Any] = inputs
        return checked

    def _admit_one(self, slot: InputSlot, value: Any, real: Size) -> torch.Tensor:
        if not isinstance(value, torch.Tensor):
            raise InputTypeError(f"input {slot.name!r} must be a tensor, got {_kind(value)}")
        if isinstance(value, LeasedTensor):
            value = released(value)
        expected = f"{slot.dtype} {slot.shape(real)} on {self.device}"
        problem = None
        if value.layout is not torch.strided:
            problem = f"layout {value.layout}"
        elif value.dtype is not slot.dtype:
            problem = f"dtype {value.dtype}"
        elif tuple(value.shape) != slot.shape(real):
            problem = f"shape {tuple(value.shape)}"
        elif value.device != self.device and value.device.type != "cpu":
            problem = f"device {value.device}"
        if problem:
            raise InputError(
                f"input {slot.name!r} has {problem}; expected {expected} (dims "
                f"{slot.dims}, {real.requests} requests, {real.tokens} tokens)"
            )
        plain = value.detach()
        if type(plain) is not torch.Tensor:
            plain = plain.as_subclass(torch.Tensor)
        if plain.device != self.device:
            return self._backend.pin(plain).to(self.device, non_blocking=True)
        return plain.clone() if self.buffers.overlaps(plain) else plain

    def eager_views(self, inputs: Mapping[str, Any], real: Size) -> dict[str, torch.Tensor]:
        """Return contiguous copies of the inputs, independent of every static buffer."""
        with torch.no_grad():
            admitted = self.admit(inputs, real)
            return {
                name: tensor.clone(memory_format=torch.contiguous_format)
                for name, tensor in zip(self.slots, admitted, strict=True)
            }


class CopyPlan:
    """Everything that loading a batch of one real size into one padded size needs.

    Args:
        arena: where the data goes.
        real: the size of the caller's batch.
        padded: the size of the graph.
        run_slots: slots that belong to the run and not to the graph: they keep the real size.
    """

    def __init__(
        self, arena: InputArena, real: Size, padded: Size, run_slots: frozenset[str]
    ) -> None:
        self._arena = arena
        self._real = real
        self._device = arena.device
        self._start, self._stop = arena.buffers.start, arena.buffers.stop
        # Sorted by dtype: a grouped copy takes one dtype, and its sources are then one slice.
        self._order = sorted(arena.slots.values(), key=lambda slot: str(slot.dtype))
        self._checks = [
            (slot.name, torch.Size(slot.shape(real)), slot.dtype) for slot in self._order
        ]
        self._count = len(self._order)
        self._groups: list[tuple[list[torch.Tensor], int, int, list[torch.Tensor]]] = []
        self._fills: list[tuple[torch.Tensor, Any]] = []
        self._late: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        self._ramps: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        start = 0
        while start < self._count:
            stop = start
            while stop < self._count and self._order[stop].dtype is self._order[start].dtype:
                stop += 1
            self._add_group(start, stop, padded, run_slots)
            start = stop

    def _add_group(self, start: int, stop: int, padded: Size, run_slots: frozenset[str]) -> None:
        heads, tails, pads = [], [], []
        for slot in self._order[start:stop]:
            size = self._real if slot.name in run_slots else padded
            view = self._arena.buffers.view(slot.name, slot.shape(size))
            head, tail = _split(view, slot, self._real)
            heads.append(head)
            if tail is None:
                continue
            template = self._arena.template(slot) if slot.pad.kind == "fill" else None
            if template is not None:
                tails.append(tail)
                pads.append(template[: tail.numel()].view(tail.shape))
            else:
                self._add_tail(slot, head, tail)
        self._groups.append(([*heads, *tails], start, stop, pads))

    def _add_tail(self, slot: InputSlot, head: torch.Tensor, tail: torch.Tensor) -> None:
        pad, axis = slot.pad, slot.axis
        assert axis is not None
        if pad.kind == "fill":
            self._fills.append((tail, pad.value))
        elif pad.source is not None:
            self._late[0].append(tail)
            self._late[1].append(pad.source.expand(tail.shape))
        else:
            last = head.narrow(axis, head.shape[axis] - 1, 1).expand(tail.shape)
            if pad.kind == "last":
                self._late[0].append(tail)
                self._late[1].append(last)
            else:
                with torch.inference_mode(False):
                    steps = Pad("ramp", pad.step, pad.step)
                    rows = _ramp(steps, tail.shape[axis], slot, self._device)
                self._ramps.append((tail, last, rows.expand(tail.shape)))

    def load(self, inputs: Mapping[str, Any]) -> None:
        """Copy ``inputs`` into the static buffers and pad the rest, on the current stream.

        Nothing is written when an input is refused. Raises as ``InputArena.admit``.
        """
        sources: list[torch.Tensor] = []
        device, start, stop = self._device, self._start, self._stop
        try:
            for name, shape, dtype in self._checks:
                value = inputs[name]
                if (
                    type(value) is torch.Tensor
                    and value.dtype is dtype
                    and value.shape == shape
                    and value.device == device
                    and not value.requires_grad
                    and not start <= value.data_ptr() < stop
                ):
                    sources.append(value)
        except (KeyError, TypeError, RuntimeError):
            sources.clear()  # admit() finds out what is wrong and says so.
        if len(sources) != self._count or len(inputs) != self._count:
            sources = self._admit(inputs)
        for targets, first, last, pads in self._groups:
            torch._foreach_copy_(targets, sources[first:last] + pads)
        for tail, value in self._fills:
            tail.fill_(value)
        if self._late[0]:
            torch._foreach_copy_(*self._late)
        for tail, last_row, offsets in self._ramps:
            torch.add(last_row, offsets, out=tail)

    def _admit(self, inputs: Mapping[str, Any]) -> list[torch.Tensor]:
        admitted = dict(zip(self._arena.slots, self._arena.admit(inputs, self._real), strict=True))
        return [admitted[slot.name] for slot in self._order]


def _split(
    view: torch.Tensor, slot: InputSlot, real: Size
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the part of ``view`` that real rows fill, and the padded rest if there is any."""
    axis = slot.axis
    if axis is None:
        return view, None
    rows = slot.shape(real)[axis]
    missing = view.shape[axis] - rows
    if not missing:
        return view, None
    return view.narrow(axis, 0, rows), view.narrow(axis, rows, missing)


def _ramp(pad: Pad, rows: int, slot: InputSlot, device: torch.device) -> torch.Tensor:
    """Return what ``rows`` rows without a real row before them hold, broadcastable to the slot."""
    step = pad.step if pad.kind == "ramp" else 0
    values = torch.arange(rows, dtype=torch.int64, device=device) * step + pad.value
    assert slot.axis is not None
    shape = [1] * len(slot.dims)
    shape[slot.axis] = rows
    return values.to(slot.dtype).view(shape)


def fill_with_pad(view: torch.Tensor, slot: InputSlot) -> None:
    """Write into every row of ``view`` what the slot holds where there is no real row."""
    pad, axis = slot.pad, slot.axis
    if pad.source is not None:
        view.copy_(pad.source.expand(view.shape))
    elif pad.kind == "fill" or axis is None:
        view.fill_(pad.value)
    else:
        view.copy_(_ramp(pad, view.shape[axis], slot, view.device).expand(view.shape))


def _kind(value: Sequence[Any] | Any) -> str:
    return "None" if value is None else type(value).__name__
