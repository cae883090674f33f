"""Outputs: one set of buffers for all graphs of a runner, and views of their real rows.

Every graph ends with a copy of the step's result into these buffers. Therefore graphs can reuse the
memory of each other's results, and an output has the same address in all buckets.

In debug mode outputs are leased, to detect late reads: after the next run, every operation on a
leased output or on a view of it raises ``StaleOutputError``, except for queries of its shape.
Copies (``clone``, ``cpu`` from another device, arithmetic) have no lease.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch.utils import _pytree as pytree

from devgraph.api.buffers import StaticBuffers
from devgraph.api.errors import (
    ConfigError,
    ConfigTypeError,
    InputError,
    StaleOutputError,
    brief,
    counted,
)
from devgraph.api.results import ResultCheck
from devgraph.api.tensors import has_place
from devgraph.runners.decisions import Variant
from devgraph.runners.slots import OutputSlot, Size


@attrs.frozen
class _Leaf:
    """One tensor of the output tree, with its shape in the largest result."""

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    slot: OutputSlot

    @property
    def kind(self) -> tuple[Any, ...]:
        """Dtype and shape, with None for the dimension of the rows."""
        rows = self.slot.dim if self.slot.rows is not None else -1
        return self.dtype, tuple(None if d == rows else n for d, n in enumerate(self.shape))

    def shape_for(self, size: Size) -> tuple[int, ...]:
        if self.slot.rows is None:
            return self.shape
        dim = self.slot.dim
        return (*self.shape[:dim], size.rows(self.slot.rows), *self.shape[dim + 1 :])

    def nbytes_for(self, size: Size) -> int:
        return math.prod(self.shape_for(size)) * self.dtype.itemsize


@attrs.frozen
class Layout:
    """The output tree of one variant; None stands for a leaf that is None."""

    spec: Any
    leaves: tuple[_Leaf | None, ...]
    largest: Size


class OutputStore:
    """The output buffers: ``learn`` each variant, ``allocate``, then ``writer`` and ``views``."""

    def __init__(self, slots: Any, share: OutputStore | None = None) -> None:
        for slot in pytree.tree_leaves(slots):
            if not isinstance(slot, OutputSlot):
                raise ConfigTypeError(
                    f"outputs must be an OutputSlot or a tree of them, got {brief(slot)}"
                )
        self._slots = slots
        self._share = share
        self.shares = False
        self._layouts: dict[Variant, Layout] = {}
        self._shown: dict[Variant, Layout] = {}
        """Layouts of variants that were not captured, for ``empty``."""
        self.buffers: StaticBuffers | None = None
        """The buffers by position in the output tree; None before ``allocate``."""

    @property
    def nbytes(self) -> int:
        return 0 if self.buffers is None else self.buffers.nbytes

    def learn(self, variant: Variant, result: Any, size: Size) -> None:
        """Store the structure of ``result``, which must have the variant's largest size."""
        self._layouts[variant] = self.layout_of(result, size)

    def layout_of(self, result: Any, size: Size) -> Layout:
        paths, spec = pytree.tree_flatten_with_path(result)
        slots = slots_by_leaf(self._slots, result)
        leaves = [
            _leaf(pytree.keystr(path) or "(the tensor itself)", value, slot, size)
            for (path, value), slot in zip(paths, slots, strict=True)
        ]
        if not any(leaves):
            raise ConfigError(f"the step returned {brief(result)}; return at least one tensor")
        return Layout(spec, tuple(leaves), size)

    def empty(
        self, variant: Variant, run: Callable[[], Any], size: Size, device: torch.device
    ) -> Any:
        """Return a result without rows, in new tensors; outputs of fixed shape are zero."""
        layout = self._layouts.get(variant) or self._shown.get(variant)
        if layout is None:
            layout = self._shown[variant] = self.layout_of(run(), size)
        none = Size(0, 0)
        tensors = [
            leaf and torch.zeros(leaf.shape_for(none), dtype=leaf.dtype, device=device)
            for leaf in layout.leaves
        ]
        return pytree.tree_unflatten(tensors, layout.spec)

    def by_item(self, result: Any, lengths: Sequence[int]) -> list[Any]:
        """Return a tree of views for each item, from the result of a pack of these lengths."""
        layout = self.layout_of(result, Size(len(lengths), sum(lengths)))
        parts: list[Sequence[Any]] = []
        for value, leaf in zip(pytree.tree_leaves(result), layout.leaves, strict=True):
            if leaf is None:
                parts.append([None] * len(lengths))
            else:
                rows = lengths if leaf.slot.rows == "tokens" else [1] * len(lengths)
                parts.append(value.split(list(rows), leaf.slot.dim))
        return [pytree.tree_unflatten(part, layout.spec) for part in zip(*parts, strict=True)]

    def allocate(self, device: torch.device) -> None:
        """Allocate one buffer per output, large enough for every variant. Idempotent."""
        if self.buffers is not None:
            return
        needed: dict[str, int] = {}
        for layout in self._layouts.values():
            for index, leaf in enumerate(layout.leaves):
                if leaf is not None:
                    size = leaf.nbytes_for(layout.largest)
                    needed[str(index)] = max(size, needed.get(str(index), 0))
        shared = {} if self._share is None else self._share.lent(self._kinds(), needed)
        self.shares = bool(shared)
        self.buffers = StaticBuffers(
            {name: ((size,), torch.uint8) for name, size in needed.items()},
            device=device,
            shared=shared,
        )

    def lent(
        self, kinds: Mapping[str, set[tuple[Any, ...]]], needed: Mapping[str, int]
    ) -> dict[str, torch.Tensor]:
        """Return the buffers that another runner can use for its outputs, by position."""
        assert self.buffers is not None
        own = self._kinds()
        return {
            name: self.buffers[name]
            for name, size in needed.items()
            if own.get(name) == kinds[name] and self.buffers[name].numel() >= size
        }

    def _kinds(self) -> dict[str, set[tuple[Any, ...]]]:
        """Return dtypes and row shapes of the outputs by position."""
        kinds: dict[str, set[tuple[Any, ...]]] = {}
        for layout in self._layouts.values():
            for index, leaf in enumerate(layout.leaves):
                if leaf is not None:
                    kinds.setdefault(str(index), set()).add(leaf.kind)
        return kinds

    def refuse_overlap(self, name: str, tensor: torch.Tensor) -> None:
        """Raise InputError if a bound tensor overlaps the output buffers."""
        if self.buffers is not None and self.buffers.overlaps(tensor):
            raise InputError(
                f"bound tensor {name!r} overlaps the runner's output buffers, which every replay "
                f"overwrites; bind a copy, or pass the tensor as an input, which is copied"
            )

    def _full_views(self, variant: Variant, size: Size) -> list[torch.Tensor | None]:
        assert self.buffers is not None
        out: list[torch.Tensor | None] = []
        for index, leaf in enumerate(self._layouts[variant].leaves):
            if leaf is None:
                out.append(None)
                continue
            flat = self.buffers[str(index)][: leaf.nbytes_for(size)]
            out.append(flat.view(leaf.dtype).view(leaf.shape_for(size)))
        return out

    def writer(self, variant: Variant, size: Size) -> Callable[[Any], Any]:
        """Return a function that copies a result of ``size`` into the buffers, or refuses it."""
        layout = self._layouts[variant]
        views = self._full_views(variant, size)
        step = ResultCheck(
            "the step",
            before=f"for {layout.largest} it returned",
            error=ConfigError,
            now=f"for {size}",
            remedy="The structure must not depend on the size of the batch, apart from the rows.",
        )

        # Older versions of Dynamo cannot trace number formatting, so format before ``write``.
        checks = [
            step if leaf is None else attrs.evolve(step, before=_declared(leaf))
            for leaf in layout.leaves
        ]

        def write(result: Any) -> Any:
            leaves, spec = pytree.tree_flatten(result)
            step.structure(spec, layout.spec)
            for value, view, check in zip(leaves, views, checks, strict=True):
                if view is not None:
                    check.layout(value, view, strides=False)
                    view.copy_(value)
                elif value is not None:
                    step.refuse(brief(value), "None")
            return pytree.tree_unflatten(views, layout.spec)

        return write

    def views(self, variant: Variant, padded: Size, real: Size) -> Callable[[], Any]:
        """Return a callable that returns the real rows of a result of size ``padded``.

        Each call returns the tree of the step, with new containers if they are mutable.
        """
        layout = self._layouts[variant]
        leaves: list[torch.Tensor | None] = []
        for view, leaf in zip(self._full_views(variant, padded), layout.leaves, strict=True):
            if leaf is not None and view is not None and leaf.slot.rows is not None:
                view = view.narrow(leaf.slot.dim, 0, real.rows(leaf.slot.rows))
            leaves.append(view)
        if layout.spec.is_leaf():
            return lambda: leaves[0]
        return lambda: pytree.tree_unflatten(leaves, layout.spec)

    def poison(self, fill: Callable[[torch.Tensor], None]) -> None:
        """Call ``fill`` with every output buffer of every variant, in the dtype of its output."""
        for variant, layout in self._layouts.items():
            for view in self._full_views(variant, layout.largest):
                if view is not None:
                    fill(view)


def _declared(leaf: Any) -> str:
    slot = leaf.slot
    return f"output {leaf.path} is declared with rows={slot.rows!r}, dim={slot.dim} and needs"


def copied(outputs: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, outputs)


def slots_by_leaf(slots: Any, result: Any) -> list[OutputSlot]:
    """Return the slot of every leaf of ``result``, from the declared tree of ``slots``."""
    try:
        spread = pytree.tree_map(
            lambda slot, part: pytree.tree_map(lambda _: slot, part), slots, result
        )
        # Use the order of the result: its mappings may be ordered differently from ``slots``.
        return pytree.tree_leaves(pytree.tree_map(lambda _, slot: slot, result, spread))
    except ValueError:
        returned, declared = (
            pytree.treespec_pprint(pytree.tree_structure(tree)) for tree in (result, slots)
        )
        raise ConfigError(
            f"the step returned {returned}, but outputs is declared as {declared}; they must have "
            f"the same structure"
        ) from None


def _leaf(path: str, value: Any, slot: OutputSlot, size: Size) -> _Leaf | None:
    if value is None:
        return None
    if not isinstance(value, torch.Tensor):
        raise ConfigError(
            f"output {path} is {brief(value)}, but a graph can only return tensors (or None). "
            f"Every replay would return this value unchanged; return it as a tensor"
        )
    if not has_place(value):
        raise ConfigError(
            f"output {path} has layout {value.layout}{' (nested)' * value.is_nested}, which cannot "
            f"be copied to a fixed address; return its parts, or to_dense()"
        )
    if slot.rows is not None:
        rows = size.rows(slot.rows)
        got = value.shape[slot.dim] if slot.dim < value.dim() else None
        if got != rows:
            raise ConfigError(
                f"output {path} has shape {tuple(value.shape)} for {size}, but is declared with "
                f"rows={slot.rows!r} along dim {slot.dim}, which needs {rows} rows. "
                f"Correct rows= ('requests', 'tokens' or None) or dim= of its OutputSlot."
            )
    return _Leaf(path, tuple(value.shape), value.dtype, slot)


class LeaseClock:
    """A counter of the runs of one runner, or of several runners that write the same outputs."""

    __slots__ = ("name", "now")

    def __init__(self, name: str) -> None:
        self.name = name
        self.now = 0

    def joined(self, name: str) -> LeaseClock:
        """Return this clock for a second runner that writes the same outputs."""
        self.name = f"{self.name} and {name}"
        return self

    def tick(self) -> None:
        """Expire all leases."""
        self.now += 1


class LeasedTensor(torch.Tensor):
    """An output that raises StaleOutputError if it is read after the next run of its runner."""

    _clock: LeaseClock
    _until: int

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        leased = [
            leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, LeasedTensor)
        ]
        if getattr(func, "__name__", "") not in _ALWAYS:
            for tensor in leased:
                _require_current(tensor)
        args, kwargs = pytree.tree_map(_plain, (args, kwargs))
        result = func(*args, **kwargs)
        return pytree.tree_map(lambda leaf: _inherit(leaf, leased), result)

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        if self._clock.now != self._until:
            return f"<expired output of {self._clock.name}>"
        return f"leased {_plain(self)!r}"


# Functions that expired leases allow: metadata is not overwritten, and error messages show it.
_ALWAYS = frozenset({"size", "dim", "numel", "is_contiguous", "stride", "type", "__len__"})


def lease(tree: Any, clock: LeaseClock) -> Any:
    """Return ``tree`` with every tensor leased until ``clock`` ticks."""
    return pytree.tree_map_only(torch.Tensor, lambda leaf: _wrap(leaf, clock, clock.now), tree)


def released(tensor: LeasedTensor) -> torch.Tensor:
    """Return the plain tensor of a lease that has not expired."""
    _require_current(tensor)
    return _plain(tensor)  # type: ignore[no-any-return]


def _wrap(tensor: torch.Tensor, clock: LeaseClock, until: int) -> LeasedTensor:
    wrapped = tensor.as_subclass(LeasedTensor)
    wrapped._clock = clock
    wrapped._until = until
    return wrapped


def _plain(leaf: Any) -> Any:
    if not isinstance(leaf, LeasedTensor):
        return leaf
    with torch._C.DisableTorchFunctionSubclass():
        return leaf.as_subclass(torch.Tensor)


def _inherit(leaf: Any, sources: list[LeasedTensor]) -> Any:
    """Lease ``leaf`` as well if it shares memory with one of ``sources``."""
    if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided:
        return leaf
    address = leaf.untyped_storage().data_ptr()
    for source in sources:
        if _plain(source).untyped_storage().data_ptr() == address:
            return _wrap(leaf, source._clock, source._until)
    return leaf


def _require_current(tensor: LeasedTensor) -> None:
    runs = tensor._clock.now - tensor._until
    if runs:
        raise StaleOutputError(
            f"an output of {tensor._clock.name} was read after {counted(runs, 'later run')}, which "
            f"overwrote it. Read it before the next run, copy it, or call run(..., clone=True)."
        )
