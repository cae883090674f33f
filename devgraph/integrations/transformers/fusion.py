"""Fusion of a model's operations into fewer and larger kernels, for the steps of an engine.

A decode step of a small model runs hundreds of kernels that each move a few kilobytes. Even in a
graph, the number of kernels determines its speed. Three replacements work for all model families:

* *norms*: one call of ``torch.nn.functional.rms_norm`` instead of about eight kernels.
* *projections*: one matrix product for consecutive linear layers with the same input (query, key
  and value, or gate and up). The weights become views of one matrix.
* *rotary embeddings*: one rotation of query and key together. The table of sines contains the
  signs, so the halves of query and key are only swapped.

Each replacement is verified first. ``OperationTrace`` records shapes while the model runs. On
random data of these shapes, the original and the replacement must agree. All other operations run
unchanged, and ``Fusion.unfused`` counts them by reason. Outside of steps, the model runs its own
code.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from devgraph.api.errors import CaptureError
from devgraph.api.marks.marks import is_capturing

logger = logging.getLogger(__name__)

_ROTARY = "apply_rotary_pos_emb"


class _FairLock:
    """A reentrant lock that prefers waiting threads over the thread that has just released it."""

    def __init__(self) -> None:
        self._queue, self._lock = threading.Lock(), threading.Lock()
        self._owner, self._depth = 0, 0

    def __enter__(self) -> None:
        if self._owner != threading.get_ident():
            with self._queue:
                self._lock.acquire()
            self._owner = threading.get_ident()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = 0
            self._lock.release()


model_lock = _FairLock()
"""A lock for code that runs models with replaced attributes, or must not see the replacements.

All models need one lock: they may share layers, and rotary functions belong to Python modules.
"""


def in_this_thread(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``hook`` for this thread only, because other threads may run the same modules."""
    thread = threading.get_ident()

    def call(*args: Any, **kwargs: Any) -> Any:
        return hook(*args, **kwargs) if threading.get_ident() == thread else None

    return call


@contextlib.contextmanager
def replaced(changes: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Set attributes inside the block, under ``model_lock`` and without the owner's own setter."""
    with model_lock:
        changes = list(changes)
        saved = [(o, name, getattr(o, name), name in vars(o)) for o, name, _ in changes]
        try:
            for owner, name, value in changes:
                object.__setattr__(owner, name, value)
            yield
        finally:
            for owner, name, value, own in saved:
                object.__setattr__(owner, name, value)
                if not own:  # Only the class has the attribute.
                    vars(owner).pop(name, None)


def _rotary_changes(
    rotations: Mapping[ModuleType, Callable[..., Any]],
) -> list[tuple[Any, str, Any]]:
    """Return changes of rotary functions. Each rotation gets the original as first argument."""
    return [
        (home, _ROTARY, functools.partial(rotate, getattr(home, _ROTARY)))
        for home, rotate in rotations.items()
    ]


class OperationTrace:
    """A record of the fusible operations of a model: linear layers, norms and rotary functions."""

    def __init__(self, model: nn.Module) -> None:
        self.norms: dict[nn.Module, torch.Size | None] = {}
        """Input shape of each RMS norm, or None if a norm has several inputs or input shapes."""
        self.rotary: dict[ModuleType, dict[_Form, functools.partial[Any]]] = {}
        """The first call of each form of a rotary function, by the function's Python module."""
        self._calls: list[tuple[nn.Module, nn.Linear, Tensor]] = []
        self._model = model

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record the operations of the model inside the block."""
        rotations = {}
        with contextlib.ExitStack() as hooks:
            for parent in self._model.modules():
                home = sys.modules[type(parent).__module__]
                if hasattr(home, _ROTARY):
                    rotations[home] = functools.partial(self._record_rotary, home)
                if "RMSNorm" in type(parent).__name__ and "forward" not in parent.__dict__:
                    norm = in_this_thread(self._record_norm)
                    hook = parent.register_forward_pre_hook(norm, with_kwargs=True)
                    hooks.enter_context(hook)
                record = in_this_thread(functools.partial(self._record_linear, parent))
                for child in parent.children():
                    if type(child) is nn.Linear:
                        hooks.enter_context(child.register_forward_pre_hook(record))
            with replaced(_rotary_changes(rotations)):
                yield

    def _record_norm(self, norm: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        plain = len(args) == 1 and not kwargs
        shape = self.norms.setdefault(norm, args[0].shape if plain else None)
        if not plain or shape != args[0].shape:
            self.norms[norm] = None

    def _record_linear(self, parent: nn.Module, child: nn.Linear, args: tuple[Any, ...]) -> None:
        # Keep the tensor alive, or a later input could have the same id.
        self._calls.append((parent, child, args[0]))

    def _record_rotary(
        self, home: ModuleType, original: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        call = functools.partial(original, *args, **kwargs)
        self.rotary.setdefault(home, {}).setdefault(_form(args, kwargs), call)
        return call()

    def groups(self) -> Iterator[tuple[list[nn.Linear], torch.Size]]:
        """Yield sibling layers that share an input but no weight, and the shape of the input."""
        counts = Counter(child.weight for _, child, _ in self._calls)
        for _, calls in itertools.groupby(self._calls, lambda call: (id(call[0]), id(call[2]))):
            run = list(calls)
            group = [child for _, child, _ in run]
            if len(group) > 1 and all(counts[child.weight] == 1 for child in group):
                yield group, run[0][2].shape


_Form = tuple[Any, ...]
"""Properties of the arguments that determine the computation of a rotary function."""


def _form(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Form:
    values = (*args, *(kwargs[name] for name in sorted(kwargs)))
    return (
        len(args),
        *sorted(kwargs),
        *((v.dim(), v.shape[-1], v.dtype) if isinstance(v, Tensor) else v for v in values),
    )


def _compatible(group: list[nn.Linear]) -> bool:
    first = group[0]
    return all(
        type(c.weight) is nn.Parameter
        and c.weight.dtype is first.weight.dtype
        and c.weight.is_contiguous()
        and (c.bias is None) == (first.bias is None)
        and not c._forward_hooks
        and "forward" not in c.__dict__
        for c in group
    )


class _Projections:
    """A group of linear layers that are computed by one matrix product."""

    def __init__(self, layers: list[nn.Linear]) -> None:
        self.layers = layers
        self.sizes = [layer.out_features for layer in layers]
        self.forwards = [functools.partial(self._forward, i) for i in range(len(layers))]
        self._given: Tensor | None = None
        self._pieces: Sequence[Tensor] = ()
        self.join()

    def refresh(self) -> None:
        """Join the weights again if one of them is no longer a view of the joined matrix."""
        # Every eager step checks every layer, and ``layer.weight`` is a slow attribute.
        if any(own["weight"].data_ptr() != address for own, address in self._addresses):
            if is_capturing():
                raise CaptureError(
                    "weights of the model were replaced; run one eager step before the capture (a "
                    "warm-up run is such a step), and invalidate older graphs"
                )
            self.join()

    @torch.inference_mode(False)  # Inference tensors cannot be written in other modes.
    @torch.no_grad()
    def join(self) -> None:
        """Concatenate the weights, and turn the layers' weights into views of the result.

        Weights that are already adjacent are not moved, because graphs may read them there.
        """
        self.weight = _concatenated([layer.weight for layer in self.layers])
        biases = [layer.bias for layer in self.layers]
        self.bias = None if biases[0] is None else _concatenated(biases)
        self._addresses: list[tuple[Any, int]] = [
            (c._parameters, c.weight.data_ptr()) for c in self.layers
        ]

    def _forward(self, index: int, given: Tensor) -> Tensor:
        """Return the output of one layer. The call for the first layer computes all outputs."""
        if index == 0:
            self._given = given
            joined = F.linear(given, self.weight, self.bias)
            self._pieces = torch.split_with_sizes(joined, self.sizes, -1)
        if self._given is not given:
            return F.linear(given, self.layers[index].weight, self.layers[index].bias)
        piece = self._pieces[index]
        if index == len(self.layers) - 1:
            self.forget()
        return piece

    def forget(self) -> None:
        self._given, self._pieces = None, ()


def _concatenated(parts: Sequence[Tensor]) -> Tensor:
    first, sizes = parts[0], [part.shape[0] for part in parts]
    ends = itertools.accumulate((part.nbytes for part in parts), initial=first.data_ptr())
    if len({part.untyped_storage().data_ptr() for part in parts}) == 1 and all(
        part.data_ptr() == end for part, end in zip(parts, ends, strict=False)
    ):
        return first.detach().as_strided((sum(sizes), *first.shape[1:]), first.stride())
    whole = torch.cat([part.detach() for part in parts])
    for part, view in zip(parts, torch.split_with_sizes(whole, sizes), strict=True):
        part.data = view
    return whole


class Fusion:
    """The verified replacements for one model. Joined weights stay joined after ``close``."""

    def __init__(self, trace: OperationTrace) -> None:
        self.unfused: Counter[str] = Counter()
        """Number of operations that were not fused, by reason."""
        self._tables: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self._projections = list(self._join(trace))
        self._forwards: list[tuple[nn.Module, str, Callable[..., Any]]] = [
            (layer, "forward", forward)
            for group in self._projections
            for layer, forward in zip(group.layers, group.forwards, strict=True)
        ]
        self._forwards += list(self._norms(trace))
        self._rotary = dict(self._rotary_forms(trace))
        logger.info("fused %s; not fused: %s", self.counts, dict(self.unfused) or "nothing")

    def _join(self, trace: OperationTrace) -> Iterator[_Projections]:
        for layers, shape in trace.groups():
            if not _compatible(layers):
                self.unfused["projections: the layers differ in dtype, bias or hooks"] += 1
                continue
            given = _noise(shape, layers[0].weight)
            with torch.no_grad():
                want = [layer(given) for layer in layers]
                group = _Projections(layers)
                got = [forward(given) for forward in group.forwards]
            if all(_near(w, g) for w, g in zip(want, got, strict=True)):
                yield group
            else:
                self.unfused["projections: the results of one product differ"] += 1

    def _norms(self, trace: OperationTrace) -> Iterator[tuple[nn.Module, str, Callable[..., Any]]]:
        for norm, shape in trace.norms.items():
            forward = _rms_norm_of(norm, shape)
            if isinstance(forward, str):
                self.unfused[f"{type(norm).__name__}: {forward}"] += 1
            else:
                yield norm, "forward", forward

    def _rotary_forms(self, trace: OperationTrace) -> Iterator[tuple[ModuleType, set[_Form]]]:
        for home, calls in trace.rotary.items():
            reasons = {form: why for form, call in calls.items() if (why := self._mismatch(call))}
            for why in reasons.values():
                self.unfused[f"{home.__name__.rpartition('.')[2]}.{_ROTARY}: {why}"] += 1
            if len(reasons) < len(calls):
                yield home, calls.keys() - reasons.keys()

    def _mismatch(self, call: functools.partial[Any]) -> str | None:
        """Return the reason why ``_rotate`` cannot replace the function in ``call``, or None."""
        try:
            with torch.no_grad():
                noisy = [_noise(a.shape, a) if isinstance(a, Tensor) else a for a in call.args]
                for args in (call.args, noisy):
                    want = call.func(*args, **call.keywords)
                    got = self._rotate(*args, **call.keywords)
                    if not isinstance(want, tuple) or len(want) != 2:
                        return "it does not return query and key"
                    if not all(_close(w, g) for w, g in zip(want, got, strict=True)):
                        return "it computes another rotation"
        except (TypeError, RuntimeError, ValueError) as error:
            return f"it does not accept these arguments ({str(error).partition(chr(10))[0]})"
        finally:
            self._tables.clear()
        return None

    @property
    def counts(self) -> dict[str, int]:
        """Number of replaced operations, by kind."""
        joined = sum(len(group.layers) for group in self._projections)
        return {
            "projections": joined,
            "norms": len(self._forwards) - joined,
            "rotary": len(self._rotary),
        }

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Apply the replacements inside the block."""
        with model_lock:
            for group in self._projections:
                group.refresh()
            rotations = {
                home: functools.partial(self._rotate_or, forms)
                for home, forms in self._rotary.items()
            }
            try:
                with replaced([*self._forwards, *_rotary_changes(rotations)]):
                    yield
            finally:
                for group in self._projections:
                    group.forget()
                self._tables.clear()

    def _rotate(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
    ) -> tuple[Tensor, Tensor]:
        # Prepare tables once per step, because all layers receive the same tables.
        tables = self._tables.get(id(sin))
        if tables is None or tables[0] is not sin:
            low, high = sin.chunk(2, -1)
            signed = torch.cat((-low, high), -1)
            tables = (sin, cos.unsqueeze(unsqueeze_dim), signed.unsqueeze(unsqueeze_dim))
            self._tables[id(sin)] = tables
        return _rotate_together(q, k, tables[1], tables[2], heads_dim=unsqueeze_dim)

    def _rotate_or(
        self, forms: set[_Form], original: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        rotate = self._rotate if _form(args, kwargs) in forms else original
        return rotate(*args, **kwargs)

    def close(self) -> None:
        """Drop all replacements, which refer to the model. Idempotent."""
        self._projections, self._forwards, self._rotary = [], [], {}


def _rms_norm_of(module: nn.Module, shape: torch.Size | None) -> functools.partial[Tensor] | str:
    """Return a replacement for the forward of ``module``, or the reason why there is none."""
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if shape is None:
        return "it has several inputs, or inputs of several shapes"
    if not isinstance(eps, float) or not isinstance(weight, nn.Parameter) or weight.dim() != 1:
        return "it has no one-dimensional weight, or no epsilon"
    given, forward = _noise(shape, weight), functools.partial(_rms_norm, module._parameters, eps)
    with torch.no_grad():
        if shape[-1] == weight.shape[0] and _close(module(given), forward(given)):
            return forward
    return "it differs from the RMS norm of torch"


def _rms_norm(parameters: dict[str, Any], eps: float, given: Tensor) -> Tensor:
    weight = parameters["weight"]  # The weight may be replaced between calls.
    return F.rms_norm(given, weight.shape, weight, eps)


def _rotate_together(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, heads_dim: int
) -> tuple[Tensor, Tensor]:
    both, width = _joined_heads(q, k, heads_dim), cos.shape[-1]
    is_whole = width >= both.shape[-1]
    rotating = both if is_whole else both[..., :width]
    low, high = rotating.chunk(2, -1)
    rotated = torch.addcmul(rotating * cos, torch.cat((high, low), -1), sin)
    if not is_whole:
        rotated = torch.cat((rotated, both[..., width:]), -1)
    sizes = (q.shape[heads_dim], k.shape[heads_dim])
    rotated_q, rotated_k = torch.split_with_sizes(rotated, sizes, heads_dim)
    return rotated_q, rotated_k


def _joined_heads(q: Tensor, k: Tensor, dim: int) -> Tensor:
    """Concatenate along ``dim``, without a copy if both outputs are adjacent in memory."""
    step = (q if q.shape[dim] > 1 else k).stride(dim)
    if (
        # The strides of dimensions of size one have no meaning.
        all(q.shape[d] == 1 or q.stride(d) == k.stride(d) for d in range(q.dim()) if d != dim)
        and (k.shape[dim] == 1 or k.stride(dim) == step)
        and k.storage_offset() == q.storage_offset() + q.shape[dim] * step
        and q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr()
    ):
        shape, strides = list(q.shape), list(q.stride())
        shape[dim] += k.shape[dim]
        strides[dim] = step
        return q.as_strided(shape, strides)
    return torch.cat((q, k), dim)


def _noise(shape: torch.Size, like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(shape, generator=generator, device="cpu")
    return drawn.to(dtype=like.dtype, device=like.device)


def _close(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype is not b.dtype:
        return False
    # Allow a few rounding errors of the dtype, or of float32 if these are larger.
    limit = 8 * max(torch.finfo(a.dtype).eps, torch.finfo(torch.float32).eps)
    is_near = torch.allclose(a.float(), b.float(), atol=limit, rtol=limit)
    return is_near and math.isfinite(float(a.float().sum()))


def _near(a: Tensor, b: Tensor) -> bool:
    """Whether two products are equal up to the order of summation."""
    return bool((a - b).abs().max() <= 0.01 * a.abs().max())
