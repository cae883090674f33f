"""Kinds of torch operations in a recording, and the calls that replay them."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from torch._ops import OpOverload

from devgraph.api.errors import DeviceGraphError
from devgraph.api.marks.marks import Args, Kwargs
from devgraph.api.modes import OwnMode
from devgraph.api.tensors import tensors_in


class Kind(enum.Enum):
    """The kind of an operation, which determines its treatment in a recording."""

    __hash__ = object.__hash__  # Enum's own hash is a slow Python function.

    DECOMPOSE = "consists of other operations, which are recorded instead"
    VIEW = "creates an alias or changes only metadata; runs at capture, not in replays"
    RESIZE = "may move the memory of its argument"
    ALLOCATE = "allocates memory without writing it"
    CONSTANT = "copies host data into a tensor"
    METADATA = "needs only metadata"
    HOST = "returns device data to the host, or needs the host in another way"
    BOOLEAN_INDEX = "has a data-dependent output shape if an index is boolean"
    MUTATE = "writes its arguments"
    COMPUTE = "returns new tensors"


@attrs.frozen(kw_only=True)
class OutVariant:
    """An overload of an operation that writes its results into given tensors."""

    func: OpOverload
    outputs: tuple[str, ...]
    """Names of the output arguments, in the order of the returned tensors."""
    dropped: frozenset[str]
    """Keyword arguments of the plain overload that this overload does not accept."""


@attrs.frozen(kw_only=True, eq=False)
class OpPlan:
    """The properties of ``func`` that a recording needs."""

    func: OpOverload
    name: str
    kind: Kind
    out: OutVariant | None
    returns: tuple[int | None, ...]
    """Position of the argument that each result aliases, or None for a new tensor."""
    writes: frozenset[int]
    """Positions of the arguments that the operation writes."""
    seeded: bool
    """Whether the operation may draw random numbers."""
    depends_on_grad: bool
    """Whether grad mode affects the values and the number of results."""

    def generator(self, args: Args, kwargs: Kwargs) -> Any:
        """Return the random generator among the arguments, or None."""
        return next((a for a in (*kwargs.values(), *args) if isinstance(a, torch.Generator)), None)

    def argument(self, position: int, args: Args, kwargs: Kwargs) -> Any:
        """Return the argument at ``position`` of the schema, or None if it was not passed."""
        if position < len(args):
            return args[position]
        return kwargs.get(self.func._schema.arguments[position].name)


_KINDS = {
    f"aten::{name}": kind
    for kind, names in (
        # These return aliases, although their schemas declare none.
        (Kind.VIEW, "_unsafe_view lift"),
        (Kind.RESIZE, "resize_ resize_as_ _resize_output_ resize_as_sparse_"),
        (Kind.ALLOCATE, "empty empty_like empty_strided empty_permuted"),
        (Kind.ALLOCATE, "new_empty new_empty_strided"),
        # These return no tensor and read no tensor data.
        (Kind.METADATA, "_fused_sdp_choice is_pinned is_same_size is_set_to"),
        (Kind.BOOLEAN_INDEX, "index index_put index_put_ _index_put_impl_"),
        (Kind.BOOLEAN_INDEX, "_unsafe_index _unsafe_index_put"),
        (Kind.CONSTANT, "lift_fresh"),
    )
    for name in names.split()
}
"""Kinds of operations whose schemas and tags do not reveal them."""

_PLAIN = frozenset({"int", "float", "bool", "str", "number", "Device"})

# Host collectives return handles and finish in other threads, so a tape cannot contain them.
_HOST_NAMESPACES = {"c10d", "_c10d_functional", "_c10d_functional_autograd"}

# Some out overloads temporarily resize their output, for example those of losses. Pointwise
# operations and the operations below do not: their out overloads equal the plain overloads on all
# samples of torch's operator database.
_DIRECT = frozenset(
    """
    _log_softmax _softmax addbmm addmm addmv all amax amin any arange argmax argmin argsort baddbmm
    bmm cat cumprod cumsum dot full gather gelu index index_add index_copy index_reduce
    index_select linalg_vector_norm logsumexp max mean min mm mv native_group_norm
    native_layer_norm ones prod scatter scatter_add scatter_reduce sort stack std sum take topk
    tril triu var zeros
    """.split()
)

_FACTORY_KEYWORDS = frozenset({"dtype", "layout", "device", "pin_memory"})


@functools.cache
def plan_of(func: OpOverload) -> OpPlan:
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
        depends_on_grad=schema.name == "aten::mkldnn_rnn_layer",
        seeded=torch.Tag.nondeterministic_seeded in func.tags,
    )


def _position(item: Any, positions: Mapping[str, int]) -> int | None:
    if item.alias_info is None:
        return None
    return next((positions[name] for name in item.alias_info.before_set if name in positions), None)


def _kind(func: OpOverload, writes: frozenset[int]) -> Kind:
    if func.namespace in _HOST_NAMESPACES:
        return Kind.HOST
    if _is_composite(func):
        return Kind.DECOMPOSE
    listed = _KINDS.get(func._schema.name)
    # Overloads with ``out=`` write, even if the table lists them as views or allocations.
    if listed is not None and not (writes and listed in (Kind.VIEW, Kind.ALLOCATE)):
        return listed
    if func.is_view or torch.Tag.inplace_view in func.tags:
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
    """Whether eager CPU execution of ``func`` runs a decomposition instead of a kernel."""
    name = func.name()  # type: ignore[no-untyped-call]
    if torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU"):
        return False
    # Exclude decompositions for torch's compilers (func.py_kernels): they are not bitwise equal.
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


_COPIES = {"aten::clone", "aten::_to_copy"}


_chosen: dict[Any, Callable[..., Any]] = {}
"""The fastest function for each recorded call, by operation and pattern of its arguments."""


def bind_into(plan: OpPlan, args: Args, kwargs: Kwargs, outputs: Any) -> Callable[[], object]:
    """Return a callable that runs an operation and writes its results into ``outputs``.

    If no overload of the operation writes outputs directly, each result is copied.
    """
    if plan.name in _COPIES:
        return functools.partial(torch.Tensor.copy_, outputs, args[0])
    single = isinstance(outputs, torch.Tensor)
    targets = (outputs,) if single or not isinstance(outputs, tuple) else outputs
    variant = plan.out
    # Sparse tensors often lack this overload.
    if any(tensor.is_sparse for tensor in tensors_in(args)):
        variant = None
    if variant is not None and (single or all(isinstance(t, torch.Tensor) for t in targets)):
        kept = {name: value for name, value in kwargs.items() if name not in variant.dropped}
        named = dict(zip(variant.outputs, targets, strict=True))
        return bind(variant.func, args, {**kept, **named})
    return _copying(plan.name, bind(plan.func, args, kwargs), outputs)


def bind(func: OpOverload, args: Args, kwargs: Kwargs) -> functools.partial[Any]:
    """Return a bound call of ``func`` or of an equivalent function in torch's Python API.

    A call takes 0.7 us through the Python API and 1.2 us through ``func`` (add of 576 numbers,
    torch 2.13).
    """
    named = tuple([(name, _pattern(v)) for name, v in kwargs.items()]) if kwargs else ()
    key = (func, _pattern(args), named)
    call = _chosen.get(key)
    if call is None:
        same = (c for c in _typed_functions(func) if _is_same(c, func, args, kwargs))
        _chosen[key] = call = next(same, func._op)
    return functools.partial(call, *args, **kwargs)


def _pattern(value: Any) -> Any:
    """Return the properties of arguments that may determine which overload torch chooses."""
    if isinstance(value, torch.Tensor):
        return (value.dtype, value.dim() == 0)
    if isinstance(value, (list, tuple)):
        return tuple(map(_pattern, value))
    return type(value)


def _typed_functions(func: OpOverload) -> tuple[Callable[..., Any], ...]:
    """Return the functions and methods of torch's Python API with the name of ``func``."""
    if func.namespace != "aten":
        return ()
    name = func._schema.name.split("::")[1]
    homes = (torch._C._VariableFunctions, torch._C._nn, torch._C.TensorBase)
    return tuple(getattr(home, name) for home in homes if hasattr(home, name))


class _Probe(OwnMode):
    """A mode that collects the operations of a call without running them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def take(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        self.seen.append((func, args, kwargs))
        return kwargs.get("out", args[0] if args else None)


def _is_same(call: Callable[..., Any], func: OpOverload, args: Args, kwargs: Kwargs) -> bool:
    probe = _Probe()
    with probe:
        try:
            call(*args, **kwargs)
        except (TypeError, RuntimeError):
            return False  # The signatures differ.
    if len(probe.seen) != 1:
        return False
    seen, seen_args, seen_kwargs = probe.seen[0]
    return (
        seen is func
        and _equal(seen_args, args)
        and seen_kwargs.keys() == kwargs.keys()
        and all(_equal(seen_kwargs[name], value) for name, value in kwargs.items())
    )


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, (list, tuple)):
        return (
            isinstance(right, (list, tuple))
            and len(left) == len(right)
            and all(_equal(a, b) for a, b in zip(left, right, strict=True))
        )
    if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
        return left is right
    return type(left) is type(right) and bool(left == right)


def _flat(value: Any) -> list[Any]:
    if isinstance(value, (tuple, list)):
        return [leaf for item in value for leaf in _flat(item)]
    return [value]


def _copying(name: str, run: Callable[[], Any], outputs: Any) -> Callable[[], None]:
    """Return a callable that runs an operation and copies its results into ``outputs``."""
    outs = _flat(outputs)

    def run_and_copy() -> None:
        for out, result in zip(outs, _flat(run()), strict=True):
            if not isinstance(out, torch.Tensor):
                continue
            if result.shape != out.shape or result.dtype is not out.dtype:
                way = "Correct the function that was registered with register_fake()."
                if name.startswith("aten::"):
                    way = f"Please report this with your torch version ({torch.__version__})."
                raise DeviceGraphError(
                    f"{name} returned {result.dtype} {tuple(result.shape)}, but {out.dtype} "
                    f"{tuple(out.shape)} for fake tensors. {way}"
                )
            out.copy_(result)

    return run_and_copy
