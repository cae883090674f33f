"""Graphs: the choice of a graph for a batch."""

from __future__ import annotations

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import devgraph as dg
from devgraph import Reason
from devgraph.runners import Decision, GraphKey, InputSlot, Pad
from tests.support.runner_steps import (
    OFFSETS,
    CacheStep,
    X,
    cache_inputs,
    decode_of,
    double,
    double_runner,
    rows_of_x,
    tokens,
)


def test_a_batch_takes_the_smallest_bucket_that_holds_it():
    runner = double_runner()
    assert list(runner.buckets) == [1, 2, 4, 8]
    assert [runner.can_run(n).bucket for n in range(1, 9)] == [1, 2, 4, 4, 8, 8, 8, 8]
    decision = runner.can_run(3)
    assert decision == Decision(Reason.GRAPH, GraphKey((), 4))


def test_can_run_counts_nothing():
    runner = double_runner()
    for n in (0, 1, 5, 99):
        runner.can_run(n)
    assert runner.stats().steps == 0
    assert runner.stats().eager == {}


@settings(max_examples=60, deadline=None)
@given(requests=st.integers(1, 20), width=st.sampled_from([1, 2, 3]), lora=st.booleans())
def test_run_does_what_can_run_says(requests, width, lora):
    runner = shared_runner()
    variant = {"lora": True} if lora else {}
    before = runner.stats()
    decision = runner.can_run(requests, requests * width, variant)
    x = torch.randn(requests * width, 3)
    out = runner.run({"x": x, "n": torch.ones(requests)}, variant={**variant, "width": width})
    factor = (3 if lora else 2) * torch.ones(requests).repeat_interleave(width)[:, None]
    assert torch.equal(out, x * factor)
    after = runner.stats()
    assert after.steps == before.steps + 1
    assert after.graph_steps == before.graph_steps + decision.ok
    reason = decision.reason.value
    assert after.eager.get(reason, 0) == before.eager.get(reason, 0) + (not decision.ok)


_SHARED: list[dg.DecodeRunner] = []


def shared_runner() -> dg.DecodeRunner:
    """One runner with slots for tokens and requests and three variants, for property tests."""
    if not _SHARED:
        n = InputSlot("n", ("requests",), torch.float32, pad=Pad.fill(1))

        def step(batch):
            factor = 3 if batch.variant.get("lora") else 2
            return batch.x * factor * batch.n.repeat_interleave(batch.width or 1)[:, None]

        _SHARED.append(
            decode_of(
                step,
                (X, n),
                variants=[{}, {"width": 2}, {"lora": True}],
                outputs=dg.OutputSlot(rows="tokens"),
                config={"buckets": [2, 4, 8]},
            )
        )
    return _SHARED[0]


@pytest.mark.parametrize(
    ("requests", "total", "variant", "reason"),
    [
        (3, 3, {}, Reason.GRAPH),
        (3, 6, {}, Reason.GRAPH),
        (3, 6, {"width": 2}, Reason.GRAPH),
        (3, 9, {}, Reason.UNKNOWN_WIDTH),
        (3, 7, {}, Reason.UNKNOWN_WIDTH),
        (3, 6, {"lora": True}, Reason.UNKNOWN_WIDTH),
        (3, 3, {"lora": True}, Reason.GRAPH),
        (3, 3, {"lora": False}, Reason.UNKNOWN_VARIANT),
        (9, 9, {}, Reason.OVER_LARGEST_BUCKET),
        (0, 0, {}, Reason.EMPTY_BATCH),
    ],
)
def test_width_and_variant_are_part_of_the_graph_key(requests, total, variant, reason):
    assert shared_runner().can_run(requests, total, variant).reason is reason


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda r: r.can_run(-1), dg.InputError),
        (lambda r: r.can_run(3, -3), dg.InputError),
        (lambda r: r.can_run(2.0), dg.InputTypeError),
        (lambda r: r.can_run(True), dg.InputTypeError),
        (lambda r: r.can_run("3"), dg.InputTypeError),
        (lambda r: r.can_run(3, None, {"lora": [1]}), dg.InputTypeError),
        (lambda r: r.can_run(4, 4, {"width": 2}), dg.InputError),
        (lambda r: r.can_run(3, 6, {"width": 1}), dg.InputError),
    ],
)
def test_a_size_that_is_no_count_is_refused(call, kind):
    """FAULTS 5."""
    with pytest.raises(kind) as caught:
        call(double_runner(captured=False, variants=[{}, {"width": 2}, {"lora": True}]))
    assert isinstance(caught.value, ValueError)


def test_an_over_large_batch_runs_eagerly_and_whole():
    step = CacheStep()
    runner = decode_of(step)
    inputs = cache_inputs(13)
    want = step.expected(step.cache.clone(), **inputs)
    torch.testing.assert_close(runner.run(inputs), want)
    assert runner.stats().eager == {"over_largest_bucket": 1}


def test_mostly_padding_runs_eagerly():
    runner = double_runner(config={"buckets": [1, 8]})
    assert runner.can_run(3).reason is Reason.PADDING
    assert runner.can_run(4).ok
    assert torch.equal(runner.run({"x": rows_of_x(3)}), rows_of_x(3) * 2)
    assert runner.stats().eager == {"padding": 1}
    assert double_runner(config={"buckets": [1, 8], "max_padding": 3}).can_run(3).ok


def test_a_decision_may_be_handed_over():
    runner = double_runner()
    larger = runner.can_run(8)
    assert torch.equal(runner.run({"x": rows_of_x(2)}, decision=larger), rows_of_x(2) * 2)
    eager = Decision(Reason.VOTED_EAGER)
    runner.run({"x": rows_of_x(2)}, decision=eager)
    stats = runner.stats()
    assert {b.key: b.hits for b in stats.buckets}["8"] == 1
    assert stats.eager == {"voted_eager": 1}
    runner.run({"x": rows_of_x(2)})
    assert {b.key: b.hits for b in runner.stats().buckets}["2"] == 1


def test_a_decision_brings_the_variant_that_it_was_made_for():
    def step(batch):
        return batch.x * (10 if batch.variant.get("lora") else 2)

    runner = decode_of(step, (X,), variants=[{}, {"lora": True}])
    x = rows_of_x(3)
    for _ in range(2):  # in graphs, and eagerly
        lora, plain = runner.can_run(3, variant={"lora": True}), runner.can_run(3)
        assert runner.run({"x": x}, decision=lora).eq(x * 10).all()
        assert runner.run({"x": x}, decision=plain).eq(x * 2).all()
        runner.invalidate()
    runner.capture()
    with pytest.raises(dg.InputError, match=r"bucket 4 \(lora=True\), but the batch .* variant {}"):
        runner.run({"x": x}, decision=runner.can_run(3, variant={"lora": True}), variant={})
    with pytest.raises(dg.InputError, match="no declared variant has 'width2'"):
        runner.run({"x": x}, decision=Decision(Reason.GRAPH, GraphKey((("width2", 1),), 4)))


def test_a_decision_for_wide_requests_counts_them_by_its_width():
    runner = decode_of(lambda batch: batch.x.view(-1, 4, 3).sum(1), (X,), variants=[{"width": 4}])
    x = rows_of_x(8)
    decision = runner.can_run(2, variant={"width": 4})
    assert runner.run({"x": x}, decision=decision).shape == (2, 3)


def test_offsets_without_a_row_are_of_no_batch():
    runner = decode_of(lambda batch: batch.x + batch.offsets[1:, None], (X, OFFSETS))
    with pytest.raises(dg.InputError, match="'offsets' has no rows"):
        runner.run({"x": rows_of_x(2), "offsets": tokens()})
    assert runner.run({"x": rows_of_x(0), "offsets": tokens(0)}).shape == (0, 3)


@pytest.mark.parametrize("pad", [Pad.zero(), Pad.last()])
def test_a_decision_for_a_graph_takes_a_batch_without_rows(pad):
    runner = decode_of(double, (attrs.evolve(X, pad=pad),))
    decision = runner.can_run(2)
    assert runner.run({"x": rows_of_x(0)}, decision=decision).shape[0] == 0
    assert runner.stats().graph_steps == 1


def test_a_decision_that_does_not_fit_is_refused():
    runner = double_runner()
    with pytest.raises(dg.InputError, match="bucket 2, but the batch has 3 requests"):
        runner.run({"x": rows_of_x(3)}, decision=runner.can_run(2))
    with pytest.raises(dg.StateError, match="on this rank decode .*not captured"):
        runner.run({"x": rows_of_x(1)}, decision=Decision(Reason.GRAPH, GraphKey((), 3)))
    with pytest.raises(
        dg.InputError, match="for an empty batch, but the batch has 1 request, 1 token"
    ):
        runner.run({"x": rows_of_x(1)}, decision=runner.can_run(0))
    assert runner.stats().steps == 0
