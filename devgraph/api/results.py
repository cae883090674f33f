"""Results at fixed addresses: outputs of captured steps, and checks of results.

Later segments and the caller read results at the addresses of the capture. Every later result must
therefore have the layout of the captured result, and is copied into its memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import attrs
import torch
from torch.utils import _pytree as pytree

from devgraph.api.errors import (
    CaptureError,
    DeviceGraphError,
    FrozenValueError,
    RegionError,
    brief,
)
from devgraph.api.guard import Term
from devgraph.api.marks.host_values import is_tracked, same_value
from devgraph.api.named import is_distinct
from devgraph.api.pool import Pool
from devgraph.api.reach import containers, is_iterator
from devgraph.api.tensors import (
    describe,
    effective_strides,
    fits,
    has_place,
    is_size,
    memory_of,
    overwrite,
)

_VALUES = (type(None), bool, int, float, complex, str, torch.Size)
"""Types of non-tensor outputs whose values must equal the captured values."""


@attrs.frozen
class ResultCheck:
    """A comparison of a function's result with an earlier result.

    The attributes are parts of the error text: "``function`` returned RESULT ``now``; ``before``
    EXPECTED. ``remedy``".
    """

    function: str
    before: str = "at capture it returned"
    error: type[DeviceGraphError] = RegionError
    now: str = ""
    remedy: str = "Write into a preallocated output of the largest size. Return values as tensors."

    def structure(self, returned: Any, expected: Any) -> None:
        """Raise the error if two tree structures differ."""
        if returned != expected:
            self.refuse(*map(str, (returned, expected)))

    def layout(self, value: Any, target: torch.Tensor, *, strides: bool = True) -> None:
        """Raise the error if ``value`` is not a tensor with the layout of ``target``."""
        if (
            not isinstance(value, torch.Tensor)
            or not has_place(value)
            or (value.dtype, value.shape) != (target.dtype, target.shape)
            or (
                strides
                and (effective_strides(value), value.device)
                != (effective_strides(target), target.device)
            )
        ):
            self.refuse(describe(value), describe(target))

    def refuse(self, returned: str, expected: str) -> NoReturn:
        """Raise the error for a result that differs from the earlier result."""
        raise self.error(
            f"{self.function} returned {returned}{self.now and ' '}{self.now}; {self.before} "
            f"{expected}. Results are fixed in graphs, so their structure, dtype, layout and plain "
            f"values must not change. {self.remedy}"
        )


class Outputs:
    """The outputs of a captured step, in memory that no other capture of the pool writes.

    Graphs of a pool reuse each other's memory: replaying an older graph overwrites the outputs of a
    newer graph. The capture therefore ends with copies of its outputs into the tensors that the
    last warm-up run returned, which have separate memory. A new capture of the step copies its
    outputs into the previous outputs, ``before``, where layouts are equal. ``earlier`` manages the
    previous outputs.
    """

    def __init__(
        self,
        pool: Pool,
        arguments: Iterable[torch.Tensor],
        earlier: Outputs | None = None,
        before: Any = None,
    ) -> None:
        self._pool = pool
        self._given = {memory_of(tensor) for tensor in arguments}
        self._warm_up: tuple[list[Any], pytree.TreeSpec] | None = None
        self._moved: set[int] = set()  # memory of the tensors that outputs were moved to
        self._before: list[Any] = []
        if earlier is not None:
            leaves, self._before_spec = pytree.tree_flatten(before, is_leaf=is_size)
            owned = [isinstance(leaf, torch.Tensor) and earlier.owns(leaf) for leaf in leaves]
            memories = [memory_of(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)]
            if len({*memories}) == len(memories):
                pairs = zip(leaves, owned, strict=True)
                self._before = [leaf if is_own else None for leaf, is_own in pairs]

    def hold(self, outputs: Any) -> None:
        """Keep the outputs of a warm-up run as copy targets if the pool already has graphs."""
        if self._pool.used:
            # Detached tensors do not keep the autograd graph of the run alive.
            leaves, spec = pytree.tree_flatten(outputs, is_leaf=is_size)
            leaves = [t.detach() if isinstance(t, torch.Tensor) else t for t in leaves]
            if self._before and spec == self._before_spec:
                pairs = zip(self._before, leaves, strict=True)
                leaves = [new if old is None or not _alike(old, new) else old for old, new in pairs]
            self._warm_up = leaves, spec

    def filled(self, outputs: Any) -> Any:
        """Copy the outputs of a capture to separate memory, as its last work; return the copies.

        Outputs outside of the pool's memory, and outputs with a different layout than in warm-up,
        are returned unchanged. Only the first call copies.
        """
        refuse_host_values(outputs)
        warm_up, self._warm_up, self._before = self._warm_up, None, []
        leaves, spec = pytree.tree_flatten(outputs, is_leaf=is_size)
        self._pool.note_outputs(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
        if warm_up is None or warm_up[1] != spec:
            return outputs
        return pytree.tree_unflatten(map(self._move, leaves, warm_up[0]), spec)

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether the capture allocated the memory of an output.

        On backends without shared pools, this is also true for a tensor of a closure.
        """
        if memory_of(tensor) in self._moved:
            return True
        if self._pool.backend.capabilities.shared_pool:
            return self._pool.alias(tensor) is not tensor
        return memory_of(tensor) not in self._given

    def _move(self, source: Any, target: Any) -> Any:
        if not (
            isinstance(source, torch.Tensor)
            and isinstance(target, torch.Tensor)
            and _alike(source, target)
            and source.data_ptr() != target.data_ptr()  # Equal if the step reuses one tensor.
            and self.owns(source)
        ):
            return source
        overwrite(target, source)
        self._moved.add(memory_of(target))
        return target

    def deliver(self, targets: Any, outputs: Any) -> None:
        """Copy the outputs of another capture of the step into ``targets``."""
        check = ResultCheck(
            "the step",
            now="for these host arguments",
            remedy="Return values as tensors, or compute them outside of the step.",
        )
        expected, spec = pytree.tree_flatten(targets, is_leaf=is_size)
        returned, returned_spec = pytree.tree_flatten(outputs, is_leaf=is_size)
        check.structure(returned_spec, spec)
        origins: dict[int, tuple[int, int]] = {}
        for target, source in zip(expected, returned, strict=True):
            if isinstance(target, torch.Tensor):
                if not fits(target, source):
                    check.refuse(describe(source), describe(target))
                if target.numel():  # an empty tensor has no address
                    self._deliver_tensor(target, source, origins)
            elif isinstance(target, _VALUES) and not same_value(target, source):
                check.refuse(brief(source), brief(target))

    def _deliver_tensor(
        self, target: torch.Tensor, source: torch.Tensor, origins: dict[int, tuple[int, int]]
    ) -> None:
        """Copy one output.

        ``origins`` maps the memory of each target to the memory and the offset of its source.
        """
        origin = memory_of(source), source.data_ptr() - target.data_ptr()
        is_mixed = origins.setdefault(memory_of(target), origin) != origin
        if not origin[1] and effective_strides(source) == effective_strides(target):
            return
        if is_mixed or not self.owns(target):
            raise RegionError(
                f"the step returned {describe(source)} for these host arguments. At capture this "
                f"output was an argument, or had the memory of another output, so a copy would "
                f"overwrite that tensor. Return a clone() instead."
            )
        overwrite(target, source)


def _alike(one: torch.Tensor, other: Any) -> bool:
    return (
        isinstance(other, torch.Tensor)
        and one.layout is other.layout is torch.strided
        and (one.dtype, one.shape, one.device) == (other.dtype, other.shape, other.device)
        and effective_strides(one) == effective_strides(other)
    )


class Containers:
    """The lists and dictionaries in outputs; a replay restores them if the caller changed them."""

    def __init__(self, outputs: Any) -> None:
        self._held: list[tuple[Any, Any, dict[str, Any]]] = []
        self.terms: list[Term] = []
        for _, node in containers("", outputs):
            if isinstance(node, list | dict):
                held = list(node) if isinstance(node, list) else dict(dict.items(node))
                self._held.append((node, held, dict(getattr(node, "__dict__", {}))))
                self.terms.append(_term_of(node, held))

    def check(self) -> None:
        """Restore the entries, and the attributes of classes such as ``ModelOutput``."""
        for node, held, attributes in self._held:
            if isinstance(node, list):
                node[:] = held
            else:
                dict.clear(node)
                dict.update(node, held)
            if attributes:
                vars(node).update(attributes)


def _term_of(node: Any, held: Any) -> Term:
    values = node if isinstance(node, list) else dict.values(node)
    if all(map(is_distinct, values)):
        return "{} == {}", (node, held)
    return "[*map({}, {})] == {}", (id, values, [*map(id, values)])


def refuse_host_values(outputs: Any) -> None:
    """Raise an error if a step returned a host argument or an iterator."""
    leaves = pytree.tree_leaves(outputs)
    if iterator := next(filter(is_iterator, leaves), None):
        raise CaptureError(
            f"the step returned {brief(iterator)}, which the caller of the first replay would "
            f"exhaust. Return a list or a tuple."
        )
    for leaf in filter(is_tracked, leaves):
        raise FrozenValueError(
            f"the step returned host argument {leaf._devgraph_name!r}, and every replay would "
            f"return its value at capture. Return tensors only; the caller of a replay knows its "
            f"host arguments."
        )
