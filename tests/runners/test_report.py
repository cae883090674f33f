"""Statistics, plan, explanation and proof of a runner."""

from __future__ import annotations

import json
import logging
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import devgraph as dg
from devgraph.api.errors import format_bytes
from devgraph.cpu.backend import CpuBackend
from devgraph.runners.report import ReplayPace
from tests.support.runner_steps import (
    CacheStep,
    X,
    decode_of,
    double,
    double_runner,
    rows_of_x,
)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(0, 12), max_size=30))
def test_every_step_is_counted_once(counts):
    runner = double_runner(config={"buckets": [1, 8]})
    for count in counts:
        runner.run({"x": rows_of_x(count)})
    stats = runner.stats()
    assert stats.steps == len(counts) == stats.graph_steps + stats.eager_steps
    in_graph = [n for n in counts if n == 1 or 4 <= n <= 8]
    assert stats.graph_steps == len(in_graph)
    assert stats.real_rows == sum(in_graph)
    assert stats.padded_rows == sum(0 if n == 1 else 8 - n for n in in_graph)
    assert stats.eager.get("padding", 0) == sum(n in (2, 3) for n in counts)
    assert stats.eager.get("over_largest_bucket", 0) == sum(n > 8 for n in counts)
    assert stats.eager.get("empty_batch", 0) == counts.count(0)
    assert sum(bucket.hits for bucket in stats.buckets) == stats.graph_steps


def test_ratios_and_plain_data():
    runner = double_runner()
    for count in (3, 8, 20):
        runner.run({"x": rows_of_x(count)})
    stats = runner.stats()
    assert stats.hit_ratio == pytest.approx(2 / 3)
    assert stats.padding_ratio == pytest.approx(1 / 12)
    data = json.loads(json.dumps(stats.to_dict()))
    assert data["eager"] == {"over_largest_bucket": 1}
    assert data["hit_ratio"] == stats.hit_ratio
    assert data["buckets"][0]["key"] == "8"
    assert str(stats).splitlines()[0] == (
        "decode: 3 steps, 2 in graphs (67 %), padding 8 %, eager: over_largest_bucket 1"
    )


def test_prometheus_text_has_a_type_for_each_metric_and_escaped_labels():
    runner = double_runner(name='de"co\\de')
    runner.run({"x": rows_of_x(3)})
    runner.run({"x": rows_of_x(9)})
    text = runner.stats().to_prometheus(rank="0")
    typed = set(re.findall(r"^# TYPE (\w+) (?:counter|gauge)$", text, re.M))
    samples = [line for line in text.splitlines() if not line.startswith("#")]
    parsed = [re.fullmatch(r"(\w+)\{(.*)\} ([-+.e\d]+)", line) for line in samples]
    assert all(parsed)
    assert {match[1] for match in parsed} == typed
    labels = r'runner="de\"co\\de",phase="decode",backend="cpu",rank="0"'
    assert f"devgraph_graph_steps_total{{{labels}}} 1" in samples
    assert f'devgraph_eager_steps_total{{{labels},reason="over_largest_bucket"}} 1' in samples
    assert f'devgraph_bucket_hits_total{{{labels},bucket="4"}} 1' in samples
    assert text.endswith("\n")
    with pytest.raises(dg.InputError, match="two runners have the labels.*its own name="):
        runner.stats().to_prometheus(runner.stats())
    both = runner.stats().to_prometheus(double_runner(name="other").stats(), rank="0")
    assert both.count("# TYPE devgraph_graph_steps_total ") == 1
    rows = both.partition("# TYPE devgraph_graph_steps_total counter\n")[2].splitlines()[:2]
    assert [row[-1] for row in rows] == ["1", "0"] and 'runner="other"' in rows[1]


def test_requested_and_effective_policy_are_both_visible():
    runner = double_runner(config="breakable", captured=False)
    assert (runner.stats().requested, runner.stats().effective) == ("breakable", "disabled")
    runner.capture()
    assert (runner.plan().requested, runner.plan().effective) == ("breakable", "breakable")
    runner.suspend()
    assert runner.plan().effective == "disabled"


def test_a_plan_before_capture_names_rows_and_known_bytes():
    runner = decode_of(
        CacheStep(),
        variants=[{}, {"width": 2}],
        max_requests=4,
        captured=False,
        outputs=dg.OutputSlot(rows="tokens"),
    )
    plan = runner.plan()
    assert [(b.requests, b.tokens) for b in plan.buckets] == [
        (4, 8),
        (4, 4),
        (2, 4),
        (2, 2),
        (1, 2),
        (1, 1),
    ]
    assert {b.state for b in plan.buckets} == {"pending"}
    assert plan.graph_bytes == 0
    assert plan.input_bytes == 512
    assert json.loads(json.dumps(plan.to_dict()))["buckets"][0]["key"] == "4 (width=2)"


def test_a_sampled_plan_estimates_without_capturing_for_real():
    runner = double_runner(captured=False)
    plan = runner.plan(sample=True)
    assert plan.estimated
    assert plan.graph_bytes == sum(b.bytes for b in plan.buckets) > 0
    assert "(estimated)" in str(plan)
    assert runner.stats().captures == 0
    assert runner.pool.bytes == 0
    runner.capture()
    measured = runner.plan()
    assert not measured.estimated
    assert measured.graph_bytes == pytest.approx(plan.graph_bytes, rel=0.5)
    assert runner.plan(sample=True) == measured


def test_a_sampled_plan_ends_the_leases_and_restores_bound_tensors():
    state = torch.zeros(1)

    def step(batch):
        state.add_(1)
        return batch.x * 2

    config = {"capture": "lazy", "lazy_hits": 1, "buckets": [2, 4]}
    runner = decode_of(step, (X,), config=config, debug=True, bound={"state": state})
    for _ in range(2):
        out = runner.run({"x": rows_of_x(2)})
    assert runner.stats().graph_steps == 1
    runner.plan(sample=True)
    with pytest.raises(dg.StaleOutputError):
        out.sum()
    assert state.item() == 2  # of the two steps


def test_report_above_the_budget_of_executables_says_why():
    runner = double_runner(config={"executable_budget": 100})
    assert "executables 0 B of 100 B (made" in str(runner.stats())
    runner.run({"x": rows_of_x(3)})
    kept = "of 100 B, because pinned executables and each graph's next recording are kept (made"
    runner.pin()
    runner.run({"x": rows_of_x(3)})
    assert kept in str(runner.stats())


def test_report_before_capture_says_so_and_how_memory_is_estimated():
    runner = double_runner(captured=False)
    for text in (str(runner.plan()), str(runner.stats())):
        assert "policy: full on cpu (not captured yet), 0 of 4 graphs captured" in text
        assert "memory: graphs unknown (plan(sample=True) estimates them), inputs" in text
    assert "graphs 2.0 MiB (estimated), inputs" in str(runner.plan(sample=True))
    runner.capture()
    runner.invalidate("weights")
    assert "(effective: disabled)" in str(runner.stats())


def test_explain_names_segments_reasons_and_counters():
    runner = double_runner(name="demo")
    runner.run({"x": rows_of_x(9)})
    text = runner.explain()
    for part in (
        "full on cpu (effective: full), 4 of 4 graphs captured",
        "bucket 4: captured",
        "policy full on cpu: 1 segment\n",
        "eager: over_largest_bucket 1",
    ):
        assert part in text
    assert "pool:" not in text  # The summary has the executables of the pool.


def test_emulated_steps_are_counted_apart_from_steps_in_graphs():
    runner = double_runner(config={"buckets": [2], "emulate": True})
    runner.run({"x": rows_of_x(2)})
    runner.run({"x": rows_of_x(3)})
    stats = runner.stats()
    assert (stats.steps, stats.graph_steps, stats.emulated_steps, stats.captures) == (2, 0, 1, 0)
    assert (stats.hit_ratio, stats.eager) == (0, {"over_largest_bucket": 1})
    text = str(stats)
    assert "2 steps, 0 in graphs (0 %), 1 emulated" in text
    assert "0 of 1 graph captured" in text and "bucket 2: emulated" in runner.explain()
    samples = dict(re.findall(r"^devgraph_(\w+)\{.*\} (\S+)$", stats.to_prometheus(), re.M))
    counted = ("graph_steps_total", "emulated_steps_total", "captures_total")
    assert [samples[name] for name in counted] == ["0", "1", "0"]
    runner.invalidate()
    assert runner.stats().emulated_steps == 1


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 * 2**20, "3.0 MiB"), (2**31, "2.0 GiB")],
)
def test_bytes_for_people(count, text):
    assert format_bytes(count) == text


class TwoPaces(CpuBackend):
    """A device whose graphs go slower from the second measurement on."""

    def __init__(self) -> None:
        super().__init__()
        self._paces = iter((0.93, 1.1, 0.94))

    def after_captures(self) -> float:
        return next(self._paces)


def test_captures_after_which_graphs_go_slower_are_told(caplog):
    runner = decode_of(double, (X,), backend=TwoPaces(), captured=False)
    assert runner.stats().replay_pace is None
    with caplog.at_level(logging.WARNING, logger="devgraph.runners.capturing"):
        runner.capture()
    stats = runner.stats()
    assert stats.replay_pace == ReplayPace(microseconds=1.1, fastest=0.93)
    assert stats.replay_pace.slow
    assert "now take 1.10 us from kernel to kernel, instead of 0.93 before" in caplog.text
    assert re.search(r"replay_pace_microseconds\{.*\} 1\.1$", stats.to_prometheus(), re.M)
    runner.invalidate("weights")
    runner.capture()
    assert not runner.stats().replay_pace.slow


def test_statistics_print_as_a_few_lines_and_hold_the_rest():
    runner = double_runner(config={"buckets": [1, 2, 8]})
    runner.run({"x": rows_of_x(2)})
    stats = runner.stats()
    first, *rest = str(stats).splitlines()
    assert "1 in graphs" in first and len(rest) == 2 and len(str(stats)) < 500
    assert "3 of 3 graphs captured" in rest[0]
    assert stats.to_dict()["buckets"][0]["key"] == "8"
