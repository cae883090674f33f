"""Input data: copied in whatever its layout, padded by rule, refused by name."""

from __future__ import annotations

import contextlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import devgraph as dg
from devgraph.api.torchlike.base import TorchPool
from devgraph.cpu.backend import CpuPool
from devgraph.runners import InputSlot, Pad, Size
from devgraph.runners import inputs as inputs_module
from devgraph.runners import load as load_module
from devgraph.runners.inputs import InputArena, Staging, StagingMemory
from devgraph.runners.load import MOST_PLACES, USES_TO_CAPTURE, CopyPlan
from tests.support.runner_steps import (
    IDS,
    OFFSETS,
    ROWS,
    CacheStep,
    X,
    cache_inputs,
    decode_of,
    double_runner,
    rows_of_x,
    tokens,
)


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
        if data.draw(st.booleans()):  # not contiguous
            values = torch.stack([values, values], dim=-1)[..., 0]
        given_inputs[slot.name] = values
        arena.buffers[slot.name].fill_(99)
        expected[slot.name] = slow_pad(slot, values, padded)
    plan = CopyPlan(arena, real, padded, {}, join=join, pool=BarePool(dg.get_backend("cpu")))
    for _ in range(3):  # looked at, seen at their places, known there
        for name in given_inputs:
            arena.buffers[name].fill_(99)
        plan.load(given_inputs)
        for name, view in arena.views(padded).items():
            assert torch.equal(view, expected[name]), name


class BarePool(CpuPool):
    """A pool whose device has tensors that do not own their memory, as torch's devices have."""

    bare = TorchPool.bare


def joined_plan():
    """A plan for three rows of two dtypes, which are copied together, and the static views."""
    ids = InputSlot("ids", ("tokens",), torch.int64, pad=Pad.fill(-1))
    scale = InputSlot("scale", ("tokens",), torch.float32, pad=Pad.zero())
    arena = arena_of(ids, scale)
    pool = BarePool(dg.get_backend("cpu"))
    plan = CopyPlan(arena, Size(3, 3, 1), Size(4, 4, 1), {}, join=True, pool=pool)
    return plan, arena.views(Size(4, 4, 1))


def load_in_place(plan, views, ids, scale, *, times):
    """Load the same tensors again and again, each time with other ids, from 2, 3, 4 on."""
    for step in range(times):
        ids.add_(1)
        plan.load({"ids": ids, "scale": scale})
        assert views["ids"].tolist() == [2 + step, 3 + step, 4 + step, -1]


def test_inputs_that_come_back_to_their_places_are_read_there_and_not_kept():
    plan, views = joined_plan()
    ids, scale = tokens(1, 2, 3), torch.ones(3)
    owners = torch._C._storage_Use_Count(ids.untyped_storage()._cdata)
    load_in_place(plan, views, ids, scale, times=5)
    assert len(plan._known) == 1
    assert torch._C._storage_Use_Count(ids.untyped_storage()._cdata) == owners
    plan.load({"ids": tokens(7, 8, 9), "scale": scale})
    assert views["ids"].tolist() == [7, 8, 9, -1]


def test_a_plan_that_was_made_in_inference_mode_serves_outside_of_it():
    with torch.inference_mode():
        plan, views = joined_plan()
        plan.load({"ids": tokens(1, 2, 3), "scale": torch.ones(3)})
        cpu = dg.get_backend("cpu")
        layouts = [((3,), torch.int64), ((2,), torch.float32)]
        staging = Staging(StagingMemory(cpu, cpu.device), layouts)
    load_in_place(plan, views, tokens(1, 2, 3), torch.ones(3), times=3)
    sent = staging.send([tokens(4, 5, 6), torch.ones(2)])
    assert [one.tolist() for one in sent] == [[4, 5, 6], [1, 1]]


def test_copies_that_are_made_all_the_time_are_a_graph(monkeypatch):
    monkeypatch.setattr(load_module, "USES_TO_CAPTURE", 2)
    monkeypatch.setattr(dg.get_backend("cpu"), "launches_quickly", True)
    plan, views = joined_plan()
    ids, scale = tokens(1, 2, 3), torch.ones(3)
    load_in_place(plan, views, ids, scale, times=8)
    (kept,) = plan._known.values()
    assert kept.graph is not None and kept.graph.state == "ready"
    plan.load({"ids": torch.arange(6)[::2], "scale": scale})  # another layout, looked at anew
    assert views["ids"].tolist() == [0, 2, 4, -1]
    assert not plan._known


@pytest.mark.parametrize("error", [dg.CaptureBusyError(), RuntimeError("the driver's"), None])
def test_copies_that_cannot_be_captured_are_made_one_by_one(monkeypatch, error):
    backend = dg.get_backend("cpu")
    monkeypatch.setattr(load_module, "USES_TO_CAPTURE", 2)
    monkeypatch.setattr(backend, "launches_quickly", True)
    if error is None:
        monkeypatch.setattr(backend, "recording", True)  # another thread captures
    else:
        monkeypatch.setattr(backend, "capture_context", lambda graph: raising(error))
    plan, views = joined_plan()
    ids, scale = tokens(1, 2, 3), torch.ones(3)
    load_in_place(plan, views, ids, scale, times=8)
    (kept,) = plan._known.values()
    assert kept.graph is None
    monkeypatch.undo()
    monkeypatch.setattr(backend, "launches_quickly", True)
    kept.uses = USES_TO_CAPTURE
    plan.load({"ids": ids, "scale": scale})
    assert kept.graph is not None


@contextlib.contextmanager
def raising(error):
    raise error
    yield


def test_another_layout_at_a_known_place_is_read_as_it_is():
    plan, views = joined_plan()
    memory, scale = torch.arange(6), torch.ones(3)
    for step in (1, 1, 1, 2, 1, 2, 2, 2, 0):
        plan.load({"ids": memory.as_strided((3,), (step,)), "scale": scale})
        assert views["ids"].tolist() == [0, step, 2 * step, -1]


def test_what_is_refused_at_a_known_place_changes_nothing():
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


def test_places_that_change_all_the_time_are_forgotten():
    plan, views = joined_plan()
    kept = [{"ids": tokens(i, i, i), "scale": torch.ones(3)} for i in range(2 * MOST_PLACES)]
    for inputs in kept + kept[::-1] + kept:
        plan.load(inputs)
        assert torch.equal(views["ids"][:3], inputs["ids"])
    assert len(plan._known) <= MOST_PLACES


def test_a_static_buffer_among_inputs_at_known_places_is_copied_first():
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


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"x": torch.zeros(2, 3, dtype=torch.float64)}, r"'x' is <.* torch.float64 on"),
        ({"x": torch.zeros(2, 4)}, r"'x' is <Tensor \(2, 4\) .*; expected torch.float32 \(2, 3\)"),
        ({"x": torch.zeros(2)}, r"'x' is <Tensor \(2,\)"),
        ({"x": torch.zeros(3, 3)}, r"'(x|n)' is <.*; expected"),
        ({"n": torch.zeros(3, dtype=torch.int64)}, r"'(x|n)' is <.*; expected"),
        ({"x": torch.zeros(2, 3, device="meta")}, "'x' is .* on meta> .*; expected .* on cpu"),
        ({"x": torch.zeros(2, 3).to_sparse()}, "'x' is .*torch.sparse_coo"),
        ({"y": torch.zeros(2)}, "unknown input y; the runner has the slots x, n"),
    ],
)
@pytest.mark.parametrize("requests", [2, 7])
def test_a_mismatched_input_is_refused_by_name_in_a_graph_and_eagerly(change, text, requests):
    """FAULTS 7."""
    n = InputSlot("n", ("tokens",), torch.int64, pad=Pad.zero())
    runner = decode_of(lambda b: b.x * b.n[:, None], (X, n), config={"buckets": [2]})
    good = {"x": torch.ones(2, 3), "n": tokens(1, 2)}
    assert runner.can_run(2).ok
    runner.run(good)
    if requests == 7:
        runner.suspend()
    with pytest.raises(dg.InputError, match=text):
        runner.run({**good, **change})
    runner.resume()
    assert runner.run(good).tolist() == [[1, 1, 1], [2, 2, 2]]


@pytest.mark.parametrize(
    ("inputs", "kind", "text"),
    [
        ({}, dg.InputError, "missing input x; the runner has the slots x"),
        ({"x": None}, dg.InputTypeError, "'x' must be a tensor .*, got None"),
        ({"x": [[1.0, 2.0, 3.0]]}, dg.InputTypeError, r"'x' must be a tensor .*, got \[\[1.0"),
        ({"X": torch.zeros(1, 3)}, dg.InputError, "missing input x and unknown input X.*mean 'x'"),
        ({"x": torch.tensor(1.0)}, dg.InputError, r"with the dims \('tokens', 3\)"),
        ([torch.zeros(1, 3)], dg.InputTypeError, "mapping of slot names to tensors, got list"),
    ],
)
def test_a_missing_or_unusable_input_is_refused(inputs, kind, text):
    runner = double_runner()
    with pytest.raises(kind, match=text):
        runner.run(inputs)
    assert runner.stats().steps == 0


def test_a_refused_input_changes_nothing():
    """FAULTS 7."""
    step = CacheStep()
    runner = decode_of(step)
    good = cache_inputs(3)
    runner.run(good)
    before = [buffer.clone() for buffer in runner.buffers.values()]
    cache = step.cache.clone()
    with pytest.raises(dg.InputError):
        runner.run({**good, "rows": good["rows"].float()})
    assert all(torch.equal(a, b) for a, b in zip(before, runner.buffers.values(), strict=True))
    assert torch.equal(cache, step.cache)


def test_overlapping_and_strided_inputs_are_copied_in():
    runner = double_runner()
    base = torch.arange(20.0)
    sliding = base.as_strided((4, 3), (1, 1))
    assert torch.equal(runner.run({"x": sliding}), sliding * 2)
    turned = base[:12].reshape(3, 4).t()
    assert torch.equal(runner.run({"x": turned}), turned * 2)
    row = torch.tensor([1.0, 2.0, 3.0])
    assert torch.equal(runner.run({"x": row.expand(4, 3)}), row.expand(4, 3) * 2)


def test_an_input_that_lies_in_the_static_buffers_is_copied_in():
    """FAULTS 8."""
    runner = double_runner()
    runner.buffers["x"].copy_(rows_of_x(8))
    shifted = runner.buffers["x"][2:6]
    assert torch.equal(runner.run({"x": shifted}), rows_of_x(8)[2:6] * 2)
    in_place = runner.buffers.view("x", (4, 3))
    in_place.copy_(rows_of_x(4, start=50))
    assert torch.equal(runner.run({"x": in_place}), rows_of_x(4, start=50) * 2)


def test_an_input_with_autograd_history_leaves_it_behind():
    runner = double_runner()
    x = torch.ones(2, 3, requires_grad=True)
    out = runner.run({"x": x * 3})
    assert not out.requires_grad
    assert not runner.buffers["x"].requires_grad
    assert out.eq(6).all()
    assert runner.run({"x": torch.nn.Parameter(torch.ones(2, 3))}).eq(2).all()


def test_inputs_under_inference_mode_are_taken():
    runner = double_runner()
    with torch.inference_mode():
        x = rows_of_x(2)
        assert torch.equal(runner.run({"x": x}), x * 2)
    assert torch.equal(runner.run({"x": x}), x * 2)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_poisoned_padding_leaves_real_rows_bit_identical(poison):
    """FAULTS 36."""
    x = InputSlot("x", ("tokens", 3), torch.float32, pad=Pad.fill(poison))
    weight = torch.randn(3, 3)
    clean = decode_of(lambda b: b.x @ weight, (X,))
    poisoned = decode_of(lambda b: b.x @ weight, (x,))
    for count in (1, 3, 5, 7):
        data = torch.randn(count, 3)
        assert torch.equal(clean.run({"x": data}), poisoned.run({"x": data}))


def test_padded_rows_of_an_earlier_larger_batch_do_not_survive():
    """FAULTS 36."""
    step = CacheStep()
    runner = decode_of(step, config={"buckets": [8], "max_padding": 8})
    runner.run(cache_inputs(8))
    before = step.cache.clone()
    runner.run({"ids": tokens(4), "rows": tokens(2)})
    changed = (step.cache != before).any(dim=1).nonzero().flatten().tolist()
    assert set(changed) <= {2, 31}


def test_capture_writes_scratch_rows_only():
    step = CacheStep()
    step.cache[:31] = torch.randn(31, 6)
    before = step.cache[:31].clone()
    runner = decode_of(step)
    assert torch.equal(step.cache[:31], before)
    runner.invalidate("test")
    runner.run(cache_inputs(8))
    live = step.cache[:31].clone()
    runner.capture()  # while serving: index slots still name real rows
    assert torch.equal(step.cache[:31], live)
    assert runner.stats().captures == 8


def test_a_step_that_writes_its_inputs_finds_pad_values_at_each_warm_up():
    seen = []

    def step(batch):
        if not dg.is_capturing():
            seen.append(batch.rows.clone())
        batch.rows.add_(100)
        return batch.ids.float() + batch.rows

    runner = decode_of(step, (IDS, ROWS), config={"buckets": [4], "warmup": 3}, max_requests=4)
    assert len(seen) == 3  # the first of them shows the outputs
    assert all(rows.eq(31).all() for rows in seen)
    assert runner.run({"ids": tokens(1, 2), "rows": tokens(5, 6)}).tolist() == [106, 108]
    assert runner.run({"ids": tokens(1, 2), "rows": tokens(5, 6)}).tolist() == [106, 108]
