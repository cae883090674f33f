"""Slots, scratch row, clean rows and moves of the fixed-address cache."""

# ruff: noqa: E402  (imports follow the skip where transformers is missing)

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="the transformers integration")

from devgraph.api.errors import DeviceGraphError, StateError
from devgraph.integrations.transformers.cache import KVCache, LayerShape


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


def test_move_to_a_slot_that_does_not_exist_is_refused(cache: KVCache) -> None:
    with pytest.raises(DeviceGraphError, match="target slot 3"):
        cache.move(0, 3, 1)


def test_write_outside_a_step_is_refused(cache: KVCache) -> None:
    with pytest.raises(StateError, match="in its steps only"):
        cache.update(torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 1, 4), 0)


def test_each_write_is_taken_once(cache: KVCache) -> None:
    put(cache, [0], 0.0)
    with pytest.raises(StateError, match="without a write"):
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


def test_size_is_that_of_all_rows(cache: KVCache) -> None:
    assert cache.nbytes == 4 * 193 * (2 * 4 + 2 * 4 + 1 * 4 + 1 * 6)
