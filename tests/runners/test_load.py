"""Loading batches: inputs of any layout are copied in, and padded by rule."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import devgraph as dg
from devgraph.runners import InputSlot, Pad, Size
from devgraph.runners import inputs as inputs_module
from devgraph.runners.inputs import InputArena, Staging
from devgraph.runners.load import CopyPlan
from devgraph.runners.slots import raw_dtype
from tests.support.runner_steps import OFFSETS, tokens


def arena_of(*slots, run_slots=frozenset()):
    named = {slot.name: slot for slot in slots}
    return InputArena(named, Size(8, 16), dg.get_backend("cpu"), run_slots)


def loaded(slot, data, real, padded, run_slots=frozenset()):
    """Load ``data`` over poison and return the graph's view."""
    arena = arena_of(slot, run_slots=run_slots)
    arena.buffers[slot.name].fill_(99)
    CopyPlan(arena, real, padded, arena.run_views(real)).load({slot.name: data})
    return arena.views(padded)[slot.name]


@pytest.mark.parametrize(
    ("pad", "tail"),
    [
        (Pad.zero(), [0, 0, 0]),
        (Pad.fill(-1), [-1, -1, -1]),
        (Pad.last(), [7, 7, 7]),
    ],
)
def test_rows_beyond_the_real_ones_follow_the_pad_rule(pad, tail):
    slot = InputSlot("n", ("requests",), torch.int64, pad=pad)
    view = loaded(slot, tokens(5, 3, 7), Size(3, 3, 1), Size(6, 6, 1))
    assert view.tolist() == [5, 3, 7, *tail]


@pytest.mark.parametrize("pad", [Pad.fill(-2), Pad.last()])
def test_a_named_dimension_need_not_be_the_first(pad):
    slot = InputSlot("position", (3, "tokens"), torch.int64, pad=pad)
    data = torch.arange(6).reshape(3, 2) * 10
    view = loaded(slot, data, Size(2, 2, 1), Size(4, 4, 1))
    last = data[:, 1:]
    tail = {
        "fill": torch.full((3, 2), -2),
        "last": last.expand(3, 2),
    }[pad.kind]
    assert view.is_contiguous()
    assert torch.equal(view, torch.cat([data, tail], dim=1))


@pytest.mark.parametrize(
    ("pad", "rows"),
    [
        (Pad.zero(), [0, 0, 0, 0]),
        (Pad.fill(-1), [-1, -1, -1, -1]),
        (Pad.last(5), [5, 5, 5, 5]),
        (Pad.fill(0.1), [0.1, 0.1, 0.1, 0.1]),
        (Pad.last(0.1), [0.1, 0.1, 0.1, 0.1]),
    ],
)
def test_a_batch_without_rows_holds_its_pad_values_exactly(pad, rows):
    slot = InputSlot("n", ("requests",), torch.float64, pad=pad)
    view = loaded(slot, tokens().double(), Size(0, 0), Size(4, 4, 1))
    assert view.tolist() == rows


def test_large_marks_of_real_rows_are_filled_in_place(monkeypatch):
    monkeypatch.setattr(inputs_module, "TEMPLATE_BYTES", 2)
    ids = InputSlot("ids", ("tokens",), torch.int64, pad=Pad.zero())
    mark = InputSlot("mark", ("tokens",), torch.bool, pad=Pad.zero(), real=True)
    arena = arena_of(ids, mark)
    CopyPlan(arena, Size(2, 2, 1), Size(4, 4, 1), {}).load({"ids": tokens(1, 2)})
    assert arena.views(Size(4, 4, 1))["mark"].tolist() == [True, True, False, False]


def test_large_pads_are_filled_in_place(monkeypatch):
    monkeypatch.setattr(inputs_module, "TEMPLATE_BYTES", 8)
    slot = InputSlot("n", ("tokens",), torch.int64, pad=Pad.fill(-1))
    view = loaded(slot, tokens(1, 2), Size(2, 2, 1), Size(4, 4, 1))
    assert view.tolist() == [1, 2, -1, -1]


def test_a_nan_pad_reaches_every_padded_row():
    slot = InputSlot("x", ("tokens",), torch.float32, pad=Pad.fill(float("nan")))
    view = loaded(slot, torch.ones(1), Size(1, 1, 1), Size(3, 3, 1))
    assert view.isnan().tolist() == [False, True, True]


def test_a_slot_of_the_run_keeps_its_real_size():
    view = loaded(
        OFFSETS, tokens(0, 4, 9), Size(2, 9), Size(6, 16), run_slots=frozenset({"offsets"})
    )
    assert view.tolist() == [0, 4, 9, 99, 99, 99, 99]


def test_a_slot_without_rows_is_copied_whole():
    slot = InputSlot("scale", (2,), torch.float32, pad=Pad.zero())
    view = loaded(slot, torch.tensor([3.0, 4.0]), Size(1, 1, 1), Size(4, 4, 1))
    assert view.tolist() == [3, 4]


@pytest.mark.parametrize("join", [False, True])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_mixed_slots_of_any_layout_arrive_whole(join, data):
    real = Size(data.draw(st.integers(1, 4)), data.draw(st.integers(4, 9)))
    padded = Size(4 + data.draw(st.integers(0, 3)), 9 + data.draw(st.integers(0, 6)))
    slots = []
    for index in range(data.draw(st.integers(1, 5))):
        dims = data.draw(
            st.sampled_from(
                [("tokens",), (2, "tokens"), ("requests", 4), ("requests+1",), (2,), ()]
            )
        )
        dtype = data.draw(
            st.sampled_from([torch.int64, torch.int32, torch.float32, torch.bfloat16, torch.bool])
        )
        pads = [Pad.zero(), Pad.fill(1)]
        if len(dims) == 1 and isinstance(dims[0], str) and dtype is not torch.bool:
            pads.append(Pad.last())
        slots.append(InputSlot(f"s{index}", dims, dtype, pad=data.draw(st.sampled_from(pads))))
    arena = arena_of(*slots)
    given_inputs, expected = {}, {}
    for slot in slots:
        values = torch.randint(50, slot.shape(real)).to(slot.dtype)
        if slot.start is not None:
            values = values.sort().values
            values[0] = slot.start
        if data.draw(st.booleans()):  # not contiguous
            values = torch.stack([values, values], dim=-1)[..., 0]
        given_inputs[slot.name] = values
        arena.buffers[slot.name].fill_(99)
        expected[slot.name] = slow_pad(slot, values, padded)
    plan = CopyPlan(arena, real, padded, {}, join=join)
    for _ in range(2):  # checked, then recognized
        for name in given_inputs:
            arena.buffers[name].fill_(99)
        plan.load(given_inputs)
        for name, view in arena.views(padded).items():
            assert torch.equal(view, expected[name]), name


def joined_plan():
    """A plan for three rows of two dtypes, which are copied together, and the static views."""
    ids = InputSlot("ids", ("tokens",), torch.int64, pad=Pad.fill(-1))
    scale = InputSlot("scale", ("tokens",), torch.float32, pad=Pad.zero())
    arena = arena_of(ids, scale)
    plan = CopyPlan(arena, Size(3, 3, 1), Size(4, 4, 1), {}, join=True)
    return plan, arena.views(Size(4, 4, 1))


def load_in_place(plan, views, ids, scale, *, times):
    """Load the same tensors again and again, each time with other ids, from 2, 3, 4 on."""
    for step in range(times):
        ids.add_(1)
        plan.load({"ids": ids, "scale": scale})
        assert views["ids"].tolist() == [2 + step, 3 + step, 4 + step, -1]


def test_inputs_are_not_kept():
    plan, views = joined_plan()
    ids, scale = tokens(1, 2, 3), torch.ones(3)
    owners = torch._C._storage_Use_Count(ids.untyped_storage()._cdata)
    load_in_place(plan, views, ids, scale, times=5)
    assert torch._C._storage_Use_Count(ids.untyped_storage()._cdata) == owners
    plan.load({"ids": tokens(7, 8, 9), "scale": scale})
    assert views["ids"].tolist() == [7, 8, 9, -1]


def test_inputs_that_come_back_at_their_addresses_are_read_as_they_are_now():
    arena = arena_of(
        InputSlot("ids", ("tokens",), torch.int64, pad=Pad.fill(-1)),
        InputSlot("scale", ("tokens",), torch.float32, pad=Pad.zero()),
    )
    plan = CopyPlan(arena, Size(3, 3, 1), Size(4, 4, 1), {}, join=True)
    views = arena.views(Size(4, 4, 1))
    pairs = [(tokens(1, 2, 3), torch.ones(3)), (tokens(4, 5, 6), torch.zeros(3))]
    for turn in (0, 0, 0, 1, 1, 0, 1, 1, 1):
        ids, scale = pairs[turn]
        ids.add_(10)
        plan.load({"ids": ids, "scale": scale})
        assert views["ids"].tolist() == [*ids.tolist(), -1]
        assert views["scale"].tolist() == [*scale.tolist(), 0]


def test_a_plan_that_was_made_in_inference_mode_serves_outside_of_it():
    with torch.inference_mode():
        plan, views = joined_plan()
        plan.load({"ids": tokens(1, 2, 3), "scale": torch.ones(3)})
        cpu = dg.get_backend("cpu")
        layouts = [((3,), torch.int64), ((2,), torch.float32)]
        transfer = Staging(cpu, cpu.device).transfer(layouts)
    load_in_place(plan, views, tokens(1, 2, 3), torch.ones(3), times=3)
    sent = transfer([tokens(4, 5, 6), torch.ones(2)])
    assert [one.tolist() for one in sent] == [[4, 5, 6], [1, 1]]


def test_another_layout_at_the_same_address_is_read_as_it_is():
    plan, views = joined_plan()
    memory, scale = torch.arange(6), torch.ones(3)
    for step in (1, 1, 1, 2, 1, 2, 2, 2, 0):
        plan.load({"ids": memory.as_strided((3,), (step,)), "scale": scale})
        assert views["ids"].tolist() == [0, step, 2 * step, -1]


def test_refused_input_after_recognized_ones_changes_nothing():
    """FAULTS 7."""
    plan, views = joined_plan()
    ids, scale = tokens(1, 2, 3), torch.ones(3)
    for _ in range(3):
        plan.load({"ids": ids, "scale": scale})
    for bad in ({"ids": ids}, {"ids": ids, "scale": scale, "x": scale}, {"ids": ids, "scale": ids}):
        ids.fill_(5)
        with pytest.raises(dg.InputError):
            plan.load(bad)
        assert views["ids"].tolist() == [1, 2, 3, -1]


def test_a_static_buffer_among_recognized_inputs_is_copied_first():
    """FAULTS 8."""
    plan, views = joined_plan()
    ids, scale = tokens(1, 2, 3), torch.ones(3)
    for _ in range(3):
        plan.load({"ids": ids, "scale": scale})
    for _ in range(3):
        plan.load({"ids": views["ids"][1:4], "scale": scale})
    assert views["ids"].tolist() == [-1, -1, -1, -1]


def test_slots_of_several_dtypes_share_one_copy_where_launches_cost(monkeypatch):
    dtypes = [torch.int64, torch.int64, torch.int32, torch.float32, torch.bfloat16]
    slots = [
        InputSlot(f"s{i}", ("tokens", 2), dtype, pad=Pad.fill(i)) for i, dtype in enumerate(dtypes)
    ]
    arena = arena_of(*slots)
    plan = CopyPlan(arena, Size(3, 3, 1), Size(5, 5, 1), {}, join=True)
    calls = []
    real = torch._foreach_copy_
    monkeypatch.setattr(torch, "_foreach_copy_", lambda *a: (calls.append(a), real(*a)))
    data = {slot.name: torch.full((3, 2), 7, dtype=slot.dtype) for slot in slots}
    data["s4"] = torch.full((7, 2), 7, dtype=torch.bfloat16).view(-1)[1:7].view(3, 2)  # unaligned
    plan.load(data)
    assert len(calls) == 1
    for index, view in enumerate(arena.views(Size(5, 5, 1)).values()):
        assert view.tolist() == [[7, 7]] * 3 + [[index, index]] * 2


def slow_pad(slot, values, padded):
    """The pad rules once more, row by row."""
    if slot.axis is None:
        return values
    rows = list(values.unbind(slot.axis))
    while len(rows) < slot.shape(padded)[slot.axis]:
        if slot.pad.kind == "fill":
            rows.append(torch.full_like(rows[0], slot.pad.value))
        else:
            rows.append(rows[-1])
    return torch.stack(rows, slot.axis)


EXOTIC = [
    torch.float4_e2m1fn_x2,
    torch.float8_e8m0fnu,
    torch.float8_e4m3fn,
    torch.uint16,
    torch.uint32,
    torch.uint64,
]


@pytest.mark.parametrize("join", [False, True])
@pytest.mark.parametrize("dtype", EXOTIC, ids=str)
def test_dtypes_without_a_grouped_copy_are_copied_as_bytes(dtype, join):
    slot = InputSlot("x", ("tokens", 4), dtype, pad=Pad.zero())
    other = InputSlot("n", ("tokens",), torch.int64, pad=Pad.last())
    arena = arena_of(slot, other)
    bits = raw_dtype(dtype)
    arena.buffers["x"].view(bits).fill_(99)
    plan = CopyPlan(arena, Size(3, 3, 1), Size(5, 5, 1), {}, join=join)
    for seed in range(2):
        data = torch.randint(100, (3, 8), generator=torch.Generator().manual_seed(seed)).to(bits)
        plan.load({"x": data[:, ::2].view(dtype), "n": tokens(1, 2, seed)})
        views = arena.views(Size(5, 5, 1))
        assert torch.equal(views["x"].view(bits)[:3], data[:, ::2])
        assert not views["x"].view(bits)[3:].any()
        assert views["n"].tolist() == [1, 2, seed, seed, seed]


def test_unsigned_pads_and_last_rows_are_kept_to_the_bit():
    x = InputSlot("x", ("tokens",), torch.uint16, pad=Pad.fill(65535))
    y = InputSlot("y", ("tokens",), torch.uint32, pad=Pad.last())
    arena = arena_of(x, y)
    plan = CopyPlan(arena, Size(2, 2, 1), Size(4, 4, 1), {})
    data = torch.tensor([40000, 7]), torch.tensor([1, 4_000_000_000])
    plan.load({"x": data[0].to(torch.uint16), "y": data[1].to(torch.uint32)})
    views = arena.views(Size(4, 4, 1))
    assert views["x"].tolist() == [40000, 7, 65535, 65535]
    assert views["y"].tolist() == [1, 4_000_000_000, 4_000_000_000, 4_000_000_000]
