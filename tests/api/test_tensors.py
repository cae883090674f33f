"""Geometry of tensors, and copies into place."""

from __future__ import annotations

import pytest
import torch

from devgraph.api.tensors import (
    alike_to,
    byte_range,
    effective_strides,
    fits,
    overwrite,
    rewrite,
    share_memory,
    tensors_in,
)


def test_byte_range_of_a_strided_view_ends_behind_its_last_element():
    base = torch.zeros(4, 6, dtype=torch.int16)
    first, last = byte_range(base[1:3, 2:5])
    assert first == base.data_ptr() + (6 + 2) * 2
    assert last == base.data_ptr() + (12 + 4) * 2 + 2


def test_tensors_are_found_in_order_in_nested_containers() -> None:
    a, b, c = torch.zeros(3).unbind()
    assert [id(t) for t in tensors_in([a, {"k": (b, 1)}, None, "text", c])] == [*map(id, (a, b, c))]


def test_strides_that_address_nothing_count_as_zero() -> None:
    assert effective_strides(torch.zeros(1, 3)) == effective_strides(torch.zeros(3, 1).t())
    assert effective_strides(torch.zeros(0, 3)) == (0, 0)


def test_interleaved_columns_share_no_memory() -> None:
    base = torch.zeros(4, 4)
    assert not share_memory(base[:, ::2], base[:, 1::2])
    assert share_memory(base[:, ::2], base[1:])


def test_an_expanded_tensor_fits_only_an_equally_expanded_target() -> None:
    target = torch.zeros(1, 3).expand(2, 3)
    assert fits(target, torch.ones(1, 3).expand(2, 3))
    assert not fits(target, torch.ones(2, 3))
    rewrite(target, torch.ones(1, 3).expand(2, 3))
    assert target.eq(1).all()


@pytest.mark.parametrize("inference", [False, True])
def test_a_copy_works_under_any_mode_of_the_caller(inference: bool) -> None:
    target = torch.zeros(3, requires_grad=True)
    with torch.inference_mode(inference):
        overwrite(target, torch.ones(3))
    assert target.eq(1).all() and target.grad_fn is None


def test_alike_tensors_have_equal_layouts_and_are_distinct() -> None:
    alike = alike_to([torch.zeros(2, 3), torch.zeros(3)])
    assert alike(torch.ones(2, 3), torch.ones(3))
    assert not alike(torch.ones(3, 2).t(), torch.ones(3))
