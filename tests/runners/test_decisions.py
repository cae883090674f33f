"""Decisions: variants, reasons, and the errors of strict runners."""

from __future__ import annotations

import math

import pytest
import torch

import devgraph as dg
from devgraph import Reason
from devgraph.runners import Decision
from tests.support.runner_steps import (
    X,
    double_runner,
    rows_of_x,
)


@pytest.mark.parametrize(
    ("prepare", "inputs", "kind", "text"),
    [
        (lambda r: None, 9, dg.InputError, r"9 requests.*bucket \(the largest is 8\); split"),
        (lambda r: None, 3, dg.InputError, "padding.*max_padding"),
        (lambda r: r.suspend(), 1, dg.StateError, "suspended; call resume"),
        (lambda r: r.invalidate("new weights"), 1, dg.StateError, r"invalidated \(new weights\)"),
    ],
)
def test_strict_raises_what_would_run_eagerly(prepare, inputs, kind, text):
    """FAULTS 4."""
    runner = double_runner(config={"buckets": [1, 8]}, strict=True)
    prepare(runner)
    with pytest.raises(kind, match=text):
        runner.run({"x": rows_of_x(inputs)})
    assert runner.stats().steps == 0


def test_strict_before_capture_says_to_capture():
    with pytest.raises(dg.StateError, match="not captured; call capture"):
        double_runner(strict=True, captured=False).run({"x": rows_of_x(1)})


def test_every_reason_but_graph_and_by_choice_has_an_error_with_a_way_out():
    from devgraph.runners.decisions import refusal

    for reason in Reason:
        if reason in (Reason.GRAPH, Reason.EMPTY_BATCH):
            continue
        error = refusal(Decision(reason), "a batch")
        assert isinstance(error, dg.DeviceGraphError)
        assert "a batch cannot run in a graph" in str(error)
        assert ";" in str(error)


def test_a_name_that_no_variant_declares_is_refused_with_the_nearest():
    runner = double_runner(variants=[{}, {"lora": True}])
    for ask in (lambda v: runner.can_run(2, variant=v), lambda v: run_x(runner, v)):
        with pytest.raises(dg.InputError, match=r"has 'lorra'. .*Did you mean 'lora'\?"):
            ask({"lorra": True})
    assert runner.can_run(2, variant={"lora": "other"}).reason is Reason.UNKNOWN_VARIANT
    with pytest.raises(
        dg.InputError, match=r"\{'lora': 'other'\} is none of \[\{\}, \{'lora': True"
    ):
        run_x(double_runner(variants=[{}, {"lora": True}], strict=True), {"lora": "other"})
    assert runner.stats().steps == 0


def run_x(runner, variant):
    return runner.run({"x": rows_of_x(2)}, variant=variant)


def test_declared_variants_are_the_runners_own():
    lora = {"lora": True}
    runner = dg.DecodeRunner(
        lambda batch: batch.x * 2 if batch.variant.get("lora") else batch.x,
        [X],
        variants=[{}, lora],
        config={"buckets": [4]},
        backend="cpu",
        max_requests=4,
    )
    lora["lora"] = False
    runner.capture()
    out = runner.run({"x": rows_of_x(3)}, variant={"lora": True})
    assert torch.equal(out, rows_of_x(3) * 2)


@pytest.mark.parametrize("value", [torch.tensor(1), torch.tensor([1, 2]), math.nan])
def test_values_of_a_variant_that_equal_nothing_are_refused(value):
    with pytest.raises(dg.InputTypeError, match="lora="):
        double_runner(variants=[{}, {"lora": value}], captured=False)
    with double_runner(variants=[{}, {"lora": True}]) as runner:
        with pytest.raises(dg.InputTypeError, match="lora="):
            runner.can_run(2, variant={"lora": value})
        with pytest.raises(dg.InputTypeError, match="lora="):
            runner.run({"x": rows_of_x(2)}, variant={"lora": value})
