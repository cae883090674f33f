"""Fewer, larger kernels for the same model: stand-ins that are active only inside our steps.

A decode step of a small model is hundreds of kernels that each move a few kilobytes, so their
number decides its speed, in a graph too. Three things in transformers' models can be computed with
fewer of them without knowing the family:

* *norms*: an RMS norm written as eight kernels is one call of ``torch.nn.functional.rms_norm``;
* *projections*: linear layers that are given the same tensor one after another (query, key and
  value; gate and up) are one product with their weights side by side. The layers' own weights
  become views of that matrix, so nothing is stored twice;
* *rotary embeddings*: query and key are turned together, with halves swapped instead of one
  negated and swapped.

Each stand-in is compared with what it replaces before it is used: ``Seen`` notes what shapes occur
when the model runs, and random data of those shapes must give equal results. What differs, or
occurs in a form that was not compared, runs as the model wrote it, and ``Fusion.unfused`` says how
often and why. Outside a step the model runs its own code.
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


_turning_lock = threading.RLock()


@contextlib.contextmanager
def standing_in(changes: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Let attributes have other values for the duration, so that a model stays as it was.

    Past the checks of their owners: some configurations take no None for the token of padding.
    """
    changes = list(changes)
    saved = [(owner, name, getattr(owner, name), name in vars(owner)) for owner, name, _ in changes]
    try:
        for owner, name, value in changes:
            object.__setattr__(owner, name, value)
        yield
    finally:
        for owner, name, value, own in saved:
            object.__setattr__(owner, name, value)
            if not own:  # its class has it
                vars(owner).pop(name, None)


@contextlib.contextmanager
def _turning(turns: Mapping[ModuleType, Callable[..., Any]]) -> Iterator[None]:
    """Call ``turns``, with the function that they stand in for first, as the rotary functions of
    Python modules. Those are for all threads, so steps of other models wait."""
    if not turns:
        yield
        return
    with (
        _turning_lock,
        standing_in(
            (home, _ROTARY, functools.partial(turn, getattr(home, _ROTARY)))
            for home, turn in turns.items()
        ),
    ):
        yield


class Seen:
    """Notes, while a model runs, what could be fused: linear layers that are given the same tensor
    in a row, the shapes that norms are given, and the calls of rotary functions."""

    def __init__(self, model: nn.Module) -> None:
        self.norms: dict[nn.Module, torch.Size | None] = {}
        """What each RMS norm is given; None if that is not one tensor."""
        self.rotary: dict[ModuleType, dict[_Form, functools.partial[Any]]] = {}
        """The first call of every form, by the Python module that the function is looked up in."""
        self._calls: list[tuple[nn.Module, nn.Linear, Tensor]] = []
        self._model = model

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Take notes for the duration."""
        hooks = []
        notes = {}
        for parent in self._model.modules():
            home = sys.modules[type(parent).__module__]
            if hasattr(home, _ROTARY):
                notes[home] = functools.partial(self._note_rotary, home)
            if "RMSNorm" in type(parent).__name__ and "forward" not in parent.__dict__:
                hooks.append(parent.register_forward_pre_hook(self._note_norm, with_kwargs=True))
            note = functools.partial(self._note_linear, parent)
            for child in parent.children():
                if type(child) is nn.Linear:
                    hooks.append(child.register_forward_pre_hook(note))
        try:
            with _turning(notes):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def _note_norm(self, norm: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        plain = len(args) == 1 and not kwargs
        known = self.norms.setdefault(norm, args[0].shape if plain else None)
        if not plain or known != args[0].shape:
            self.norms[norm] = None

    def _note_linear(self, parent: nn.Module, child: nn.Linear, args: tuple[Any, ...]) -> None:
        # The tensor is kept: an address that is free again must not pass for the same input.
        self._calls.append((parent, child, args[0]))

    def _note_rotary(
        self, home: ModuleType, original: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        call = functools.partial(original, *args, **kwargs)
        self.rotary.setdefault(home, {}).setdefault(_form(args, kwargs), call)
        return call()

    def groups(self) -> Iterator[tuple[list[nn.Linear], torch.Size]]:
        """Return runs of two or more siblings with one input, each weight used once, and the shape
        of that input."""
        counts = Counter(child.weight for _, child, _ in self._calls)
        for _, calls in itertools.groupby(self._calls, lambda call: (id(call[0]), id(call[2]))):
            run = list(calls)
            group = [child for _, child, _ in run]
            if len(group) > 1 and all(counts[child.weight] == 1 for child in group):
                yield group, run[0][2].shape


_Form = tuple[Any, ...]
"""What decides, of the arguments of a rotary function, how it computes."""


def _form(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Form:
    values = (*args, *(kwargs[name] for name in sorted(kwargs)))
    return (
        len(args),
        *sorted(kwargs),
        *((v.dim(), v.shape[-1], v.dtype) if isinstance(v, Tensor) else v for v in values),
    )


def _alike(group: list[nn.Linear]) -> bool:
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
    """One product in place of those of a group of linear layers."""

    def __init__(self, layers: list[nn.Linear]) -> None:
        self.layers = layers
        self.sizes = [layer.out_features for layer in layers]
        self.forwards = [functools.partial(self._forward, i) for i in range(len(layers))]
        self._given: Tensor | None = None
        self._pieces: Sequence[Tensor] = ()
        self.join()

    @property
    def joined(self) -> bool:
        """Whether the layers' weights still are the views that ``join`` made."""
        # The parameters' own dictionary: this runs for every layer of every eager step.
        return all(
            parameters["weight"].data_ptr() == address for parameters, address in self._addresses
        )

    @torch.inference_mode(False)  # in which weights could not be written outside of that mode
    @torch.no_grad()
    def join(self) -> None:
        """Put the weights side by side and make the layers' own weights views of that.

        Weights that lie side by side already are left where they are: graphs may read them there.
        """
        self.weight = _side_by_side([layer.weight for layer in self.layers])
        biases = [layer.bias for layer in self.layers]
        self.bias = None if biases[0] is None else _side_by_side(biases)
        self._addresses: list[tuple[Any, int]] = [
            (c._parameters, c.weight.data_ptr()) for c in self.layers
        ]

    def _forward(self, index: int, given: Tensor) -> Tensor:
        """Compute all products for the first layer, and hand each layer its own."""
        if index == 0:
            self._given = given
            joined = F.linear(given, self.weight, self.bias)
            self._pieces = torch.split_with_sizes(joined, self.sizes, -1)
        if self._given is not given:
            layer = self.layers[index]
            return F.linear(given, layer.weight, layer.bias)
        piece = self._pieces[index]
        if index == len(self.layers) - 1:
            self.forget()
        return piece

    def forget(self) -> None:
        self._given, self._pieces = None, ()


def _side_by_side(parts: Sequence[Tensor]) -> Tensor:
    first, at = parts[0], parts[0].data_ptr()
    adjacent = True
    for part in parts:
        same = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        adjacent &= same and part.data_ptr() == at
        at += part.nbytes
    sizes = [part.shape[0] for part in parts]
    if adjacent:
        return first.detach().as_strided((sum(sizes), *first.shape[1:]), first.stride())
    whole = torch.cat([part.detach() for part in parts])
    for part, view in zip(parts, torch.split_with_sizes(whole, sizes), strict=True):
        part.data = view
    return whole


class Fusion:
    """The stand-ins for one model.

    The model's values never change; weights of joined layers stay where they were put, side by
    side, when the stand-ins are gone.

    Args:
        seen: what was noted while the model ran, in evaluation mode and on its device.
    """

    def __init__(self, seen: Seen) -> None:
        self.unfused: Counter[str] = Counter()
        """How many of what run as the model wrote them, by the reason."""
        self._turned: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self._projections = list(self._join(seen))
        self._forwards: list[tuple[nn.Module, str, Callable[..., Any]]] = [
            (layer, "forward", forward)
            for group in self._projections
            for layer, forward in zip(group.layers, group.forwards, strict=True)
        ]
        self._forwards += list(self._norms(seen))
        self._rotary = dict(self._rotary_forms(seen))
        logger.info("fused %s; not fused: %s", self.counts, dict(self.unfused) or "nothing")

    def _join(self, seen: Seen) -> Iterator[_Projections]:
        for layers, shape in seen.groups():
            if not _alike(layers):
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
                self.unfused["projections: one product gives other results"] += 1

    def _norms(self, seen: Seen) -> Iterator[tuple[nn.Module, str, Callable[..., Any]]]:
        for norm, shape in seen.norms.items():
            found = _rms_norm_of(norm, shape)
            if isinstance(found, str):
                self.unfused[f"{type(norm).__name__}: {found}"] += 1
            else:
                yield norm, "forward", found

    def _rotary_forms(self, seen: Seen) -> Iterator[tuple[ModuleType, set[_Form]]]:
        for home, calls in seen.rotary.items():
            other = {form: why for form, call in calls.items() if (why := self._other_turn(call))}
            for why in other.values():
                self.unfused[f"{home.__name__.rpartition('.')[2]}.{_ROTARY}: {why}"] += 1
            if len(other) < len(calls):
                yield home, calls.keys() - other.keys()

    def _other_turn(self, call: functools.partial[Any]) -> str | None:
        """Return why ``_turn`` cannot replace the function of ``call``, or None if it can."""
        try:
            with torch.no_grad():
                noisy = [_noise(a.shape, a) if isinstance(a, Tensor) else a for a in call.args]
                for args in (call.args, noisy):
                    want = call.func(*args, **call.keywords)
                    got = self._turn(*args, **call.keywords)
                    if not isinstance(want, tuple) or len(want) != 2:
                        return "it returns something else than query and key"
                    if not all(_close(w, g) for w, g in zip(want, got, strict=True)):
                        return "it turns in another way"
        except (TypeError, RuntimeError, ValueError) as error:
            return f"it cannot be called in this way ({str(error).partition(chr(10))[0]})"
        finally:
            self._turned.clear()
        return None

    @property
    def counts(self) -> dict[str, int]:
        """How many of each kind are replaced."""
        joined = sum(len(group.layers) for group in self._projections)
        return {
            "projections": joined,
            "norms": len(self._forwards) - joined,
            "rotary": len(self._rotary),
        }

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Run the model with the stand-ins for the duration."""
        self._refresh()
        turns = {
            home: functools.partial(self._turn_or, forms) for home, forms in self._rotary.items()
        }
        try:
            with standing_in(self._forwards), _turning(turns):
                yield
        finally:
            for group in self._projections:
                group.forget()
            self._turned.clear()

    def _refresh(self) -> None:
        for group in self._projections:
            if not group.joined:
                if is_capturing():
                    raise CaptureError(
                        "weights of the model were replaced; run one step eagerly (the warm-up of "
                        "a capture does) before capturing, and invalidate graphs made before"
                    )
                group.join()

    def _turn(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
    ) -> tuple[Tensor, Tensor]:
        # All layers are given the same tables; what is made of them is made once a step.
        tables = self._turned.get(id(sin))
        if tables is None or tables[0] is not sin:
            low, high = sin.chunk(2, -1)
            signed = torch.cat((-low, high), -1)
            tables = (sin, cos.unsqueeze(unsqueeze_dim), signed.unsqueeze(unsqueeze_dim))
            self._turned[id(sin)] = tables
        return _turn_together(q, k, tables[1], tables[2], heads_dim=unsqueeze_dim)

    def _turn_or(
        self, forms: set[_Form], original: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        turn = self._turn if _form(args, kwargs) in forms else original
        return turn(*args, **kwargs)

    def close(self) -> None:
        """Forget the model. Safe to call twice."""
        self._projections, self._forwards, self._rotary = [], [], {}


def _rms_norm_of(module: nn.Module, shape: torch.Size | None) -> functools.partial[Tensor] | str:
    """Return what ``module`` gives by ``F.rms_norm``, to the rounding of its dtype, or why that
    gives something else."""
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if shape is None:
        return "it is given several tensors, or several shapes"
    if not isinstance(eps, float) or not isinstance(weight, nn.Parameter) or weight.dim() != 1:
        return "it has no weight of one dimension, or no epsilon"
    given, forward = _noise(shape, weight), functools.partial(_rms_norm, module._parameters, eps)
    with torch.no_grad():
        if shape[-1] == weight.shape[0] and _close(module(given), forward(given)):
            return forward
    return "it computes something else than torch's RMS norm"


def _rms_norm(parameters: dict[str, Any], eps: float, given: Tensor) -> Tensor:
    weight = parameters["weight"]  # looked up each time: it may be replaced
    return F.rms_norm(given, weight.shape, weight, eps)


def _turn_together(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, heads_dim: int
) -> tuple[Tensor, Tensor]:
    both = _joined_heads(q, k, heads_dim)
    turning, rest = both, None
    if cos.shape[-1] < both.shape[-1]:
        turning, rest = both[..., : cos.shape[-1]], both[..., cos.shape[-1] :]
    low, high = turning.chunk(2, -1)
    turned = torch.addcmul(turning * cos, torch.cat((high, low), -1), sin)
    if rest is not None:
        turned = torch.cat((turned, rest), -1)
    sizes = (q.shape[heads_dim], k.shape[heads_dim])
    turned_q, turned_k = torch.split_with_sizes(turned, sizes, heads_dim)
    return turned_q, turned_k


def _joined_heads(q: Tensor, k: Tensor, dim: int) -> Tensor:
    """Return ``q`` and ``k`` as one tensor along ``dim``; a view where they lie side by side."""
    step = (q if q.shape[dim] > 1 else k).stride(dim)
    if (
        # The stride of a dimension of one, as of a single token, says nothing.
        all(q.shape[d] == 1 or q.stride(d) == k.stride(d) for d in range(q.dim()) if d != dim)
        and (k.shape[dim] == 1 or k.stride(dim) == step)
        and k.storage_offset() == q.storage_offset() + q.shape[dim] * step
        and q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr()
    ):
        # Heads of one joined projection: rows of more heads, nothing to copy.
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
    # A few roundings of the dtype, and of float32 at least.
    unit = max(torch.finfo(a.dtype).eps, torch.finfo(torch.float32).eps)
    limit = 8 * unit
    return bool(torch.allclose(a.float(), b.float(), atol=limit, rtol=limit)) and math.isfinite(
        float(a.float().sum())
    )


def _near(a: Tensor, b: Tensor) -> bool:
    """Whether two products are equal to what another order of summation may change."""
    return bool((a - b).abs().max() <= 0.01 * a.abs().max())
