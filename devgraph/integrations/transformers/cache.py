"""A key-value cache whose addresses never change: one slot of fixed length per request.

Per layer, keys lie in one tensor ``[kv_heads, slots * max_len + 1, head_dim]`` and values in
another. A request owns the rows of its slot, so where a token goes is one number (``slot *
max_len + position``) that a graph reads from a device tensor. The last row is scratch: padded
tokens write there and nothing reads it. Heads come first because then the rows of one request and
head are contiguous, which is what attention on the CPU streams through, while a row still has one
stride over all slots, which is what kernels with device lengths address by.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import Tensor
from transformers.cache_utils import Cache

from devgraph.api.errors import InputError, StateError


@attrs.frozen(kw_only=True)
class LayerShape:
    """What one attention layer of a model caches, and how it scores."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    """Rows that a token sees, its own included; None for all."""
    softcap: float | None = None
    """Scores are squashed into ``(-softcap, softcap)`` by a tanh; None for no such thing."""


class CacheLayer:
    """The rows of one layer, which are written and found through ``KVCache``.

    Attributes:
        shape: geometry and window of the layer.
        keys, values: ``[kv_heads, slots * max_len + 1, dim]``.
        keys_by_slot, values_by_slot: views ``[slots, kv_heads, max_len, dim]``.
        keys_by_row, values_by_row: views ``[slots * max_len, kv_heads, dim]``.
    """

    # What a ``Cache`` of transformers asks its layers.
    is_sliding = is_compileable = is_croppable = False
    is_initialized = supports_early_init = True

    def __init__(self, shape: LayerShape, keys: Tensor, values: Tensor, slots: int) -> None:
        self.shape = shape
        self.keys, self.values = keys, values
        keys, values = keys[:, :-1], values[:, :-1]  # all but the scratch row
        self.keys_by_slot, self.values_by_slot = (
            rows.view(shape.kv_heads, slots, -1, rows.shape[2]).transpose(0, 1)
            for rows in (keys, values)
        )
        self.keys_by_row, self.values_by_row = keys.transpose(0, 1), values.transpose(0, 1)

    def read(self, slots: int | Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of whole slots: of the first so many, or of those in a tensor."""
        if isinstance(slots, int):
            return self.keys_by_slot[:slots], self.values_by_slot[:slots]
        return self.keys_by_slot.index_select(0, slots), self.values_by_slot.index_select(0, slots)


class KVCache(Cache):  # type: ignore[misc]
    """The cache of every layer, its slots, and which of their rows are known to be clean.

    Args:
        shapes: one per layer.
        slots: requests that fit.
        max_len: rows of a slot.
        rows_first: lay memory out by rows instead of by heads: what a backend's own attention
            reads as blocks.
        answers: whether a model that asks for the length gets one, because it was seen that
            nothing depends on it.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        slots: int,
        *,
        max_len: int,
        rows_first: bool = False,
        dtype: torch.dtype,
        device: torch.device,
        answers: bool = False,
    ) -> None:
        self.slots = slots
        self._answers = answers
        self.max_len = max_len

        def rows(kv_heads: int, dim: int) -> Tensor:
            count = slots * max_len + 1
            sizes = (count, kv_heads, dim) if rows_first else (kv_heads, count, dim)
            made = torch.zeros(sizes, dtype=dtype, device=device)
            return made.transpose(0, 1) if rows_first else made

        layers = []
        with torch.inference_mode(False):  # in which they could not be written outside of that mode
            for shape in shapes:
                dims = (shape.key_dim, shape.value_dim)
                keys, values = (rows(shape.kv_heads, dim) for dim in dims)
                layers.append(CacheLayer(shape, keys, values, slots))
        super().__init__(layers=layers)
        self._clean = [0] * slots
        self._target: Tensor | None = None
        self._shown: int | Tensor | None = None
        self._length = 0
        self._written: CacheLayer | None = None

    @property
    def scratch_row(self) -> int:
        """Where padded tokens are written."""
        return self.slots * self.max_len

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self._tensors())

    def _tensors(self) -> list[Tensor]:
        return [t for layer in self.layers for t in (layer.keys, layer.values)]

    def aim(
        self, rows: Tensor | None, shown: int | Tensor | None = None, *, width: int = 0
    ) -> None:
        """Set where the next forward writes: a row for each token, int64 ``[tokens]``.

        Args:
            shown: slots that its attention is given as a whole, one for each request of ``width``
                tokens, see ``CacheLayer.read``; None where attention finds the layer by ``take``.
        """
        self._target, self._shown = rows, shown
        # As if the new tokens were the last of full slots.
        self._length = 0 if shown is None else self.max_len - width
        self._written = None

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the new tokens of a layer; attention then finds the layer through ``take``."""
        if self._target is None:
            raise StateError("this cache belongs to an engine and is written in its steps only")
        layer: CacheLayer = self.layers[layer_idx]
        for kept, new in ((layer.keys, key_states), (layer.values, value_states)):
            kept.index_copy_(1, self._target, new.transpose(0, 1).flatten(1, 2))
        if self._shown is not None:
            return layer.read(self._shown)
        self._written = layer
        return key_states, value_states

    def take(self) -> CacheLayer:
        """Return the layer that was just written; each write is taken once."""
        layer, self._written = self._written, None
        if layer is None:
            raise StateError("attention was called without a write to the cache before it")
        return layer

    def get_seq_length(self, layer_idx: int = 0) -> int:
        if self._answers:
            return self._length
        raise StateError(
            "this cache holds requests of different lengths, so it has no length; a model must "
            "take its positions from position_ids"
        )

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self._length + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return the rows of a slot."""
        return self.max_len

    # The name of get_max_length before transformers 5.18.
    get_max_cache_shape = get_max_length

    def prepare(self, slot: int, length: int, upto: int) -> None:
        """Clear the rows of ``slot`` from ``length`` to ``upto`` that no one cleared yet.

        Rows below ``length`` are the request's own. Until ``release``, rows that were cleared
        stay so: only the request itself writes to its slot.
        """
        first = max(length, self._clean[slot])
        if first < upto:
            start = slot * self.max_len
            torch._foreach_zero_([t[:, start + first : start + upto] for t in self._tensors()])
            self._clean[slot] = upto

    def release(self, slot: int) -> None:
        """Forget what is known about the rows of ``slot``: its request is gone."""
        self._clean[slot] = 0

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` rows of ``source`` to ``target``; ``source`` is released."""
        for name, slot in (("source", source), ("target", target)):
            if not 0 <= slot < self.slots:
                raise InputError(f"{name} slot {slot} does not exist; there are {self.slots}")
        if length:
            a, b = source * self.max_len, target * self.max_len
            tensors = self._tensors()
            torch._foreach_copy_(
                [t[:, b : b + length] for t in tensors], [t[:, a : a + length] for t in tensors]
            )
        self._clean[target] = 0
        self.release(source)

    def __repr__(self) -> str:
        return f"<KVCache of {len(self.layers)} layers, {self.slots} slots of {self.max_len} rows>"
