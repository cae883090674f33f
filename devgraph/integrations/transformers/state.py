"""Recurrent state of linear-attention layers, held in request slots.

A *mixer* is a module that reads and writes the recurrent state of one layer: a convolution window,
a scan's state, or both. In a step it runs on a cache layer of transformers' own class whose tensors
are rows of the slots. Therefore a mixer needs no code of its own here.

Decode steps gather the rows of their requests, run the mixer for one token at a time, and scatter
the rows. Padded requests use the scratch row. Packed steps run the mixer once for each request on
its tokens, without padding, inside a region.
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

_KEYS = frozenset({"keys", "values"})
"""Tensors of a cache layer that belong to attention."""


def state_tensors(layer: Any) -> list[Tensor]:
    """Return the state tensors of a cache layer."""
    return [tensor for _, _, tensor in _tensors(layer)]


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
    made = copy.copy(layer)
    for name, value in vars(layer).items():
        if isinstance(value, dict):
            setattr(made, name, dict(value))
    for (name, key, _), tensor in zip(list(_tensors(layer)), tensors, strict=True):
        if key is None:
            setattr(made, name, tensor)
        else:
            getattr(made, name)[key] = tensor
    flags = layer.has_previous_state
    made.has_previous_state = dict.fromkeys(flags, carried) if isinstance(flags, dict) else carried
    return made


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


class RecurrentStates:
    """The state rows of all request slots.

    Args:
        layers: a filled cache layer for each layer with state, by index.
        slots: number of request slots; one more row is scratch.
    """

    def __init__(self, layers: Mapping[int, Any], slots: int) -> None:
        self.layers = dict(layers)
        self.carries = True
        """Whether mixers carry a state through several tokens; else they continue one by one."""
        self._slots = slots
        self._history: dict[int, list[Tensor]] = {}
        # Inference tensors could not be written outside of inference mode.
        with torch.inference_mode(False):
            self.rows = {
                index: [
                    tensor.new_zeros((slots + 1, *tensor.shape[1:]))
                    for tensor in state_tensors(layer)
                ]
                for index, layer in layers.items()
            }

    def __bool__(self) -> bool:
        return bool(self.layers)

    @property
    def nbytes(self) -> int:
        """Size of the rows in bytes."""
        return sum(tensor.nbytes for rows in self.rows.values() for tensor in rows)

    def keep_history(self, width: int) -> None:
        """Keep the state after each token in decode steps of one request and up to ``width``."""
        with torch.inference_mode(False):
            self._history = {
                index: [row.new_zeros((width, 2, *row.shape[1:])) for row in rows]
                for index, rows in self.rows.items()
            }

    def settle(self, token: int) -> None:
        """Make the state after token ``token`` of the last step the state of slot 0."""
        rows = [row[0] for rows in self.rows.values() for row in rows]
        kept = [state[token, 0] for states in self._history.values() for state in states]
        torch._foreach_copy_(rows, kept)

    def read(self, index: int, count: int) -> list[Tensor]:
        """Return copies of the state of the first ``count`` slots in layer ``index``."""
        return [row[:count].clone() for row in self.rows.get(index, ())]

    def write(self, index: int, tensors: list[Tensor]) -> None:
        """Set the state of the first slots in layer ``index``."""
        for row, tensor in zip(self.rows.get(index, ()), tensors, strict=True):
            row[: tensor.shape[0]].copy_(tensor)

    def slot_tensors(self, slot: int) -> dict[str, Tensor]:
        """Return the state of a slot as views, by the layer's index and the state's name."""
        return {
            f"{index}.{name}" if key is None else f"{index}.{name}.{key}": row[slot]
            for index, layer in self.layers.items()
            for (name, key, _), row in zip(_tensors(layer), self.rows[index], strict=True)
        }

    def clear(self, slot: int) -> None:
        """Zero the state of a slot, for a new request."""
        torch._foreach_zero_([row[slot] for rows in self.rows.values() for row in rows])

    def move(self, source: int, target: int) -> None:
        """Copy the state of one slot to another."""
        for rows in self.rows.values():
            for row in rows:
                row[target].copy_(row[source])

    def decode(
        self, mixer: Mixer, slots: Tensor, width: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a mixer for ``width`` tokens of each request; its state is in rows ``slots``."""
        rows = self.rows[mixer.layer]
        state = [row.index_select(0, slots) for row in rows]
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tokens = [
            isinstance(leaf, Tensor) and leaf.shape[:2] == (len(slots), width) for leaf in leaves
        ]
        outputs = []
        for token in range(width):
            given = [
                leaf[:, token : token + 1] if cut else leaf
                for leaf, cut in zip(leaves, tokens, strict=True)
            ]
            output, state = self._call(mixer, state, True, *pytree.tree_unflatten(given, spec))
            outputs.append(output)
            if width > 1:
                for kept, tensor in zip(self._history[mixer.layer], state, strict=True):
                    # Row 1 is scratch.
                    kept[token].index_copy_(0, slots.clamp(max=1), tensor)
        if width == 1:
            for row, tensor in zip(rows, state, strict=True):
                row.index_copy_(0, slots, tensor)
            return outputs[0]
        return pytree.tree_map(lambda *parts: _joined(parts), *outputs)

    def run(
        self,
        mixer: Mixer,
        inputs: tuple[tuple[Any, ...], dict[str, Any]],
        outputs: list[Tensor],
        spans: tuple[int, ...],
    ) -> None:
        """Run a mixer on the packed tokens of each request, and write its outputs."""
        first = 0
        leaves, spec = pytree.tree_flatten(inputs)
        packed = outputs[0].shape[:2]
        for slot, cached, count in zip(spans[::3], spans[1::3], spans[2::3], strict=True):
            rows = [row[slot : slot + 1] for row in self.rows[mixer.layer]]
            step = count if self.carries or not cached else 1
            for begin in range(first, first + count, step):
                own = slice(begin, begin + step)
                given = [
                    leaf[:, own] if isinstance(leaf, Tensor) and leaf.shape[:2] == packed else leaf
                    for leaf in leaves
                ]
                args, kwargs = pytree.tree_unflatten(given, spec)
                output, state = self._call(mixer, rows, bool(cached), args, kwargs)
                for row, tensor in zip(rows, state, strict=True):
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
        return output, state_tensors(layer)


def _joined(parts: tuple[Any, ...]) -> Any:
    return torch.cat(parts, 1) if isinstance(parts[0], Tensor) else parts[0]


@region(host_args=("spans",), mutates=("outputs", "rows"))
def run_packed(
    states: RecurrentStates,
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
        states: state of the slots.
        mixer: the module to run.
        rows: state rows of the layer.
        weights: tensors of the module.
        inputs: arguments of its forward; tensors ``[1, tokens, ...]`` are cut into requests.
        outputs: output tensors, ``[1, tokens, ...]``; rows of padding are not written.
        spans: slot, number of cached tokens and number of new tokens of each request.
    """
    with model_lock:
        states.run(mixer, inputs, outputs, spans)
