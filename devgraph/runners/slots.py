"""Declarations of a runner's data: input slots, host slots, output slots, sizes and pad rules.

Rows without a real request contain pad values: all rows in a capture, the rows after the real rows
in a run (written by a ``CopyPlan``), and the rows of finished requests in a loop (``pad_rows``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import attrs
import torch

from devgraph.api.errors import ConfigError, ConfigTypeError, brief, counted, did_you_mean, whole

Dim = int | str
Scalar = int | float | bool
_ROW_DIMS = ("tokens", "requests", "requests+1")
STATE_SLOTS = "state_slots"
"""Name of the input slot with the request slots of a batch."""

_RESERVED = frozenset({"host", "real", "requests", "tokens", "variant", "width"})
"""Attributes of ``Batch`` that a slot of the same name would hide."""

_COPIED = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_LEAST = -(2**63)
_REQUIRED: Any = None
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def raw_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which data of ``dtype`` is copied and filled.

    Not every device has torch's grouped copy for unsigned integers above 8 bits and for floats of
    at most 8 bits. For these dtypes, return an integer dtype of equal size.
    """
    wide = dtype.is_complex or (dtype.is_floating_point and dtype.itemsize > 1)
    return dtype if wide or dtype in _COPIED else _INTEGERS.get(dtype.itemsize, dtype)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` reinterpreted as its ``raw_dtype``."""
    dtype = raw_dtype(tensor.dtype)
    return tensor if dtype is tensor.dtype else tensor.view(dtype)


def raw_value(value: Scalar, dtype: torch.dtype) -> Scalar:
    """Return the bits of ``value`` in ``dtype`` as a number of ``raw_dtype(dtype)``."""
    bits = raw_dtype(dtype)
    if bits is dtype or value == 0:
        return value if bits is dtype else 0
    single = torch.tensor([value], dtype=dtype, device="cpu")
    return single.view(bits).item()


@attrs.frozen
class Pad:
    """A rule for the rows of a slot that belong to no real request.

    Captures, warm-up runs and idle ranks run the step on pad values alone, so pad values must be
    legal for every operation of the step. A padded row must never write real state: pad indices
    with -1 or a reserved row, lengths with a sentinel, and cumulative offsets with ``Pad.last()``.
    Create rules with the class methods.
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
        """Repeat the last real row. In cumulative offsets, padded requests then have the length 0.

        Without a real row (in a capture, on an idle rank), every row is ``start``. Offsets on the
        host must begin with ``start`` and must not decrease.
        """
        return cls("last", start)

    def continued(self, values: Sequence[Any], count: int) -> tuple[Any, ...]:
        """Return the host values padded to ``count`` entries."""
        repeated = values[-1] if self.kind == "last" and values else self.value
        return (*values, *[repeated] * (count - len(values)))


@attrs.frozen
class Size:
    """The size of a batch: requests, tokens, and ``width``, the tokens per request.

    ``width`` is None if requests differ in length (prefill).
    """

    requests: int
    tokens: int
    width: int | None = None

    def __str__(self) -> str:
        return f"{counted(self.requests, 'request')}, {counted(self.tokens, 'token')}"

    @property
    def is_empty(self) -> bool:
        """Whether there are no requests or no tokens."""
        return not (self.requests and self.tokens)

    def rows(self, dim: str) -> int:
        """Return the extent of the dimension ``"tokens"``, ``"requests"`` or ``"requests+1"``."""
        # torch.compile traces this method. Inductor of torch 2.11 needs a sum of ints here: it
        # fails for an int that is returned unchanged and for a bool that is added.
        extra = 1 if dim == "requests+1" else 0
        return (self.tokens if dim == "tokens" else self.requests) + extra


def as_dims(dims: Iterable[Any] | Any) -> tuple[Any, ...]:
    """Return ``dims`` as a tuple; a slot with one dim may be declared without a tuple."""
    return tuple(dims) if isinstance(dims, Iterable) and not isinstance(dims, str) else (dims,)


def require_name(kind: str, name: object) -> None:
    """Raise ConfigError unless ``name`` can be an attribute of a batch."""
    if not isinstance(name, str) or not name.isidentifier() or name[0] == "_":
        raise ConfigError(
            f"{kind} {brief(name)} must be a Python identifier without a leading underscore"
        )


def _require_rows(kind: str, dim: object, owner: str) -> None:
    if dim not in _ROW_DIMS:
        raise ConfigError(f"unknown {kind} {dim!r} of {owner}. {did_you_mean(str(dim), _ROW_DIMS)}")


def _require_pad(pad: object, owner: str) -> None:
    if not isinstance(pad, Pad):
        raise ConfigTypeError(
            f"{owner} needs pad=Pad.zero(), Pad.fill(value) or Pad.last(), got {brief(pad)}"
        )


@attrs.frozen
class InputSlot:
    """One input of a step: a static tensor that ``run`` copies the caller's data into.

    Args:
        name: Key of the input in ``run`` and attribute of the batch.
        dims: Shape. Each entry is an int, ``"tokens"``, ``"requests"`` or ``"requests+1"``. At most
            one entry may be a name. Without a name, the slot has a fixed shape and no padding.
        dtype: Exact dtype of the data. Nothing is converted.
        pad: Rule for padded rows, and for every row during capture.
        real: Value of every real row, so that the step can distinguish real rows from padding. The
            runner writes the slot, and callers leave it out. Requires a named dim and a constant
            pad.
        sample: Callable that takes a shape and a ``torch.Generator`` and returns legal data on the
            host, for proofs. By default, floating-point slots receive normally distributed numbers,
            slots with a range receive numbers in this range, and all others keep their pad value.
            In a slot with ``real``, the callable replaces the values of real rows in a proof.
        low: Smallest legal integer in real rows; 0 if only ``high`` is given.
        high: Exclusive upper bound of integers in real rows, as in ``torch.randint``.

    Raises:
        ConfigError: A name, dimension, dtype, range or pad rule is invalid (a ValueError).
    """

    name: str
    dims: tuple[Dim, ...] = attrs.field(converter=as_dims)
    dtype: torch.dtype
    pad: Pad = attrs.field(default=_REQUIRED, kw_only=True)
    real: Scalar | None = attrs.field(default=None, kw_only=True)
    sample: Callable[[tuple[int, ...], torch.Generator], torch.Tensor] | None = attrs.field(
        default=None, kw_only=True, eq=False
    )
    low: int | None = attrs.field(default=None, kw_only=True)
    high: int | None = attrs.field(default=None, kw_only=True)

    def __attrs_post_init__(self) -> None:
        name = self.name
        require_name("input slot", name)
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
                f"input slot {self.name!r} marks real rows with {brief(self.real)}; this requires "
                f"a named dim, Pad.fill(value) or Pad.zero(), and a dtype that can represent it"
            )
        if self.low is not None or self.high is not None:
            self._check_range()
            object.__setattr__(self, "sample", self._drawn)

    def _check_range(self) -> None:
        name, low = self.name, 0 if self.low is None else self.low
        whole(f"high of input slot {name!r}", self.high, _LEAST, ConfigError)
        whole(f"low of input slot {name!r}", low, _LEAST, ConfigError)
        assert self.high is not None
        if self.dtype.is_floating_point or self.dtype.is_complex or self.row_dim == "requests+1":
            raise ConfigError(
                f"input slot {name!r} has a range, but ranges are only for integers that do not "
                f"depend on each other; declare sample= for floating-point data and for offsets"
            )
        if self.sample is not None:
            raise ConfigError(f"input slot {name!r} has both a range and sample=; declare one")
        if low >= self.high or not (_fits(low, self.dtype) and _fits(self.high - 1, self.dtype)):
            raise ConfigError(
                f"input slot {name!r} has the range {low} to {self.high}, which must not be empty "
                f"and must fit into {self.dtype}"
            )

    def _drawn(self, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        assert self.high is not None
        return torch.randint(self.low or 0, self.high, shape, generator=generator).to(self.dtype)

    def _check_pad(self) -> None:
        _require_pad(self.pad, f"input slot {self.name!r}")
        if not isinstance(self.pad.value, int | float):
            raise ConfigTypeError(
                f"input slot {self.name!r} must pad with a number, got {brief(self.pad.value)}"
            )
        if not _fits(self.pad.value, self.dtype):
            raise ConfigError(
                f"input slot {self.name!r} is {self.dtype} and cannot represent its pad value "
                f"{self.pad.value!r}{_only_zero(self.dtype)}"
            )

    @property
    def axis(self) -> int | None:
        """Index of the named dimension, or None if the shape is fixed."""
        return next((i for i, dim in enumerate(self.dims) if isinstance(dim, str)), None)

    @property
    def fixed_in_proofs(self) -> bool:
        """Whether proofs leave the slot at its pad value, because they cannot draw legal data."""
        drawn = self.dtype.is_floating_point or self.dtype.is_complex
        return self.sample is None and self.real is None and not drawn

    @property
    def row_shape(self) -> tuple[int | None, ...]:
        """The dims, with None in place of the named dim."""
        return tuple(None if isinstance(dim, str) else dim for dim in self.dims)

    @property
    def row_dim(self) -> str | None:
        """The named dimension, or None if the shape is fixed."""
        return next((dim for dim in self.dims if isinstance(dim, str)), None)

    @property
    def by_requests(self) -> bool:
        """Whether the slot grows with the number of requests."""
        return self.row_dim in ("requests", "requests+1")

    @property
    def start(self) -> Scalar | None:
        """The first value of cumulative offsets, or None for other slots."""
        are_offsets = self.dims == ("requests+1",) and self.pad.kind == "last"
        return self.pad.value if are_offsets else None

    def shape(self, size: Size) -> tuple[int, ...]:
        return tuple(size.rows(dim) if isinstance(dim, str) else dim for dim in self.dims)


@attrs.frozen
class HostSlot:
    """A host argument that is a sequence with one entry per request or token.

    Declare it as a value of ``host_args``. The caller passes a sequence of the real length. The
    step receives a tuple, because host arguments must be hashable to form keys. In a graph, the pad
    rule extends the tuple to the length of the bucket.

    Args:
        dim: ``"tokens"``, ``"requests"`` or ``"requests+1"``.
        pad: ``Pad.zero()``, ``Pad.fill(value)`` or ``Pad.last()``.
    """

    dim: str
    pad: Pad = attrs.field(default=_REQUIRED, kw_only=True)

    def __attrs_post_init__(self) -> None:
        _require_rows("dim", self.dim, "a host slot")
        _require_pad(self.pad, "a host slot")

    def padded(self, values: Sequence[Any], size: Size) -> tuple[Any, ...]:
        return self.pad.continued(values, size.rows(self.dim))


@attrs.frozen
class OutputSlot:
    """The kind and position of the rows of an output tensor.

    Args:
        rows: ``"requests"``, ``"requests+1"`` or ``"tokens"``, or None for a tensor whose shape
            does not depend on the batch. Callers receive only real rows.
        dim: Index of the dimension of the rows.
    """

    rows: str | None = attrs.field(default="requests", kw_only=True)
    dim: int = attrs.field(default=0, kw_only=True)

    def __attrs_post_init__(self) -> None:
        if self.rows is not None:
            _require_rows("rows", self.rows, "an output slot")
        whole("dim of an output slot", self.dim, kind=ConfigError)


ROW_PER_REQUEST = OutputSlot(rows="requests")
ROW_PER_TOKEN = OutputSlot(rows="tokens")


def check_slots(
    slots: Sequence[InputSlot], own: Sequence[InputSlot] = (), state: InputSlot | None = None
) -> dict[str, InputSlot]:
    """Check the input slots and return them by name, with the runner's ``own`` slots last."""
    by_name: dict[str, InputSlot] = {}
    if isinstance(slots, InputSlot) or not isinstance(slots, Iterable):
        raise ConfigTypeError(f"inputs must be a list of InputSlot objects, got {brief(slots)}")
    slots = [*slots]
    for slot in (*slots, *own, *([] if state is None else [state])):
        if not isinstance(slot, InputSlot):
            raise ConfigTypeError(f"inputs must contain InputSlot objects, got {brief(slot)}")
        if slot.name in by_name:
            raise ConfigError(f"input slot {slot.name!r} is declared twice")
        if slot.name == "state" and state is not None:
            raise ConfigError("input slot 'state' would hide batch.state; rename it")
        by_name[slot.name] = slot
    if not any(slot.row_dim and slot.real is None for slot in slots):
        raise ConfigError(
            "a runner takes the size of a batch from its input slots; declare at least one with a "
            "dim 'tokens' or 'requests'"
        )
    return by_name


def _fits(value: Scalar, dtype: torch.dtype) -> bool:
    if dtype is torch.bool or _only_zero(dtype):
        return value == 0 or (dtype is torch.bool and value == 1)
    # Do not convert the value: an int may be too large for a float.
    if dtype.is_floating_point or dtype.is_complex:
        return value != value or abs(value) == math.inf or abs(value) <= torch.finfo(dtype).max
    limits = torch.iinfo(dtype)
    return value % 1 == 0 and limits.min <= value <= limits.max


def _only_zero(dtype: torch.dtype) -> str:
    """Return the reason why 0 is the only constant of ``dtype``, or "" if there are others."""
    try:
        torch.ones(1, dtype=dtype, device="cpu")
    except (NotImplementedError, RuntimeError):
        return ": torch cannot convert numbers to this dtype, so only 0 (all bits clear) works"
    return ""


def pad_rows(tensor: torch.Tensor, pad: Pad, axis: int, real: torch.Tensor) -> None:
    """Write the pad value on the device into rows along ``axis`` where ``real`` is false."""
    padded = real.logical_not()
    tensor, value = raw(tensor), raw_value(pad.value, tensor.dtype)
    if pad.kind == "last":
        index = torch.arange(len(real), device=tensor.device)
        last = torch.where(real, index, -1).cummax(0).values  # -1 before the first real row
        tensor.copy_(tensor.index_select(axis, last.clamp(min=0)))
        padded = last < 0
    shape = [-1 if dim == axis else 1 for dim in range(tensor.dim())]
    tensor.masked_fill_(padded.view(shape), value)
