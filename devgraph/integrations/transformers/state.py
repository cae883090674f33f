"""Recurrent state of linear-attention layers, stored in state slots of the runners.

A *mixer* is a module that reads and writes the recurrent state of one layer: a convolution window,
the state of a scan, or both. In a step, a mixer receives a cache layer of transformers' own class,
filled with rows of ``batch.state``, so mixers need no special code here.

Decode steps gather the rows of their requests, run the mixer for one token at a time, and scatter
the rows. Packed steps run the mixer inside a region, once for the tokens of each request, without
padding.
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
"""Attributes of a cache layer with the tensors of attention."""


def state_tensors(layer: Any) -> dict[str, Tensor]:
    """Return the state tensors of a cache layer, by name."""
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
    """Copy a cache layer with new tensors, which earlier tokens wrote if ``carried`` is true."""
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
    """Output of a run with a few tokens, with tensors ``[1, tokens, ...]``."""
    forward: Callable[..., Any]
    """The module's own forward, which is replaced during steps."""


class RecurrentLayers:
    """The filled cache layers with recurrent state, by index, and their state slots."""

    def __init__(self, layers: Mapping[int, Any]) -> None:
        self.layers = dict(layers)
        self.carries = True
        """Whether mixers can continue a state with several tokens at once."""
        self.named: dict[int, dict[str, StateSlot]] = {
            index: {
                name: StateSlot(
                    f"layer{index}_{name.replace('.', '_')}", rows.shape[1:], rows.dtype
                )
                for name, rows in state_tensors(layer).items()
            }
            for index, layer in layers.items()
        }
        """The state slots, by layer and name of the state."""
        self.slots = [slot for named in self.named.values() for slot in named.values()]

    def __bool__(self) -> bool:
        return bool(self.layers)

    def rows(self, state: Any, index: int) -> list[Tensor]:
        """Return the tensors of layer ``index`` in ``batch.state`` or in its history."""
        return [getattr(state, slot.name) for slot in self.named.get(index, {}).values()]

    def split(self, layers: Any, row: Any = ...) -> dict[str, Tensor]:
        """Return the states in ``row`` of all layers, for ``import_state``."""
        return {
            slot.name: layers[index][name][row].to(slot.dtype)
            for index, named in self.named.items()
            for name, slot in named.items()
        }

    def layer(self, index: int, states: list[dict[str, Tensor]], *, carried: bool) -> Any:
        """Return a cache layer that contains the exported states of all requests in a batch."""
        slots = self.named[index].values()
        tensors = [torch.stack([state[slot.name] for state in states]) for slot in slots]
        return layer_with(self.layers[index], tensors, carried=carried)

    def zeros(self, rows: int, device: torch.device) -> StateViews:
        """Return the initial state of ``rows`` requests, for steps outside of a runner."""
        return StateViews(
            {s.name: torch.zeros(rows, *s.shape, dtype=s.dtype, device=device) for s in self.slots}
        )

    def decode(
        self, mixer: Mixer, batch: Batch, width: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a mixer on ``width`` tokens of each request in a batch."""
        slots, rows = batch.state_slots, self.rows(batch.state, mixer.layer)
        history = batch.state.history and self.rows(batch.state.history, mixer.layer)
        state = [row.index_select(0, slots) for row in rows]
        outputs = []
        for token in range(width):
            inputs = _cut((args, kwargs), (len(slots), width), token, token + 1)
            output, state = self.call(mixer, state, True, *inputs)
            outputs.append(output)
            for target, tensor in zip(
                [versions[token] for versions in history] if history else rows, state, strict=True
            ):
                target.index_copy_(0, slots, tensor)
        return outputs[0] if width == 1 else pytree.tree_map(_joined, *outputs)

    def call(
        self,
        mixer: Mixer,
        state: list[Tensor],
        carried: bool,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[Any, list[Tensor]]:
        """Run a mixer on ``state``, and return its output and the new state."""
        layer = layer_with(self.layers[mixer.layer], state, carried=carried)
        cache = Cache(layers=[layer] * (mixer.layer + 1))

        def own(value: Any) -> Any:
            return cache if isinstance(value, Cache) else value

        args, kwargs = tuple(map(own, args)), {name: own(value) for name, value in kwargs.items()}
        output = mixer.forward(*args, **kwargs)
        return output, list(state_tensors(layer).values())


def _cut(inputs: Any, rows: tuple[int, ...], first: int, end: int) -> Any:
    """Return the inputs for tokens ``first`` to ``end``: cut all tensors ``[*rows, ...]``."""
    return pytree.tree_map_only(
        Tensor, lambda leaf: leaf[:, first:end] if leaf.shape[:2] == rows else leaf, inputs
    )


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

    A region calls the mixer, which may read device data on the host or loop over tokens.

    Args:
        states: the layers with state.
        mixer: the module to run.
        rows: state rows of the layer.
        weights: tensors of the module, so that the graph keeps them alive.
        inputs: arguments of the mixer; tensors ``[1, tokens, ...]`` are split by request.
        outputs: output tensors, ``[1, tokens, ...]``; padding is not written.
        spans: as for ``packed_exact``.
    """
    first = 0
    with model_lock:
        for slot, cached, count in zip(spans[::3], spans[1::3], spans[2::3], strict=True):
            own_rows = [row[slot : slot + 1] for row in rows]
            step = count if states.carries or not cached else 1
            for begin in range(first, first + count, step):
                given = _cut(inputs, outputs[0].shape[:2], begin, begin + step)
                output, state = states.call(mixer, own_rows, bool(cached), *given)
                for row, tensor in zip(own_rows, state, strict=True):
                    if tensor is not row:
                        row.copy_(tensor)
                results = (leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor))
                for target, result in zip(outputs, results, strict=True):
                    target[:, begin : begin + step].copy_(result)
            first += count
