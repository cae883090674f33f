"""The attention kernels against a plain computation, over a cache full of NaN."""

# ruff: noqa: E402  (imports follow the skip where transformers is missing)

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="the transformers integration")

from devgraph.integrations.transformers.attention import (
    BLOCK_ROWS,
    decode_bounded,
    decode_mask,
    decode_whole,
    has_varlen,
    packed_exact,
)
from devgraph.integrations.transformers.cache import KVCache, LayerShape

KV_HEADS, GROUP, KEY_DIM, VALUE_DIM = 2, 3, 8, 12
HEADS = KV_HEADS * GROUP
SCALE = 0.31


def make_cache(slots: int, max_len: int, **options: object) -> KVCache:
    shape = LayerShape(
        heads=HEADS, kv_heads=KV_HEADS, key_dim=KEY_DIM, value_dim=VALUE_DIM, **options
    )
    cache = KVCache(
        [shape], slots, max_len=max_len, dtype=torch.float32, device=torch.device("cpu")
    )
    for layer in cache.layers:
        layer.keys.fill_(math.nan)
        layer.values.fill_(math.nan)
    return cache


def write(cache: KVCache, slot: int, first: int, count: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.arange(first, first + count) + slot * cache.max_len
    cache.aim(rows)
    key = torch.randn(1, KV_HEADS, count, KEY_DIM, generator=generator)
    value = torch.randn(1, KV_HEADS, count, VALUE_DIM, generator=generator)
    cache.update(key, value, 0)
    cache.aim(None)


def expected(
    cache: KVCache,
    slot: int,
    query: torch.Tensor,
    first: int,
    window: int | None,
    cap: float | None,
) -> torch.Tensor:
    """Attend ``query [heads, n, dim]``, token by token, in float64."""
    layer = cache.layers[0]
    rows = []
    for i in range(query.shape[1]):
        high = first + i + 1
        low = 0 if window is None else max(0, high - window)
        keys = layer.keys_by_slot[slot, :, low:high].repeat_interleave(GROUP, 0).double()
        values = layer.values_by_slot[slot, :, low:high].repeat_interleave(GROUP, 0).double()
        scores = (keys @ query[:, i, :, None].double())[..., 0] * SCALE
        if cap is not None:
            scores = torch.tanh(scores / cap) * cap
        rows.append((torch.softmax(scores, -1)[:, None] @ values)[:, 0])
    return torch.stack(rows)


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 1, 5, 100])
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("bounded", [True, False])
def test_decode_matches_plain_attention(
    width: int, window: int | None, cap: float | None, bounded: bool
) -> None:
    cache = make_cache(4, 192)
    layer = cache.layers[0]
    firsts = [70, 0, 126]
    for slot, first in enumerate(firsts):
        write(cache, slot, 0, first + width, seed=slot)
        cache.prepare(slot, first + width, 192)
    query = torch.randn(1, HEADS, 3 * width, KEY_DIM, generator=torch.Generator().manual_seed(9))
    positions = torch.cat([torch.arange(f, f + width) for f in firsts])
    mask = decode_mask(positions, torch.arange(192), width, window, torch.float32)
    out = torch.full((1, 3 * width, HEADS, VALUE_DIM), math.nan)
    views = (query, layer.keys_by_slot, layer.values_by_slot, mask, out, (SCALE, cap, window))
    if bounded:
        decode_bounded(*views, kv_len=192, kv_from=0)
    else:
        decode_whole(*views)
    for i, first in enumerate(firsts):
        own = slice(i * width, (i + 1) * width)
        want = expected(cache, i, query[0, :, own], first, window, cap)
        torch.testing.assert_close(out[0, own].double(), want, atol=1e-5, rtol=1e-5)


def test_decode_reads_nothing_outside_its_bounds() -> None:
    cache = make_cache(2, 256)
    layer = cache.layers[0]
    write(cache, 0, 0, 190, seed=0)
    # Rows below the window's first block and rows past kv_len are poisoned again.
    layer.keys_by_slot[0, :, :64] = layer.values_by_slot[0, :, :64] = math.nan
    cache.prepare(0, 190, 192)
    query = torch.randn(1, HEADS, 1, KEY_DIM)
    mask = decode_mask(torch.tensor([189]), torch.arange(256), 1, 100, torch.float32)
    out = torch.empty(1, 1, HEADS, VALUE_DIM)
    views = (query, layer.keys_by_slot, layer.values_by_slot, mask, out, (SCALE, None, 100))
    decode_bounded(*views, kv_len=192, kv_from=189)
    want = expected(cache, 0, query[0], 189, 100, None)
    torch.testing.assert_close(out[0].double(), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 1, 7, 300])
def test_packed_matches_plain_attention(window: int | None, cap: float | None) -> None:
    cache = make_cache(5, 640)
    layer = cache.layers[0]
    # A prompt, one longer than a block, a chunk behind a prefix, a chunk over a block border, a
    # decoding request; slots in no order.
    spans = [(3, 0, 5), (0, 0, BLOCK_ROWS + 44), (4, 33, 20), (1, 200, BLOCK_ROWS + 3), (2, 77, 1)]
    for slot, cached, new in spans:
        write(cache, slot, 0, cached + new, seed=slot)
    tokens = sum(new for *_, new in spans)
    query = torch.randn(1, HEADS, tokens + 4, KEY_DIM, generator=torch.Generator().manual_seed(4))
    query[:, :, tokens:] = math.nan
    out = torch.full((1, tokens + 4, HEADS, VALUE_DIM), -7.0)
    flat = tuple(n for span in spans for n in span)
    scoring, views = (SCALE, cap, window), (layer.keys_by_slot, layer.values_by_slot)
    packed_exact(query, *views, torch.arange(640), out, scoring, spans=flat)
    first = 0
    for slot, cached, new in spans:
        own = slice(first, first + new)
        want = expected(cache, slot, query[0, :, own], cached, window, cap)
        torch.testing.assert_close(out[0, own].double(), want, atol=1e-5, rtol=1e-5)
        first += new
    assert (out[0, tokens:] == -7.0).all()


def test_fused_kernel_serves_both_phases_on_the_cpu() -> None:
    """Neither phase may fall to the kernel that builds all scores."""
    cache = make_cache(2, 128)
    layer = cache.layers[0]
    for slot in range(2):
        write(cache, slot, 0, 40, seed=slot)
        cache.prepare(slot, 40, 128)
    query = torch.randn(1, HEADS, 40, KEY_DIM)
    mask = decode_mask(torch.tensor([39, 39]), torch.arange(128), 1, None, torch.float32)
    # Same head size for keys and values: what every family but the exotic has.
    keys, values = layer.keys_by_slot, layer.values_by_slot[..., :KEY_DIM]
    out = torch.empty(1, 40, HEADS, KEY_DIM)
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, acc_events=True) as seen:
        scoring, spans = (SCALE, None, None), (0, 0, 20, 1, 20, 20)
        first = (query[:, :, :2], keys, values, mask, out[:, :2])
        decode_bounded(*first, scoring, kv_len=64, kv_from=0)
        packed_exact(query, keys, values, torch.arange(128), out, scoring, spans=spans)
    names = [event.name for event in seen.events()]
    fused = sum("_scaled_dot_product_flash_attention_for_cpu" in name for name in names)
    assert fused == 3
    assert not any("_scaled_dot_product_attention_math" in name for name in names)


def test_device_lengths_are_tried_and_not_assumed() -> None:
    assert has_varlen(64, dtype=torch.float32, device=torch.device("cpu")) is False
