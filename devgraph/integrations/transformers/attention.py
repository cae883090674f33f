"""Attention over the fixed-address cache, written so that a graph can hold it.

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

import torch
from torch import Tensor
from torch.nn import functional as F

from devgraph.api.marks.marks import region
from devgraph.runners.batch import Batch

BLOCK_ROWS = 256
"""Query rows that ``packed_exact`` masks at once; bounds the size of a mask."""

_WINDOW_STEP = 64
"""The first row that a windowed layer reads is a multiple of this, so that its views repeat."""


Scoring = tuple[float, float | None, int | None]
"""How a layer scores: the scale, the softcap, and the window; None for none."""


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
        return torch.randn(shape, generator=generator).to(device=device, dtype=dtype)

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
