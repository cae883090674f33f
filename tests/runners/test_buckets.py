"""Bucket lists: defaults, normalizing, alignment, refusals."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

import devgraph as dg
from devgraph.runners.buckets import Buckets, default_buckets, spans


def test_default_decode_buckets_follow_the_documented_steps():
    sizes = list(default_buckets("decode", 600))
    assert sizes[:8] == [1, 2, 4, 8, 12, 16, 24, 32]
    assert [b for b in sizes if 16 <= b <= 256] == list(range(16, 257, 8))
    assert [b for b in sizes if 257 <= b <= 511] == list(range(272, 512, 16))
    assert [b for b in sizes if b >= 512] == [512, 544, 576, 600]


def test_default_prefill_buckets_follow_the_documented_steps():
    sizes = list(default_buckets("prefill", 6000))
    expected = [
        *range(4, 33, 4),
        *range(48, 257, 16),
        *range(288, 513, 32),
        *range(576, 1025, 64),
        *range(1280, 4097, 256),
        *range(4608, 6000, 512),
        6000,
    ]
    assert sizes == expected


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("maximum", [1, 2, 3, 5, 13, 250, 257, 511, 512, 1030, 8192])
def test_default_buckets_end_with_the_maximum_whatever_it_is(phase, maximum):
    sizes = default_buckets(phase, maximum)
    assert sizes[-1] == maximum
    assert list(sizes) == sorted(set(sizes))


def test_aligned_defaults_are_multiples_and_hold_the_maximum():
    sizes = default_buckets("decode", 30, multiple_of=4)
    assert all(size % 4 == 0 for size in sizes)
    assert sizes[-1] == 32
    assert list(sizes) == [4, 8, 12, 16, 24, 32]


def test_explicit_buckets_are_sorted_deduplicated_and_kept_exactly():
    """FAULTS 6."""
    assert list(Buckets.of([8, 2, 8, 1], phase="decode", maximum=16)) == [1, 2, 8]


@pytest.mark.parametrize(
    ("sizes", "most", "text"),
    [
        ([1, 2, 4, 8], 2.0, None),
        ([1, 2], 2.0, "3 to 8"),
        ([4, 8], 2.0, "1"),
        ([1, 8], 2.0, "2 to 3"),
        ([2, 7], 1.0, "1, 3 to 6 and 8"),
        ([100], 2.0, "1 to 8"),
    ],
)
def test_sizes_without_a_bucket_are_known(sizes, most, text):
    missing = Buckets(sizes).uncovered(8, most)
    assert (spans(missing) if missing else None) == text


@given(st.sets(st.integers(1, 40), min_size=1), st.floats(1, 4))
def test_a_size_is_uncovered_exactly_where_no_bucket_would_hold_it(sizes, most):
    buckets = Buckets(sorted(sizes))
    said = {rows for span in buckets.uncovered(40, most) for rows in span}
    assert said == {n for n in range(1, 41) if (buckets.fitting(n) or math.inf) > most * n}


def test_missing_buckets_mean_the_defaults():
    assert Buckets.of(None, phase="decode", maximum=8) == default_buckets("decode", 8)


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        ([0, 2], "at least 1, got 0"),
        ([4, -3], "got -3"),
        ([4, 17], "17 is above the capacity of 16"),
        ([], "decode buckets: the list is empty"),
    ],
)
def test_a_bad_bucket_is_refused_with_its_value(bad, text):
    """FAULTS 6."""
    with pytest.raises(dg.ConfigError, match=text) as caught:
        Buckets.of(bad, phase="decode", maximum=16)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("bad", [[2.5], ["8"], [True], [None], 8, "8 16"])
def test_a_bucket_of_another_kind_is_refused(bad):
    with pytest.raises(dg.ConfigTypeError) as caught:
        Buckets.of(bad, phase="decode", maximum=16)
    assert isinstance(caught.value, TypeError)


def test_a_misaligned_bucket_is_refused_with_its_value():
    """FAULTS 6."""
    with pytest.raises(dg.ConfigError, match="6 is not a multiple of align=4; use 8"):
        Buckets.of([4, 6], phase="decode", maximum=16, multiple_of=4)


@given(st.sets(st.integers(1, 300), min_size=1), st.integers(300, 400), st.integers(1, 400))
def test_fitting_is_the_smallest_bucket_that_holds_the_rows(sizes, maximum, rows):
    buckets = Buckets.of(sizes, phase="decode", maximum=maximum)
    holding = [size for size in sizes if size >= rows]
    assert buckets.fitting(rows) == (min(holding) if holding else None)
    assert list(buckets.at_least(rows)) == sorted(holding)
