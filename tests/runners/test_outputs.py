"""Outputs: shared buffers, views of real rows, leases, copies, feedback."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch

import devgraph as dg
from devgraph.runners import OutputSlot
from tests.support.runner_steps import (
    IDS,
    CacheStep,
    X,
    cache_inputs,
    decode_of,
    double_runner,
    rows_of_x,
    tokens,
)


def addresses(runner, counts):
    return {n: runner.run({"x": rows_of_x(n)}).data_ptr() for n in counts}


def test_all_buckets_write_one_output_buffer():
    runner = double_runner()
    assert len(set(addresses(runner, (1, 2, 3, 8)).values())) == 1


def test_outputs_hold_the_real_rows_only():
    runner = double_runner()
    for count in (1, 3, 5, 8):
        out = runner.run({"x": rows_of_x(count)})
        assert torch.equal(out, rows_of_x(count) * 2)


def test_a_tree_of_outputs_keeps_its_structure_and_rows():
    def step(batch):
        sums = batch.ids.float().cumsum(0)
        return {
            "per_token": batch.ids * 2,
            "pair": (batch.ids.reshape(batch.requests, -1).sum(1), [sums[-1:]]),
            "none": None,
            "turned": torch.stack([batch.ids, batch.ids + 1]),
        }

    slots = {
        "per_token": OutputSlot(rows="tokens"),
        "pair": (OutputSlot(rows="requests"), [OutputSlot(rows=None)]),
        "none": OutputSlot(rows=None),
        "turned": OutputSlot(rows="tokens", dim=1),
    }
    runner = decode_of(step, (IDS,), outputs=slots, variants=[{"width": 2}])
    out = runner.run({"ids": tokens(1, 2, 3, 4, 5, 6)}, variant={"width": 2})
    assert out["per_token"].tolist() == [2, 4, 6, 8, 10, 12]
    assert isinstance(out["pair"], tuple)
    assert out["pair"][0].tolist() == [3, 7, 11]
    assert out["pair"][1][0].tolist() == [21]
    assert out["none"] is None
    assert out["turned"].tolist() == [[1, 2, 3, 4, 5, 6], [2, 3, 4, 5, 6, 7]]
    eager = runner.run({"ids": tokens(1, 2, 3)}, variant={"width": 3})
    assert list(eager) == list(out)


def test_a_caller_may_change_the_containers_it_was_given():
    runner = decode_of(lambda b: {"y": b.x + 1, "z": [b.x]}, (X,))
    first = runner.run({"x": rows_of_x(2)})
    first.pop("y")
    first["z"].clear()
    second = runner.run({"x": rows_of_x(2)})
    assert set(second) == {"y", "z"}
    assert len(second["z"]) == 1


@pytest.mark.parametrize(
    ("step", "slots", "text"),
    [
        (lambda b: b.x.sum(0), OutputSlot(rows="tokens"), r"shape \(3,\) .* needs 8 rows"),
        (lambda b: b.x[:1], OutputSlot(rows="requests"), r"shape \(1, 3\)"),
        (lambda b: b.x, OutputSlot(rows="tokens", dim=4), "along dim 4"),
        (lambda b: {"y": b.x}, {"z": OutputSlot()}, "must have the same structure"),
        (lambda b: (b.x, 3), OutputSlot(), "can only return tensors"),
        (lambda b: None, OutputSlot(), "at least one tensor"),
        (lambda b: b.x.to_sparse(), OutputSlot(), "has layout torch.sparse_coo"),
    ],
)
def test_outputs_that_do_not_fit_their_declaration_are_refused(step, slots, text):
    with pytest.raises(dg.ConfigError, match=text):
        decode_of(step, (X,), outputs=slots)


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (lambda b: b.x if b.tokens == 8 else b.x.double(), "returned torch.float64"),
        (lambda b: b.x if b.tokens == 8 else (b.x, b.x), "must not depend on the size"),
        (lambda b: b.x if b.tokens == 8 else None, "returned None.* for"),
        (lambda b: (b.x, None if b.tokens == 8 else b.x), r"returned <.*> for .* it returned None"),
        (lambda b: b.x.repeat(1, 1 if b.tokens == 8 else 2), r"\(4, 6\).*needs .*\(4, 3\)"),
    ],
)
def test_a_smaller_bucket_that_returns_something_else_is_refused(step, text):
    runner = decode_of(step, (X,), captured=False)
    with pytest.raises(dg.ConfigError, match=text):
        runner.capture()
    assert runner.can_run(8).ok  # the largest was captured before and stays usable
    assert runner.can_run(4).reason is dg.Reason.CAPTURE_FAILED
    assert "ConfigError" in runner.explain()


def test_variants_share_the_output_memory():
    runner = decode_of(
        lambda b: b.x * (3 if b.variant.get("lora") else 2), (X,), variants=[{}, {"lora": True}]
    )
    plain = runner.run({"x": rows_of_x(4)})
    first = plain.clone()
    tuned = runner.run({"x": rows_of_x(4)}, variant={"lora": True})
    assert torch.equal(first, rows_of_x(4) * 2)
    assert torch.equal(tuned, rows_of_x(4) * 3)
    assert plain.data_ptr() == tuned.data_ptr()


def test_variants_may_return_different_outputs():
    def step(batch):
        return (batch.x, batch.x.double()) if batch.variant else batch.x.sum(1)

    runner = decode_of(step, (X,), variants=[{}, {"hidden": True}])
    assert runner.run({"x": rows_of_x(2)}).shape == (2,)
    both = runner.run({"x": rows_of_x(2)}, variant={"hidden": True})
    assert [t.dtype for t in both] == [torch.float32, torch.float64]


@pytest.mark.parametrize("count", [1, 3, 8, 20])
def test_an_output_fed_back_as_the_next_input_is_read_before_it_is_overwritten(count):
    runner = double_runner()
    x = rows_of_x(count)
    for _ in range(4):
        x = runner.run({"x": x})
    assert torch.equal(x, rows_of_x(count) * 16)
    reasons = runner.stats().eager
    assert reasons == ({"over_largest_bucket": 4} if count > 8 else {})


def test_part_of_an_output_may_be_fed_back_into_another_bucket():
    runner = double_runner()
    out = runner.run({"x": rows_of_x(8)})
    again = runner.run({"x": out[2:5]})
    assert torch.equal(again, rows_of_x(8)[2:5] * 4)


def test_the_next_run_overwrites_an_output_and_clone_keeps_it():
    """FAULTS 11."""
    runner = double_runner()
    view = runner.run({"x": rows_of_x(2)})
    kept = runner.run({"x": rows_of_x(2)}, clone=True)
    runner.run({"x": rows_of_x(2, start=100)})
    assert torch.equal(view, rows_of_x(2, start=100) * 2)
    assert torch.equal(kept, rows_of_x(2) * 2)


def test_an_output_read_after_the_next_run_is_detected_in_debug_mode():
    """FAULTS 11."""
    runner = double_runner(debug=True)
    out = runner.run({"x": rows_of_x(2)})
    row = out[1]
    assert out.sum().item() == rows_of_x(2).sum().item() * 2
    runner.run({"x": rows_of_x(2)})
    for read in (
        lambda: out + 1,
        lambda: out.tolist(),
        lambda: torch.stack([out, out]),
        lambda: row.sum(),
        lambda: out[0],
        lambda: float(row[0]),
    ):
        with pytest.raises(dg.StaleOutputError, match="of decode was read .*clone=True"):
            read()
    assert "expired" in repr(out)


def test_what_was_computed_from_a_lease_is_free_of_it():
    runner = double_runner(debug=True)
    out = runner.run({"x": rows_of_x(2)})
    copies = [out.clone(), out + 0, out.detach().clone(), torch.cat([out]), out.float().clone()]
    runner.run({"x": rows_of_x(2, start=9)})
    for kept in copies:
        assert torch.equal(kept, rows_of_x(2) * 2)
        assert type(kept) is torch.Tensor


def test_views_of_a_lease_expire_with_it():
    runner = double_runner(debug=True)
    out = runner.run({"x": rows_of_x(2)})
    views = [out.t(), out.view(-1), out.detach(), out.unbind()[0], out.chunk(2)[1]]
    runner.run({"x": rows_of_x(2)})
    for view in views:
        with pytest.raises(dg.StaleOutputError):
            view.sum()


def test_a_current_lease_may_be_fed_back_and_an_expired_one_may_not():
    """FAULTS 11."""
    runner = double_runner(debug=True)
    first = runner.run({"x": rows_of_x(2)})
    second = runner.run({"x": first})
    assert torch.equal(second.clone(), rows_of_x(2) * 4)
    with pytest.raises(dg.StaleOutputError):
        runner.run({"x": first})


def test_leases_cover_every_output_of_a_tree_and_eager_steps():
    runner = decode_of(lambda b: {"y": b.x + 1}, (X,), debug=True)
    for count in (2, 20):  # in a graph, and over the largest bucket
        out = runner.run({"x": rows_of_x(count)})
        assert torch.equal(out["y"].clone(), rows_of_x(count) + 1)
        runner.run({"x": rows_of_x(1)})
        with pytest.raises(dg.StaleOutputError):
            out["y"].sum()


def test_the_environment_switches_debug_on(monkeypatch):
    monkeypatch.setenv("DEVGRAPH_DEBUG", "1")
    out = double_runner().run({"x": rows_of_x(1)})
    assert type(out) is not torch.Tensor
    monkeypatch.setenv("DEVGRAPH_DEBUG", "0")
    assert type(double_runner().run({"x": rows_of_x(1)})) is torch.Tensor
    monkeypatch.delenv("DEVGRAPH_DEBUG")
    assert type(double_runner().run({"x": rows_of_x(1)})) is torch.Tensor


def test_outputs_do_not_require_grad_although_weights_do():
    weight = torch.randn(3, 3, requires_grad=True)
    runner = decode_of(lambda b: b.x @ weight, (X,))
    for count in (2, 20):
        assert not runner.run({"x": rows_of_x(count)}).requires_grad


def test_all_buckets_stay_right_in_every_order_after_all_are_captured():
    @dg.region(mutates=("out",))
    def mix(hidden, out):
        torch.mul(hidden.flip(0), 2, out=out)

    def step(batch):
        hidden = batch.x + 1
        for _ in range(3):
            out = torch.empty_like(hidden)
            mix(hidden, out)
            hidden = out + hidden
        return hidden

    def expected(x):
        hidden = x + 1
        for _ in range(3):
            hidden = hidden.flip(0) * 2 + hidden
        return hidden

    runner = decode_of(
        step, (X,), config={"policy": "breakable", "buckets": [1, 2, 4]}, max_requests=4
    )
    for order in itertools.permutations([1, 2, 4]):
        for count in order:
            x = torch.randn(count, 3)
            assert torch.equal(runner.run({"x": x}), expected(x)), order


def test_ten_thousand_runs_hold_no_memory():
    import gc

    runner = double_runner(config={"buckets": [8]})
    inputs = [{"x": rows_of_x(count)} for count in (5, 6, 8)]
    for batch in inputs:
        runner.run(batch)
    gc.collect()
    before = len(gc.get_objects())
    for index in range(10_000):
        runner.run(inputs[index % 3])
    gc.collect()
    assert len(gc.get_objects()) - before < 50
    assert runner.stats().graph_steps == 10_003


def test_a_runner_cannot_be_pickled_or_copied():
    """FAULTS 29."""
    runner = double_runner(captured=False)
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(runner)
    with pytest.raises(TypeError, match="cannot be pickled"):
        copy.deepcopy(runner)


def test_a_region_that_raises_at_replay_leaves_the_runner_usable():
    """FAULTS 25."""
    fail = []

    @dg.region(mutates=("out",))
    def risky(x, out):
        if fail:
            raise RuntimeError("the region failed")
        out.copy_(x * 2)

    def step(batch):
        out = torch.empty_like(batch.x)
        risky(batch.x, out)
        return out + 1

    runner = decode_of(step, (X,), config="breakable")
    fail.append(1)
    with pytest.raises(RuntimeError, match="the region failed"):
        runner.run({"x": rows_of_x(2)})
    fail.clear()
    assert torch.equal(runner.run({"x": rows_of_x(2)}), rows_of_x(2) * 2 + 1)
    assert runner.stats().graph_steps == 1


def test_state_and_outputs_follow_a_sequence_of_mixed_batch_sizes():
    step = CacheStep()
    runner = decode_of(step)
    for seed in range(30):
        count = 1 + seed * 7 % 11  # up to 11: some are over the largest bucket
        inputs = cache_inputs(count, seed)
        want = step.expected(step.cache.clone(), **inputs)
        torch.testing.assert_close(runner.run(inputs), want)
    stats = runner.stats()
    assert stats.graph_steps and stats.eager == {"over_largest_bucket": 30 - stats.graph_steps}
