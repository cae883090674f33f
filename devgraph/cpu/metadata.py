"""Metadata of results (sizes, strides and dtypes), inferred without running the recorded call."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)

from devgraph.api.marks.marks import Args, Kwargs
from devgraph.api.tensors import tensors_in
from devgraph.cpu.ops import OpPlan


class DataDependentError(Exception):
    """The sizes of a result depend on the data in the arguments."""


class UnrecordableError(Exception):
    """An operation cannot be recorded; the text is the reason, without a final period."""


class ResizeError(UnrecordableError):
    """An operation resizes its outputs; ``wanted`` pairs each output with its new size."""

    def __init__(self, wanted: list[tuple[torch.Tensor, torch.Size]]) -> None:
        super().__init__("an operation would resize its outputs")
        self.wanted = wanted


class UnknownMetadataError(UnrecordableError):
    """Fake tensors do not support the operation."""


class OtherDeviceError(Exception):
    """An argument or a result of an operation is not in CPU memory."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(str(device))
        self.device = device


@attrs.frozen
class Layout:
    """Size, stride and dtype of a tensor."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Layout:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)


def _map(value: Any, change: Callable[[Any], Any], *, kind: type) -> Any:
    """Return ``value`` with ``change`` applied to every ``kind`` in it, including nested lists."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, (list, tuple)):
        items = [_map(item, change, kind=kind) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    return value


map_tensors = functools.partial(_map, kind=torch.Tensor)
map_layouts = functools.partial(_map, kind=Layout)


_NORMS = ("batch", "group", "layer")
"""Norms whose statistics have the dtype of the weights, but the input's dtype in fake results."""

_UNFAITHFUL = {
    "aten::mkldnn_rnn_layer",
    "aten::_native_multi_head_attention",
    "aten::quantize_per_tensor",
    "aten::im2col",
    "aten::roll",
    *(f"aten::native_{norm}_norm{back}" for norm in _NORMS for back in ("", "_backward")),
    "aten::_native_batch_norm_legit",
    "aten::_native_batch_norm_legit_no_training",
}
"""Operations whose fake results differ from those of the kernels."""


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_nested)


def _odd(tensor: torch.Tensor, subject: str) -> UnrecordableError:
    kind = "quantized" if tensor.is_quantized else tensor.layout
    kind = "nested" if tensor.is_nested else kind
    return UnrecordableError(
        f"{subject}a {kind} tensor, but a graph needs tensors with plain memory at fixed "
        f"addresses. Use a plain, dense tensor, or call the operation in a function marked "
        f"@dg.no_graph"
    )


def _key(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if not value.is_cpu:
            raise OtherDeviceError(value.device)
        if value.is_nested:
            raise _odd(value, "an argument is ")
        return (value.dtype, value.shape, value.stride() if _is_plain(value) else value.layout)
    if isinstance(value, (list, tuple)):
        return tuple(map(_key, value))
    if isinstance(value, torch.Generator):
        return torch.Generator  # The key must not keep a generator alive.
    # The key includes the type, because 1, 1.0 and True are equal but different arguments.
    return (type(value), value)


class Metadata:
    """A thread-safe cache of result metadata, by operation and argument layouts.

    The metadata matches eager execution. Only strides of dimensions of size 1 may differ, if they
    do not affect the memory format.
    """

    LIMIT = 20_000
    """Number of entries at which the cache is cleared."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[Any, Any] = {}

    @functools.cached_property
    def mode(self) -> FakeTensorMode:
        """The fake tensor mode, created on first use.

        Creation takes seconds, because it imports torch's compiler. The mode's own cache is off,
        because it has no size limit.
        """
        mode = FakeTensorMode()
        mode.cache_enabled = False
        return mode

    def infer(self, plan: OpPlan, args: Args, kwargs: Kwargs) -> Any:
        """Return the result of the operation with a ``Layout`` in place of each tensor.

        Raise DataDependentError, OtherDeviceError, or UnrecordableError (the operation resizes an
        argument, a tensor is not dense, or torch cannot determine the result).
        """
        named = tuple([(n, _key(v)) for n, v in kwargs.items()]) if kwargs else ()
        with_grad = plan.depends_on_grad and torch.is_grad_enabled()
        key = (plan, _key(args), named, with_grad, torch.get_default_dtype())
        try:
            layouts = self._known.get(key)
        except TypeError:  # An argument is not hashable, such as a script object.
            return self._ask(plan, args, kwargs)
        if layouts is None:
            layouts = self._ask(plan, args, kwargs)
            with self._lock:
                if len(self._known) >= self.LIMIT:
                    self._known.clear()
                self._known[key] = layouts
        return layouts

    def _ask(self, plan: OpPlan, args: Args, kwargs: Kwargs) -> Any:
        odd = next((t for t in tensors_in((args, kwargs)) if not _is_plain(t)), None)
        if odd is not None:  # The operation may still support such a tensor.
            refusal = _odd(odd, "an argument is ")
            if plan.writes:
                raise refusal
            return _probe(plan, args, kwargs, refusal)
        if plan.name in _UNFAITHFUL or (_is_pointwise(plan) and _has_expanded_half(args, kwargs)):
            return _probe(plan, args, kwargs)
        if plan.func.namespace == "aten" and not plan.writes and _is_ambiguous(args, kwargs):
            with contextlib.suppress(Exception):  # The operation may refuse scratch data.
                return _probe(plan, args, kwargs)
        try:
            return self._ask_fakes(plan, args, kwargs)
        except UnknownMetadataError as error:
            return _probe(plan, args, kwargs, UnrecordableError(str(error)))
        except RuntimeError as error:  # The operation itself may succeed.
            return _probe(plan, args, kwargs, error)

    def reads_data(self, plan: OpPlan, args: Args, kwargs: Kwargs) -> bool:
        """Whether an operation that returns no tensor needs the data of its arguments."""
        # Without a metadata kernel, fake tensors would run the CPU kernel on zeros.
        name = plan.func.name()  # type: ignore[no-untyped-call]
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
        if not (has_kernel(name, "Meta") or has_kernel(name, "CompositeExplicitAutograd")):
            return True
        try:
            self._ask_fakes(plan, args, kwargs)
        except (DataDependentError, UnrecordableError, RuntimeError):
            return True
        return False

    def _ask_fakes(self, plan: OpPlan, args: Args, kwargs: Kwargs) -> Any:
        with self._lock, self.mode, _quiet():
            return _infer(plan, args, kwargs)


def _is_pointwise(plan: OpPlan) -> bool:
    return plan.func.namespace == "aten" and torch.Tag.pointwise in plan.func.tags


def _has_expanded_half(*tree: Any) -> bool:
    """Whether a 16-bit float tensor is expanded; kernels then order strides unlike fake results."""
    halves = (t for t in tensors_in(tree) if t.dtype in (torch.bfloat16, torch.float16))
    return any(0 in tensor.stride() for tensor in halves)


def _is_ambiguous(*tree: Any) -> bool:
    """Whether metadata kernels may differ from the CPU in the strides of dimensions of size 1.

    These strides decide whether a result is channels-last, and thus which kernels read it.
    """
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        twins = (
            (tensor, torch.empty_strided(tensor.shape, tensor.stride(), device="meta"))
            for tensor in tensors_in(tree)
            if tensor.dim() > 3 and 1 in tensor.shape
        )
        return any(torch.empty_like(twin).stride() != tensor.stride() for tensor, twin in twins)


def _infer(plan: OpPlan, args: Args, kwargs: Kwargs) -> Any:
    """Run the operation on stand-ins for the arguments, and return the layouts of its results."""
    schema = plan.func._schema.arguments
    positions = {argument.name: at for at, argument in enumerate(schema)}
    written: list[tuple[torch.Tensor, torch.Tensor]] = []

    def stand_in(position: int, value: Any) -> Any:
        if isinstance(value, torch.Generator):
            return None  # A generator must be on the device of the tensors.
        resizable = plan.func.namespace == "aten" and schema[position].is_out

        def new(tensor: torch.Tensor) -> torch.Tensor:
            if position not in plan.writes:
                return _new(Layout.of(tensor))
            # torch silently resizes an empty output, so an empty stand-in reveals the new size.
            layout = Layout((0,), (1,), tensor.dtype) if resizable else Layout.of(tensor)
            written.append((tensor, _new(layout)))
            return written[-1][1]

        return map_tensors(value, new)

    result = _run(
        plan.func,
        [stand_in(at, value) for at, value in enumerate(args)],
        {name: stand_in(positions[name], value) for name, value in kwargs.items()},
    )
    if resized := [(t, other.shape) for t, other in written if other.shape != t.shape]:
        raise ResizeError(resized)
    return map_tensors(result, functools.partial(_layout, plan))


def _probe(plan: OpPlan, args: Args, kwargs: Kwargs, refusal: Exception | None = None) -> Any:
    """Run an operation on scratch data and return the layouts of its results.

    Raise ``refusal`` if the operation fails, and DataDependentError if a second run on other data
    returns other layouts.
    """
    answers = []
    random = torch.get_rng_state()
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        for fill in (1, -1):
            scratch = functools.partial(_scratch, fill=fill)
            try:
                result = plan.func(
                    *map_tensors(args, scratch),
                    **{name: map_tensors(value, scratch) for name, value in kwargs.items()},
                )
            except Exception as error:
                if fill == 1 and refusal is not None:
                    raise refusal from error
                if fill == 1:
                    raise
                continue  # The operation does not accept such data.
            finally:
                torch.set_rng_state(random)
            answers.append(map_tensors(result, functools.partial(_layout, plan)))
    if answers[0] != answers[-1]:
        raise DataDependentError(f"sizes of the results of {plan.name} depend on data")
    return answers[0]


def _scratch(tensor: torch.Tensor, *, fill: int) -> torch.Tensor:
    """Return a tensor like ``tensor`` filled with ``fill``; integers are 0, a valid index."""
    if not _is_plain(tensor):
        return tensor
    scratch = _new(Layout.of(tensor))
    # Elements of expanded tensors share memory, so write through a flat view.
    count = scratch.untyped_storage().nbytes() // scratch.itemsize
    flat = scratch.as_strided((count,), (1,))
    if scratch.dtype is torch.bool:
        flat.fill_(fill > 0)
    elif scratch.dtype.is_floating_point or scratch.dtype.is_complex:
        flat.copy_(torch.full((), fill, dtype=torch.float32))
    else:
        flat.zero_()
    return scratch


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress log messages of torch about errors that torch also raises."""
    log = logging.getLogger(FakeTensorMode.__module__)
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _new(layout: Layout) -> torch.Tensor:
    return torch.empty_strided(layout.size, layout.stride, dtype=layout.dtype, device="cpu")


def _layout(plan: OpPlan, result: torch.Tensor) -> Layout:
    if not _is_plain(result):
        raise _odd(result, f"{plan.name} returns ")
    if result.device.type != "cpu":
        raise OtherDeviceError(result.device)
    return Layout.of(result)


def _run(func: OpOverload, args: list[Any], kwargs: Kwargs) -> Any:
    try:
        return func(*args, **kwargs)
    except (DynamicOutputShapeException, DataDependentOutputException) as error:
        raise DataDependentError(str(error)) from error
    # torch raises KeyError for dtypes that its tables lack.
    except (UnsupportedOperatorException, NotImplementedError, KeyError) as error:
        raise UnknownMetadataError(
            f"torch cannot determine the result of {func} without running it; register a fake "
            f"implementation with torch.library.register_fake, or call the operation in a function "
            f"marked @dg.no_graph"
        ) from error
