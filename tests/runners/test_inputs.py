"""Input data: refused by name where it does not fit, and free of what lay there before."""

from __future__ import annotations

import pytest
import torch

import devgraph as dg
from devgraph.runners import InputSlot, Pad
from tests.support.runner_steps import (
    IDS,
    ROWS,
    CacheStep,
    X,
    cache_inputs,
    decode_of,
    double_runner,
    rows_of_x,
    tokens,
)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"x": torch.zeros(2, 3, dtype=torch.float64)}, r"'x' is <.* torch.float64 on"),
        (
            {"x": torch.zeros(2, 3).double()},
            r"cpu>; expected .*; convert it with \.to\(torch\.float32\)",
        ),
        ({"x": torch.zeros(2, 4)}, r"'x' is <Tensor \(2, 4\) .*; expected torch.float32 \(2, 3\)"),
        ({"x": torch.zeros(2)}, r"'x' is <Tensor \(2,\)"),
        ({"x": torch.zeros(3, 3)}, r"'(x|n)' is <.*; expected"),
        ({"n": torch.zeros(3, dtype=torch.int64)}, r"'(x|n)' is <.*; expected"),
        ({"x": torch.zeros(2, 3, device="meta")}, "'x' is .* on meta>; expected .* on cpu"),
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
    assert len(seen) == 4  # The first run shows the outputs; three warm-up runs follow.
    assert all(rows.eq(31).all() for rows in seen)
    assert runner.run({"ids": tokens(1, 2), "rows": tokens(5, 6)}).tolist() == [106, 108]
    assert runner.run({"ids": tokens(1, 2), "rows": tokens(5, 6)}).tolist() == [106, 108]


@pytest.mark.parametrize("start", [0, 5])
@pytest.mark.parametrize("where", ["graph", "eager"])
def test_offsets_on_the_host_begin_with_their_start(start, where):
    """Rows before the first offset would belong to no request."""
    slots = [X, InputSlot("starts", ("requests+1",), torch.int64, pad=Pad.last(start))]
    runner = decode_of(lambda b: b.x + b.starts[:-1, None], slots, config={"buckets": [2]})
    if where == "eager":
        runner.suspend()
    for shift in (0, 1, 0, 2):  # checked, then recognized
        inputs = {"x": torch.ones(2, 3), "starts": tokens(0, 1, 2) + start + shift}
        if shift:
            with pytest.raises(dg.InputError, match=rf"begin with {start + shift}, so .* {start},"):
                runner.run(inputs)
        else:
            assert runner.run(inputs)[:, 0].tolist() == [1 + start, 2 + start]


@pytest.mark.parametrize("where", ["graph", "eager"])
def test_offsets_on_the_host_do_not_decrease_and_end_within_the_tokens(where):
    starts = InputSlot("starts", ("requests+1",), torch.int64, pad=Pad.last())
    other = InputSlot("other", ("requests+1",), torch.int64, pad=Pad.last())

    def prefill_of(*slots):
        runner = dg.PrefillRunner(
            lambda batch: batch.x * 2, [X, *slots], backend="cpu", max_tokens=8, max_requests=4
        )
        runner.capture()
        if where == "eager":
            runner.suspend()
        return runner

    runner, x = prefill_of(starts), torch.ones(4, 3)
    for right, wrong, message in (
        ([0, 3, 4], [0, 5, 4], "decrease at index 2, from 5 to 4"),
        ([0, 1, 3, 4], [0, 3, 2, 4], "decrease at index 2, from 3 to 2"),
        ([0, 0, 2], [0, -1, 4], "decrease at index 1, from 0 to -1"),
        (
            [0, 4],
            [0, 9],
            r"end with 9 at index 1, but the batch has 4 tokens\. The last offset must",
        ),
    ):
        for _ in range(2):  # checked, then recognized
            assert runner.run({"x": x, "starts": tokens(*right)}).shape == x.shape
            with pytest.raises(
                dg.InputError, match=f"'starts' has cumulative offsets that {message}"
            ):
                runner.run({"x": x, "starts": tokens(*wrong)})
    pages = {"starts": tokens(0, 4), "other": tokens(0, 9)}  # ``other`` may count pages
    assert prefill_of(starts, other).run({"x": x, **pages}).shape == x.shape


@pytest.mark.parametrize("where", ["graph", "eager"])
def test_debug_mode_refuses_values_outside_the_range_of_a_slot(where: str):
    ids = InputSlot("ids", ("tokens",), torch.int64, pad=Pad.fill(9), low=1, high=5)

    def runner_of(*, debug: bool) -> dg.DecodeRunner:
        runner = decode_of(lambda batch: batch.ids * 2, (ids,), debug=debug)
        if where == "eager":
            runner.suspend()
        return runner

    runner = runner_of(debug=True)
    for _ in range(2):  # checked, then recognized
        assert runner.run({"ids": tokens(1, 4, 9)}).tolist() == [2, 8, 18]  # 9 is the pad value
        for wrong in (0, 5, -1):
            message = f"'ids' has the value {wrong}, but its slot declares the range 1 to 4"
            with pytest.raises(dg.InputError, match=message):
                runner.run({"ids": tokens(1, wrong)})
    assert runner_of(debug=False).run({"ids": tokens(7)}).tolist() == [14]
