"""Batches as a newcomer fills, keeps and shares them: right, or an error that says what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import devgraph as dg

POLICIES = ("full", "breakable", "piecewise")

WIDTH = 8


def _decode(forward: Any, **options: Any) -> dg.DecodeRunner:
    slots = [
        dg.InputSlot("x", ("tokens", WIDTH), torch.float32, pad=dg.Pad.zero()),
        dg.InputSlot("scale", ("requests",), torch.float32, pad=dg.Pad.fill(1.0)),
    ]
    return dg.DecodeRunner(forward, slots, backend="cpu", max_requests=4, **options)


def _scaled(batch: Any) -> torch.Tensor:
    return batch.x * batch.scale[:, None]


@pytest.mark.parametrize("name", ["end", "over", "live"])
def test_slot_may_have_any_name_that_is_not_reserved(name: str):
    slot = dg.InputSlot(name, ("tokens",), torch.float32, pad=dg.Pad.zero())
    runner = dg.DecodeRunner(
        lambda batch: getattr(batch, name) * 2, [slot], backend="cpu", max_requests=2
    )
    runner.capture()
    for rows in (2, 5):  # in a graph, and eagerly
        assert torch.equal(runner.run({name: torch.ones(rows)}), torch.full((rows,), 2.0))
    runner.close()


def test_slots_that_disagree_about_the_batch_are_refused():
    runner = _decode(_scaled)
    runner.capture()
    for rows, requests, text in (
        (3, 4, "only 3 tokens for 4 requests"),
        (0, 4, "only 0 tokens for 4 requests"),
        (3, 0, "the batch has 3 tokens but no requests"),
    ):
        with pytest.raises(dg.InputError, match=text):
            runner.run({"x": torch.ones(rows, WIDTH), "scale": torch.ones(requests)})
    runner.close()


def test_proof_of_a_runner_without_graphs_says_that_nothing_was_compared():
    runner = _decode(_scaled, config="disabled")
    runner.capture()
    report = runner.prove()
    assert not report.ok
    assert "nothing was compared" in str(report)
    runner.close()


def _prefill(policy: str, body: Any) -> dg.PrefillRunner:
    slots = [
        dg.InputSlot("x", ("tokens", WIDTH), torch.float32, pad=dg.Pad.zero()),
        dg.InputSlot("starts", ("requests+1",), torch.int64, pad=dg.Pad.last()),
    ]
    runner = dg.PrefillRunner(
        body,
        slots,
        tail=lambda hidden, batch: hidden[batch.starts[1:] - 1],
        config={"policy": policy, "buckets": [8, 16]},
        backend="cpu",
        max_tokens=16,
        max_requests=3,
    )
    runner.capture()
    return runner


SHAPES = ((3, 2), (20, 20), (5, 2, 9), (1, 2), (1, 1, 1, 1, 1), (2, 7))
"""Lengths of batches; (20, 20) has too many tokens for a graph, the ones too many requests."""


def _first_length_cases():
    """Yield inputs of batches, and their rows times the length of the first request."""
    for lengths in SHAPES:
        starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
        x = torch.randn(sum(lengths), WIDTH)
        yield x, starts, (x * lengths[0])[starts[1:] - 1]


@pytest.mark.parametrize("policy", [*POLICIES, "disabled"])
def test_batch_that_a_step_keeps_shows_the_requests_of_the_run_after_eager_ones(policy: str):
    kept = {}

    @dg.region(mutates=("out",))
    def first_length(x, out):
        out.copy_(x * kept["batch"].starts[1])

    def body(batch):
        kept["batch"] = batch
        out = torch.empty_like(batch.x)
        first_length(batch.x, out)
        return out

    runner = _prefill(policy, body)
    for x, starts, expected in _first_length_cases():
        assert torch.equal(runner.run({"x": x, "starts": starts}), expected)
    runner.close()


@pytest.mark.parametrize("policy", ["breakable", "piecewise", "disabled"])
def test_region_reads_what_the_engine_keeps_of_the_step_by_context(policy: str):
    current = {"starts": torch.tensor([0, 1])}

    @dg.region(mutates=("out",), context=lambda: current["starts"])
    def first_length(x, out, *, context):
        out.copy_(x * context[1])

    def body(batch):
        out = torch.empty_like(batch.x)
        first_length(batch.x, out)
        return out

    runner = _prefill(policy, body)
    for x, starts, expected in _first_length_cases():
        current["starts"] = starts
        assert torch.equal(runner.run({"x": x, "starts": starts}), expected)
    runner.close()


def test_token_data_of_an_eager_step_that_is_over_is_refused():
    kept = {}

    @dg.region(mutates=("out",))
    def doubled(x, out):
        out.copy_(x + kept["batch"].x[: len(x)])

    def body(batch):
        kept["batch"] = batch
        out = torch.empty_like(batch.x)
        doubled(batch.x, out)
        return out

    runner = _prefill("breakable", body)
    over = {"x": torch.ones(20, WIDTH), "starts": torch.tensor([0, 20])}
    assert torch.equal(runner.run(over), torch.full((1, WIDTH), 2.0))
    with pytest.raises(dg.StateError, match="pass the batch or the tensor as an argument"):
        runner.run({"x": torch.ones(7, WIDTH), "starts": torch.tensor([0, 7])})
    runner.close()


def test_runner_shows_what_it_is():
    runner = _decode(_scaled)
    assert repr(runner) == "<DecodeRunner decode: full on cpu, 0 of 3 graphs captured>"
    runner.capture()
    assert repr(runner) == "<DecodeRunner decode: full on cpu, 3 of 3 graphs captured>"
    runner.close()
    assert repr(runner) == "<DecodeRunner decode: closed on cpu, 0 of 3 graphs captured>"


def test_unknown_key_of_a_phase_lists_only_what_can_be_set():
    with pytest.raises(dg.ConfigError, match="Did you mean 'policy'") as caught:
        _decode(_scaled, config={"polcy": "full"})
    assert "explicit" not in str(caught.value)
