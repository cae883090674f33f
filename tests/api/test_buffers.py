"""Static buffers: one allocation, fixed addresses, bound tensors that must not move."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

import devgraph as dg
from devgraph.api.buffers import StaticBuffers


def make(**specs):
    return StaticBuffers(specs, device="cpu")


def test_buffers_share_one_allocation_and_start_as_zeros():
    buffers = make(ids=((3,), torch.int64), hidden=((2, 5), torch.bfloat16), flag=((), torch.bool))
    addresses = [buffers[name].data_ptr() for name in buffers]
    assert all(buffers.start <= address < buffers.stop for address in addresses)
    assert all((address - buffers.start) % 256 == 0 for address in addresses)
    assert len(set(addresses)) == 3
    assert buffers["hidden"].shape == (2, 5)
    assert buffers["flag"].shape == ()
    assert all(not buffer.any() for buffer in buffers.values())
    assert buffers.nbytes == 3 * 256


def test_buffers_do_not_touch_each_other_when_one_is_filled():
    buffers = make(a=((7,), torch.float32), b=((7,), torch.float32))
    buffers["a"].fill_(float("nan"))
    assert buffers["b"].eq(0).all()


def test_a_view_is_contiguous_at_the_address_of_its_buffer():
    buffers = make(positions=((3, 8), torch.int64))
    view = buffers.view("positions", (3, 5))
    assert view.is_contiguous()
    assert view.data_ptr() == buffers["positions"].data_ptr()
    view.fill_(7)
    assert buffers["positions"].flatten()[:15].eq(7).all()
    assert buffers["positions"].flatten()[15:].eq(0).all()


def test_a_view_that_is_too_large_is_refused():
    with pytest.raises(dg.InputError, match=r"'x' has 4 elements.*\(5,\)"):
        make(x=((4,), torch.float32)).view("x", (5,))


def test_a_shape_may_have_ints_of_numpy():
    two = np.int64(2)
    buffers = make(x=((two, 2), torch.float32))
    assert buffers.view("x", (two, 1)).shape == (2, 1)


@pytest.mark.parametrize("shape", [(-1,), (-1, -2), 5, (1.5,), ("x",), (True,)])
def test_a_view_of_no_shape_is_refused(shape):
    with pytest.raises(dg.InputError, match="'x' cannot have the shape"):
        make(x=((4,), torch.float32)).view("x", shape)


def test_an_unknown_buffer_is_refused_with_the_nearest_name():
    with pytest.raises(dg.InputError, match="Did you mean 'slot_mapping'"):
        make(slot_mapping=((4,), torch.float32)).view("slot_maping", (1,))


@pytest.mark.parametrize("shape", [(-1,), (2.0,), (True,)])
def test_a_bad_shape_is_refused(shape):
    with pytest.raises(dg.InputError, match="'x' has shape"):
        make(x=(shape, torch.float32))


def test_a_dtype_of_another_kind_is_refused():
    with pytest.raises(dg.InputTypeError, match="needs a torch.dtype"):
        make(x=((1,), "float32"))


def test_a_bound_tensor_that_moved_is_refused_until_bound_again():
    buffers = make(x=((1,), torch.float32))
    cache = torch.zeros(4)
    buffers.bind("cache", cache)
    buffers.check()
    cache.fill_(3)
    buffers.check()
    keep = torch.ones(4)
    cache.data = keep
    with pytest.raises(dg.StateError, match="'cache' has moved .* was .* at 0x.* and is .* at 0x"):
        buffers.check()
    buffers.rebind()
    buffers.check()
    assert buffers.bound["cache"] is cache


def test_a_bound_tensor_with_another_layout_at_its_address_is_refused_until_bound_again():
    """FAULTS 9."""
    buffers = make(x=((1,), torch.float32))
    cache = torch.zeros(2, 3)
    buffers.bind("cache", cache)
    for change in (cache.t_, lambda: cache.resize_(6)):
        change()
        with pytest.raises(dg.StateError, match="'cache' has .* a new layout"):
            buffers.check()
        buffers.rebind()
        buffers.check()


@pytest.mark.parametrize("inference", [False, True])
def test_bound_tensors_are_watched_as_closely_after_they_were_found_in_order(inference):
    buffers = make()
    first, second = torch.ones(2, 3), torch.nn.Parameter(torch.ones(3), requires_grad=False)
    buffers.bind("caches", [first, second, first])
    with torch.inference_mode(inference):
        for _ in range(3):
            buffers.check()
        second.requires_grad_()
        buffers.check()
        first.t_()
        with pytest.raises(dg.StateError, match=r"caches\[0\]' .* a new layout: it was \(2, 3\)"):
            buffers.check()
        first.t_()
        buffers.check()
        second.data = torch.ones(3)
        with pytest.raises(dg.StateError, match=r"caches\[1\]' has moved"):
            buffers.check()


def test_a_bound_tensor_is_kept_alive():
    buffers = make(x=((1,), torch.float32))
    buffers.bind("cache", torch.full((4,), 5.0))
    assert buffers.bound["cache"].eq(5).all()


def test_binding_a_taken_name_or_no_tensor_is_refused():
    buffers = make(x=((1,), torch.float32))
    with pytest.raises(dg.InputError, match="already a buffer 'x'"):
        buffers.bind("x", torch.zeros(1))
    with pytest.raises(dg.InputTypeError, match="must be a tensor"):
        buffers.bind("y", [1])


def test_binding_under_a_name_that_is_none_changes_nothing():
    buffers = dg.StaticBuffers({"x": ((2,), torch.float32)}, device="cpu")
    with pytest.raises(dg.InputTypeError, match="must be strings, got 5"):
        buffers.bind(5, torch.zeros(2))
    buffers.bind("cache", torch.zeros(2))
    assert list(buffers.bound) == ["cache"]


def test_overlap_counts_every_byte_a_tensor_can_reach():
    buffers = make(x=((8,), torch.float32))
    assert buffers.overlaps(buffers["x"][2:3])
    assert buffers.overlaps(buffers.view("x", (2, 4)).t())
    assert not buffers.overlaps(torch.zeros(8))
    assert not buffers.overlaps(buffers["x"][:0])


def test_buffers_made_under_inference_mode_can_be_written_outside_it():
    with torch.inference_mode():
        buffers = make(x=((2,), torch.float32))
    buffers["x"].fill_(1)
    assert not buffers["x"].is_inference()


def test_buffers_cannot_be_pickled():
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(make(x=((1,), torch.float32)))


def test_repr_names_every_buffer():
    assert "x (2,) torch.int32" in repr(make(x=((2,), torch.int32)))


@pytest.mark.parametrize("size", [2**58, 2**80])
def test_buffers_that_do_not_fit_into_memory_are_a_resource_error_with_the_bytes(size):
    with pytest.raises(dg.ResourceError, match=f"static buffers of {size} bytes do not fit"):
        StaticBuffers({"x": ((size,), torch.uint8)}, device="cpu")


def test_a_tree_of_bound_tensors_is_watched_leaf_by_leaf():
    buffers = make(x=((1,), torch.float32))
    layers = [{"k": torch.zeros(2), "v": torch.ones(2)}, None]
    buffers.bind("cache", layers)
    assert list(buffers.bound) == ["cache[0]['k']", "cache[0]['v']"]
    layers[0]["k"].data = torch.ones(2)
    with pytest.raises(dg.StateError, match=r"cache\[0\]\['k'\].* moved"):
        buffers.check()
    buffers.rebind()
    layers[0]["v"] = torch.zeros(2)
    with pytest.raises(dg.StateError, match=r"cache\[0\]\['v'\] among the bound tensors"):
        buffers.check()
    buffers.rebind()
    buffers.check()
    assert buffers.bound["cache[0]['v']"] is layers[0]["v"]


def test_what_is_no_tensor_in_a_bound_tree_is_named_by_its_path():
    buffers = make(x=((1,), torch.float32))
    with pytest.raises(dg.InputTypeError, match=r"'cache\[0\]' must be a tensor .*got 1"):
        buffers.bind("cache", [1, torch.randn(99)])
    with pytest.raises(dg.InputTypeError, match=r"'cache\[1\]' must .* layout torch.sparse_coo"):
        buffers.bind("cache", [torch.randn(99), torch.eye(3).to_sparse()])
    buffers.bind("cache", [torch.randn(99)])
