"""New inputs of a replay: checked against what a capture bound, and copied into its tensors."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from devgraph.api.buffers import byte_range, effective_strides, fits, overwrite, share_memory
from devgraph.api.errors import HostArgumentError, InputError, InputTypeError, brief, did_you_mean
from devgraph.api.marks.host_values import same_value

if TYPE_CHECKING:
    from devgraph.api.policy.job import Job

Pair = tuple[torch.Tensor, torch.Tensor]
"""A bound tensor and the new data for it."""


class Inputs:
    """The arguments that a capture bound, for replays that are given new ones."""

    def __init__(self, job: Job) -> None:
        self._fn, self._host = job.fn, job.spec.declared
        self._args, self._kwargs = job.args, job.kwargs
        self._share_memory = functools.cache(share_memory)

    def taken(
        self, given: Sequence[Any], named: Mapping[str, Any]
    ) -> tuple[list[Pair], dict[str, Any]]:
        """Return what is to be copied for a replay with these arguments, and its host arguments.

        Raises:
            InputError: data of another shape, dtype, device or structure than what is bound, or a
                value that is no tensor and another than at capture.
            HostArgumentError: there is no argument of that name (a TypeError).
        """
        if len(given) > len(self._args):
            raise InputError(
                f"{len(given)} inputs were given and {len(self._args)} arguments are bound; a "
                f"replay takes new data for these, in their order, and host arguments by name"
            )
        pairs: list[Pair] = []
        for index, value in enumerate(given):
            pairs += _pairs(self._name(index), self._args[index], value)
        host = {}
        for name, value in named.items():
            if name in self._host:
                host[name] = value
            else:
                pairs += _pairs(name, self._named(name, len(given)), value)
        new: dict[int, torch.Tensor] = {}
        for target, source in pairs:
            if new.setdefault(id(target), source) is not source:
                raise InputError(
                    f"one bound tensor ({brief(target)}) is several arguments of the step and was "
                    f"given different data; capture with a tensor for each"
                )
        if len(new) > 1:
            self._require_agreement([target for target, _ in pairs], new)
        return pairs, host

    def _require_agreement(
        self, targets: Sequence[torch.Tensor], new: Mapping[int, torch.Tensor]
    ) -> None:
        """Raise InputError where ``targets`` share memory and their ``new`` data, by the target's
        id, does not share it in the same way: the last copy would be in all of them."""
        ordered = sorted(targets, key=torch.Tensor.data_ptr)
        for index, one in enumerate(ordered):
            end = byte_range(one)[1]
            for other in ordered[index + 1 :]:
                if other.data_ptr() >= end:
                    break
                if _agree(one, new[id(one)], other, new[id(other)]):
                    continue
                if self._share_memory(one, other):
                    raise InputError(
                        f"bound tensors that share memory ({brief(one)} and {brief(other)}) were "
                        f"given data that does not share it in the same way; capture with memory "
                        f"for each"
                    )

    @functools.cached_property
    def _names(self) -> list[str]:
        """The names of the bound positional arguments, as far as the callable tells."""
        fn = self._fn.forward if isinstance(self._fn, torch.nn.Module) else self._fn
        try:
            parameters = inspect.signature(fn).parameters.values()
        except (TypeError, ValueError):
            return []
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        return [p.name for p in parameters if p.kind in kinds][: len(self._args)]

    def _name(self, index: int) -> str:
        return self._names[index] if index < len(self._names) else f"argument {index}"

    def _named(self, name: str, given: int) -> Any:
        if name in self._kwargs:
            return self._kwargs[name]
        if name not in self._names:
            known = {*self._host, *self._kwargs, *self._names}
            raise HostArgumentError(
                f"unknown host argument {name!r}, and no bound argument has that name. "
                f"{did_you_mean(name, known)}"
            )
        index = self._names.index(name)
        if index < given:
            raise InputError(f"input {name!r} was given twice: in its place and by name")
        return self._args[index]


def _agree(
    target: torch.Tensor, source: torch.Tensor, other: torch.Tensor, its: torch.Tensor
) -> bool:
    """Whether new data lies to other new data as the bound tensors lie to each other."""
    way = target.data_ptr() - source.data_ptr()
    return way == other.data_ptr() - its.data_ptr() and all(
        effective_strides(bound) == effective_strides(new)
        and (bound.is_conj(), bound.is_neg()) == (new.is_conj(), new.is_neg())
        for bound, new in ((target, source), (other, its))
    )


def write(pairs: Sequence[Pair]) -> None:
    """Copy new data into bound tensors, all of it as it was before the first copy."""
    ranges = [byte_range(target) for target, _ in pairs]
    held = []
    for target, source in pairs:
        first, last = byte_range(source)
        overlaps = any(first < stop and last > start for start, stop in ranges)
        held.append(source.clone() if overlaps and source is not target else source)
    for (target, _), source in zip(pairs, held, strict=True):
        if source is not target:
            overwrite(target, source)


def _pairs(name: str, bound: Any, value: Any) -> list[Pair]:
    leaves, spec = pytree.tree_flatten_with_path(bound)
    values, given = pytree.tree_flatten(value)
    if spec != given:
        raise InputTypeError(
            f"input {name!r} is {brief(value)}, and {brief(bound)} is bound; it must have the same "
            f"structure"
        )
    pairs = []
    for (path, target), source in zip(leaves, values, strict=True):
        where = name + pytree.keystr(path)
        if isinstance(target, torch.Tensor):
            if not fits(target, source) or source.device != target.device:
                raise _misfit(where, target, source)
            pairs.append((target, source))
        elif not same_value(target, source):
            raise InputError(
                f"input {where!r} is {brief(source)} and was {brief(target)} at capture, which is "
                f"in the graph; capture again, or make it a host argument of a marked function"
            )
    return pairs


def _misfit(where: str, target: torch.Tensor, source: Any) -> InputError:
    kind = InputError if isinstance(source, torch.Tensor) else InputTypeError
    return kind(
        f"input {where!r} is {brief(source)}, and {brief(target)} is bound: a replay copies new "
        f"data into the bound tensor, whose shape, dtype and device stay. Capture again for "
        f"others, or use a runner, which pads batches to captured sizes."
    )
