"""Static input buffers: views, pad values, checks of inputs, and transfers from the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from devgraph.api.backend import Backend
from devgraph.api.buffers import StaticBuffers
from devgraph.api.errors import (
    ConfigError,
    InputError,
    InputTypeError,
    brief,
    counted,
    did_you_mean,
)
from devgraph.runners.outputs import LeasedTensor, released
from devgraph.runners.slots import STATE_SLOTS, InputSlot, Pad, Size, raw, raw_dtype, raw_value

_ALIGNMENT = 16  # bytes to which packed tensors are aligned

TEMPLATE_BYTES = 2**20
"""Maximum size of a pad template: a tensor of pad values that a grouped copy writes without an
additional launch. Larger padding is filled in place and needs no memory."""


Parts = tuple[torch.Tensor, torch.Tensor | None]
"""The real and the padded rows of a view; the second is None if there are no padded rows."""


class InputArena:
    """The static buffers of a runner's input slots."""

    def __init__(
        self,
        slots: Mapping[str, InputSlot],
        largest: Size,
        backend: Backend,
        run_slots: frozenset[str] = frozenset(),
        share: InputArena | None = None,
        *,
        divides_tokens: bool = False,
    ) -> None:
        self.slots = dict(slots)
        self.largest = largest
        self.given = {name: slot for name, slot in slots.items() if slot.real is None}
        """The slots that callers pass."""
        self.run_slots = run_slots
        """The slots that only eager code reads, so that no graph has their addresses."""
        self.graph_slots = frozenset(slots) - run_slots
        self.backend = backend
        self.buffers = StaticBuffers(
            {name: (slot.shape(largest), slot.dtype) for name, slot in slots.items()},
            device=backend.device,
            shared={} if share is None else share.lent(self.slots.values(), largest),
        )
        self.device = self.buffers.device
        self.is_shared = share is not None
        """Whether another runner uses the same buffers."""
        self.staging = Staging(backend, self.device)
        offsets = [name for name, slot in self.given.items() if slot.start is not None]
        self.token_offsets = offsets[0] if divides_tokens and len(offsets) == 1 else None
        """The slot that divides the tokens among the requests; None if several have offsets."""
        self._templates: dict[tuple[torch.dtype, str], torch.Tensor] = {}

    def lent(self, slots: Iterable[InputSlot], largest: Size) -> dict[str, torch.Tensor]:
        """Return the buffers that another runner can use for its ``slots``, by name."""
        lent = {}
        for slot in slots:
            own = self.slots.get(slot.name)
            if slot.name == STATE_SLOTS:  # Never shared: either runner may need more rows.
                continue
            if own is None or (own.dtype, own.row_shape) != (slot.dtype, slot.row_shape):
                continue
            self.is_shared = True
            lent[slot.name] = self.buffers[slot.name]
            if lent[slot.name].numel() < math.prod(slot.shape(largest)):
                raise ConfigError(
                    f"input slot {slot.name!r} needs shape {slot.shape(largest)}, but the buffer "
                    f"of the share= runner has shape {tuple(lent[slot.name].shape)}, the size of "
                    f"its largest bucket. Add a larger bucket to that runner, rename the slot, or "
                    f"create the runner with the larger batches first and pass it as share= to the "
                    f"other"
                )
        return lent

    def views(self, size: Size, names: frozenset[str] | None = None) -> dict[str, torch.Tensor]:
        """Return the static view of each slot (or of ``names``) for a batch of ``size``."""
        return {
            name: self.buffers.view(name, slot.shape(size))
            for name, slot in self.slots.items()
            if names is None or name in names
        }

    def split(self, padded: Size, real: Size, names: frozenset[str]) -> dict[str, Parts]:
        """Return the real and the padded rows of each static view of a graph of size ``padded``."""
        parts: dict[str, Parts] = {}
        for name, view in self.views(padded, names).items():
            axis, padding = self.slots[name].axis, None
            if axis is not None and (rows := self.slots[name].shape(real)[axis]) < view.shape[axis]:
                padding = view.narrow(axis, rows, view.shape[axis] - rows)
                view = view.narrow(axis, 0, rows)
            parts[name] = view, padding
        return parts

    def holds(self, size: Size) -> bool:
        """Whether the static buffers are large enough for a batch of ``size``."""
        return size.requests <= self.largest.requests and size.tokens <= self.largest.tokens

    def run_views(self, size: Size) -> dict[str, torch.Tensor]:
        """Return the static views of run slots, or new tensors if a batch exceeds the buffers."""
        if self.holds(size):
            return self.views(size, self.run_slots)
        with torch.inference_mode(False):
            return {
                name: torch.empty(slot.shape(size), dtype=slot.dtype, device=self.device)
                for name, slot in self.slots.items()
                if name in self.run_slots
            }

    def fill(self, views: Mapping[str, torch.Tensor]) -> None:
        """Write pad values into every row of ``views``, a result of ``views()``."""
        for name, view in views.items():
            raw(view).fill_(raw_value(self.slots[name].pad.value, view.dtype))

    def template(self, slot: InputSlot, pad: Pad) -> torch.Tensor | None:
        """Return a flat tensor of pad values for copies; None if they vary or are too many."""
        needed = math.prod(slot.shape(self.largest))
        if pad.kind != "fill" or needed * slot.dtype.itemsize > TEMPLATE_BYTES:
            return None
        key = (slot.dtype, repr(pad.value))
        template = self._templates.get(key)
        if template is None or template.numel() < needed:
            value, dtype = raw_value(pad.value, slot.dtype), raw_dtype(slot.dtype)
            with torch.inference_mode(False):
                template = torch.full((needed,), value, dtype=dtype, device=self.device)
            self._templates[key] = template
        return template

    def admit(self, inputs: Mapping[str, Any], real: Size) -> list[torch.Tensor]:
        """Check the inputs; return plain tensors outside the buffers, in the order of ``given``."""
        self.require(inputs, self.given)
        return [self.admit_one(slot, inputs[name], real) for name, slot in self.given.items()]

    def require(self, inputs: object, slots: Collection[str]) -> None:
        """Raise InputError unless ``inputs`` has exactly the names of ``slots``."""
        if not isinstance(inputs, Mapping):
            raise InputTypeError(
                f"inputs must be a mapping of slot names to tensors, got {type(inputs).__name__}"
            )
        missing = [name for name in slots if name not in inputs]
        unknown = [name for name in inputs if name not in slots]
        if missing or unknown:
            raise InputError(_misfit(missing, unknown, slots))

    def admit_one(self, slot: InputSlot, value: Any, real: Size) -> torch.Tensor:
        """Check and return one input; see ``admit``."""
        if not isinstance(value, torch.Tensor):
            raise InputTypeError(f"input {slot.name!r} must be a tensor, got {brief(value)}")
        if isinstance(value, LeasedTensor):
            value = released(value)
        near = value.device == self.device or value.device.type == "cpu"
        alike = value.layout is torch.strided and value.dtype is slot.dtype
        if not (near and alike and tuple(value.shape) == slot.shape(real)):
            wrong_dtype = value.dtype is not slot.dtype
            raise (InputTypeError if wrong_dtype else InputError)(
                f"input {slot.name!r} is {brief(value)}"
                + f" ({value.layout})" * (value.layout is not torch.strided)
                + f"; expected {slot.dtype} {slot.shape(real)} on {self.device} "
                f"(dims {slot.dims}, {real})"
                + (f"; convert it with .to({slot.dtype})" * wrong_dtype)
            )
        self.require_offsets(slot, value, real)
        if value.requires_grad:
            value = value.detach()
        plain = value if type(value) is torch.Tensor else value.as_subclass(torch.Tensor)
        return _copy(plain) if self.buffers.overlaps(plain) else plain

    def require_ranges(self, inputs: Mapping[str, Any]) -> None:
        """Wait for the device, and raise InputError for a value outside the range of its slot."""
        for name, slot in self.given.items():
            value = inputs.get(name)
            if slot.high is None or not isinstance(value, torch.Tensor):
                continue
            value = released(value) if isinstance(value, LeasedTensor) else value
            low = slot.low or 0
            wrong = (value < low) | (value >= slot.high)
            if slot.pad.kind == "fill":
                wrong &= value != slot.pad.value
            if wrong.any():
                raise InputError(
                    f"input {name!r} has the value {value[wrong][0].item()}, but its slot declares "
                    f"the range {low} to {slot.high - 1} (low= and high=). On a device, an invalid "
                    f"index would stop the process."
                )

    def require_offsets(self, slot: InputSlot, tensor: torch.Tensor, real: Size) -> None:
        """Raise InputError for invalid offsets on the host; reading a device would block."""
        if slot.start is None or not tensor.is_cpu:
            return
        offsets: list[int] = tensor.tolist()
        is_bounded = slot.name == self.token_offsets
        if offsets[0] != slot.start:
            fault = (
                f"begin with {offsets[0]}, so the rows before that belong to no request. Begin "
                f"with {slot.start}, or declare another start with pad=Pad.last(start)"
            )
        elif offsets != sorted(offsets):
            at = next(i for i in range(1, len(offsets)) if offsets[i] < offsets[i - 1])
            fault = (
                f"decrease at index {at}, from {offsets[at - 1]} to {offsets[at]}. Each offset is "
                f"the end of a request and the start of the next one"
            )
        elif is_bounded and offsets[-1] > slot.start + real.tokens:
            fault = (
                f"end with {offsets[-1]} at index {len(offsets) - 1}, but the batch has "
                f"{counted(real.tokens, 'token')}. The last offset must be at most "
                f"{slot.start + real.tokens}. If these offsets do not count tokens, declare "
                f"another slot with the offsets of tokens"
            )
        else:
            return
        raise InputError(f"input {slot.name!r} has cumulative offsets that {fault}.")

    def eager_inputs(self, inputs: Mapping[str, Any], real: Size) -> dict[str, torch.Tensor]:
        """Return contiguous copies of the inputs, independent of every static buffer."""
        with torch.no_grad():
            admitted = zip(self.given, self.admit(inputs, real), strict=True)
            marks = {
                name: torch.full(
                    slot.shape(real),
                    raw_value(slot.real, slot.dtype),
                    dtype=raw_dtype(slot.dtype),
                    device=self.device,
                ).view(slot.dtype)
                for name, slot in self.slots.items()
                if slot.real is not None
            }
            return {**{name: self._own_copy(tensor) for name, tensor in admitted}, **marks}

    def _own_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device == self.device:
            return _copy(tensor)
        return self.backend.pin(tensor.contiguous()).to(self.device, non_blocking=True)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return raw(tensor).clone(memory_format=torch.contiguous_format).view(tensor.dtype)


def _misfit(missing: Sequence[str], unknown: Sequence[Any], slots: Collection[str]) -> str:
    faults = []
    for fault, names in (("missing", missing), ("unknown", unknown)):
        if names:
            plural = "s" if len(names) > 1 else ""
            faults.append(f"{fault} input{plural} {', '.join(map(str, names))}")
    near = did_you_mean(str(unknown[0]), missing or slots) if unknown else ""
    hint = near[near.find(" Did") :] if " Did" in near else ""
    names = ", ".join(name for name in slots if name != STATE_SLOTS)
    return f"{' and '.join(faults)}; the runner has the slots {names}.{hint}"


class Staging:
    """A block of memory on the host and a block on the device, for transfers of host tensors.

    Transfers may reuse the blocks: the device block is written and read in stream order, and the
    host block is copied into pinned memory before a transfer starts.
    """

    def __init__(self, backend: Backend, device: torch.device) -> None:
        self._backend = backend
        self._device = device
        with torch.inference_mode(False):
            self._host = torch.empty(0, dtype=torch.uint8, device="cpu")
            self._twin = torch.empty(0, dtype=torch.uint8, device=device)

    def transfer(
        self, layouts: Sequence[tuple[Sequence[int], torch.dtype]]
    ) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
        """Return a function that sends host tensors in one transfer (a copy takes about 25 us)."""
        offsets, total = [], 0
        for shape, dtype in layouts:
            offsets.append(total)
            total += -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        with torch.inference_mode(False):  # Inference tensors could not be written later.
            if self._host.numel() < total:
                self._host = torch.empty(total, dtype=torch.uint8, device="cpu")
                self._twin = torch.empty(total, dtype=torch.uint8, device=self._device)
            host, twin = self._host[:total], self._twin[:total]
            packed, sent = (
                [
                    block[at : at + math.prod(shape) * dtype.itemsize]
                    .view(dtype)
                    .view(tuple(shape))
                    for at, (shape, dtype) in zip(offsets, layouts, strict=True)
                ]
                for block in (host, twin)
            )

        def send(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            torch._foreach_copy_(packed, tensors)
            twin.copy_(self._backend.pin(host), non_blocking=True)
            return sent

        return send
