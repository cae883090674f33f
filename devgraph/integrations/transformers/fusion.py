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

Each stand-in is compared with what it replaces, on random data, before it is used. Outside a step
the model runs its own code.
"""

from __future__ import annotations

import contextlib
import logging
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from devgraph.api.errors import StateError
from devgraph.api.marks.marks import is_capturing

__all__ = ["Fusion", "LinearCalls"]

logger = logging.getLogger(__name__)

_ROTARY = "apply_rotary_pos_emb"


class LinearCalls:
    """Notes, while a model runs, which plain linear layers are given the same tensor in a row."""

    def __init__(self, model: nn.Module) -> None:
        self._calls: list[tuple[nn.Module, nn.Linear, torch.Tensor]] = []
        self._hooks = []
        for parent in model.modules():
            for child in parent.children():
                if type(child) is nn.Linear:
                    self._hooks.append(child.register_forward_pre_hook(self._hook(parent)))

    def _hook(self, parent: nn.Module) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def note(child: nn.Module, args: tuple[Any, ...]) -> None:
            assert isinstance(child, nn.Linear)
            # The tensor is kept: an address that is free again must not pass for the same input.
            self._calls.append((parent, child, args[0]))

        return note

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def groups(self) -> list[list[nn.Linear]]:
        """Return runs of two or more siblings with one input, each layer called once."""
        counts: dict[int, int] = {}
        for _, child, _ in self._calls:
            counts[id(child)] = counts.get(id(child), 0) + 1
        groups: list[list[nn.Linear]] = []
        before: tuple[nn.Module, torch.Tensor] | None = None
        for parent, child, given in self._calls:
            if before is not None and before[0] is parent and before[1] is given:
                groups[-1].append(child)
            else:
                groups.append([child])
            before = (parent, given)
        return [
            g for g in groups if len(g) > 1 and all(counts[id(c)] == 1 for c in g) and _alike(g)
        ]


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
        self.weight = torch.empty(0)
        self.bias: torch.Tensor | None = None
        self._addresses: list[tuple[dict[str, Any], int]] = []
        self._given: torch.Tensor | None = None
        self._pieces: Sequence[torch.Tensor] = ()
        self.join()
        self.forwards = [self._forward_of(i) for i in range(len(layers))]

    @property
    def joined(self) -> bool:
        """Whether the layers' weights still are the views that ``join`` made."""
        # The parameters' own dictionary: this runs for every layer of every eager step.
        return all(
            parameters["weight"].data_ptr() == address for parameters, address in self._addresses
        )

    @torch.no_grad()
    def join(self) -> None:
        """Put the weights side by side and make the layers' own weights views of that.

        Weights that lie side by side already are left where they are: graphs may read them there.
        """
        self.weight = _side_by_side([layer.weight for layer in self.layers])
        if self.layers[0].bias is not None:
            self.bias = _side_by_side([layer.bias for layer in self.layers])
        self._addresses = [(c._parameters, c.weight.data_ptr()) for c in self.layers]

    def _forward_of(self, index: int) -> Callable[[torch.Tensor], torch.Tensor]:
        layer, last = self.layers[index], len(self.layers) - 1

        def forward(given: torch.Tensor) -> torch.Tensor:
            if index == 0:
                self._given = given
                joined = F.linear(given, self.weight, self.bias)
                self._pieces = torch.split_with_sizes(joined, self.sizes, -1)
            if self._given is not given:
                return F.linear(given, layer.weight, layer.bias)
            piece = self._pieces[index]
            if index == last:
                self.forget()
            return piece

        return forward

    def forget(self) -> None:
        self._given, self._pieces = None, ()


def _side_by_side(parts: list[torch.Tensor]) -> torch.Tensor:
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
        model: in evaluation mode, on its device.
        groups: from ``LinearCalls.groups``.
        attention: the attention modules, whose rotary function may be replaced.
    """

    def __init__(
        self, model: nn.Module, groups: Iterable[list[nn.Linear]], attention: Iterable[nn.Module]
    ) -> None:
        self._projections = [_Projections(group) for group in groups]
        self._forwards: list[tuple[dict[str, Any], Callable[..., Any]]] = [
            (layer.__dict__, forward)
            for group in self._projections
            for layer, forward in zip(group.layers, group.forwards, strict=True)
        ]
        norms = [m for m in model.modules() if "forward" not in m.__dict__ and _is_rms_norm(m)]
        self._forwards += [(m.__dict__, _rms_norm_of(m)) for m in norms]
        self._rotary = list(_rotary_modules(attention))
        self._turned: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        logger.debug(
            "fused %d projections, %d norms, %d rotary functions",
            len(self._projections),
            len(norms),
            len(self._rotary),
        )

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
        originals = [(module, getattr(module, _ROTARY)) for module in self._rotary]
        try:
            for attributes, forward in self._forwards:
                attributes["forward"] = forward
            for module in self._rotary:
                setattr(module, _ROTARY, self._turn)
            yield
        finally:
            for attributes, _ in self._forwards:
                attributes.pop("forward", None)
            for module, original in originals:
                setattr(module, _ROTARY, original)
            for group in self._projections:
                group.forget()
            self._turned.clear()

    def _refresh(self) -> None:
        for group in self._projections:
            if not group.joined:
                if is_capturing():
                    raise StateError(
                        "weights of the model were replaced; run one step eagerly (the warm-up of "
                        "a capture does) before capturing, and invalidate graphs made before"
                    )
                group.join()

    def _turn(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        unsqueeze_dim: int = 1,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # All layers are given the same tables; what is made of them is made once a step.
        tables = self._turned.get(id(sin))
        if tables is None or tables[0] is not sin:
            tables = (sin, cos.unsqueeze(unsqueeze_dim), _signed(sin).unsqueeze(unsqueeze_dim))
            self._turned[id(sin)] = tables
        return _turn_together(q, k, tables[1], tables[2], heads_dim=unsqueeze_dim)

    def close(self) -> None:
        """Forget the model. Safe to call twice."""
        self._projections, self._forwards, self._rotary = [], [], []


def _is_rms_norm(module: nn.Module) -> bool:
    """Whether ``F.rms_norm`` gives what ``module`` gives, to the rounding of its dtype."""
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if "RMSNorm" not in type(module).__name__ or not isinstance(eps, float):
        return False
    if not isinstance(weight, nn.Parameter) or weight.dim() != 1:
        return False
    given = _noise(2, weight.shape[0], like=weight)
    with torch.no_grad():
        return _close(module(given), F.rms_norm(given, weight.shape, weight, eps))


def _rms_norm_of(module: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    parameters = module._parameters

    def forward(given: torch.Tensor) -> torch.Tensor:
        # Looked up each time: the parameter may be replaced.
        weight = parameters["weight"]
        assert weight is not None
        return F.rms_norm(given, weight.shape, weight, eps)

    return forward


def _rotary_modules(attention: Iterable[nn.Module]) -> Iterator[ModuleType]:
    """Yield the Python modules of ``attention`` whose rotary function ``_turn`` can replace."""
    seen = {}
    for module in attention:
        home = sys.modules.get(type(module).__module__)
        if home is not None and hasattr(home, _ROTARY):
            seen[home.__name__] = home
    for home in seen.values():
        if _same_turn(getattr(home, _ROTARY)):
            yield home


def _same_turn(function: Callable[..., Any]) -> bool:
    like = torch.empty(0)
    q, k = _noise(1, 4, 3, 8, like=like), _noise(1, 2, 3, 8, like=like)
    cos, sin = _noise(1, 3, 8, like=like), _noise(1, 3, 8, like=like) * 0.5
    try:
        want = function(q, k, cos, sin)
    except (TypeError, RuntimeError, ValueError):
        return False
    got = _turn_together(q, k, cos[:, None], _signed(sin)[:, None], heads_dim=1)
    return (
        isinstance(want, tuple)
        and len(want) == 2
        and all(_close(w, g) for w, g in zip(want, got, strict=True))
    )


def _signed(sin: torch.Tensor) -> torch.Tensor:
    low, high = sin.chunk(2, -1)
    return torch.cat((-low, high), -1)


def _turn_together(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, heads_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    both = _joined_heads(q, k, heads_dim)
    low, high = both.chunk(2, -1)
    turned = torch.addcmul(both * cos, torch.cat((high, low), -1), sin)
    sizes = (q.shape[heads_dim], k.shape[heads_dim])
    turned_q, turned_k = torch.split_with_sizes(turned, sizes, heads_dim)
    return turned_q, turned_k


def _joined_heads(q: torch.Tensor, k: torch.Tensor, dim: int) -> torch.Tensor:
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


def _noise(*shape: int, like: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator).to(dtype=like.dtype, device=like.device)


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype is not b.dtype:
        return False
    # A few roundings of the dtype, and of float32 at least.
    unit = max(torch.finfo(a.dtype).eps, torch.finfo(torch.float32).eps)
    limit = 8 * unit
    return bool(torch.allclose(a.float(), b.float(), atol=limit, rtol=limit)) and math.isfinite(
        float(a.float().sum())
    )
