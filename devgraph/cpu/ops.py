"""The kinds of torch's operations for a recording, and the calls that replay them."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from torch._ops import OpOverload

from devgraph.api.errors import DeviceGraphError


class Kind(enum.Enum):
    """How a recording treats an operation."""

    __hash__ = object.__hash__  # Enum's own is a slow Python function

    DECOMPOSE = "consists of other operations, which are recorded instead"
    VIEW = "makes an alias or changes metadata only; runs at capture, not in replays"
    RESIZE = "may move the memory of its argument"
    ALLOCATE = "allocates memory without writing it"
    CONSTANT = "copies host data into a tensor"
    METADATA = "needs metadata only"
    HOST = "returns device data to the host, or needs the host in another way"
    BOOLEAN_INDEX = "has a data-dependent output shape if an index is boolean"
    MUTATE = "writes its arguments"
    COMPUTE = "returns new tensors"


@attrs.frozen(kw_only=True, eq=False)
class OpPlan:
    """The properties of ``func`` that a recording needs."""

    func: OpOverload
    name: str
    kind: Kind
    returns: tuple[int | None, ...]
    """For each result: the position of the argument that it is, or None for a new tensor."""
    writes: frozenset[int]
    """Positions of the arguments that it writes."""
    seeded: bool
    """Whether it may draw random numbers."""
    depends_on_grad: bool
    """Whether it computes other bits and more results while gradients are recorded."""

    def generator(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the random generator among the arguments, or None."""
        return next((a for a in (*kwargs.values(), *args) if isinstance(a, torch.Generator)), None)

    def argument(self, position: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the argument at ``position`` of the schema, or None if it was left out."""
        if position < len(args):
            return args[position]
        return kwargs.get(self.func._schema.arguments[position].name)


def _aten(names: str) -> frozenset[str]:
    return frozenset(f"aten::{name}" for name in names.split())


# These return aliases, although their schemas do not say so.
_VIEWS = _aten("_unsafe_view lift alias detach")

_RESIZES = _aten("resize_ resize_as_ _resize_output_ resize_as_sparse_")

_ALLOCATIONS = _aten("empty empty_like empty_strided empty_permuted new_empty new_empty_strided")

# These return no tensor and read no tensor data.
_METADATA = _aten(
    """
    _fused_sdp_choice is_same_size is_pinned size stride numel sym_size sym_stride sym_numel
    sym_storage_offset _has_compatible_shallow_copy_type result_type is_complex
    is_floating_point is_signed is_inference _debug_has_internal_overlap is_set_to
    """
)

_PLAIN = frozenset({"int", "float", "bool", "str", "number", "Device"})

_INDEXING = _aten("index index_put index_put_ _index_put_impl_ _unsafe_index _unsafe_index_put")

# Collectives of the host return handles and finish in other threads.
_HOST_NAMESPACES = {"c10d", "_c10d_functional", "_c10d_functional_autograd"}


@functools.cache
def plan_of(func: OpOverload) -> OpPlan:
    """Return the plan for ``func``."""
    schema = func._schema
    positions = {
        name: at
        for at, argument in enumerate(schema.arguments)
        if argument.alias_info is not None
        for name in argument.alias_info.before_set
    }
    returns = tuple(_position(item, positions) for item in schema.returns)
    writes = frozenset(
        at
        for at, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    kind = _kind(func, writes)
    return OpPlan(
        func=func,
        name=f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name,
        kind=kind,
        returns=returns,
        writes=writes,
        depends_on_grad=schema.name == "aten::mkldnn_rnn_layer",
        seeded=torch.Tag.nondeterministic_seeded in func.tags,
    )


def _position(item: Any, positions: Mapping[str, int]) -> int | None:
    if item.alias_info is None:
        return None
    return next((positions[name] for name in item.alias_info.before_set if name in positions), None)


def _kind(func: OpOverload, writes: frozenset[int]) -> Kind:
    name = func._schema.name
    if func.namespace in _HOST_NAMESPACES:
        return Kind.HOST
    if _is_composite(func):
        return Kind.DECOMPOSE
    for kind, names in (
        (Kind.RESIZE, _RESIZES),
        (Kind.ALLOCATE, _ALLOCATIONS),
        (Kind.METADATA, _METADATA),
        (Kind.BOOLEAN_INDEX, _INDEXING),
    ):
        if name in names and not (kind is Kind.ALLOCATE and writes):
            return kind
    if name == "aten::lift_fresh":
        return Kind.CONSTANT
    if func.is_view or torch.Tag.inplace_view in func.tags or name in _VIEWS:
        return Kind.VIEW
    if writes:
        return Kind.MUTATE
    returns = [str(item.type) for item in func._schema.returns]
    takes = [str(argument.type) for argument in func._schema.arguments]
    if any("Tensor" in kind for kind in returns):
        return Kind.COMPUTE
    if not any("Tensor" in kind for kind in takes) and (returns or not _PLAIN.issuperset(takes)):
        return Kind.METADATA  # such as a profiler's range
    return Kind.HOST if returns else Kind.COMPUTE


def _is_composite(func: OpOverload) -> bool:
    """Whether eager CPU execution of ``func`` runs its decomposition rather than a kernel."""
    name = func.name()  # type: ignore[no-untyped-call]
    if torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU"):
        return False
    # The decompositions for torch's compilers (func.py_kernels) compute other bits.
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")


_COPIES = {"aten::clone", "aten::_to_copy"}


def make_call(
    plan: OpPlan, args: tuple[Any, ...], kwargs: Mapping[str, Any], outputs: Any
) -> Callable[[], object]:
    """Return a call that runs an operation and copies its results into ``outputs``."""
    if plan.name in _COPIES:
        return functools.partial(torch.Tensor.copy_, outputs, args[0])
    run, outs = functools.partial(plan.func._op, *args, **kwargs), _flat(outputs)
    is_checked = False

    def run_and_copy() -> None:
        nonlocal is_checked
        results = run()
        if not is_checked:
            _require_layouts(plan.name, outs, _flat(results))
            is_checked = True
        if isinstance(results, torch.Tensor):
            outputs.copy_(results)
            return
        for out, result in zip(outs, _flat(results), strict=True):
            if isinstance(out, torch.Tensor):
                out.copy_(result)

    return run_and_copy


def _require_layouts(name: str, outs: list[Any], results: list[Any]) -> None:
    """Raise DeviceGraphError if results of an operation differ from the metadata of ``outs``."""
    for out, result in zip(outs, results, strict=True):
        if isinstance(out, torch.Tensor) and (
            result.shape != out.shape or result.dtype is not out.dtype
        ):
            raise DeviceGraphError(
                f"{name} returned {result.dtype} {tuple(result.shape)} where torch's own "
                f"metadata said {out.dtype} {tuple(out.shape)}; please report this with the "
                f"version of torch ({torch.__version__})."
            )


def _flat(value: Any) -> list[Any]:
    if isinstance(value, (tuple, list)):
        return [leaf for item in value for leaf in _flat(item)]
    return [value]
