"""Checks of captured graphs at start and while serving, as the key ``verify`` asks."""

from __future__ import annotations

import pytest
import torch

import devgraph as dg
from devgraph.runners.capturing import CaptureScheduler
from tests.runners.test_prove import sampled_slots
from tests.support.runner_steps import CacheStep, X, decode_of, double_runner


class Switched:
    """A step that multiplies by a number of the host, in a place that it does not name."""

    def __init__(self):
        self.factor = 1.0

    def __call__(self, batch):
        factor = getattr(self, "factors"[:-1])
        return batch.x * factor + (batch.x.shape[0] == 2) * self.late

    late = 0.0


def captured_then(monkeypatch, change):
    """Call ``change`` between the captures and the check at start."""
    run = CaptureScheduler.round

    def changed(self, *args):
        run(self, *args)
        change()

    monkeypatch.setattr(CaptureScheduler, "round", changed)


def test_check_at_start_passes_right_graphs():
    step = CacheStep()
    runner = decode_of(step, sampled_slots(), config={"verify": "start"})
    stats = runner.stats()
    assert (stats.checks, stats.failed_checks) == (1 + 1 + 2 + 2, 0)
    assert "checks_total" in stats.to_prometheus()
    assert len(runner.graphs.captured) == 4


def test_proofs_and_checks_try_all_host_arguments_that_are_sampled_or_given():
    seen = set()

    @dg.region(host_args=("lengths",), mutates=("out",))
    def scaled(x, out, *, lengths):
        seen.add(lengths)
        out.copy_(x * lengths[0])

    def step(batch):
        out = torch.empty_like(batch.x)
        scaled(batch.x, out, lengths=batch.host.lengths)
        return out

    runner = decode_of(
        step,
        (X,),
        host_args={"lengths": dg.HostSlot("requests", pad=dg.Pad.fill(1))},
        sample={"lengths": lambda shape, generator: [7] * shape[0]},
        config={"verify": "start", "buckets": [1, 2]},
        max_requests=2,
    )
    assert {(7,), (7, 7)} <= seen
    runner = decode_of(
        step, (X,), host_args=runner._options.host_args, config={"buckets": [1, 2]}, max_requests=2
    )
    assert runner.prove().not_varied == ("lengths",)
    assert runner.prove(host_args=[{"lengths": [3, 4, 5]}]).not_varied == ()
    assert {(3,), (3, 4)} <= seen
    with pytest.raises(dg.InputError, match="sample: there is no 'y'"):
        double_runner(sample={"y": len}, config={"verify": "start"})


def test_check_at_start_drops_buckets_that_differ(monkeypatch, caplog):
    step = Switched()
    captured_then(monkeypatch, lambda: setattr(step, "late", 1.0))
    runner = decode_of(step, (X,), config={"verify": "start", "buckets": [2, 4]}, max_requests=4)
    assert [graph.key.bucket for graph in runner.graphs.captured] == [4]
    assert runner.stats().failed_checks == 1
    assert "bucket 2, because its graph differs from eager runs: every element" in caplog.text
    assert "verify_failed: every element" in runner.explain()
    with pytest.raises(dg.CaptureError, match="graphs differ from eager runs in buckets 2"):
        captured_then(monkeypatch, lambda: setattr(step, "late", 2.0))
        config = {"verify": "start", "buckets": [2], "strict": True}
        decode_of(step, (X,), config=config, max_requests=2)


def test_check_is_repeated_at_idle_after_so_many_steps():
    step = Switched()
    config = {"verify": {"start": False, "every": 3}, "buckets": [4]}
    runner = decode_of(step, (X,), config=config, max_requests=4)
    assert runner.stats().checks == 0 and not runner.idle()
    step.factor = 2.0
    for _ in range(3):
        runner.run({"x": torch.ones(4, 3)})
    assert not runner.idle(ready=False)
    assert runner.idle()
    assert runner.stats().failed_checks == 1 and not runner.graphs.captured


def test_environment_asks_for_the_check_at_start(monkeypatch):
    monkeypatch.setenv("DEVGRAPH_VERIFY", "start")
    assert double_runner().stats().checks > 0
