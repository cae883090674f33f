"""The cache: slots, scratch row, clean rows, moves; its kernels against a plain computation."""

# ruff: noqa: E402  (imports follow the skip where transformers is missing)

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="the transformers integration")

from devgraph.api.errors import StateError
from devgraph.integrations.transformers.attention import (
    BLOCK_ROWS,
    KVCache,
    LayerShape,
    decode_bounded,
    decode_mask,
    decode_whole,
    has_varlen,
    packed_exact,
)


@pytest.fixture
def cache() -> KVCache:
    shapes = [
        LayerShape(heads=2, kv_heads=2, key_dim=4, value_dim=4),
        LayerShape(heads=2, kv_heads=1, key_dim=4, value_dim=6),
    ]
    made = KVCache(shapes, 3, max_len=64, dtype=torch.float32, device=torch.device("cpu"))
    for layer in made.layers:
        layer.keys.fill_(math.nan)
        layer.values.fill_(math.nan)
    return made


def put(cache: KVCache, rows: list[int], value: float) -> None:
    cache.aim(torch.tensor(rows))
    for index, layer in enumerate(cache.layers):
        key = torch.full((1, layer.keys.shape[0], len(rows), 4), value)
        new = torch.full((1, layer.keys.shape[0], len(rows), layer.values.shape[2]), value)
        same = cache.update(key, new, index)
        assert same[0] is key
        assert same[1] is new
        assert cache.take() is layer
    cache.aim(None)


def test_tokens_land_in_their_rows_and_nowhere_else(cache: KVCache) -> None:
    put(cache, [2, 64 + 5, cache.scratch_row], 1.0)
    for layer in cache.layers:
        for flat in (layer.keys, layer.values):
            written = ~flat.isnan().all(-1)
            assert written.nonzero()[:, 1].unique().tolist() == [2, 69, 192]
        assert not layer.keys_by_slot[1, :, 5].isnan().any()


def test_slot_views_share_the_memory_of_the_rows(cache: KVCache) -> None:
    for layer in cache.layers:
        for flat, by_slot in (
            (layer.keys, layer.keys_by_slot),
            (layer.values, layer.values_by_slot),
        ):
            assert by_slot.shape == (3, flat.shape[0], 64, flat.shape[2])
            assert by_slot.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()


def test_prepare_clears_only_what_no_one_wrote(cache: KVCache) -> None:
    put(cache, [64, 65], 3.0)
    cache.prepare(1, 2, 10)
    for layer in cache.layers:
        assert (layer.keys_by_slot[1, :, :2] == 3.0).all()
        assert (layer.values_by_slot[1, :, 2:10] == 0.0).all()
        assert layer.values_by_slot[1, :, 10:].isnan().all()
        assert layer.keys_by_slot[0].isnan().all()
        assert layer.keys_by_slot[2].isnan().all()


def test_prepare_keeps_rows_written_since_the_last_time(cache: KVCache) -> None:
    cache.prepare(0, 1, 8)
    put(cache, [1, 2, 3], 5.0)
    cache.prepare(0, 4, 16)
    assert (cache.layers[0].keys_by_slot[0, :, 1:4] == 5.0).all()
    assert (cache.layers[0].keys_by_slot[0, :, 4:16] == 0.0).all()


def test_released_slot_is_cleared_again_for_the_next_request(cache: KVCache) -> None:
    cache.prepare(0, 0, 64)
    put(cache, list(range(30)), math.nan)
    cache.release(0)
    put(cache, [0], 1.0)
    cache.prepare(0, 1, 64)
    assert (cache.layers[1].values_by_slot[0, :, 1:] == 0.0).all()


def test_move_copies_the_rows_of_a_request_and_forgets_what_was_clean(cache: KVCache) -> None:
    put(cache, [128, 129], 4.0)
    cache.prepare(0, 0, 64)
    put(cache, [10], math.nan)
    cache.move(2, 0, 2)
    cache.prepare(0, 2, 64)
    for layer in cache.layers:
        assert (layer.keys_by_slot[0, :, :2] == 4.0).all()
        assert (layer.values_by_slot[0, :, 2:] == 0.0).all()


def test_write_outside_a_step_is_refused(cache: KVCache) -> None:
    with pytest.raises(StateError, match="only steps of the engine write to it"):
        cache.update(torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 1, 4), 0)


def test_each_write_is_taken_once(cache: KVCache) -> None:
    put(cache, [0], 0.0)
    with pytest.raises(StateError, match="without a preceding write"):
        cache.take()


def test_whole_slots_are_given_to_a_model_that_attends_itself(cache: KVCache) -> None:
    layer = cache.layers[0]
    layer.keys[:, :-1] = torch.arange(cache.slots * cache.max_len)[None, :, None]
    for shown, slots in ((2, [0, 1]), (torch.tensor([1]), [1])):
        rows = torch.tensor([slot * cache.max_len + 5 for slot in slots])
        cache.aim(rows, shown, width=1)
        new = torch.full((len(slots), layer.shape.kv_heads, 1, layer.shape.key_dim), -1.0)
        keys, values = cache.update(new, new, 0)
        assert cache.get_mask_sizes(1) == (cache.max_len, 0)
        assert keys.shape[2] == values.shape[2] == cache.max_len
        for given, slot in zip(keys, slots, strict=True):
            want = torch.arange(cache.max_len) + slot * cache.max_len
            assert (given[..., 0] == torch.where(want % cache.max_len == 5, -1, want)).all()
    cache.aim(None)


def test_asking_for_a_length_is_refused(cache: KVCache) -> None:
    with pytest.raises(StateError, match="position_ids"):
        cache.get_seq_length()


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
    views = (query, layer.keys_by_slot, layer.values_by_slot, mask, out, (SCALE, cap, window, True))
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
    views = (query, layer.keys_by_slot, layer.values_by_slot, mask, out, (SCALE, None, 100, True))
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
    scoring, views = (SCALE, cap, window, True), (layer.keys_by_slot, layer.values_by_slot)
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
        scoring, spans = (SCALE, None, None, True), (0, 0, 20, 1, 20, 20)
        first = (query[:, :, :2], keys, values, mask, out[:, :2])
        decode_bounded(*first, scoring, kv_len=64, kv_from=0)
        packed_exact(query, keys, values, torch.arange(128), out, scoring, spans=spans)
    names = [event.name for event in seen.events()]
    fused = sum("_scaled_dot_product_flash_attention_for_cpu" in name for name in names)
    assert fused == 3
    assert not any("_scaled_dot_product_attention_math" in name for name in names)


def test_device_lengths_are_tried_and_not_assumed() -> None:
    assert has_varlen(64, dtype=torch.float32, device=torch.device("cpu")) is False
