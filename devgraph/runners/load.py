"""Loading of batches: inputs are copied into static buffers and padded in a few grouped launches.

A ``CopyPlan`` prepares shapes, target views and pad templates once for each batch size, and
``CopyPlan.load`` runs in every step. A launch takes about as much host time as viewing six tensors
in another dtype. Therefore, slots of different dtypes are copied in one launch, as four-byte words,
if that saves time.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch

from devgraph.api.tensors import alike_to
from devgraph.runners.inputs import InputArena, Parts
from devgraph.runners.slots import InputSlot, Pad, Scalar, Size, raw, raw_dtype, raw_value

_WORD = torch.int32
_VIEWS_PER_LAUNCH = 6
"""Number of tensors that can be viewed in another dtype (0.8 us each) in the host time of one
grouped launch (5 us), measured on the host of an H200."""

Values = tuple[torch.Tensor, ...]
"""The inputs of a batch, in the order of a plan's copies."""


@attrs.frozen
class _Group:
    """One grouped copy of ``sources[first:last]`` and ``pads`` to ``targets``."""

    targets: list[torch.Tensor]
    first: int
    last: int
    pads: list[torch.Tensor]


class CopyPlan:
    """A plan that loads batches of one real size into the static views of one padded size."""

    def __init__(
        self,
        arena: InputArena,
        real: Size,
        padded: Size,
        run_tensors: Mapping[str, torch.Tensor],
        *,
        join: bool | None = None,
    ) -> None:
        self._arena = arena
        self._real = real
        parts = arena.split(padded, real, arena.graph_slots)
        parts |= {name: (tensor, None) for name, tensor in run_tensors.items()}
        if join is None:
            join = arena.device.type != "cpu"
        joined = _joined(list(arena.given.values())) if join else set()

        def copy_dtype(slot: InputSlot) -> torch.dtype:
            return _WORD if slot.name in joined else raw_dtype(slot.dtype)

        # Sort slots by group, so that the sources of each group are one slice.
        slots = sorted(arena.slots.values(), key=lambda slot: str(copy_dtype(slot)))
        self._order = [slot for slot in slots if slot.real is None]
        self._names = [slot.name for slot in self._order]
        self._select: Callable[[Any], Any] = operator.itemgetter(*self._names)
        self._is_alike: Callable[..., bool] = _never
        """Whether inputs match the last checked inputs in shapes, strides, dtypes and devices, and
        require no gradients."""
        self._on_host: tuple[int, ...] = ()  # indices of the inputs that come from the host
        self._offsets = [(i, s) for i, s in enumerate(self._order) if s.start is not None]
        self._reinterpreted = [
            (index, copy_dtype(slot))
            for index, slot in enumerate(self._order)
            if slot.dtype is not copy_dtype(slot)
        ]
        self._transfers: dict[tuple[int, ...], Callable[[list[torch.Tensor]], Any]] = {}
        """Transfers by the indices of inputs that come from the host; created on first use."""
        self._groups: list[_Group] = []
        self._fills: list[tuple[torch.Tensor, Scalar]] = []
        """Padded parts without a template, each with its pad value."""
        self._repeats: list[torch.Tensor] = []
        """Padding that repeats the last real row, which is at the same index in ``_repeated``."""
        self._repeated: list[torch.Tensor] = []
        for dtype, group in itertools.groupby(slots, copy_dtype):
            self._add_group(list(group), dtype, parts)

    def _add_group(
        self, slots: Sequence[InputSlot], dtype: torch.dtype, rows_of: Mapping[str, Parts]
    ) -> None:
        heads, parts, pads = [], [], []
        for slot in slots:
            head, tail = rows_of[slot.name]
            rules = [(tail, slot.pad)]
            if slot.real is None:
                heads.append(head)
            else:
                rules.append((head, Pad.fill(slot.real)))
            for part, pad in rules:
                if part is None:
                    continue
                template = self._arena.template(slot, pad)
                rows = 0 if slot.axis is None else head.shape[slot.axis]
                # Run slots may have more rows than the buffers, and therefore than a template.
                if template is not None and template.numel() >= part.numel():
                    parts.append(part)
                    pads.append(template[: part.numel()].view(part.shape))
                elif pad.kind == "last" and slot.axis is not None and rows:
                    row = head.narrow(slot.axis, rows - 1, 1)
                    self._repeats.append(raw(part))
                    self._repeated.append(raw(row).expand(part.shape))
                else:
                    self._fills.append((raw(part), raw_value(pad.value, part.dtype)))
        targets = [_as(tensor, dtype) for tensor in (*heads, *parts)]
        first = self._groups[-1].last if self._groups else 0
        pads = [_as(pad, dtype) for pad in pads]
        if targets:
            self._groups.append(_Group(targets, first, first + len(heads), pads))

    def load(self, inputs: Mapping[str, Any]) -> None:
        """Copy ``inputs`` into the static buffers on the current stream, and pad the other rows.

        Raises the errors of ``InputArena.admit`` before it writes anything.
        """
        values = self._recognized(inputs)
        sources = list(self._admitted(inputs) if values is None else values)
        if self._on_host:
            self._send(sources)
        for index, dtype in self._reinterpreted:
            try:
                sources[index] = sources[index].view(dtype)
            except RuntimeError:  # The strides of this tensor do not allow the view.
                contiguous = sources[index].clone(memory_format=torch.contiguous_format)
                sources[index] = contiguous.view(dtype)
        for group in self._groups:
            torch._foreach_copy_(group.targets, sources[group.first : group.last] + group.pads)
        for part, value in self._fills:
            part.fill_(value)
        if self._repeats:  # after the real rows were copied
            torch._foreach_copy_(self._repeats, self._repeated)

    def _recognized(self, inputs: Mapping[str, Any]) -> Values | None:
        """Return the inputs in the order of the copies, or None if they need a full check.

        Inputs like the last checked inputs need no check unless they are in the static buffers.
        """
        try:
            selected = self._select(inputs)
        except (KeyError, TypeError):
            return None
        values: Values = selected if len(self._names) > 1 else (selected,)
        if len(inputs) != len(self._names) or not self._is_alike(*values):
            return None
        start, stop = self._arena.buffers.start, self._arena.buffers.stop
        if any(start <= value.data_ptr() < stop for value in values):
            return None
        for index, slot in self._offsets:
            self._arena.require_offsets(slot, values[index], self._real)
        return values

    def _admitted(self, inputs: Mapping[str, Any]) -> Values:
        """Check all inputs, and store their layout for ``_recognized``."""
        admitted = dict(zip(self._arena.given, self._arena.admit(inputs, self._real), strict=True))
        values = tuple(admitted[name] for name in self._names)
        device = self._arena.device
        self._on_host = tuple(i for i, value in enumerate(values) if value.device != device)
        self._is_alike = _never
        if all(map(operator.is_, values, map(inputs.__getitem__, self._names))):
            self._is_alike = alike_to(values)
        return values

    def _send(self, sources: list[torch.Tensor]) -> None:
        """Replace sources on the host with copies at fixed addresses on the device."""
        on_host = self._on_host
        transfer = self._transfers.get(on_host)
        if transfer is None:
            slots = [self._order[index] for index in on_host]
            layouts = [(slot.shape(self._real), slot.dtype) for slot in slots]
            transfer = self._transfers[on_host] = self._arena.staging.transfer(layouts)
        sent = transfer([sources[index] for index in on_host])
        for index, tensor in zip(on_host, sent, strict=True):
            sources[index] = tensor


def _never(*values: object) -> bool:
    return False


def _joined(slots: Sequence[InputSlot]) -> set[str]:
    """Return the names of the slots to copy together as words; none if that would be slower."""
    fitting = [slot for slot in slots if _has_whole_words(slot)]
    saved_launches = len({raw_dtype(slot.dtype) for slot in fitting}) - 1
    views = sum(slot.dtype is not _WORD for slot in fitting)
    if views > saved_launches * _VIEWS_PER_LAUNCH:
        return set()
    return {slot.name for slot in fitting}


def _has_whole_words(slot: InputSlot) -> bool:
    if not slot.dims or slot.dtype.is_complex:
        return False
    innermost = slot.dims[-1] if isinstance(slot.dims[-1], int) else 1
    return innermost * slot.dtype.itemsize % _WORD.itemsize == 0


def _as(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return ``tensor`` as ``dtype``, in a view that is writable outside of inference mode."""
    with torch.inference_mode(False):
        return tensor if tensor.dtype is dtype else tensor.view(dtype)
