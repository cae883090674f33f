"""A key-value cache at fixed addresses, and attention functions on that cache for captures.

Each layer has one tensor of keys, ``[kv_heads, slots * max_len + 1, head_dim]``, and one of values.
A request owns the rows of its slot, so one number, ``slot * max_len + position``, addresses a
token. Graphs read this number from a device tensor. Padded tokens write to the last row, the
scratch row, which is never read. The rows of a request in one head are contiguous, because the CPU
reads contiguous rows faster.

Decode steps call ``decode_bounded``, and packed steps call ``packed_exact``. Both functions take
lengths as host arguments. If the device has a fused kernel for the dtype and head size, the
functions ``varlen_*`` replace them and read lengths from device tensors.

Rows that no request has written never affect a result. ``packed_exact`` and ``varlen_*`` do not
read such rows. ``decode_bounded`` reads them only after ``KVCache.prepare`` has cleared them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, Protocol

import attrs
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import Cache

from devgraph.api.errors import StateError
from devgraph.api.marks.gates import signal
from devgraph.api.marks.marks import region
from devgraph.runners.batch import Batch


class SlotAttention(Protocol):
    """The extension ``slot_attention``: a backend's own attention over slots, in a region.

    Under ``full``, the region is part of the graph, and updates change the lengths. Under
    ``breakable``, the region is an eager segment.
    """

    row_multiple: int
    """A divisor of the number of rows in each slot."""

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
        """Compute causal attention for the packed tokens of each request over its rows.

        Args:
            query: ``[tokens, heads, dim]``: the requests in sequence, followed by padding.
            keys: ``[slots * rows, kv_heads, dim]``, contiguous.
            values: like ``keys``.
            out: output, ``[tokens, heads, dim]``; zero for padding.
            scale: factor by which the scores are multiplied.
            spans: host argument, as for ``packed_exact``, in ascending order of slots.
        """


BLOCK_ROWS = 256
"""Maximum number of query rows per mask in ``packed_exact``."""

_WINDOW_STEP = 64
"""A windowed layer begins at a multiple of this row, so that few distinct views occur."""

Scoring = tuple[float, float | None, int | None, bool]
"""Scale, softcap and window of a layer (the last two may be None), and whether to call torch's
fused attention, which some devices cannot capture."""


@attrs.frozen(kw_only=True)
class LayerShape:
    """Geometry and scoring of one attention layer."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    """Number of rows that a token attends to, including its own row; None means all rows."""
    softcap: float | None = None
    """Bound on the scores, enforced by a tanh; None means unbounded."""

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.kv_heads, self.key_dim, self.value_dim


class CacheLayer:
    """The keys and values of one layer, which ``KVCache`` writes.

    Attributes:
        keys, values: ``[kv_heads, slots * max_len + 1, dim]``.
        keys_by_slot, values_by_slot: views ``[slots, kv_heads, max_len, dim]``.
        keys_by_row, values_by_row: views ``[slots * max_len, kv_heads, dim]``.
    """

    # transformers reads these attributes of a layer.
    is_sliding = is_compileable = is_croppable = False
    is_initialized = supports_early_init = True

    def __init__(self, shape: LayerShape, keys: Tensor, values: Tensor, slots: int) -> None:
        self.shape = shape
        self.keys, self.values = keys, values
        keys, values = keys[:, :-1], values[:, :-1]  # Omit the scratch row.
        self.keys_by_slot, self.values_by_slot = (
            rows.view(shape.kv_heads, slots, -1, rows.shape[2]).transpose(0, 1)
            for rows in (keys, values)
        )
        self.keys_by_row, self.values_by_row = keys.transpose(0, 1), values.transpose(0, 1)

    def read(self, slots: int | Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of the first ``slots`` slots, or of the slots in a tensor."""
        if isinstance(slots, int):
            return self.keys_by_slot[:slots], self.values_by_slot[:slots]
        return self.keys_by_slot.index_select(0, slots), self.values_by_slot.index_select(0, slots)


class KVCache(Cache):  # type: ignore[misc]
    """The cache of all layers, with ``slots`` request slots of ``max_len`` rows.

    ``shapes`` contains None for each layer without attention. With ``rows_first``, memory is laid
    out by rows instead of by heads, as a backend's own attention needs. With ``answers``, a model
    that reads the length gets one instead of an error, because the probe has verified that the
    length does not affect the results.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape | None],
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

        self._blocks: list[Tensor] = []
        """Keys and values, ``[tensors, kv_heads, rows, dim]``. Adjacent layers of equal sizes share
        a block, so that one operation copies several tensors."""

        def block(tensors: int, heads: int, dim: int) -> tuple[Tensor, ...]:
            rows = slots * max_len + 1
            sizes = (rows, heads) if rows_first else (heads, rows)
            new = torch.zeros(tensors, *sizes, dim, dtype=dtype, device=device)
            self._blocks.append(new.transpose(1, 2) if rows_first else new)
            return self._blocks[-1].unbind(0)

        layers: list[CacheLayer | None] = []
        # Allocate normal tensors: inference tensors cannot be written outside inference mode.
        with torch.inference_mode(False):
            for sizes, run in itertools.groupby(shapes, lambda s: s.sizes if s else None):
                alike = list(run)
                if sizes is None:
                    layers += [None] * len(alike)
                    continue
                heads, key_dim, value_dim = sizes
                if key_dim == value_dim:
                    both = block(2 * len(alike), heads, key_dim)
                    keys, values = both[::2], both[1::2]
                else:
                    keys, values = (block(len(alike), heads, dim) for dim in sizes[1:])
                layers += map(CacheLayer, alike, keys, values, itertools.repeat(slots))  # type: ignore[arg-type]
            super().__init__(layers=layers)
        self._clean = [0] * slots
        self._target: Tensor | None = None
        self._shown: int | Tensor | None = None
        self._length = 0
        self._written: CacheLayer | None = None
        self.signals = False
        """Whether the step signals the gate ``kv.LAYER`` after the write of each layer."""

    @property
    def scratch_row(self) -> int:
        """The row to which padded tokens write."""
        return self.slots * self.max_len

    def aim(
        self, rows: Tensor | None, shown: int | Tensor | None = None, *, width: int = 0
    ) -> None:
        """Set the target rows of the next forward.

        Args:
            rows: the target row of each token, int64 ``[tokens]``; None ends the step.
            shown: slots that ``update`` returns as a whole (see ``CacheLayer.read``), one per
                request of ``width`` tokens. With None, attention gets the layer from ``take``.
            width: number of tokens per request.
        """
        self._target, self._shown = rows, shown
        # Masks must cover whole slots, so the new tokens count as the last tokens of full slots.
        self._length = 0 if shown is None else self.max_len - width
        self._written = None

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if self._target is None:
            raise StateError(
                "this cache belongs to an engine; only steps of the engine write to it"
            )
        layer: CacheLayer = self.layers[layer_idx]
        for kept, new in ((layer.keys, key_states), (layer.values, value_states)):
            kept.index_copy_(1, self._target, new.transpose(0, 1).flatten(1, 2))
        if self.signals:
            signal(f"kv.{layer_idx}")
        if self._shown is not None:
            return layer.read(self._shown)
        self._written = layer
        return key_states, value_states

    def take(self) -> CacheLayer:
        """Return the layer that was written last. Each write can be taken only once."""
        layer, self._written = self._written, None
        if layer is None:
            raise StateError("attention was called without a preceding write to the cache")
        return layer

    def get_seq_length(self, layer_idx: int = 0) -> int:
        if self._answers:
            return self._length
        raise StateError(
            "this cache holds requests of different lengths, so it has no single length; a model "
            "must take its positions from position_ids"
        )

    def has_previous_state(self, *args: Any) -> bool:
        """Return True, so that models skip their padding masks as in the middle of a text."""
        return True

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self._length + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self.max_len

    # Name of get_max_length before transformers 5.18.
    get_max_cache_shape = get_max_length

    def prepare(self, slot: int, length: int, upto: int) -> None:
        """Clear the rows of ``slot`` between ``length`` and ``upto`` that are not yet clean."""
        first = max(length, self._clean[slot])
        if first < upto:
            start = slot * self.max_len
            for block in self._blocks:
                block[:, :, start + first : start + upto].zero_()
            self._clean[slot] = upto

    def release(self, slot: int) -> None:
        """Mark the rows of ``slot`` as unclean after its request has ended."""
        self._clean[slot] = 0

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` rows of ``source`` to ``target``, and release ``source``."""
        for block in self._blocks if length else ():
            new, old = (block[:, :, s * self.max_len :][:, :, :length] for s in (target, source))
            new.copy_(old)
        self._clean[target] = 0
        self.release(source)


def decode_mask(
    positions: Tensor, rows: Tensor, width: int, window: int | None, dtype: torch.dtype
) -> Tensor:
    """Return a mask ``[requests, 1, width, rows]``: 0 where a token may read a row, otherwise -inf.

    ``positions`` contains the position of each token. ``rows`` is ``arange(max_len)`` on the
    device.
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
    """Compute attention of ``[B, H, q, D]`` over ``[B, H, k, D]``; ``causal`` requires q = k."""
    scale, softcap, _, fused = scoring
    if fused and softcap is None:
        return F.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, is_causal=causal, scale=scale
        )
    scores = torch.matmul(query, keys.transpose(2, 3)) * scale
    if softcap is not None:
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
    # Query heads that share a key head become query rows. One pass over the keys is then enough,
    # keys are not repeated, and fused kernels need no grouped mode.
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
    """Compute attention for ``width`` tokens per request over ``kv_len`` rows of its slot.

    The mask hides all rows that a token may not read, so the host arguments only bound the work.

    Args:
        query: ``[1, heads, requests * width, head_dim]``.
        keys: ``[slots, kv_heads, max_len, dim]``; request ``i`` has slot ``i``.
        values: as ``keys``.
        mask: the result of ``decode_mask`` for the window in ``scoring``.
        out: output, ``[1, requests * width, heads, value_dim]``.
        scoring: scoring of the layer.
        kv_len: upper bound of the lengths, including the new tokens.
        kv_from: lower bound of the positions. Layers with a window skip the rows far below it.
    """
    low, window = 0, scoring[2]
    if window is not None:
        low = max(0, kv_from - window + 1) // _WINDOW_STEP * _WINDOW_STEP
    _decode(query, keys, values, mask, out, scoring, low, kv_len)


@region(mutates=("out",))
def decode_whole(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, out: Tensor, scoring: Scoring
) -> None:
    """Compute ``decode_bounded`` over whole slots, for graphs that cannot be updated."""
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
    """Compute attention for the packed tokens of each request over the rows of its slot.

    Args:
        query: ``[1, heads, tokens, head_dim]``: the requests in sequence, followed by padding.
        keys: ``[slots, kv_heads, max_len, dim]``.
        values: as ``keys``.
        rows: ``arange(max_len)`` on the device.
        out: output, ``[1, tokens, heads, value_dim]``; padded rows are not written.
        scoring: scoring of the layer.
        spans: slot, number of cached tokens and number of new tokens of each request.
    """
    _, softcap, window, fused = scoring
    _, heads, tokens, dim = query.shape
    group = (keys.shape[1], heads // keys.shape[1])
    grouped = query[0].view(*group, tokens, dim)
    targets = out[0].view(tokens, *group, values.shape[-1]).permute(1, 2, 0, 3)
    first = 0
    for slot, cached, new in zip(spans[::3], spans[1::3], spans[2::3], strict=True):
        # The causal mode of the kernels is correct only for prompts without a cached prefix.
        plain = fused and cached == 0 and softcap is None and (window is None or new <= window)
        step = new if plain else BLOCK_ROWS
        for begin in range(0, new, step):
            count = min(step, new - begin)
            at = cached + begin
            low = 0 if window is None else max(0, at - window + 1)
            high = at + count
            mask = None
            if not plain and count > 1:
                mask = decode_mask(rows[at:high], rows[low:high], count, window, query.dtype)
            # Expanded views let the heads of a group share keys and values without a copy.
            k, v = (t[slot, :, None, low:high].expand(*group, -1, -1) for t in (keys, values))
            block = (slice(None), slice(None), slice(first + begin, first + begin + count))
            result = _score(grouped[block], k, v, mask, scoring, causal=plain and count > 1)
            targets[block].copy_(result)
        first += new


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
    """Return the attention of a decode step, ``[1, tokens, heads, value_dim]``.

    ``query`` is ``[1, heads, requests * width, head_dim]``. The ``keys`` and ``values`` of all
    slots are ``[kv_heads, rows, dim]``. ``spans`` contains three int32 tensors on the device: the
    first token and the first cache row of each request, both ``[requests + 1]``, and the number of
    rows that each request reads, including its new tokens, ``[requests]``.
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
    """Return the attention of a packed step, ``[1, tokens, heads, value_dim]``.

    The region reads ``query_starts``, ``row_starts`` and ``lengths`` from the batch, because their
    sizes depend on the number of requests, but graphs depend only on the number of tokens. Padded
    rows of the output are zero.
    """
    spans = (batch.query_starts, batch.row_starts, batch.lengths)
    result = varlen_decode(query, keys, values, spans, scale, window, query.shape[2], max_len)
    tokens = torch.arange(query.shape[2], device=query.device)
    # The kernel does not write padded rows, so their memory may contain any values.
    return result.masked_fill_((tokens >= batch.query_starts[-1])[:, None, None], 0)


def has_varlen(head_dim: int, *, dtype: torch.dtype, device: torch.device) -> bool:
    """Test whether the device's fused kernel supports slots in any order.

    The test compares the kernel with plain attention. It uses two requests, two key heads, four
    query heads, slots in reverse order, and NaN in the rows after each length.
    """
    max_len, lengths, scale = 64, (37, 5), head_dim**-0.5
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        drawn = torch.randn(*shape, head_dim, generator=generator, device="cpu")
        return drawn.to(device=device, dtype=dtype)

    query, keys, values = draw(1, 4, 2), draw(2, 2, max_len), draw(2, 2, max_len)
    for slot, length in enumerate(reversed(lengths)):
        keys[:, slot, length:] = values[:, slot, length:] = math.nan

    def int32(*numbers: int) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=device)

    spans = (int32(0, 1, 2), int32(max_len, 0, 0), int32(*lengths))
    flat_keys, flat_values = keys.flatten(1, 2), values.flatten(1, 2)
    try:
        got = varlen_decode(query, flat_keys, flat_values, spans, scale, None, 1, max_len)
    except (RuntimeError, NotImplementedError, TypeError):
        return False
    for i, length in enumerate(lengths):
        k, v = (t[:, 1 - i, :length].repeat_interleave(2, 0).float() for t in (keys, values))
        want = torch.softmax(query[0, :, i : i + 1].float() @ k.mT * scale, -1) @ v
        if not torch.allclose(got[0, i].float(), want[:, 0], atol=2e-2, rtol=2e-2):
            return False
    return True
