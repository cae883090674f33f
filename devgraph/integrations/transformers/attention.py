"""A cache whose addresses never change, and attention over it that a graph can hold.

Per layer, keys lie in one tensor ``[kv_heads, slots * max_len + 1, head_dim]`` and values in
another. A request owns the rows of its slot, so where a token goes is one number (``slot *
max_len + position``) that a graph reads from a device tensor. The last row is scratch: padded
tokens write there and nothing reads it. Heads come first because then the rows of one request and
head are contiguous, which is what attention on the CPU streams through, while a row still has one
stride over all slots, which is what kernels with device lengths address by.

Three kernels:

``decode_bounded``  every request has ``width`` query tokens; row ``i`` of the batch reads slot
                    ``i``. What is valid comes from a mask made of device positions; the host
                    argument ``kv_len`` only bounds the work and is rounded, so its key repeats.
``packed_exact``    requests of any length; a loop over host spans that reads exactly the rows a
                    request owns.
``varlen_*``        both phases with lengths in device tensors: nothing from the host. For devices
                    that have the fused kernel for the dtype and head size.

None of them lets a row that no request wrote reach a result: ``packed_exact`` and ``varlen_*`` do
not read it, and ``decode_bounded`` reads only rows that ``KVCache.prepare`` has cleared. Arguments
are tensors and numbers only; every tensor of the cache has a fixed address.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import attrs
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import Cache

from devgraph.api.errors import StateError
from devgraph.api.marks.marks import region
from devgraph.runners.batch import Batch


class SlotAttention(Protocol):
    """A backend's own attention over slots: an updatable region, and an extension by that name.

    Under ``full`` it is part of the graph for any number of requests, since only lengths change.
    Under ``breakable`` it is an eager segment.
    """

    row_multiple: int
    """The number of rows in a slot is a multiple of this."""

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        out: Tensor,
        *,
        scale: float,
        spans: tuple[int, ...],
    ) -> None:
        """Attend the packed tokens of requests causally to the rows that each request owns.

        Args:
            query: ``[tokens, heads, dim]``, requests one after another, followed by padding.
            keys: ``[slots * rows, kv_heads, dim]``, contiguous.
            values: like ``keys``.
            out: receives ``[tokens, heads, dim]``; zero for padding.
            scale: factor of the scores.
            spans: three numbers per request: its slot, its cached tokens, its new tokens. Slots
                ascend. A host argument: pass it on as it was received.
        """


BLOCK_ROWS = 256
"""Query rows that ``packed_exact`` masks at once; bounds the size of a mask."""

_WINDOW_STEP = 64
"""The first row that a windowed layer reads is a multiple of this, so that its views repeat."""


Scoring = tuple[float, float | None, int | None]
"""How a layer scores: the scale, the softcap, and the window; None for none."""


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
        if length:
            a, b = source * self.max_len, target * self.max_len
            tensors = self._tensors()
            torch._foreach_copy_(
                [t[:, b : b + length] for t in tensors], [t[:, a : a + length] for t in tensors]
            )
        self._clean[target] = 0
        self.release(source)


def decode_mask(
    positions: Tensor, rows: Tensor, width: int, window: int | None, dtype: torch.dtype
) -> Tensor:
    """Return ``[requests, 1, width, rows]``: 0 where a token may read a row, -inf elsewhere.

    Args:
        positions: position of every token, ``[requests * width]``.
        rows: ``arange(max_len)`` on the device.
        window: how many rows a token sees, its own included; None for all.
    """
    at = positions.view(-1, 1, width, 1)
    hidden = rows > at
    if window is not None:
        hidden = hidden | (rows <= at - window)
    return torch.zeros((), dtype=dtype, device=rows.device).masked_fill(hidden, -math.inf)


def _score(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scoring: Scoring,
    *,
    causal: bool = False,
) -> Tensor:
    """Attend ``[B, H, q, D]`` to ``[B, H, k, D]``; ``causal`` is for q and k of one length."""
    scale, softcap, _ = scoring
    if softcap is None:
        return F.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, is_causal=causal, scale=scale
        )
    scores = torch.matmul(query, keys.transpose(2, 3)) * scale
    scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.matmul(weights, values)


def _decode(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    out: Tensor,
    scoring: Scoring,
    low: int,
    high: int,
) -> None:
    requests, _, width, _ = mask.shape
    kv_heads, value_dim = keys.shape[1], values.shape[-1]
    # The query heads that share a key head become query rows: one pass over the keys serves them
    # all, nothing is repeated, and the fused kernels need no grouped mode.
    grouped = query[0].view(kv_heads, -1, requests, width, query.shape[-1])
    group = grouped.shape[1]
    rows = grouped.permute(2, 0, 1, 3, 4).flatten(2, 3)
    mask = mask[..., low:high]
    if width > 1:
        mask = mask.expand(-1, group, -1, -1).reshape(requests, 1, group * width, high - low)
    shown = (slice(requests), slice(None), slice(low, high))
    result = _score(rows, keys[shown], values[shown], mask, scoring)
    result = result.view(requests, kv_heads, group, width, value_dim)
    out.view(requests, width, kv_heads, group, value_dim).copy_(result.permute(0, 3, 1, 2, 4))


@region(host_args=("kv_len", "kv_from"), mutates=("out",))
def decode_bounded(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    out: Tensor,
    scoring: Scoring,
    *,
    kv_len: int,
    kv_from: int,
) -> None:
    """Attend ``width`` tokens of each request to the first ``kv_len`` rows of its slot.

    Args:
        query: ``[1, heads, requests * width, head_dim]``.
        keys, values: ``[slots, kv_heads, max_len, dim]``; request ``i`` has slot ``i``.
        mask: from ``decode_mask``, for the window of ``scoring``.
        out: written, ``[1, requests * width, heads, value_dim]``.
        kv_len: at least the longest length, the new tokens included.
        kv_from: at most the shortest position; windowed layers start near it.
    """
    low, window = 0, scoring[2]
    if window is not None:
        low = max(0, kv_from - window + 1) // _WINDOW_STEP * _WINDOW_STEP
    _decode(query, keys, values, mask, out, scoring, low, kv_len)


@region(mutates=("out",))
def decode_whole(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, out: Tensor, scoring: Scoring
) -> None:
    """``decode_bounded`` over whole slots, for a graph that cannot be updated."""
    _decode(query, keys, values, mask, out, scoring, 0, mask.shape[-1])


@region(host_args=("spans",), mutates=("out",))
def packed_exact(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: Tensor,
    out: Tensor,
    scoring: Scoring,
    *,
    spans: tuple[int, ...],
) -> None:
    """Attend the packed tokens of every request to the rows that it owns.

    Args:
        query: ``[1, heads, tokens, head_dim]``, requests one after another, padding behind them.
        keys, values: ``[slots, kv_heads, max_len, dim]``.
        rows: ``arange(max_len)`` on the device.
        out: written for the tokens of the requests, ``[1, tokens, heads, value_dim]``.
        spans: three numbers a request: its slot, the tokens it has cached, its new tokens.
    """
    first = 0
    for slot, cached, new in zip(spans[::3], spans[1::3], spans[2::3], strict=True):
        own = slice(first, first + new)
        _attend_request(
            query[0, :, own], keys[slot], values[slot], rows, out[0, own], scoring, cached
        )
        first += new


def _attend_request(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: Tensor,
    out: Tensor,
    scoring: Scoring,
    cached: int,
) -> None:
    _, softcap, window = scoring
    new, kv_heads = query.shape[1], keys.shape[0]
    group = query.shape[0] // kv_heads
    grouped = query.view(kv_heads, group, new, query.shape[2])
    target = out.view(new, kv_heads, group, values.shape[-1]).permute(1, 2, 0, 3)
    # A prompt without a cached prefix is the one case that kernels know as "causal".
    plain = cached == 0 and softcap is None and (window is None or new <= window)
    step = new if plain else BLOCK_ROWS
    for begin in range(0, new, step):
        count = min(step, new - begin)
        at = cached + begin
        low = 0 if window is None else max(0, at - window + 1)
        high = at + count
        mask = None
        if not plain and count > 1:
            mask = decode_mask(rows[at:high], rows[low:high], count, window, query.dtype)
        # Expanded, not repeated: the heads of a group read the same memory.
        result = _score(
            grouped[:, :, begin : begin + count],
            keys[:, None, low:high].expand(-1, group, -1, -1),
            values[:, None, low:high].expand(-1, group, -1, -1),
            mask,
            scoring,
            causal=plain and count > 1,
        )
        target[:, :, begin : begin + count].copy_(result)


@region()
def varlen_decode(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    spans: tuple[Tensor, Tensor, Tensor],
    scale: float,
    window: int | None,
    width: int,
    max_len: int,
) -> Tensor:
    """``decode_bounded`` with lengths read on the device.

    Args:
        query: ``[1, heads, requests * width, head_dim]``.
        keys, values: ``[kv_heads, rows, dim]``, all slots one after another.
        spans: first token and first cache row of each request, int32 ``[requests + 1]``, and rows
            to read, the new tokens included, int32 ``[requests]``.

    Returns:
        ``[1, requests * width, heads, value_dim]``.
    """
    starts, row_starts, lengths = spans
    causal = width > 1
    result = torch.ops.aten._flash_attention_forward(
        query[0].transpose(0, 1),
        keys.transpose(0, 1),
        values.transpose(0, 1),
        starts,
        row_starts,
        width,
        max_len,
        0.0,
        causal,
        False,
        scale=scale,
        window_size_left=-1 if window is None else window - 1,
        window_size_right=0 if causal else -1,
        seqused_k=lengths,
    )
    return result[0].unsqueeze(0)  # type: ignore[no-any-return]


@region()
def varlen_packed(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    batch: Batch,
    scale: float,
    window: int | None,
    max_len: int,
) -> Tensor:
    """``packed_exact`` with lengths read on the device.

    The request slots ``query_starts``, ``row_starts`` and ``lengths`` are read here, from the
    batch: they belong to the run where the graph depends on tokens only. Tokens that belong to no
    request have zeros.
    """
    spans = (batch.query_starts, batch.row_starts, batch.lengths)
    result = varlen_decode(query, keys, values, spans, scale, window, query.shape[2], max_len)
    tokens = torch.arange(query.shape[2], device=query.device)
    # The kernel does not write them, and what memory held before may be anything.
    return result.masked_fill_((tokens >= batch.query_starts[-1])[:, None, None], 0)


def has_varlen(head_dim: int, *, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this device's fused kernel gives right results for slots in any order.

    Tried rather than looked up: two requests with two key heads and four query heads, slots in
    reverse order and rows behind the lengths poisoned, against the plain computation.
    """
    slots, max_len, kv_heads, group = 2, 64, 2, 2
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        drawn = torch.randn(shape, generator=generator, device="cpu")
        return drawn.to(device=device, dtype=dtype)

    keys = draw(kv_heads, slots * max_len, head_dim)
    values = draw(kv_heads, slots * max_len, head_dim)
    lengths = (37, 5)
    for slot, length in enumerate(reversed(lengths)):
        keys[:, slot * max_len + length : (slot + 1) * max_len] = math.nan
        values[:, slot * max_len + length : (slot + 1) * max_len] = math.nan
    query = draw(1, kv_heads * group, 2, head_dim)

    def int32(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    spans, scale = (int32(0, 1, 2), int32(max_len, 0, 0), int32(*lengths)), head_dim**-0.5
    try:
        got = varlen_decode(query, keys, values, spans, scale, None, 1, max_len)
    except (RuntimeError, NotImplementedError, TypeError):
        return False
    by_slot = (kv_heads, slots, max_len, head_dim)
    for i, length in enumerate(lengths):
        k = keys.view(by_slot)[:, 1 - i, :length].repeat_interleave(group, 0).float()
        v = values.view(by_slot)[:, 1 - i, :length].repeat_interleave(group, 0).float()
        q = query[0, :, i : i + 1].float()
        want = torch.softmax(q @ k.transpose(1, 2) * scale, -1) @ v
        if not torch.allclose(got[0, i].float(), want[:, 0], atol=2e-2, rtol=2e-2):
            return False
    return True
