"""The block pool: ownership, reuse, aliases, poison."""

from __future__ import annotations

import gc
import itertools
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import devgraph as dg
from devgraph.api.errors import ResourceError
from devgraph.cpu.memory import ALIGNMENT, SLAB_BYTES, BlockPool
from tests.support.refusals import X

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn]


def floats(pool: BlockPool, *size: int) -> torch.Tensor:
    return pool.empty(size, torch.empty(size, device="meta").stride(), torch.float32)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float8_e5m2fnuz, torch.complex64])
def test_new_block_is_nan_in_every_floating_dtype(dtype: torch.dtype) -> None:
    block = BlockPool().empty((3, 5), (5, 1), dtype)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    assert block.to(wide).isnan().all()


def test_new_block_is_true_or_huge_in_other_dtypes() -> None:
    pool = BlockPool()
    assert pool.empty((9,), (1,), torch.bool).all()
    for dtype in (torch.int16, torch.int32, torch.int64):
        block = pool.empty((9,), (1,), dtype)
        assert (block > torch.iinfo(dtype).max // 2).all()


def test_blocks_are_aligned_and_do_not_overlap() -> None:
    pool = BlockPool()
    tensors = [floats(pool, n) for n in (1, 3, 17, 1000, SLAB_BYTES)]
    spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors)
    assert all(start % ALIGNMENT == 0 for start, _ in spans)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


def test_strided_and_empty_sizes_get_what_they_need() -> None:
    pool = BlockPool()
    column = pool.empty((3, 4), (1, 3), torch.float32)
    assert column.stride() == (1, 3)
    assert pool.empty((0, 4), (4, 1), torch.float32).shape == (0, 4)
    assert pool.empty((), (), torch.float64).isnan()
    # As in eager execution, although the block has whole lines.
    assert pool.empty((3, 4), (0, 1), torch.float32).untyped_storage().nbytes() == 16


def test_block_is_free_when_its_last_tensor_dies_and_not_before() -> None:
    pool = BlockPool()
    hold = pool.hold()
    first = floats(pool, 4, 4)
    address = first.data_ptr()
    row = first[2]
    del first
    assert floats(pool, 4, 4).data_ptr() != address
    del row
    assert floats(pool, 4, 4).data_ptr() == address
    hold.release()


def test_alias_sees_the_memory_and_does_not_keep_it() -> None:
    pool = BlockPool()
    hold = pool.hold()
    owner = floats(pool, 4, 4)
    alias = pool.alias(owner[1:, ::2])
    owner.fill_(5.0)
    assert alias.shape == (3, 2) and alias.stride() == (4, 2) and (alias == 5).all()
    address = owner.data_ptr()
    del owner
    again = floats(pool, 4, 4)
    assert again.data_ptr() == address
    assert alias.isnan().all(), "the new owner was not poisoned through the alias"
    hold.release()


def test_alias_of_foreign_memory_is_the_tensor_itself() -> None:
    pool, other = BlockPool(), BlockPool()
    outside = torch.ones(4)
    assert pool.alias(outside) is outside
    theirs = floats(other, 4)
    assert pool.alias(theirs) is theirs
    mine = floats(pool, 4)
    alias = pool.alias(mine)
    assert pool.alias(alias) is alias


def test_alias_of_a_dead_owner_is_not_taken_for_the_next_owner() -> None:
    pool = BlockPool()
    hold = pool.hold()
    owner = floats(pool, 64)
    stale = pool.alias(owner)
    del owner
    shorter = floats(pool, 16)
    assert shorter.data_ptr() == stale.data_ptr()
    assert pool.alias(stale) is stale
    hold.release()


def test_alias_keeps_lazy_conjugation_and_negation() -> None:
    pool = BlockPool()
    owner = pool.empty((3,), (1,), torch.complex64)
    owner.copy_(torch.complex(torch.arange(3.0), torch.ones(3)))
    for view in (owner.conj(), owner.conj().imag):
        alias = pool.alias(view)
        assert (alias.is_conj(), alias.is_neg()) == (view.is_conj(), view.is_neg())
        assert torch.equal(alias.resolve_conj().resolve_neg(), view.resolve_conj().resolve_neg())


def test_memory_outlives_the_pool_while_a_tensor_or_an_alias_is_left() -> None:
    pool = BlockPool()
    owner = floats(pool, 1000).fill_(3.0)
    alias = pool.alias(floats(pool, 1000).fill_(4.0))
    del pool
    gc.collect()
    junk = [torch.full((1000,), 9.0) for _ in range(50)]
    assert (owner == 3).all() and (alias == 4).all() and len(junk) == 50


def test_reservation_is_kept_while_retained_and_given_back_after() -> None:
    pool = BlockPool()
    first = pool.hold()
    floats(pool, SLAB_BYTES)
    kept = floats(pool, 4)
    held = pool.reserved_bytes
    assert held >= 4 * SLAB_BYTES
    second = pool.hold()
    second.release()
    second.release()
    assert pool.reserved_bytes == held, "another graph still uses the pool"
    del kept, first
    assert pool.reserved_bytes == 0


def test_neighbouring_free_blocks_are_joined() -> None:
    pool = BlockPool()
    hold = pool.hold()
    tensors = [floats(pool, SLAB_BYTES // 64) for _ in range(16)]
    before = pool.reserved_bytes
    for index in (3, 5, 4, 0, 1, 2, 15, 14, *range(6, 14)):
        tensors[index] = torch.empty(0)
    whole = floats(pool, SLAB_BYTES // 4)
    assert pool.reserved_bytes == before and whole.nbytes == SLAB_BYTES
    hold.release()


def test_live_blocks_carry_what_they_were_made_for() -> None:
    pool = BlockPool()
    tensor = pool.empty((4,), (1,), torch.float32, origin="why")
    (block,) = pool.live()
    assert (block.origin, block.address, block.bytes) == ("why", tensor.data_ptr(), ALIGNMENT)
    del tensor
    assert pool.live() == []


def test_more_memory_than_there_is_is_a_resource_error() -> None:
    with pytest.raises(ResourceError, match="no memory for a tensor of"):
        BlockPool().empty((2**44,), (1,), torch.float32)
    for warmup in (0, 2):
        with pytest.raises(ResourceError, match="no memory for a tensor"):
            dg.capture(lambda x: torch.zeros(2**42)[:4] + x, X, backend="cpu", warmup=warmup)


def test_threads_share_a_pool() -> None:
    pool = BlockPool()
    failures: list[str] = []

    def work(value: float) -> None:
        for _ in range(300):
            mine = floats(pool, 33).fill_(value)
            other = floats(pool, 7).fill_(-value)
            if not ((mine == value).all() and (other == -value).all()):
                failures.append("another thread wrote this block")

    threads = [threading.Thread(target=work, args=(float(n + 1),)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and pool.live() == []


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 200_000), st.booleans()), max_size=60))
def test_any_order_of_allocation_and_release_keeps_blocks_apart(
    steps: list[tuple[int, bool]],
) -> None:
    pool = BlockPool()
    hold = pool.hold()
    kept: list[tuple[torch.Tensor, float]] = []
    for number, (size, drop) in enumerate(steps):
        if drop and kept:
            kept.pop(size % len(kept))
        kept.append((floats(pool, size).fill_(float(number)), float(number)))
    assert all((tensor == value).all() for tensor, value in kept)
    kept.clear()
    hold.release()
    assert pool.reserved_bytes == 0


def test_hold_dropped_by_a_collection_inside_the_pool_does_not_block() -> None:
    pool = BlockPool()
    hold = pool.hold()
    with pool._lock:  # as when the garbage collector runs in the middle of an allocation
        hold.release()
    assert pool.reserved_bytes == 0
    floats(pool, 8)
    assert pool.reserved_bytes == 0
