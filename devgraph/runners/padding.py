"""The padding of slots: the rule of each, and all that writes by it.

Rows that no real request owns hold pad values: in a capture all of them, in a run those behind the
real ones (``Padding``; constants travel with the inputs of a ``CopyPlan``), between the steps of a
loop those of requests that are done (``pad_rows``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import attrs
import torch

from devgraph.api.errors import ConfigTypeError, brief

Scalar = int | float | bool


@attrs.frozen
class Pad:
    """What the rows of a slot hold that no real request owns.

    A padded row must never write real state: give index-like slots a value that points nowhere
    (``Pad.fill(-1)``, or a reserved row), lengths a sentinel, and cumulative offsets
    ``Pad.last()``. Make one with the class methods.
    """

    kind: Literal["fill", "last", "ramp", "value_of"]
    value: Scalar = 0
    step: int = 0
    source: torch.Tensor | None = attrs.field(default=None, eq=False, repr=brief)

    @classmethod
    def zero(cls) -> Pad:
        """Pad with zeros."""
        return cls("fill", 0)

    @classmethod
    def fill(cls, value: Scalar) -> Pad:
        """Pad with ``value``, for example a length sentinel or the index of a scratch row."""
        return cls("fill", value)

    @classmethod
    def last(cls, start: Scalar = 0) -> Pad:
        """Repeat the last real row: in cumulative offsets, unused requests get the length 0.

        Where there is no real row (capture, an idle rank) every row holds ``start``.
        """
        return cls("last", start)

    @classmethod
    def ramp(cls, step: int, start: int = 0) -> Pad:
        """Continue from the last real row in steps of ``step``.

        In cumulative offsets, every unused request gets the length ``step``. Where there is no
        real row the slot holds ``start``, ``start + step``, ...
        """
        return cls("ramp", start, step)

    @classmethod
    def value_of(cls, source: torch.Tensor) -> Pad:
        """Pad with what ``source`` holds at each run: a scalar tensor, or one row of the slot.

        It must lie on the device of the slot; it is read in place, so writing it changes the
        padding of later runs without a new capture.
        """
        if not isinstance(source, torch.Tensor):
            raise ConfigTypeError(
                f"Pad.value_of takes a tensor that is read at every run, got {brief(source)}; use "
                f"Pad.fill({brief(source)}) for a constant"
            )
        return cls("value_of", source=source)

    def continued(self, values: Sequence[Any], count: int) -> tuple[Any, ...]:
        """Return host values, continued to ``count`` of them."""
        missing = range(count - len(values))
        if self.kind == "ramp":
            last = values[-1] if values else self.value - self.step
            return (*values, *(last + self.step * (i + 1) for i in missing))
        repeated = values[-1] if self.kind == "last" and values else self.value
        return (*values, *(repeated for _ in missing))

    def first_rows(self, view: torch.Tensor, axis: int | None) -> torch.Tensor:
        """Return what ``view`` holds where no real row is before it, broadcastable to it."""
        if self.source is not None:
            return self.source.detach()
        if axis is None or not self.step:
            return torch.full((), self.value, dtype=view.dtype, device=view.device)
        ramp = torch.arange(view.shape[axis], device=view.device) * self.step + self.value
        return _along(ramp.to(view.dtype), axis, view)


class Padding:
    """What writes pad values into parts of buffers: built once, written in every run.

    A launch costs more than all else here, so that all that can be copied is one grouped copy.
    """

    def __init__(self) -> None:
        self._targets: list[torch.Tensor] = []
        self._sources: list[torch.Tensor] = []
        self._fills: list[tuple[torch.Tensor, Scalar]] = []
        self._ramps: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def add(
        self,
        part: torch.Tensor,
        pad: Pad,
        axis: int | None,
        *,
        template: torch.Tensor | None = None,
        last: torch.Tensor | None = None,
    ) -> None:
        """Let ``part``, whose rows are along ``axis``, hold padding.

        Args:
            template: a flat tensor of the constant that ``pad`` is, where there is one.
            last: the real row before the part, read at every write; None where there is none.
        """
        if pad.kind == "ramp" and last is not None:
            with torch.inference_mode(False):
                steps = Pad.ramp(pad.step, pad.step).first_rows(part, axis).expand(part.shape)
            self._ramps.append((part, last.expand(part.shape), steps))
        elif pad.kind == "last" and last is not None:
            self._copy(part, last)
        elif template is not None and template.numel() >= part.numel():
            self._copy(part, cut(template, part))
        elif pad.kind in ("fill", "last"):
            self._fills.append((part, pad.value))
        else:
            with torch.inference_mode(False):
                self._copy(part, pad.first_rows(part, axis))

    def _copy(self, part: torch.Tensor, source: torch.Tensor) -> None:
        self._targets.append(part)
        self._sources.append(source.expand(part.shape))

    def __bool__(self) -> bool:
        return bool(self._targets or self._fills or self._ramps)

    def write(self) -> None:
        """Write all of it, on the current stream."""
        for part, value in self._fills:
            part.fill_(value)
        if self._targets:
            torch._foreach_copy_(self._targets, self._sources)
        for part, last, steps in self._ramps:
            torch.add(last, steps, out=part)


def cut(template: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Return as much of a flat ``template`` of one pad value as fills ``part``, in its shape."""
    return template[: part.numel()].view(part.shape)


def pad_rows(tensor: torch.Tensor, pad: Pad, axis: int, real: torch.Tensor) -> None:
    """Write the pad value into every row of ``tensor`` along ``axis`` that is not in ``real``.

    Everything happens on the device, as part of a graph. ``real`` is a bool a row.
    """
    keep = _along(real, axis, tensor)
    if pad.kind == "fill":
        tensor.masked_fill_(keep.logical_not(), pad.value)
        return
    padded = pad.first_rows(tensor, axis)
    if pad.source is None:
        at = torch.arange(len(real), device=tensor.device)
        last = torch.where(real, at, -1).cummax(0).values  # the row to continue from
        steps = _along((pad.step * (at - last)).to(tensor.dtype), axis, tensor)
        continued = tensor.index_select(axis, last.clamp(min=0)) + steps
        padded = torch.where(_along(last >= 0, axis, tensor), continued, padded)
    tensor.copy_(torch.where(keep, tensor, padded))


def _along(values: torch.Tensor, axis: int, tensor: torch.Tensor) -> torch.Tensor:
    """Return ``values`` so that they broadcast along ``axis`` of ``tensor``."""
    return values.view([-1 if dim == axis else 1 for dim in range(tensor.dim())])
