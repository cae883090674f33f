"""What a runner is told about its data: input slots, host slots, output slots, sizes, padding.

Rows that no real request owns hold pad values: in a capture all of them, in a run those behind the
real ones (``Padding``; constants travel with the inputs of a ``CopyPlan``), between the steps of a
loop those of requests that are done (``pad_rows``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import attrs
import torch

from devgraph.api.errors import ConfigError, ConfigTypeError, brief, did_you_mean, whole

Dim = int | str
Scalar = int | float | bool
_ROW_DIMS = ("tokens", "requests", "requests+1")
# Attributes of Batch that a slot of the same name would hide.
_RESERVED = frozenset({"host", "real", "requests", "tokens", "variant", "width"})


@attrs.frozen
class Pad:
    """What the rows of a slot hold that no real request owns.

    A padded row must never write real state: give index-like slots a value that points nowhere
    (``Pad.fill(-1)``, or a reserved row), lengths a sentinel, and cumulative offsets
    ``Pad.last()``. Make one with the class methods.
    """

    kind: Literal["fill", "last"]
    value: Scalar = 0

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

    def continued(self, values: Sequence[Any], count: int) -> tuple[Any, ...]:
        """Return host values, continued to ``count`` of them."""
        repeated = values[-1] if self.kind == "last" and values else self.value
        return (*values, *[repeated] * (count - len(values)))


@attrs.frozen
class Size:
    """How large a batch is: ``requests``, ``tokens``, and ``width`` = tokens per request.

    ``width`` is None where requests differ in length (prefill).
    """

    requests: int
    tokens: int
    width: int | None = None

    def rows(self, dim: str) -> int:
        """Return the extent of a dimension named ``"tokens"``, ``"requests"``, ``"requests+1"``."""
        # Steps are traced through here. Inductor of torch 2.11 defines a sum of ints, but not one
        # int that is used as it is read; nor can it add a bool.
        extra = 1 if dim == "requests+1" else 0
        return (self.tokens if dim == "tokens" else self.requests) + extra


def _dims(dims: Iterable[Dim] | Dim) -> tuple[Dim, ...]:
    return tuple(dims) if isinstance(dims, Iterable) and not isinstance(dims, str) else (dims,)


def _require_rows(kind: str, dim: object, owner: str) -> None:
    if dim not in _ROW_DIMS:
        raise ConfigError(f"unknown {kind} {dim!r} of {owner}. {did_you_mean(str(dim), _ROW_DIMS)}")


@attrs.frozen
class InputSlot:
    """One input of a step: a static tensor that ``run`` copies the caller's data into.

    Args:
        name: key of the input in ``run`` and attribute of the batch.
        dims: shape; each entry is an int, ``"tokens"``, ``"requests"`` or ``"requests+1"``. At
            most one entry may be named; without one the slot has a fixed shape and no padding.
        dtype: exact dtype of the data; nothing is converted.
        pad: what padded rows hold, and every row during capture.
        real: what every real row holds, so that the step can tell rows from padding: the runner
            writes it, and callers leave the slot out. It needs a named dim and a constant pad.
        sample: for ``prove``: called with the shape and a ``torch.Generator``, returns fresh legal
            data on the host. Without it floating slots get normal random numbers and all others
            keep their pad value, because a random index may point anywhere. With ``real``, what
            rows hold in a proof instead.

    Raises:
        ConfigError: a name, dimension, dtype or pad rule that cannot work. It is a ValueError.
    """

    name: str
    dims: tuple[Dim, ...] = attrs.field(converter=_dims)
    dtype: torch.dtype
    pad: Pad = attrs.field(kw_only=True)
    real: Scalar | None = attrs.field(default=None, kw_only=True)
    sample: Callable[[tuple[int, ...], torch.Generator], torch.Tensor] | None = attrs.field(
        default=None, kw_only=True, eq=False
    )

    def __attrs_post_init__(self) -> None:
        name = self.name
        if not isinstance(name, str) or not name.isidentifier() or name[0] == "_":
            raise ConfigError(
                f"input slot {brief(name)} must be a Python identifier without leading underscore"
            )
        if name in _RESERVED:
            raise ConfigError(
                f"input slot {name!r} would hide batch.{name}; reserved: "
                f"{', '.join(sorted(_RESERVED))}"
            )
        for dim in self.dims:
            if isinstance(dim, str):
                _require_rows("dim", dim, f"input slot {name!r}")
            else:
                whole(f"a dim of input slot {name!r}", dim, 1, ConfigError)
        if sum(isinstance(dim, str) for dim in self.dims) > 1:
            raise ConfigError(
                f"input slot {self.name!r} has dims {self.dims}: at most one may be named, the "
                f"others must be ints"
            )
        if not isinstance(self.dtype, torch.dtype):
            raise ConfigTypeError(
                f"input slot {self.name!r} needs a torch.dtype, got {brief(self.dtype)}"
            )
        self._check_pad()
        if self.real is not None and (
            self.pad.kind != "fill" or self.axis is None or not _fits(self.real, self.dtype)
        ):
            raise ConfigError(
                f"input slot {self.name!r} marks real rows with {brief(self.real)}, for which it "
                f"needs a named dim, Pad.fill(value) or Pad.zero(), and a dtype that holds it"
            )

    def _check_pad(self) -> None:
        if not isinstance(self.pad, Pad):
            raise ConfigTypeError(
                f"input slot {self.name!r} needs pad=Pad.zero(), Pad.fill(value) or Pad.last(), "
                f"got {brief(self.pad)}"
            )
        if not isinstance(self.pad.value, int | float):
            raise ConfigTypeError(
                f"input slot {self.name!r} pads with a number, got {brief(self.pad.value)}"
            )
        if not _fits(self.pad.value, self.dtype):
            raise ConfigError(
                f"input slot {self.name!r} is {self.dtype} and cannot hold its pad value "
                f"{self.pad.value!r}"
            )

    @property
    def axis(self) -> int | None:
        """Index of the named dimension, or None when the shape is fixed."""
        return next((i for i, dim in enumerate(self.dims) if isinstance(dim, str)), None)

    @property
    def fixed_in_proofs(self) -> bool:
        """Whether ``prove`` leaves it at its pad value, because it cannot draw valid data."""
        drawn = self.dtype.is_floating_point or self.dtype.is_complex
        return self.sample is None and self.real is None and not drawn

    @property
    def row_shape(self) -> tuple[int | None, ...]:
        """The dims, with None for the named one, whatever it counts."""
        return tuple(None if isinstance(dim, str) else dim for dim in self.dims)

    @property
    def row_dim(self) -> str | None:
        """The named dimension, or None when the shape is fixed."""
        return next((dim for dim in self.dims if isinstance(dim, str)), None)

    @property
    def by_requests(self) -> bool:
        """Whether the slot grows with the number of requests."""
        return self.row_dim in ("requests", "requests+1")

    def shape(self, size: Size) -> tuple[int, ...]:
        """Return the shape for a batch of ``size``."""
        return tuple(size.rows(dim) if isinstance(dim, str) else dim for dim in self.dims)


@attrs.frozen
class HostSlot:
    """A host argument that is a sequence with one entry per request or token.

    Declared as a value of ``host_args``. The caller passes a sequence of the real length; the step
    receives a tuple (which is hashable, so it can be a key), in graphs continued to the bucket's
    length by the pad rule.

    Args:
        dim: ``"tokens"``, ``"requests"`` or ``"requests+1"``.
        pad: ``Pad.zero()``, ``Pad.fill(value)`` or ``Pad.last()``.
    """

    dim: str
    pad: Pad = attrs.field(kw_only=True)

    def __attrs_post_init__(self) -> None:
        _require_rows("dim", self.dim, "a host slot")
        if not isinstance(self.pad, Pad):
            raise ConfigTypeError(
                f"a host slot needs pad=Pad.zero(), Pad.fill(value) or Pad.last(), got "
                f"{brief(self.pad)}"
            )

    def padded(self, values: Sequence[Any], size: Size) -> tuple[Any, ...]:
        """Return ``values`` continued by the pad rule to the length that ``size`` asks for."""
        return self.pad.continued(values, size.rows(self.dim))


@attrs.frozen
class OutputSlot:
    """How a tensor that the step returns grows with the batch.

    Args:
        rows: ``"requests"``, ``"tokens"``, or None for a tensor whose shape never depends on the
            batch; only real rows are handed out.
        dim: the dimension that has one entry per row.
    """

    rows: str | None = attrs.field(default="requests", kw_only=True)
    dim: int = attrs.field(default=0, kw_only=True)

    def __attrs_post_init__(self) -> None:
        if self.rows is not None:
            _require_rows("rows", self.rows, "an output slot")
        whole("dim of an output slot", self.dim, kind=ConfigError)


ROW_PER_REQUEST = OutputSlot(rows="requests")
ROW_PER_TOKEN = OutputSlot(rows="tokens")


def check_slots(slots: Sequence[InputSlot], own: Sequence[InputSlot] = ()) -> dict[str, InputSlot]:
    """Return the slots by name, and then the runner's ``own``; duplicates, non-slots and an empty
    list raise ``ConfigError``."""
    by_name: dict[str, InputSlot] = {}
    if isinstance(slots, InputSlot) or not isinstance(slots, Iterable):
        raise ConfigTypeError(f"inputs must be a list of InputSlot objects, got {brief(slots)}")
    slots = [*slots]
    for slot in (*slots, *own):
        if not isinstance(slot, InputSlot):
            raise ConfigTypeError(f"inputs must be InputSlot objects, got {brief(slot)}")
        if slot.name in by_name:
            raise ConfigError(f"input slot {slot.name!r} is declared twice")
        by_name[slot.name] = slot
    if not any(slot.row_dim for slot in slots):
        raise ConfigError(
            "a runner needs at least one input slot with a dim 'tokens' or 'requests', or it "
            "cannot see the size of a batch"
        )
    return by_name


def _fits(value: Scalar, dtype: torch.dtype) -> bool:
    if dtype is torch.bool:
        return value in (0, 1)
    # Compared as they are: an int may be too large to become a float.
    if dtype.is_floating_point or dtype.is_complex:
        return value != value or abs(value) == math.inf or abs(value) <= torch.finfo(dtype).max
    info = torch.iinfo(dtype)
    return value % 1 == 0 and info.min <= value <= info.max


class Padding:
    """What writes pad values into parts of buffers: built once, written in every run.

    A launch costs more than all else here, so that all that can be copied is one grouped copy.
    """

    def __init__(self) -> None:
        self._targets: list[torch.Tensor] = []
        self._sources: list[torch.Tensor] = []
        self._fills: list[tuple[torch.Tensor, Scalar]] = []

    def add(
        self,
        part: torch.Tensor,
        pad: Pad,
        *,
        template: torch.Tensor | None = None,
        last: torch.Tensor | None = None,
    ) -> None:
        """Let ``part`` hold padding.

        Args:
            template: a flat tensor of the constant that ``pad`` is, where there is one.
            last: the real row before the part, read at every write; None where there is none.
        """
        source = None
        if pad.kind == "last" and last is not None:
            source = last.expand(part.shape)
        elif template is not None and template.numel() >= part.numel():
            source = cut(template, part)
        if source is None:
            self._fills.append((part, pad.value))
        else:
            self._targets.append(part)
            self._sources.append(source)

    def __bool__(self) -> bool:
        return bool(self._targets or self._fills)

    def write(self) -> None:
        """Write all of it, on the current stream."""
        for part, value in self._fills:
            part.fill_(value)
        if self._targets:
            torch._foreach_copy_(self._targets, self._sources)


def cut(template: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Return as much of a flat ``template`` of one pad value as fills ``part``, in its shape."""
    return template[: part.numel()].view(part.shape)


def pad_rows(tensor: torch.Tensor, pad: Pad, axis: int, real: torch.Tensor) -> None:
    """Write the pad value into every row of ``tensor`` along ``axis`` that is not in ``real``.

    Everything happens on the device, as part of a graph. ``real`` is a bool a row.
    """
    alone = real.logical_not()
    if pad.kind == "last":
        at = torch.arange(len(real), device=tensor.device)
        last = torch.where(real, at, -1).cummax(0).values  # the row to repeat, of a real one itself
        tensor.copy_(tensor.index_select(axis, last.clamp(min=0)))
        alone = last < 0
    tensor.masked_fill_(_along(alone, axis, tensor), pad.value)


def _along(values: torch.Tensor, axis: int, tensor: torch.Tensor) -> torch.Tensor:
    """Return ``values`` so that they broadcast along ``axis`` of ``tensor``."""
    return values.view([-1 if dim == axis else 1 for dim in range(tensor.dim())])
