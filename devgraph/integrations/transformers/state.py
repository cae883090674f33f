"""Recurrent state of linear-attention layers, in state slots of the runners.

A *mixer* is a module that reads and writes the recurrent state of one layer: a convolution window,
a scan's state, or both. In a step it runs on a cache layer of transformers' own class whose tensors
are rows of ``batch.state``. Therefore a mixer needs no code of its own here.

Decode steps gather the rows of their requests, run the mixer for one token at a time, and scatter
the rows. Packed steps run the mixer once for each request on its tokens, without padding, inside a
region.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers.cache_utils import Cache

from devgraph.api.marks.marks import region
from devgraph.integrations.transformers.fusion import model_lock
from devgraph.runners.batch import Batch, StateViews
from devgraph.runners.state import StateSlot

_KEYS = frozenset({"keys", "values"})
"""Tensors of a cache layer that belong to attention."""


def state_tensors(layer: Any) -> dict[str, Tensor]:
    """Return the state tensors of a cache layer by name."""
    return {
        name if key is None else f"{name}.{key}": tensor for name, key, tensor in _tensors(layer)
    }


def _tensors(layer: Any) -> Iterator[tuple[str, int | None, Tensor]]:
    for name, value in sorted(vars(layer).items()):
        if name in _KEYS:
            continue
        for key, tensor in value.items() if isinstance(value, dict) else [(None, value)]:
            if isinstance(tensor, Tensor):
                yield name, key, tensor


def layer_with(layer: Any, tensors: list[Tensor], *, carried: bool) -> Any:
    """Return a copy of a cache layer with other state tensors.

    Args:
        layer: a layer that was filled once.
        tensors: new tensors, in the order of ``state_tensors``.
        carried: whether the tensors hold the state of earlier tokens.
    """
    twin = copy.copy(layer)
    for name, value in vars(layer).items():
        if isinstance(value, dict):
            setattr(twin, name, dict(value))
    for (name, key, _), tensor in zip(list(_tensors(layer)), tensors, strict=True):
        if key is None:
            setattr(twin, name, tensor)
        else:
            getattr(twin, name)[key] = tensor
    flags = layer.has_previous_state
    twin.has_previous_state = dict.fromkeys(flags, carried) if isinstance(flags, dict) else carried
    return twin


@attrs.frozen(kw_only=True, eq=False)
class Mixer:
    """A module that reads and writes the recurrent state of one layer."""

    module: nn.Module
    layer: int
    """Index of the layer in the cache."""
    output: Any
    """Output of a run with a few tokens; its tensors are ``[1, tokens, ...]``."""
    forward: Callable[..., Any]
    """Forward of the module outside of steps."""


class RecurrentLayers:
    """The layers with recurrent state, and the state slots that hold it.

    Args:
        layers: a filled cache layer for each layer with state, by index.
    """

    def __init__(self, layers: Mapping[int, Any]) -> None:
        self.layers = dict(layers)
        self.carries = True
        """Whether mixers carry a state through several tokens; else they continue one by one."""
        slots = {
            index: {
                name: StateSlot(
                    f"layer{index}_{name.replace('.', '_')}", tensor.shape[1:], tensor.dtype
                )
                for name, tensor in state_tensors(layer).items()
            }
            for index, layer in layers.items()
        }
        self._names = {index: [slot.name for slot in own.values()] for index, own in slots.items()}
        self.slots = [slot for own in slots.values() for slot in own.values()]
        """The state slots of the runners."""
        self.names = {
            slot.name: f"{index}.{name}"
            for index, own in slots.items()
            for name, slot in own.items()
        }
        """Layer and name of the state in each slot, as handoffs name them."""

    def __bool__(self) -> bool:
        return bool(self.layers)

    def rows(self, state: Any, index: int) -> list[Tensor]:
        """Return the rows of layer ``index`` in ``batch.state`` or in its history."""
        return [getattr(state, name) for name in self._names.get(index, ())]

    def split(self, layers: Mapping[int, Any], row: int) -> dict[str, Tensor]:
        """Return the state of one row of a batch in filled cache layers, for ``import_state``."""
        return {
            name: tensor[row]
            for index, names in self._names.items()
            for name, tensor in zip(names, state_tensors(layers[index]).values(), strict=True)
        }

    def layer(self, index: int, states: list[dict[str, Tensor]], *, carried: bool) -> Any:
        """Return a cache layer with the exported state of a batch."""
        tensors = [torch.stack([state[name] for state in states]) for name in self._names[index]]
        return layer_with(self.layers[index], tensors, carried=carried)

    def zeros(self, rows: int, device: torch.device) -> StateViews:
        """Return the state of ``rows`` new requests, for steps outside of a runner."""
        return StateViews(
            {s.name: torch.zeros(rows, *s.shape, dtype=s.dtype, device=device) for s in self.slots}
        )

    def decode(
        self, mixer: Mixer, batch: Batch, width: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a mixer for ``width`` tokens of each request of a batch."""
        slots, rows = batch.state_slots, self.rows(batch.state, mixer.layer)
        history = batch.state.history and self.rows(batch.state.history, mixer.layer)
        state = [row.index_select(0, slots) for row in rows]
        leaves, spec = pytree.tree_flatten((args, kwargs))
        outputs = []
        for token in range(width):
            inputs = [
                leaf[:, token : token + 1]
                if isinstance(leaf, Tensor) and leaf.shape[:2] == (len(slots), width)
                else leaf
                for leaf in leaves
            ]
            output, state = self._call(mixer, state, True, *pytree.tree_unflatten(inputs, spec))
            outputs.append(output)
            for target, tensor in zip(
                [versions[token] for versions in history] if history else rows, state, strict=True
            ):
                target.index_copy_(0, slots, tensor)
        return outputs[0] if width == 1 else pytree.tree_map(_joined, *outputs)

    def run(
        self,
        mixer: Mixer,
        rows: list[Tensor],
        inputs: tuple[tuple[Any, ...], dict[str, Any]],
        outputs: list[Tensor],
        spans: tuple[int, ...],
    ) -> None:
        """Run a mixer on the packed tokens of each request, and write its outputs."""
        first = 0
        leaves, spec = pytree.tree_flatten(inputs)
        packed = outputs[0].shape[:2]
        for slot, cached, count in zip(spans[::3], spans[1::3], spans[2::3], strict=True):
            own_rows = [row[slot : slot + 1] for row in rows]
            step = count if self.carries or not cached else 1
            for begin in range(first, first + count, step):
                own = slice(begin, begin + step)
                given = [
                    leaf[:, own] if isinstance(leaf, Tensor) and leaf.shape[:2] == packed else leaf
                    for leaf in leaves
                ]
                args, kwargs = pytree.tree_unflatten(given, spec)
                output, state = self._call(mixer, own_rows, bool(cached), args, kwargs)
                for row, tensor in zip(own_rows, state, strict=True):
                    if tensor is not row:
                        row.copy_(tensor)
                results = (leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor))
                for target, result in zip(outputs, results, strict=True):
                    target[:, own].copy_(result)
            first += count

    def _call(
        self,
        mixer: Mixer,
        state: list[Tensor],
        carried: bool,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[Any, list[Tensor]]:
        layer = layer_with(self.layers[mixer.layer], state, carried=carried)
        cache = Cache(layers=[layer] * (mixer.layer + 1))

        def own(value: Any) -> Any:
            return cache if isinstance(value, Cache) else value

        args, kwargs = tuple(map(own, args)), {name: own(value) for name, value in kwargs.items()}
        output = mixer.forward(*args, **kwargs)
        return output, list(state_tensors(layer).values())


def _joined(*parts: Any) -> Any:
    return torch.cat(parts, 1) if isinstance(parts[0], Tensor) else parts[0]


@region(host_args=("spans",), mutates=("outputs", "rows"))
def run_packed(
    states: RecurrentLayers,
    mixer: Mixer,
    rows: list[Tensor],
    weights: list[Tensor],
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
    outputs: list[Tensor],
    *,
    spans: tuple[int, ...],
) -> None:
    """Run a mixer on the packed tokens of each request.

    Its own code may read the host or loop over tokens, so it runs outside of the graph's segments.

    Args:
        states: the layers with state.
        mixer: the module to run.
        rows: state rows of the layer.
        weights: tensors of the module.
        inputs: arguments of its forward; tensors ``[1, tokens, ...]`` are cut into requests.
        outputs: output tensors, ``[1, tokens, ...]``; rows of padding are not written.
        spans: slot, number of cached tokens and number of new tokens of each request.
    """
    with model_lock:
        states.run(mixer, rows, inputs, outputs, spans)
