"""Outputs of an engine's steps: trees of tensors, and one set of buffers for all shapes."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from devgraph.api.errors import CapabilityError


def mapped(change: Callable[[Tensor], Any], output: Any) -> Any:
    """Return ``output`` with every tensor replaced by what ``change`` returns for it.

    Takes what an engine's step returns: a tensor, a list, tuple or dictionary of them, a
    dataclass, an object with a dictionary ``tensors``; anything else is handed back. Containers
    are new; ``output`` is not changed.
    """
    if isinstance(output, Tensor):
        return change(output)
    if isinstance(output, list):
        return [mapped(change, item) for item in output]
    if isinstance(output, tuple):
        items = [mapped(change, item) for item in output]
        return type(output)(*items) if hasattr(output, "_fields") else tuple(items)
    if isinstance(output, dict):
        filled = copy.copy(output)  # of its own class, which may have attributes
        for name, item in output.items():
            filled[name] = mapped(change, item)
        return filled
    names = _attributes(output)
    if not names:
        return output
    changed = copy.copy(output)
    for name in names:
        # Not setattr: a dataclass may be frozen.
        object.__setattr__(changed, name, mapped(change, getattr(output, name)))
    return changed


def _attributes(output: Any) -> list[str]:
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        return [each.name for each in dataclasses.fields(output) if hasattr(output, each.name)]
    return ["tensors"] if isinstance(getattr(output, "tensors", None), dict) else []


def tensors(output: Any) -> list[Tensor]:
    """Return the tensors of ``output`` in the order in which ``mapped`` visits them."""
    found: list[Tensor] = []

    def take(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    mapped(take, output)
    return found


class SharedOutputs:
    """One set of buffers for the outputs of all shapes of a phase, which replay one at a time."""

    def __init__(self) -> None:
        self._buffers: dict[Hashable, Tensor] = {}

    def places(self, output: Any, *, rows: int | None, capacity: int | None) -> list[Tensor]:
        """Return where the tensors of outputs like ``output`` go: views of the leading rows.

        The buffers are those of the largest shape so far, so that capturing largest first makes
        one set.

        Args:
            rows: how many rows of each tensor count; None for all.
            capacity: how many rows a new buffer has; None for as many as ``rows``.
        """
        found = []
        for index, tensor in enumerate(tensors(output)):
            if tensor.dim() == 0:
                found.append(torch.empty_like(tensor))
                continue
            count = len(tensor) if rows is None else rows
            # A buffer for each place in the output, because those of one output live together.
            key = (index, tensor.shape[1:], tensor.dtype, tensor.device)
            buffer = self._buffers.get(key)
            if buffer is None or len(buffer) < count:
                buffer = tensor.new_empty((max(count, capacity or 0), *tensor.shape[1:]))
                self._buffers[key] = buffer
            found.append(buffer[:count])
        return found

    def clear(self) -> None:
        """Let the buffers go; views of them keep theirs."""
        self._buffers.clear()


def copy_into(places: list[Tensor], output: Any) -> Any:
    """Copy every tensor of ``output`` to its place; return ``output`` with the places in it.

    Raises:
        CapabilityError: the output has another structure than the one that the places are for.
    """
    found = tensors(output)
    layouts, wanted = [_layout(tensor) for tensor in found], [_layout(place) for place in places]
    # A place has the rows that count; there may be more of them, and one is never repeated.
    if layouts != wanted or any(map(_shorter, found, places)):
        raise CapabilityError(
            f"the step returned {[(t.dtype, tuple(t.shape)) for t in found]} when it was captured "
            f"and {[(p.dtype, tuple(p.shape)) for p in places]} when it was warmed up; what a step "
            f"returns must depend on nothing but the captured shape."
        )
    left = iter(places)

    def fill(tensor: Tensor) -> Tensor:
        place = next(left)
        place.copy_(tensor if tensor.dim() == 0 else tensor[: len(place)])
        return place

    return mapped(fill, output)


def _shorter(tensor: Tensor, place: Tensor) -> bool:
    return tensor.dim() > 0 and len(tensor) < len(place)


def _layout(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...]]:
    return tensor.dtype, tuple(tensor.shape[1:])
