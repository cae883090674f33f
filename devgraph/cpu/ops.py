"""What each operation of torch means to a recording: made once per operation, read many times."""

from __future__ import annotations

import enum
import functools
from collections.abc import Mapping
from typing import Any

import attrs
import torch
from torch._ops import OpOverload


class Kind(enum.Enum):
    """How a recording treats an operation."""

    __hash__ = object.__hash__  # Enum's own is a function of Python, for each operation

    DECOMPOSE = "made of other operations, which are recorded instead"
    VIEW = "makes an alias or changes metadata only: runs now, and never again"
    RESIZE = "may move its argument's memory"
    ALLOCATE = "gives memory without writing it"
    CONSTANT = "brings host data into a tensor"
    METADATA = "answers from metadata"
    HOST = "answers with device data, or needs the host in some other way"
    BOOLEAN_INDEX = "has an output whose shape depends on data if an index is boolean"
    MUTATE = "writes its arguments"
    COMPUTE = "returns new tensors"


@attrs.frozen(kw_only=True)
class OutVariant:
    """The overload of an operation that writes into given tensors and nowhere else."""

    func: OpOverload
    outputs: tuple[str, ...]
    """Names of its output arguments, in the order of the returned tensors."""
    dropped: frozenset[str]
    """Keyword arguments of the plain overload that this one does not take."""


@attrs.frozen(kw_only=True, eq=False)
class OpPlan:
    """What a recording needs to know of ``func``."""

    func: OpOverload
    name: str
    kind: Kind
    out: OutVariant | None
    returns: tuple[int | None, ...]
    """Per return: the position in the schema of the argument it is, or None for a new tensor."""
    writes: frozenset[int]
    """Positions in the schema of the arguments that it writes."""
    seeded: bool
    """It may draw random numbers."""

    def argument(self, position: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the argument at ``position`` of the schema, or None if it was left out."""
        if position < len(args):
            return args[position]
        return kwargs.get(self.func._schema.arguments[position].name)


def _aten(names: str) -> frozenset[str]:
    return frozenset(f"aten::{name}" for name in names.split())


# Functional in name, aliases in fact.
_VIEWS = _aten("_unsafe_view lift alias detach")

_RESIZES = _aten("resize_ resize_as_ _resize_output_ resize_as_sparse_")

_ALLOCATIONS = _aten("empty empty_like empty_strided empty_permuted new_empty new_empty_strided")

# These return no tensor and read no tensor data.
_METADATA = _aten(
    """
    _fused_sdp_choice is_same_size is_pinned size stride numel sym_size sym_stride sym_numel
    sym_storage_offset _has_compatible_shallow_copy_type result_type is_complex
    is_floating_point is_signed is_inference _debug_has_internal_overlap
    """
)

_INDEXING = _aten("index index_put index_put_ _index_put_impl_ _unsafe_index _unsafe_index_put")

# Collectives of the host: they return handles, and finish on other threads.
_HOST_NAMESPACES = {"c10d", "_c10d_functional", "_c10d_functional_autograd"}

# Not every out overload leaves its output where it is: those of the losses resize it on the way,
# and one of them then computes something else. Pointwise operations and these were compared with
# the plain overloads, on every sample of torch's own operator database.
_DIRECT = frozenset(
    """
    _log_softmax _softmax addbmm addmm addmv all amax amin any arange argmax argmin argsort baddbmm
    bmm cat cumprod cumsum dot gather gelu index index_add index_copy index_reduce index_select
    linalg_vector_norm logsumexp max mean min mm mv native_group_norm native_layer_norm prod
    scatter scatter_add scatter_reduce sort stack std sum take topk tril triu var
    """.split()
)

_FACTORY_KEYWORDS = frozenset({"dtype", "layout", "device", "pin_memory"})


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
        out=_out_variant(func) if kind in (Kind.COMPUTE, Kind.BOOLEAN_INDEX) else None,
        returns=returns,
        writes=writes,
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
    if func._schema.returns and not any("Tensor" in str(r.type) for r in func._schema.returns):
        return Kind.HOST
    return Kind.COMPUTE


def _is_composite(func: OpOverload) -> bool:
    """Whether eager CPU execution of ``func`` runs its decomposition rather than a kernel."""
    name = func.name()  # type: ignore[no-untyped-call]
    if torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU"):
        return False
    # Decompositions that torch keeps for its compilers (func.py_kernels) compute other bits.
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")


def _signature(arguments: list[Any], without: frozenset[str]) -> list[tuple[str, str]]:
    return [(a.name, str(a.type)) for a in arguments if a.name not in without]


def _is_direct(func: OpOverload) -> bool:
    if func.namespace != "aten":
        return False
    return torch.Tag.pointwise in func.tags or func._schema.name.split("::")[1] in _DIRECT


def _out_variant(func: OpOverload) -> OutVariant | None:
    schema = func._schema
    if any(str(item.type) != "Tensor" for item in schema.returns):
        return None
    packet = getattr(getattr(torch.ops, func.namespace), schema.name.split("::")[1])
    for name in packet.overloads():
        candidate = getattr(packet, name)
        arguments = candidate._schema.arguments
        outputs = [a.name for a in arguments if a.is_out]
        if not outputs or len(outputs) != len(schema.returns):
            continue
        inputs = [a for a in arguments if not a.is_out]
        taken = {a.name for a in inputs}
        dropped = frozenset(
            a.name
            for a in schema.arguments
            if a.name in _FACTORY_KEYWORDS and a.kwarg_only and a.name not in taken
        )
        if not _is_direct(candidate):
            continue
        if _signature(schema.arguments, dropped) == _signature(inputs, frozenset()):
            return OutVariant(func=candidate, outputs=tuple(outputs), dropped=dropped)
    return None
