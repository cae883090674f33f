"""New inputs of a replay: checks against the bound arguments, and copies into them."""

from __future__ import annotations

import copy
import enum
import functools
import numbers
import operator
import re
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from devgraph.api.errors import (
    HostArgumentError,
    InputError,
    InputTypeError,
    brief,
    did_you_mean,
)
from devgraph.api.marks.host_values import same_value
from devgraph.api.marks.source import warn
from devgraph.api.owned import Owned, require_place
from devgraph.api.reach import PLAIN, is_array
from devgraph.api.tensors import (
    byte_range,
    describe,
    effective_strides,
    fits,
    has_place,
    memory_of,
    overlaps_itself,
    overwrite,
    share_memory,
    tensors_in,
    unexpanded,
)
from devgraph.api.trees import attributes_of, children_of, leaves_of, rebuilt, same_kind

Pair = tuple[torch.Tensor, torch.Tensor]
"""A bound tensor and the new data for it."""


class Inputs:
    """The bound arguments of a capture, which receive the inputs of replays."""

    def __init__(
        self, owned: Owned, host: Collection[str], held: Sequence[tuple[str, torch.Tensor]]
    ) -> None:
        self._host, self._held = host, held[len(owned.given) :]
        self._arguments, self._count = owned.arguments, owned.count
        self._names = [*owned.arguments]
        self._share_memory = functools.cache(share_memory)
        self._written, self._iterated, self._moved = owned.written, owned.iterated, owned.moved
        self._changed, self._has_warned = owned.changed, False
        self._ordered = owned.ordered
        self._read = [name for name in _PROPERTIES if name in owned.names]
        """Names of tensor properties that the step may read; empty after the warning about one."""

    def taken(
        self, given: Sequence[Any], named: Mapping[str, Any]
    ) -> tuple[list[Pair], dict[str, Any]]:
        """Check the inputs of a replay; return the pairs to copy and the host arguments."""
        if len(given) > self._count:
            raise InputError(
                f"there are more inputs ({len(given)}) than bound arguments ({self._count}). Pass "
                f"new data in the order of the bound arguments, and host arguments by name."
            )
        pairs: list[Pair] = []
        if self._ordered:
            now = [name for name in named if name in self._ordered]
            if now != (then := [name for name in self._ordered if name in named]):
                raise _other_order("the replay has its keyword arguments", now, then)
        for name, value in zip(self._names, given, strict=False):
            pairs += self._pairs(name, self._arguments[name], value)
        host = {}
        for name, value in named.items():
            if name in self._host:
                host[name] = value
            else:
                pairs += self._pairs(name, self._named(name, len(given)), value)
        new: dict[int, torch.Tensor] = {}
        for target, source in pairs:
            if new.setdefault(id(target), source) is not source:
                raise InputError(
                    f"the bound tensor {brief(target)} is passed as several arguments of the step, "
                    f"and different data was given for them. Capture with separate tensors."
                )
        self._require_apart_from_state(pairs)
        if len(new) > 1:
            self._require_agreement([target for target, _ in pairs], new)
            self._require_apart(pairs)
        return pairs, host

    def require_all(self, given: Sequence[Any], named: Mapping[str, Any]) -> None:
        """Raise InputError if some, but not all, inputs that contain tensors are given."""
        if len(given) == len(self._names):
            return
        new = [*self._names[: len(given)], *(name for name in named if name in self._arguments)]
        missing = [n for n in self._names if n not in new and self._has_tensors(n)] if new else ()
        if missing:
            way = ", ".join(f"{name}=..." for name in new)
            raise InputError(
                f"missing inputs: {', '.join(missing)}. A call takes new data for all inputs or "
                f"for none. To keep the data of an input, pass its bound tensor, or use replay, "
                f"which keeps the data of omitted inputs: replay({way})."
            )

    def _has_tensors(self, name: str) -> bool:
        leaves = leaves_of(name, self._arguments[name])
        return any(isinstance(leaf, torch.Tensor) for _, leaf in leaves)

    def other_values(self, given: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments whose plain values changed, with new values and bound tensors.

        Arguments that the step changed are left out, because a replay would not change them.
        """
        values = dict(zip(self._names, given, strict=False))
        values |= {name: value for name, value in named.items() if name in self._arguments}
        others = {}
        for name, value in values.items():
            if any(path.startswith((f"{name}.", f"{name}[")) for path in self._moved):
                continue
            try:
                self._pairs(name, self._arguments[name], value)
            except InputError:
                others[name] = _merged(self._arguments[name], value)
        return others

    def holding(self, values: Mapping[str, Any]) -> Inputs:
        """Return a copy in which ``values`` replace the bound arguments of the same names."""
        other = copy.copy(self)
        other._arguments = {**self._arguments, **values}
        return other

    @functools.cached_property
    def _state(self) -> dict[int, list[tuple[str, torch.Tensor]]]:
        """The tensors that the step can reach in addition to its arguments, by storage."""
        state: dict[int, list[tuple[str, torch.Tensor]]] = {}
        for name, tensor in self._held:
            if has_place(tensor):
                state.setdefault(memory_of(tensor), []).append((name, tensor))
        return state

    def _require_apart_from_state(self, pairs: Sequence[Pair]) -> None:
        """Refuse an input that would overwrite state; warn once if the step writes an input."""
        for target, source in pairs:
            if source is target:
                continue
            near = [self._state.get(memory_of(tensor), ()) for tensor in (target, source)]
            if not any(near) or _window(source) == _window(target):
                continue
            if held := next((name for name, t in near[0] if share_memory(target, t)), None):
                raise InputError(
                    f"the bound tensor {brief(target)} shares memory with {held}, which the step "
                    f"also uses, so a copy of the input {brief(source)} would overwrite it. "
                    f"Capture with a clone()."
                )
            changed = (pair for pair in near[1] if id(pair[1]) in self._changed)
            written = next((name for name, t in changed if share_memory(source, t)), None)
            if written and not self._has_warned:
                self._has_warned = True
                warn(
                    f"the input {brief(source)} shares memory with {written}, which the step "
                    f"writes. A replay copies the input before the step begins, so the step does "
                    f"not see its own later writes through this input. If that is intended, pass "
                    f"a clone()."
                )

    def _require_apart(self, pairs: Sequence[Pair]) -> None:
        """Raise InputError if inputs share written memory but their bound tensors do not.

        In eager code, both inputs would change; in a replay, only one would.
        """
        for target, source in [pair for pair in pairs if id(pair[0]) in self._written]:
            for other, given in pairs:
                if (
                    other is not target
                    and share_memory(source, given)
                    and not self._share_memory(target, other)
                ):
                    raise InputError(
                        f"the inputs {brief(source)} and {brief(given)} share memory, and the step "
                        f"writes one of them, but the bound tensors do not share memory. Pass a "
                        f"clone(), or capture with tensors that share memory in this way."
                    )

    def _pairs(self, name: str, bound: Any, value: Any) -> list[Pair]:
        """Return the pairs of a bound tree and a new tree, whose structures must be equal."""
        if isinstance(bound, torch.Tensor):
            if isinstance(value, torch.Tensor):
                require_place(f"input {name!r}", value)
            elif children_of(value) is not None:
                raise _other_structure(name, bound, value)
            if not fits(bound, value) or value.device != bound.device:
                raise _misfit(name, bound, value)
            if type(value) is not type(bound) and not {type(value), type(bound)} <= _TENSORS:
                raise InputTypeError(
                    f"input {name!r} is a {type(value).__name__} and was a {type(bound).__name__} "
                    f"at capture, but the graph has only the work for the old class. Capture again."
                )
            if bound.is_quantized and (own := _scheme(value)) != (held := _scheme(bound)):
                raise InputError(
                    f"input {name!r} is quantized with {own} instead of {held}, but the graph uses "
                    f"the old scale. Capture again."
                )
            if overlaps_itself(unexpanded(bound)) and value.stride() != bound.stride():
                raise InputError(
                    f"input {name!r} has strides {value.stride()}, but the bound tensor has "
                    f"overlapping windows with strides {bound.stride()}, so one address would "
                    f"receive several values. Pass windows with the same strides, such as those of "
                    f"unfold()."
                )
            for key, old in vars(bound).items():
                new = vars(value).get(key)
                is_same = new is old or (isinstance(old, PLAIN) and same_value(new, old))
                if not (is_same or key.startswith("_")):
                    raise _other_value(f"{name}.{key}", old, new)
            if self._read and value is not bound:
                self._warn_of_properties(name, bound, value)
            return [(bound, value)]
        children = children_of(bound)
        if children is None:
            if not (bound is value or same_value(bound, value)):
                raise _other_value(name, bound, value)
            return []
        given = children_of(value) if same_kind(bound, value) else None
        if given is None or len(given) != len(children):
            raise _other_structure(name, bound, value)
        new = dict(given)
        if any(suffix not in new for suffix, _ in children):
            raise _other_structure(name, bound, value)
        if isinstance(bound, Mapping):
            now, then = [*value.keys()], [*bound.keys()]
            if now != then and re.findall(r"\w+", name)[-1] in self._iterated:
                raise _other_order(f"input {name!r} has its keys", now, then)
        return [pair for s, child in children for pair in self._pairs(name + s, child, new[s])]

    def _warn_of_properties(self, name: str, bound: torch.Tensor, value: torch.Tensor) -> None:
        """Warn once if an input differs from the bound tensor in a property that the step reads."""
        for read in self._read:
            if _PROPERTIES[read](bound) != _PROPERTIES[read](value):
                self._read = []
                warn(
                    f"input {name!r} differs in {read} from the bound tensor ({describe(value)} "
                    f"and {describe(bound)}), and the step reads {read}. The replay uses the "
                    f"branch of the capture. If the results depend on {read}, capture again, or "
                    f"use dg.graphed, which captures a graph for each layout."
                )
                return

    def _require_agreement(
        self, targets: Sequence[torch.Tensor], new: Mapping[int, torch.Tensor]
    ) -> None:
        """Raise InputError if targets share memory, but their new data does not.

        The last copy would overwrite the others. ``new`` maps the id of a target to its data.
        """
        ordered = sorted(targets, key=torch.Tensor.data_ptr)
        for index, one in enumerate(ordered):
            end = byte_range(one)[1]
            for other in ordered[index + 1 :]:
                if other.data_ptr() >= end:
                    break
                if _agree((one, new[id(one)]), (other, new[id(other)])):
                    continue
                if self._share_memory(one, other):
                    raise InputError(
                        f"the bound tensors {brief(one)} and {brief(other)} share memory, but "
                        f"their new data does not share memory in the same way. Capture with "
                        f"separate memory for each."
                    )

    def _named(self, name: str, given: int) -> Any:
        if name not in self._arguments:
            known = {*self._host, *self._arguments}
            raise HostArgumentError(
                f"unknown host argument {name!r}, and no bound argument has that name. "
                f"{did_you_mean(name, known)} A replay takes only arguments that were passed to "
                f"the capture: by position, in kwargs= or in host_args=."
            )
        if name in self._names[:given]:
            raise InputError(f"input {name!r} was given twice: by position and by name")
        return self._arguments[name]


def _scheme(tensor: torch.Tensor) -> str:
    return repr(tensor).rpartition("scheme=")[2]


def _agree(*pairs: Pair) -> bool:
    """Whether new data shares memory in the same way as the bound tensors."""
    return len({target.data_ptr() - source.data_ptr() for target, source in pairs}) == 1 and all(
        _window(target)[1:] == _window(source)[1:] for target, source in pairs
    )


def _window(tensor: torch.Tensor) -> tuple[Any, ...]:
    bits = tensor.is_conj(), tensor.is_neg()
    return tensor.data_ptr(), tensor.shape, effective_strides(tensor), bits


def write(pairs: Sequence[Pair], outputs: Any, written: Collection[int] = ()) -> list[Pair]:
    """Copy new data into bound tensors, as if all sources were read before the first write.

    The copies may overwrite a storage that the caller also passed as an input at another position.
    Return the bound tensors in such a storage with their old contents, for ``write_back``. A bound
    tensor that is itself an input is returned only if its id is in ``written``.

    Raises:
        InputError: an input is in the storage of a bound tensor that is among the outputs.
    """
    new = [pair for pair in pairs if pair[0] is not pair[1]]
    memories = {memory_of(target) for target, _ in new}
    sources, kept = [source for _, source in new], list[Pair]()
    if not memories.isdisjoint(near := [*map(memory_of, sources)]):
        windows = {*map(_window, sources)}
        for target, _ in new:
            if memory_of(target) not in near:
                continue
            if id(target) not in written and _window(target) in windows:
                continue  # The caller passes a bound tensor, which has the newest data.
            if any(has_place(t) and share_memory(target, t) for t in tensors_in(outputs)):
                raise InputError(
                    f"the input {brief(sources[near.index(memory_of(target))])} shares memory with "
                    f"the bound tensor {brief(target)}, whose memory is among the outputs. "
                    f"Therefore the replay cannot restore the contents of the bound tensor. Pass a "
                    f"clone()."
                )
            kept.append((target, _clone(target)))
        sources = [_clone(t) if memory_of(t) in memories else t for t in sources]
    for (target, _), source in zip(new, sources, strict=True):
        _copy(target, source)
    return kept


def write_back(pairs: Sequence[Pair], written: Collection[int], kept: Sequence[Pair]) -> None:
    """Restore the contents of ``kept``, and copy bound tensors that the step wrote to the inputs.

    ``written`` contains the ids of the bound tensors that the step wrote.
    """
    results = [(s, t) for t, s in pairs if s is not t and id(t) in written]
    if kept:
        results = [*kept, *((source, _clone(target)) for source, target in results)]
    for target, source in results:
        _copy(target, source)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    if overlaps_itself(unexpanded(target)):
        target, source = _windowed(target), _windowed(source)
    overwrite(target, source)


def _clone(source: torch.Tensor) -> torch.Tensor:
    if overlaps_itself(unexpanded(source)):  # clone() of overlapping windows loses the strides.
        return _windowed(source).clone().as_strided(source.shape, source.stride())
    return source.clone()


def _windowed(windows: torch.Tensor) -> torch.Tensor:
    """Return the memory of overlapping windows as a flat tensor."""
    first, last = byte_range(windows)
    return windows.as_strided(((last - first) // windows.itemsize,), (1,))


def _merged(bound: Any, value: Any) -> Any:
    """Return a tree with the values of ``value`` and the tensors of ``bound``.

    Where the structures differ, the result contains the part of ``bound``, which a later check
    refuses.
    """
    if bound is None and type(value) is torch.Tensor and has_place(value):
        with torch.inference_mode(False), torch.no_grad():
            static: Any = _clone(value)
        static._devgraph_was_none = True
        return static.requires_grad_(value.requires_grad)
    if value is None and hasattr(bound, "_devgraph_was_none"):
        return None
    if all(map(_is_plain, (bound, value))):
        return value if (children_of(bound) is None) is (children_of(value) is None) else bound
    own, given = children_of(bound), children_of(value) if same_kind(bound, value) else None
    if own is None or given is None or (held := dict(own)).keys() != dict(given).keys():
        return bound
    return rebuilt(value, [_merged(held[suffix], child) for suffix, child in given])


def _is_plain(tree: Any) -> bool:
    """Whether a tree contains only values that a graph can contain, such as numbers and strings."""
    return all(
        all(map(_is_plain, leaf))
        if isinstance(leaf, set | frozenset)
        else isinstance(leaf, (*PLAIN, *_VALUES)) or is_array(leaf)
        for _, leaf in leaves_of("", tree)
    )


def _is_contiguous(tensor: torch.Tensor) -> tuple[bool, ...]:
    """Return whether a tensor is contiguous, is channels-last, and has a contiguous transpose."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    by_channel = tensor.ndim in formats and tensor.is_contiguous(memory_format=formats[tensor.ndim])
    return tensor.is_contiguous(), by_channel, tensor.ndim > 1 and tensor.mT.is_contiguous()


_PROPERTIES: dict[str, Callable[[torch.Tensor], Any]] = {
    "is_contiguous": _is_contiguous,
    "stride": effective_strides,
    "storage_offset": torch.Tensor.storage_offset,
    "requires_grad": operator.attrgetter("requires_grad"),
    "is_leaf": operator.attrgetter("is_leaf"),
    "_is_view": torch.Tensor._is_view,
    "is_conj": torch.Tensor.is_conj,
}
"""Functions that return a property of a tensor, by the name in the code of a step."""

_TENSORS = {torch.Tensor, torch.nn.Parameter}
_VALUES = (
    *(bytes, enum.Enum, numbers.Number, slice, types.FunctionType, types.BuiltinFunctionType),
    *(range, torch.dtype, torch.device, torch.Size, torch.Generator),
)


def _other_structure(where: str, bound: Any, value: Any) -> InputError:
    return InputTypeError(
        f"input {where!r} is {brief(value)}, but {brief(bound)} is bound. Pass the same structure."
    )


def _other_value(where: str, bound: Any, value: Any) -> InputError:
    is_open = attributes_of(bound) is not None or hasattr(type(bound), "__slots__")
    is_object = is_open and not callable(bound) and not isinstance(bound, enum.Enum)
    if is_object and type(bound) is type(value):
        return InputError(
            f"input {where!r} is not the captured {type(bound).__name__}, and a replay "
            f"cannot copy its contents: register the class with torch.utils._pytree."
            f"register_pytree_node, or pass the tensors themselves."
        )
    if children_of(value) is not None:
        return _other_structure(where, bound, value)
    return InputError(
        f"input {where!r} is {brief(value)} and was {brief(bound)} at capture. The graph uses the "
        f"old value. Capture again, or make the input a host argument of a marked function."
    )


def _other_order(what: str, now: list[Any], then: list[Any]) -> InputError:
    return InputError(
        f"{what} in the order {brief(now)} instead of {brief(then)}. The step iterates over them, "
        f"so the graph uses the captured order. Pass them in that order, or capture again."
    )


def _misfit(where: str, target: torch.Tensor, source: Any) -> InputError:
    if not isinstance(source, torch.Tensor) or source.dtype is not target.dtype:
        is_tensor = isinstance(source, torch.Tensor)
        way = f"x.to({target.dtype})" if is_tensor else f"torch.as_tensor(x, dtype={target.dtype})"
        return InputTypeError(
            f"input {where!r} is {brief(source)}, but {brief(target)} is bound. A replay copies "
            f"new data into the bound tensor without conversion: pass a tensor of "
            f"{target.dtype}, such as {way}"
        )
    way = (
        "whose shape, dtype and device are fixed. Capture again, or use dg.graphed, which captures "
        "each shape, or a runner, which pads batches to captured sizes."
    )
    if (source.shape, source.device) == (target.shape, target.device):
        way = "which is expanded. Capture with a clone(), or pass a tensor that is expanded too."
    return InputError(
        f"input {where!r} is {brief(source)}, but {brief(target)} is bound: a replay copies new "
        f"data into the bound tensor, {way}"
    )
