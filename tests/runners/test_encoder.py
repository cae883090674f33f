"""EncoderRunner: packing, what the step sees, outputs of items, bounds, refusals and ranks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import devgraph as dg
from devgraph.runners.encoder import packed
from tests.support.runner_steps import encode_alone, encoder_items, encoder_of

LENGTHS = (3, 9, 1, 20, 7, 7, 5, 12)


def check(runner: dg.EncoderRunner, lengths: Sequence[int] = LENGTHS, seed: int = 0) -> None:
    """Run items of these lengths and compare each with the step over it alone."""
    items = encoder_items(lengths, seed)
    outputs = runner.run(items)
    assert len(outputs) == len(items)
    for item, output in zip(items, outputs, strict=True):
        torch.testing.assert_close(output, encode_alone(item), rtol=0, atol=0)


@pytest.mark.parametrize("policy", ["full", "breakable", "disabled"])
def test_each_item_gets_what_it_gets_alone_in_the_order_of_the_items(policy):
    runner = encoder_of(config=policy)
    for seed, lengths in enumerate([LENGTHS, (5,), (16, 16), tuple(reversed(LENGTHS)), (1,) * 9]):
        check(runner, lengths, seed)
    stats = runner.stats()
    assert (stats.phase, stats.graph_steps > 0) == ("encoder", policy != "disabled")
    assert runner.prove(cases=3).ok == (policy != "disabled")


def test_the_step_sees_numbers_and_offsets_of_the_items_and_padding():
    seen: list[Any] = []

    def look(batch):
        assert batch.item_ids.dtype is batch.offsets.dtype is torch.int32
        seen.append((batch.item_ids.tolist(), batch.offsets.tolist(), batch.requests))

    runner = encoder_of(prepare=look, budgets=[8], max_items=4)
    assert seen[0] == ([-1] * 8, [0] * 5, 4)
    check(runner, (2, 3, 1))
    assert seen[-1] == ([0, 0, 1, 1, 1, 2, -1, -1], [0, 2, 5, 6, 6], 4)
    check(runner, (9,))
    assert seen[-1] == ([0] * 9, [0, 9], 1)


def test_outputs_outlive_later_packs_and_later_runs():
    runner = encoder_of(debug=True)
    items = encoder_items(LENGTHS)
    first = runner.run(items)
    check(runner, (16, 16, 16), seed=5)
    for item, output in zip(items, first, strict=True):
        torch.testing.assert_close(output, encode_alone(item), rtol=0, atol=0)


def test_sixty_four_images_of_five_sizes_have_little_padding_and_no_eager_step():
    lengths = [49, 64, 100, 144, 196] * 13
    random.Random(1).shuffle(lengths)
    runner = encoder_of(budgets=[256, 512, 1024], max_items=16)
    check(runner, lengths[:64])
    stats = runner.stats()
    assert stats.eager == {}
    assert stats.padding_ratio < 0.25
    assert stats.real_rows == sum(lengths[:64])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 40), max_size=30),
    st.sets(st.integers(1, 32), min_size=1, max_size=5),
    st.integers(1, 6),
)
def test_packs_hold_every_item_once_and_fit(lengths, budgets, max_items):
    packs = packed(range(len(lengths)), lengths, sorted(budgets), max_items, max_padding=2)
    assert sorted(item for pack in packs for item in pack) == list(range(len(lengths)))
    for pack in packs:
        assert pack == sorted(pack) and len(pack) <= max_items
        assert len(pack) == 1 or sum(lengths[item] for item in pack) <= max(budgets)


def test_packs_take_the_budgets_that_leave_the_fewest_padded_rows():
    def packs(lengths, budgets, items=None):
        return packed(items or range(len(lengths)), lengths, budgets, 4, max_padding=2)

    assert packs([6, 6, 6, 6], [8, 12]) == [[0, 1], [2, 3]]
    assert packs([8, 8, 8], [8, 20]) == [[0], [1], [2]]
    assert packs([9, 4, 9, 4], [8], [1, 3]) == [[1, 3]]
    assert packs([5, 4, 4, 3, 1], [8]) == [[0], [1, 3], [2, 4]]  # not 5 and 3, which leaves 1 over


def test_an_item_over_the_largest_budget_runs_eagerly_counted_or_raises():
    check(runner := encoder_of(), (40, 16))
    assert runner.stats().eager == {"over_largest_bucket": 1}
    assert runner.stats().graph_steps == 1
    with pytest.raises(dg.InputError, match="over largest bucket"):
        check(encoder_of(strict=True), (40,))


def test_no_items_are_an_empty_batch():
    runner = encoder_of()
    assert runner.run([]) == []
    assert runner.stats().eager == {"empty_batch": 1}
    idle = encoder_of(idle_dummy=True)
    assert idle.run([]) == []
    assert idle.stats().idle_steps == 1


def test_packs_are_made_for_the_budgets_that_have_graphs():
    runner = encoder_of(config={"time_budget_s": 1e-9})
    assert {bucket.bucket: bucket.state for bucket in runner.plan().buckets} == {
        32: "captured",
        16: "time_budget",
    }
    check(runner, (16, 16, 16, 16))
    assert runner.stats().graph_steps == runner.stats().steps == 2


def test_configuration_bounds_budgets_and_items():
    assert encoder_of(config={"buckets": [8, 24]}).buckets == (8, 24)
    assert encoder_of(config={"max_bs": 20}).buckets == (16, 20)
    runner = encoder_of(config={"max_requests": 2})
    check(runner, (8, 8, 8, 8))
    assert runner.stats().graph_steps == 2
    assert {bucket.requests for bucket in runner.plan().buckets} == {2}
    assert runner.stats().requested == "full"
    with pytest.raises(dg.ConfigError, match="encoder bucket 64 is above the capacity of 32"):
        encoder_of(config={"buckets": [64]})


def test_graphs_of_exact_shapes_make_room_for_those_that_ran_last():
    runner = encoder_of(
        budgets=range(1, 33),
        max_items=1,
        max_graphs=2,
        config={"capture": "lazy", "lazy_hits": 1, "max_padding": 1},
    )
    for length in (7, 9, 7, 12, 7, 9):  # 12 takes the place of 9, and 9 then that of 12
        check(runner, (length,), seed=length)
    captured = {b.bucket for b in runner.plan().buckets if b.state == "captured"}
    assert captured == {7, 9}
    stats = runner.stats()
    assert stats.eager == {"not_captured": 3, "evicted": 1}
    assert (stats.graph_steps, stats.captures, stats.padded_rows) == (2, 4, 0)
    assert "made room for 9" in runner.explain()
    assert runner.idle() is False
    runner.invalidate()
    runner.capture(everything=True)
    assert [bucket.key.bucket for bucket in runner.graphs.captured] == [32, 31]
    assert runner.prove().ok


def test_a_bound_on_graphs_is_for_lazy_captures():
    with pytest.raises(
        dg.ConfigError, match=r"max_graphs=2 needs capture='lazy'.* capture='eager'"
    ):
        encoder_of(max_graphs=2)
    with pytest.raises(dg.ConfigError, match="max_graphs: expected at least 1, got 0"):
        encoder_of(max_graphs=0, config={"capture": "lazy"})


def test_a_life_of_an_encoder():
    runner = encoder_of(config={"emulate": True})
    check(runner, (5, 9))
    assert runner.effective_policy == "emulated"
    runner = encoder_of()
    other = encoder_of(share=runner)
    assert other.buffers["item_ids"].data_ptr() == runner.buffers["item_ids"].data_ptr()
    check(other, LENGTHS)
    runner.suspend()
    check(runner, (9,))
    runner.resume()
    runner.invalidate("weights")
    check(runner, (9,))
    runner.capture()
    check(runner, (9,))
    assert runner.stats().eager == {"suspended": 1, "invalidated": 1}
    runner.close()
    with pytest.raises(dg.StateError, match="cannot run: encoder is closed"):
        runner.run(encoder_items((3,)))


def test_host_arguments_and_variants_hold_for_every_pack():
    @dg.region(host_args=("factor",), mutates=("out",))
    def scaled(x, out, *, factor):
        out.copy_(x * factor)

    def forward(batch):
        out = torch.empty_like(batch.x)
        scaled(batch.x, out, factor=batch.host.factor)
        return out + 1 if batch.variant.get("shift") else out

    runner = encoder_of(
        forward,
        variants=[{}, {"shift": True}],
        host_args={"factor": 1},
        outputs=dg.OutputSlot(rows="tokens"),
    )
    items = encoder_items((16, 16, 16))
    for factor, variant in ((3, None), (5, {"shift": True})):
        outputs = runner.run(items, host_args={"factor": factor}, variant=variant)
        for item, output in zip(items, outputs, strict=True):
            assert torch.equal(output, item["x"] * factor + (variant is not None))
    assert runner.stats().eager == {}
    runner.run(items[:1], host_args={"factor": 1}, variant={"shift": 7})
    assert runner.stats().eager == {"unknown_variant": 1}


@pytest.mark.parametrize(
    ("items", "text", "noted"),
    [
        ({"x": 1}, "takes a list of items, each a mapping of slot names to tensors", None),
        (None, "takes a list of items, each a mapping of slot names to tensors", None),
        ([{"x": torch.ones(2, 4)}], "missing input scale; the runner has the slots x, scale", 0),
        (
            [*encoder_items((3,)), {"x": torch.ones(2, 5), "scale": torch.ones(1)}],
            r"input 'x' is <Tensor \(2, 5\) .*; expected",
            1,
        ),
        ([{"x": torch.ones(2, 4), "scale": torch.ones(2)}], "input 'scale' is <", 0),
        ([{"x": torch.ones(0, 4), "scale": torch.ones(1)}], "'x' of an item has no rows", 0),
        ([3], "inputs must be a mapping of slot names", 0),
        ([{**encoder_items((3,))[0], "item_ids": torch.zeros(3)}], "unknown input item_ids", 0),
    ],
)
def test_data_that_is_no_item_is_refused_and_named(items, text, noted):
    runner = encoder_of()
    with pytest.raises(dg.InputError, match=text) as caught:
        runner.run(items)
    named = [text for text in caught.value.__notes__ if text.startswith("in item")]
    assert named == ([] if noted is None else [f"in item {noted} of encoder"])
    assert runner.stats().steps == 0


X = dg.InputSlot("x", ("tokens", 4), torch.float32, pad=dg.Pad.zero())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"inputs": None}, "list of InputSlot objects, got None"),
        ({"budgets": []}, "encoder buckets: the list is empty. Name at least one size"),
        ({"budgets": [0]}, "at least 1, got 0"),
        ({"budgets": None}, "have no defaults; list them"),
        ({"max_items": 0}, "max_items: expected at least 1"),
        ({"outputs": dg.OutputSlot(rows=None)}, "rows=None, but must have rows of items"),
        ({"inputs": [dg.InputSlot("n", (3,), torch.int64, pad=dg.Pad.zero()), X]}, "dims \\(3,\\)"),
        (
            {"inputs": [dg.InputSlot("n", ("requests",), torch.int64, pad=dg.Pad.zero())]},
            "'tokens'",
        ),
        (
            {"inputs": [X, dg.InputSlot("offsets", ("tokens",), torch.int64, pad=dg.Pad.zero())]},
            "'offsets' is declared twice",
        ),
        ({"variants": [{"width": 2}]}, "width is only for decode"),
        ({"data_parallel": "dp"}, "must be a process group of torch.distributed, got 'dp'"),
    ],
)
def test_a_declaration_that_cannot_work_is_refused(options, text):
    made = {"inputs": [X], "budgets": [8], "max_items": 2, "backend": "cpu", **options}
    with pytest.raises(dg.ConfigError, match=text):
        dg.EncoderRunner(lambda batch: batch.x, **made)


def test_a_result_that_is_not_as_declared_is_refused_without_graphs_too():
    runner = encoder_of(
        lambda batch: batch.x.sum(0), config="disabled", outputs=dg.OutputSlot(rows="tokens")
    )
    with pytest.raises(dg.ConfigError, match="declared with rows='tokens' along dim 0"):
        runner.run(encoder_items((3, 4)))


def test_autograd_history_of_items_is_left_behind():
    items = encoder_items((3, 4))
    items[0]["x"].requires_grad_()
    assert not any(output["attended"].requires_grad for output in encoder_of().run(items))
