"""Memory of tensors: addresses, byte ranges, strides, overlaps, and copies into fixed memory."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import starmap
from typing import Any

import torch
from torch._C._dynamo.guards import TensorGuards
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from devgraph.api.guard import Term, by_turns

Place = tuple[torch.UntypedStorage, int, torch.Size, tuple[int, ...]]
"""Storage, offset, shape and strides: all properties that in-place layout changes affect."""

FEW = 8
"""Number of similar comparisons above which a guard combines them into one term."""

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_LEAVES = frozenset({type(None), bool, int, float, str})


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Return all tensors in nested tuples, lists and dictionaries, in order."""
    tensors: list[torch.Tensor] = []
    pending = [tree]
    # torch's own traversal costs one generator per node, and marked calls traverse often.
    while pending:
        node = pending.pop()
        kind = type(node)
        if isinstance(node, torch.Tensor):
            tensors.append(node)
        elif kind is tuple or kind is list:
            pending.extend(reversed(node))
        elif kind is dict:
            pending.extend(reversed(node.values()))
        elif kind not in _LEAVES:
            leaves = pytree.tree_leaves(node)
            tensors.extend(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
    return tensors


def is_size(node: object) -> bool:
    """Whether a node is a ``torch.Size``, which torch's pytree would turn into a tuple."""
    return type(node) is torch.Size


def describe(value: object) -> str:
    """Return dtype, shape, strides and device of a tensor as text, or the repr of another value."""
    if not isinstance(value, torch.Tensor):
        return repr(value)
    kind = f"strides {value.stride()}" if has_place(value) else str(value.layout)
    return f"{value.dtype} {tuple(value.shape)} {kind} on {value.device}"


def has_place(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` has an address and strides.

    Sparse, nested, meta and lazy tensors and wrapper subclasses have neither.
    """
    return (
        tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_meta)
        and (type(tensor) in _PLAIN or _has_memory(tensor))
    )


def _has_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor of a subclass has its own memory; fake tensors count as having memory."""
    if type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
        return not is_lazy(tensor)
    if is_traceable_wrapper_subclass(tensor):
        return False
    try:
        return hasattr(tensor, "fake_mode") or tensor.untyped_storage().data_ptr() >= 0
    except RuntimeError:
        return False


def place_of(tensor: torch.Tensor) -> Place:
    return (tensor.untyped_storage(), int(tensor.storage_offset()), tensor.shape, tensor.stride())


def memory_of(tensor: torch.Tensor) -> int:
    """Return the address of the storage, which all its views share."""
    return tensor.untyped_storage().data_ptr()


def layout_of(tensor: torch.Tensor) -> tuple[int, torch.dtype, torch.Size, tuple[int, ...]]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


class Memory:
    """A check that tensors keep their memory and layout.

    ``tensor.data = other`` replaces the memory, and ``t_()`` the layout. On devices, weak
    references report that the original memory was freed, and the addresses of the first ``count``
    tensors are compared. Layouts are compared in groups, one group per replay in rotation. Without
    ``count``, each replay also compares the first group. On the CPU, all addresses and layouts are
    compared, because graphs keep the original memory alive.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], count: int = 0) -> None:
        unique = {id(tensor): tensor for tensor in tensors if has_place(tensor)}.values()
        self._placed = [(tensor, layout_of(tensor)) for tensor in unique]
        compared = [pair for i, pair in enumerate(self._placed) if pair[0].is_cpu or i < count]
        self._ended = list[Any]()
        watched = (tensor.untyped_storage() for tensor, _ in self._placed)
        self._references = [weakref.ref(storage, self._ended.append) for storage in watched]
        places = addressed([t for t, _ in compared], [layout[0] for _, layout in compared])
        plain, size = [t for t in unique if type(t) in _PLAIN], count or FEW
        groups = [plain[at : at + size] for at in range(0, len(plain), size)]
        self._layouts = [(group, dict[bool, Callable[..., bool]]()) for group in groups]
        first = len(groups) if len(compared) == len(self._placed) else not count
        terms = by_turns([*starmap(alike_term, self._layouts)], first, 1)
        self.terms = [("not {}", (self._ended,)), *places, *terms] if self._placed else []

    def is_kept(self) -> bool:
        """Whether all tensors still have their original memory and layout."""
        if self._ended or self.moved():
            return False
        mode = torch.is_inference_mode_enabled()
        for group, alike in self._layouts:
            if mode not in alike or not alike[mode](*group):
                alike[mode] = alike_to(group)
        return True

    def moved(self) -> list[torch.Tensor]:
        """Return the tensors whose memory or layout was replaced."""
        return [tensor for tensor, layout in self._placed if layout_of(tensor) != layout]


def alike_term(tensors: Sequence[torch.Tensor], alike: Mapping[bool, Callable[..., bool]]) -> Term:
    """Return a term that compares tensors by the guard in ``alike`` for the inference mode."""
    inputs = ", ".join("{}" for _ in tensors)
    return f"{{}}[{{}}()]({inputs})", (alike, torch.is_inference_mode_enabled, *tensors)


def addressed(tensors: Sequence[torch.Tensor], places: Sequence[int]) -> Iterator[Term]:
    """Yield terms of a guard that compare the addresses of tensors."""
    if len(tensors) > FEW:
        yield "[*{}({}, {})] == {}", (map, torch.Tensor.data_ptr, tensors, places)
    else:
        pairs = zip(tensors, places, strict=True)
        yield from (("{}() == {}", (tensor.data_ptr, place)) for tensor, place in pairs)


def byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of the first byte of a strided tensor and of the byte after its last."""
    first = tensor.data_ptr()
    if not tensor.numel():  # data_ptr() of an empty tensor is 0
        first = memory_of(tensor) + int(tensor.storage_offset()) * tensor.itemsize
        return first, first
    reach = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return first, first + (reach + 1) * tensor.element_size()


def effective_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides, with 0 in dimensions of size one and in tensors without elements."""
    if not tensor.numel():
        return (0,) * tensor.ndim
    return tuple(
        step if size > 1 else 0 for size, step in zip(tensor.shape, tensor.stride(), strict=True)
    )


def share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two strided tensors have at least one byte in common."""
    (start, end), (first, last) = byte_range(one), byte_range(other)
    if max(start, first) >= min(end, last):
        return False
    (starts, length), (others, size) = _runs(one), _runs(other)
    # For each run of ``other``, find the last run of ``one`` that begins before its end.
    before = torch.searchsorted(starts, others + size) - 1
    return bool((starts[before.clamp(min=0)] + length > others)[before >= 0].any())


def _runs(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the sorted start addresses of the contiguous runs of ``tensor``, and their length."""
    starts, length = torch.tensor([tensor.data_ptr()], device="cpu"), tensor.itemsize
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if step * tensor.itemsize == length and len(starts) == 1:
            length *= size
        elif step:
            offsets = step * tensor.itemsize * torch.arange(size, device="cpu")
            starts = (starts + offsets[:, None]).flatten()
    return starts.sort().values, length


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether elements of ``tensor`` share memory, as in expanded tensors and sliding windows."""
    reach = 0
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if step <= reach:
                return tensor.numel() > 0
            reach += step * (size - 1)
    return False


def alike_to(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """Return a callable that compares its arguments with ``tensors`` in one call.

    The callable compares types, shapes, strides, dtypes, devices, dispatch modes and
    ``requires_grad``. It returns False if a tensor is passed twice.
    """
    shapes: list[Any] = [list(tensor.shape) for tensor in tensors]
    strides: list[Any] = [list(tensor.stride()) for tensor in tensors]
    return TensorGuards(*tensors, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides).check


def with_bits_of(tensor: torch.Tensor, plain: torch.Tensor) -> torch.Tensor:
    """Return ``plain`` with the conjugate and negative bits of ``tensor``."""
    plain = plain.conj() if tensor.is_conj() and not plain.is_conj() else plain
    return torch._neg_view(plain) if tensor.is_neg() and not plain.is_neg() else plain


def unexpanded(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` with expanded dimensions narrowed to one, so that it can be written."""
    for axis, (size, step) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if step == 0 and size > 1:
            tensor = tensor.narrow(axis, 0, 1)
    return tensor


def fits(target: torch.Tensor, source: Any) -> bool:
    """Whether ``source`` can be copied into ``target`` without loss."""
    return (
        isinstance(source, torch.Tensor)
        and has_place(source)
        and (source.dtype, source.shape) == (target.dtype, target.shape)
        and all(map(operator.le, unexpanded(source).shape, unexpanded(target).shape))
    )


def rewrite(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy ``source`` into ``target`` without autograd; both have the same expanded dimensions."""
    dense = unexpanded(target)
    if dense is not target:
        source = source.as_strided(dense.shape, source.stride())
    dense.copy_(source.detach() if source.requires_grad else source)


def overwrite(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy ``source`` into ``target`` as ``rewrite`` does, under any grad or inference mode."""
    # Leaving inference mode enables gradients, so no_grad must be entered last. An interrupt could
    # skip the exit of torch.inference_mode, which is a Python function.
    with torch._C._InferenceMode(target.is_inference()), torch.no_grad():
        rewrite(target, source)
