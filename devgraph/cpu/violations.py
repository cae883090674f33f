"""Violations: code that a capture refuses or freezes, described in terms of the user's code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import attrs
import torch
from torch.utils import _pytree as pytree

from devgraph.api.errors import CaptureError
from devgraph.api.marks.host_reads import host_read_cure, host_read_error
from devgraph.api.marks.marks import refused
from devgraph.api.marks.source import SourceLine, user_line
from devgraph.cpu.metadata import Layout
from devgraph.cpu.tape import Op


@attrs.frozen(kw_only=True)
class Violation:
    """A line of code that a device capture refuses, or whose effect it freezes."""

    kind: str
    """A key of ``KINDS`` in ``devgraph.cli.arguments``, such as host_sync."""
    op: str
    file: str
    line: int
    text: str
    """The cause and the remedy."""

    @classmethod
    def at(cls, where: SourceLine, *, kind: str, op: str, text: str) -> Violation:
        return cls(kind=kind, op=op, file=where.file, line=where.line, text=text)


class Refusal:
    """The reaction to violations: an error, or a report after which the recording continues."""

    def __init__(self, on_violation: Callable[[Violation], None] | None) -> None:
        self._on_violation = on_violation
        self.collects = on_violation is not None
        """Whether the recording continues after a violation."""
        self._has_assumed = False

    def read(self, name: str) -> None:
        """Report a host read; raise HostReadError unless the recording continues."""
        text = f"{name} reads device data on the host, which a capture cannot record"
        self._has_assumed = True
        self.note("host_sync", name, f"{text}. {host_read_cure()}")
        if not self.collects:
            raise host_read_error(text)

    def shape(self, name: str, *, known: bool) -> None:
        """Report a data-dependent shape.

        Raise HostReadError unless the recording continues and an assumed shape is ``known``.
        """
        text = f"{name} has an output whose shape depends on device data, which the host must read"
        self._has_assumed = True
        self.note("data_dependent_shape", name, f"{text}. {host_read_cure()}")
        if not (self.collects and known):
            raise host_read_error(text) from None

    def foreign(self, op: Op) -> None:
        """Report a tensor that another thread created, or raise CaptureError."""
        text = (
            "a tensor was created during the capture by another thread, or by code that bypasses "
            "torch's dispatcher, so every replay would use its current data. Do that work in the "
            "thread of the step, or in a function marked @dg.no_graph under policy='breakable'"
        )
        if self._on_violation is None:
            raise refused(CaptureError(f"{text} (used by {op})."))
        if not self._has_assumed:
            self._on_violation(Violation.at(op.line, kind="thread", op=op.name, text=f"{text}."))

    def other(self, name: str, text: str, cause: BaseException | None = None) -> NoReturn:
        """Report any other violation, and raise CaptureError."""
        self.note("refused", name, f"{text}.")
        raise refused(CaptureError(f"{text} (at {user_line()}).")) from cause

    def note(self, kind: str, op: str, text: str) -> None:
        """Report a violation, if violations are collected."""
        if self._on_violation is not None:
            self._on_violation(Violation.at(user_line(), kind=kind, op=op, text=text))


# User-code spelling of functions that read tensors on the host without an operation, or through an
# operation with a less clear name.
HOST_READS: dict[Any, str] = {
    torch.Tensor.tolist: ".tolist()",
    torch.Tensor.numpy: ".numpy()",
    torch.Tensor.cpu: ".cpu()",
    torch.Tensor.__array__: "numpy.asarray() of a tensor",
    torch.Tensor.__repr__: "print() or repr() of a tensor",
    torch.Tensor.__format__: "formatting a tensor",
    torch.Tensor.__deepcopy__: "copy.deepcopy() of a tensor",
    torch.Tensor.__dlpack__: "exporting a tensor with DLPack",
    torch.Tensor.untyped_storage: "torch.save() or pickling of a tensor",
    torch.Tensor.apply_: ".apply_()",
    torch.Tensor.map_: ".map_()",
    torch.Tensor.map2_: ".map2_()",
    torch.Tensor.to: ".to('cpu')",
    torch.Tensor.tensor_split: ".tensor_split() at indices of a tensor",
    torch._sobol_engine_draw: "SobolEngine.draw()",
    torch.tensor_split: "torch.tensor_split() at indices of a tensor",
}

# Functions that take host data. They read the tensors in a list on the host, one at a time.
CONSTRUCTORS = {
    torch.tensor: "torch.tensor() of a list of tensors",
    torch.as_tensor: "torch.as_tensor() of a list of tensors",
    torch.asarray: "torch.asarray() of a list of tensors",
    torch.Tensor.new_tensor: ".new_tensor() of a list of tensors",
}

# The spelling of host reads in user code, by function.
_SPELLING = {
    "item": ".item()",
    "__bool__": "bool() of a tensor",
    "__int__": "int() of a tensor",
    "__float__": "float() of a tensor",
    "__complex__": "complex() of a tensor",
    "__index__": "a tensor used as an index or length",
    "__getitem__": "indexing with a scalar tensor",
    "__setitem__": "indexing with a scalar tensor",
    "__contains__": "'in' on a tensor",
    "equal": "torch.equal()",
    "allclose": "torch.allclose()",
}


def host_read_name(function: str, operation: str) -> str:
    """Return the user-code spelling of a host read, for which ``function`` called ``operation``."""
    return _SPELLING.get(function, f"{function}()" if function else operation)


def read_by_backward(operation: str) -> str:
    """Return the name of the backward pass in which ``operation`` replaces a host read, or "".

    In such a pass, torch reads data unless a mode is active or an input belongs to a transform.
    """
    kind, saved, name = _BACKWARDS.get(operation, ("", "", ""))
    node: Any = torch._C._current_autograd_node() if kind else None
    if not type(node).__name__.startswith(kind or "-"):
        return ""
    transforms = torch._C._functorch
    tensor = transforms.unwrap_if_dead(getattr(node, saved))
    if transforms.is_functorch_wrapped_tensor(tensor):
        return ""
    return f"the backward of {name}"


_BACKWARDS = {
    "aten::cumprod": ("ProdBackward", "_saved_self", "prod()"),
    "aten::where.self": ("MaskedFillBackward1", "_saved_mask", "masked_fill() with a tensor"),
}


def reads_tensors(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether an argument of a constructor is a list that contains tensors."""
    return any(
        isinstance(value, (list, tuple))
        and any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(value))
        for value in (*args, *kwargs.values())
    )


def assumed_scalar(dtype: torch.dtype) -> Any:
    """Return the value that a check assumes for a host read: 1 in the type of ``dtype``."""
    if dtype is torch.bool:
        return True
    if dtype.is_complex:
        return 1 + 0j
    return 1.0 if dtype.is_floating_point else 1


def _nonzero(tensor: torch.Tensor) -> Layout:
    count, width = tensor.numel(), tensor.dim()
    return Layout((count, width), (1, max(count, 1)), torch.int64)  # column-major


def _row(count: int, dtype: torch.dtype) -> Layout:
    return Layout((count,), (1,), dtype)


def _masked_select(tensor: torch.Tensor, mask: torch.Tensor) -> Layout:
    size = torch.broadcast_shapes(tensor.shape, mask.shape)  # type: ignore[no-untyped-call]
    return _row(size.numel(), tensor.dtype)


def _unique(tensor: torch.Tensor, *flags: Any, **named: Any) -> tuple[Layout, Layout, Layout]:
    shape = tuple(tensor.shape)
    inverse = Layout(shape, torch.empty(shape, device="meta").stride(), torch.int64)
    return (_row(tensor.numel(), tensor.dtype), inverse, _row(tensor.numel(), torch.int64))


_ASSUMED: dict[str, Callable[..., Any]] = {
    "aten::nonzero": _nonzero,
    "aten::masked_select": _masked_select,
    "aten::_unique2": _unique,
    "aten::unique_consecutive": _unique,
}


def assumed_layouts(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the largest possible result of a data-dependent operation, or None if unknown.

    The result assumes that all mask elements are true and that all values differ.
    """
    rule = _ASSUMED.get(name.split(".")[0])
    return rule(*args, **kwargs) if rule is not None else None
