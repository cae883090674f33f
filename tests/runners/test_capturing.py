"""Capture: order, warm-up, budgets, exhaustion, lazy and background, invalidation, life."""

from __future__ import annotations

import collections
import gc
import json
import logging
import math
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import devgraph as dg
from devgraph import Reason
from devgraph.api import snapshots
from devgraph.cpu.tape import Tape
from devgraph.runners import capturing as rounds_module
from tests.support.runner_steps import (
    IDS,
    ROWS,
    CacheStep,
    X,
    cache_inputs,
    decode_of,
    double,
    double_runner,
    rows_of_x,
)


class Recorder:
    """Stands before the real capture: notes what is captured, and fails or waits on demand."""

    def __init__(self, monkeypatch, *, fail_at=None, error=None):
        self.sizes: list[int] = []
        self.frozen: list[int] = []
        self.enabled: list[bool] = []
        self.fail_at, self.error = fail_at, error
        real = rounds_module.capture

        def capture(fn, **options):
            self.frozen.append(gc.get_freeze_count())
            self.enabled.append(gc.isenabled())
            if len(self.sizes) == self.fail_at:
                self.sizes.append(-1)
                raise self.error
            captured = real(fn, **options)
            outputs = captured.outputs
            self.sizes.append(outputs.shape[0])
            return captured

        monkeypatch.setattr(rounds_module, "capture", capture)


def test_buckets_are_captured_largest_first_in_one_pool(monkeypatch):
    recorder = Recorder(monkeypatch)
    runner = double_runner()
    assert recorder.sizes == [8, 4, 2, 1]
    assert {entry.captured.pool for entry in runner.graphs} == {runner.pool}


def test_two_runners_share_a_pool():
    first = double_runner()
    second = decode_of(CacheStep(), pool=first.pool)
    assert second.pool is first.pool
    inputs = cache_inputs(3)
    a = first.run({"x": rows_of_x(3)})
    b = second.run(inputs)
    assert torch.equal(a, rows_of_x(3) * 2)
    first.close()
    assert torch.equal(second.run({**inputs, "rows": inputs["rows"] * 0 + 31}) * 0, b * 0)


@pytest.mark.usefixtures("thawed_heap")
def test_the_collector_rests_during_capture_and_is_as_before_afterwards(monkeypatch):
    recorder = Recorder(monkeypatch)
    assert gc.isenabled() and gc.get_freeze_count() == 0
    double_runner()
    assert all(recorder.frozen)
    assert not any(recorder.enabled)
    assert gc.isenabled() and gc.get_freeze_count() == 0


@pytest.mark.usefixtures("thawed_heap")
def test_the_collector_is_restored_after_a_failed_capture(monkeypatch):
    Recorder(monkeypatch, fail_at=1, error=dg.InputError("no"))
    with pytest.raises(dg.InputError):
        double_runner()
    assert gc.isenabled() and gc.get_freeze_count() == 0


@pytest.mark.usefixtures("thawed_heap")
def test_a_collector_that_was_off_or_frozen_stays_so():
    gc.disable()
    gc.freeze()
    try:
        count = gc.get_freeze_count()
        double_runner()
        assert not gc.isenabled()
        assert gc.get_freeze_count() > 0.9 * count > 0
    finally:
        gc.enable()


def test_each_bucket_is_warmed_up_and_synchronised_after_every_warm_up(monkeypatch):
    events = []
    backend = dg.get_backend("cpu")
    real = backend.synchronize
    monkeypatch.setattr(backend, "synchronize", lambda: (events.append("sync"), real())[1])

    def step(batch):
        events.append(f"{'record' if dg.is_capturing() else 'warm'} {batch.tokens}")
        return batch.x * 2

    decode_of(step, (X,), config={"buckets": [2, 4], "warmup": 2}, max_requests=4)
    for size, runs in ((4, 3), (2, 2)):  # The first run of the largest size shows the outputs.
        start = events.index(f"warm {size}")
        between = events[start : events.index(f"record {size}")]
        warm = [i for i, event in enumerate(between) if event.startswith("warm")]
        assert len(warm) == runs
        assert all(between[i + 1] == "sync" for i in warm)


@pytest.mark.parametrize("policy", ["full", "breakable"])
def test_without_warm_ups_only_what_fails_to_be_captured_has_some(policy):
    """Code that sets itself up in its first run of a size reads from the device in it."""
    events, tuned = [], set()

    def step(batch):
        events.append((batch.tokens, dg.is_capturing()))
        if batch.tokens == 4 and batch.tokens not in tuned:
            batch.x.sum().item()
            tuned.add(batch.tokens)
        return batch.x * 2

    config = {"buckets": [2, 4, 8], "policy": policy, "warmup": 0}
    runner = decode_of(step, (X,), config=config, max_requests=8)
    runs = [(8, False), (8, True), (4, True), (4, False), (4, False), (4, True), (2, True)]
    assert events == runs
    for count in range(1, 9):
        decision = runner.can_run(count)
        assert decision.ok
        assert torch.equal(runner.run({"x": rows_of_x(count)}), rows_of_x(count) * 2)
    assert runner.stats().captures == 3
    events.clear()
    runner.invalidate("weights")
    runner.capture()
    assert events == [(8, True), (4, True), (2, True)]


@dg.region(host_args=("n",))
def _shifted(x, *, n):
    return x + n


@pytest.mark.parametrize("policy", ["full", "breakable"])
def test_exact_types_are_checked_in_the_first_capture_of_a_variant(policy):
    """The check makes each call of Python slower: the captures of an engine took three times as
    long with it."""
    checked = []

    def step(batch):
        if dg.is_capturing() and sys.gettrace() is not None:
            checked.append((batch.variant["lora"], batch.tokens))
        return _shifted(batch.x * 2, n=batch.host.n)

    options: dict[str, Any] = {"config": {"buckets": [2, 4, 8], "policy": policy, "warmup": 0}}
    variants = [{"lora": False}, {"lora": True}]
    runner = decode_of(step, (X,), host_args={"n": 1}, variants=variants, **options)
    assert sorted(checked) == [(False, 8), (True, 8)]
    runner.invalidate("weights")
    runner.capture()
    assert sorted(checked) == [(False, 8), (False, 8), (True, 8), (True, 8)]
    out = runner.run({"x": rows_of_x(3)}, host_args={"n": 5}, variant={"lora": True})
    assert torch.equal(out, rows_of_x(3) * 2 + 5)


def test_an_exact_type_of_a_later_variant_is_refused():
    def scaled(x, n):
        return x * (2 if type(n) is int else 3)

    def step(batch):
        x = scaled(batch.x, batch.host.n) if batch.variant["lora"] else batch.x
        return _shifted(x, n=batch.host.n)

    variants = [{"lora": False}, {"lora": True}]
    runner = decode_of(step, (X,), host_args={"n": 1}, variants=variants, captured=False)
    for _ in range(2):
        with pytest.raises(dg.FrozenValueError, match="by type\\(n\\)"):
            runner.capture()


@pytest.mark.parametrize("policy", ["full", "breakable"])
def test_what_a_step_keeps_of_its_first_run_of_a_size_is_there_before_any_replay(policy):
    kept = {}

    def step(batch):
        if batch.tokens not in kept:
            kept[batch.tokens] = torch.full((batch.tokens, 1), float(batch.tokens))
        return batch.x * kept[batch.tokens]

    config = {"buckets": [2, 4, 8], "policy": policy}
    runner = decode_of(step, (X,), config=config, max_requests=8)
    assert {size: float(one[0]) for size, one in kept.items()} == {8: 8, 4: 4, 2: 2}
    other = decode_of(step, (X,), config=config, max_requests=8)
    for count in (3, 1, 8):
        for each in (other, runner):
            want = rows_of_x(count) * each.can_run(count).bucket
            assert torch.equal(each.run({"x": rows_of_x(count)}), want)


def test_what_a_warm_up_does_not_change_is_raised_at_once(monkeypatch):
    recorder = Recorder(monkeypatch, fail_at=1, error=dg.InputError("no"))
    with pytest.raises(dg.InputError):
        double_runner()
    assert recorder.sizes == [8, -1]


def test_bound_tensors_are_restored_after_every_warm_up_and_capture():
    """FAULTS 47."""
    state = torch.full((1,), 5.0)
    seen = []

    def step(batch):
        if not dg.is_capturing():
            seen.append(state.item())
        state.add_(1)
        return batch.x + state

    runner = decode_of(
        step, (X,), config={"buckets": [2], "warmup": 3}, max_requests=2, bound={"state": state}
    )
    assert state.item() == 5
    assert set(seen) == {5}
    assert runner.run({"x": torch.zeros(1, 3)}).eq(6).all()
    assert runner.run({"x": torch.zeros(1, 3)}).eq(7).all()


def test_bound_tensor_above_the_limit_of_copies_must_not_be_written():
    """FAULTS 47."""
    small, large = torch.zeros(2), torch.zeros(100)
    writes = [True]

    def step(batch):
        small.add_(1)
        if writes:
            large[0].add_(1)
        return batch.x + large[0]

    runner = decode_of(
        step,
        (X,),
        captured=False,
        config={"buckets": [1, 2]},
        bound={"small": small, "large": large},
        snapshot_limit=12,
    )
    with pytest.raises(dg.CaptureError, match=r"wrote bound tensor 'large'.*pad rule"):
        runner.capture()
    assert not small.any()
    assert runner.can_run(1).reason is Reason.CAPTURE_FAILED
    writes.clear()
    runner.capture()
    assert runner.can_run(1).ok
    assert not small.any()


def test_a_tensor_above_the_limit_is_hashed_twice_for_all_buckets(monkeypatch):
    calls = []
    hash_of = snapshots.hash_of
    monkeypatch.setattr(snapshots, "hash_of", lambda t: calls.append(t) or hash_of(t))
    decode_of(
        lambda batch: batch.x * 2,
        (X,),
        config={"buckets": [1, 2, 4, 8]},
        bound={"cache": torch.zeros(100)},
        snapshot_limit=12,
    )
    assert len(calls) == 2


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(3))
        self.cache = torch.zeros(3)

    def forward(self, batch):
        return batch.x * self.scale + self.cache


EXCHANGES = {
    "assigned": lambda model: setattr(model, "cache", torch.ones(3)),
    "loaded": lambda model: model.load_state_dict({"scale": torch.zeros(3)}, assign=True),
    "data": lambda model: setattr(model.scale, "data", torch.zeros(3)),
}


@pytest.mark.parametrize("bound", ["module", "functions"])
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_exchanged_tensor_of_a_bound_model_is_refused_until_captured_again(exchange, bound):
    """FAULTS 10."""
    model = Model()
    trees = {
        "module": {"model": model},
        "functions": {"weights": lambda: [model.scale], "cache": lambda: model.cache},
    }
    runner = decode_of(model, (X,), bound=trees[bound])
    assert runner.run({"x": rows_of_x(2)}).eq(rows_of_x(2)).all()
    EXCHANGES[exchange](model)
    with pytest.raises(dg.StateError):
        runner.run({"x": rows_of_x(2)})
    runner.invalidate()
    runner.capture()
    with torch.no_grad():
        want = rows_of_x(2) * model.scale + model.cache
    assert torch.equal(runner.run({"x": rows_of_x(2)}), want)


def test_a_failure_of_the_step_is_raised_and_earlier_buckets_are_kept():
    bad = [4]
    is_bad = bad.__contains__  # state that the step does not name

    def step(batch):
        if is_bad(batch.tokens):
            raise KeyError("no such layer")
        return batch.x * 2

    runner = decode_of(step, (X,), captured=False)
    with pytest.raises(KeyError, match="no such layer"):
        runner.capture()
    assert runner.can_run(8).ok
    assert runner.can_run(4).reason is Reason.CAPTURE_FAILED
    assert runner.can_run(2).reason is Reason.NOT_CAPTURED
    assert runner.run({"x": rows_of_x(2)}).shape == (2, 3)
    bad.clear()
    runner.capture()
    assert all(runner.can_run(n).ok for n in range(1, 9))


@pytest.mark.parametrize("good_runs", [0, 1])
def test_a_failed_capture_leaves_random_numbers_and_the_state_of_the_engine(good_runs):
    state = torch.zeros(1)
    calls = []

    def step(batch):
        torch.rand(3)
        state.add_(1)
        calls.append(1)
        if len(calls) > good_runs:
            raise KeyError("no such layer")
        return batch.x * 2

    runner = decode_of(step, (X,), captured=False, bound={"state": state})
    rng = torch.get_rng_state()
    with pytest.raises(KeyError):
        runner.capture()
    assert torch.equal(rng, torch.get_rng_state()) and state.item() == 0


def test_the_first_look_at_a_lazy_step_runs_without_gradients():
    weight, cache = torch.nn.Parameter(torch.ones(3)), torch.zeros(8, 3)

    def step(batch):
        cache[: batch.tokens] = batch.x * weight
        return batch.x * weight

    runner = decode_of(step, (X,), config={"capture": "lazy"}, bound={"cache": cache})
    assert runner.stats().captures == 0 and not cache.requires_grad


@pytest.mark.parametrize("kind", [KeyboardInterrupt, GeneratorExit])
def test_an_interrupt_during_capture_goes_through_and_capture_works_afterwards(kind):
    armed = [True]

    def step(batch):
        if armed and dg.is_capturing():
            raise kind
        return batch.x * 2

    runner = decode_of(step, (X,), captured=False)
    with pytest.raises(kind):
        runner.capture()
    armed.clear()
    runner.capture()
    assert torch.equal(runner.run({"x": rows_of_x(3)}), rows_of_x(3) * 2)


@pytest.mark.parametrize(
    "error", [dg.ResourceError("no streams"), torch.OutOfMemoryError("no memory"), MemoryError()]
)
def test_exhaustion_keeps_what_is_captured_and_drops_the_rest(monkeypatch, caplog, error):
    """FAULTS 3."""
    Recorder(monkeypatch, fail_at=2, error=error)
    with caplog.at_level(logging.WARNING, logger="devgraph"):
        runner = double_runner()
    assert [b.state for b in runner.plan().buckets] == ["captured"] * 2 + ["out_of_memory"] * 2
    assert "dropped 2 buckets (2, 1): out of memory" in caplog.text
    assert "2 graphs captured" in runner.explain()
    # a dropped bucket's batches use the next larger graph within the padding factor
    assert runner.can_run(2).bucket == 4
    assert runner.can_run(1).reason is Reason.OUT_OF_MEMORY
    assert torch.equal(runner.run({"x": rows_of_x(2)}), rows_of_x(2) * 2)
    assert torch.equal(runner.run({"x": rows_of_x(1)}), rows_of_x(1) * 2)
    assert runner.stats().eager == {"out_of_memory": 1}


def test_exhaustion_at_the_first_bucket_leaves_an_eager_runner(monkeypatch):
    """FAULTS 3."""
    Recorder(monkeypatch, fail_at=0, error=torch.OutOfMemoryError("no memory"))
    runner = double_runner()
    assert runner.effective_policy == "disabled"
    assert runner.stats().requested == "full"
    assert runner.run({"x": rows_of_x(2)}).shape == (2, 3)


def test_strict_exhaustion_raises_with_what_is_missing(monkeypatch):
    """FAULTS 3."""
    Recorder(monkeypatch, fail_at=2, error=torch.OutOfMemoryError("no memory"))
    runner = double_runner(strict=True, captured=False)
    with pytest.raises(
        dg.ResourceError, match=r"buckets 2, 1 cannot.*2 graphs captured, .*B in their pool"
    ):
        runner.capture()
    assert runner.can_run(8).ok


@pytest.mark.parametrize(("key", "budget"), [("graph_budget_bytes", 1), ("time_budget_s", 1e-9)])
def test_strict_runner_refuses_to_start_over_its_budget(key, budget):
    runner = double_runner(strict=True, captured=False, config={key: budget})
    with pytest.raises(dg.ResourceError, match=f"1 cannot run in a graph: .*; raise {key}"):
        runner.capture()


def test_invalidate_gives_dropped_buckets_another_chance(monkeypatch):
    recorder = Recorder(monkeypatch, fail_at=2, error=dg.ResourceError("no streams"))
    runner = double_runner()
    recorder.fail_at = None
    runner.capture()
    assert runner.can_run(1).reason is Reason.OUT_OF_MEMORY
    runner.invalidate("more memory now")
    runner.capture()
    assert runner.can_run(1).ok


def test_a_spent_time_budget_drops_the_rest():
    runner = double_runner(config={"time_budget_s": 1e-9})
    assert [b.state for b in runner.plan().buckets] == ["captured"] + ["time_budget"] * 3
    assert runner.can_run(2).reason is Reason.TIME_BUDGET
    runner.run({"x": rows_of_x(2)})
    assert runner.stats().eager == {"time_budget": 1}


def test_after_an_invalidate_the_time_budget_begins_anew():
    runner = double_runner(config={"time_budget_s": 3600})
    for graph in runner.graphs:
        graph.seconds = 3600.0
    runner.invalidate()
    runner.capture()
    assert all(runner.can_run(n).ok for n in range(1, 9))


def test_a_graph_over_the_memory_budget_is_dropped_with_the_rest():
    runner = double_runner(config={"graph_budget_bytes": 1})
    assert {b.state for b in runner.plan().buckets} == {"memory_budget"}
    assert runner.stats().graph_bytes == 0
    assert torch.equal(runner.run({"x": rows_of_x(8)}), rows_of_x(8) * 2)


def test_one_summary_line_per_capture_names_buckets_seconds_and_bytes(caplog):
    with caplog.at_level(logging.INFO, logger="devgraph.runners"):
        double_runner(name="demo")
    lines = [r.getMessage() for r in caplog.records if r.name.startswith("devgraph.runners")]
    assert len(lines) == 1
    assert lines[0].startswith("demo: captured 4 of 4 buckets in ")
    assert lines[0].endswith("(full on cpu)")
    assert "B (" in lines[0]


def test_progress_is_shown_on_a_terminal_unless_refused(capsys, monkeypatch):
    monkeypatch.setattr(rounds_module, "PROGRESS_SECONDS", math.inf)
    double_runner()  # standard error is no terminal here, and the captures take no seconds
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    double_runner(progress=False)
    assert capsys.readouterr().err == ""
    double_runner()
    shown = capsys.readouterr()
    assert "capturing" in shown.err
    assert shown.out == ""


@pytest.mark.parametrize("name", ["a[/b]", "a[red]b :ok:"])
def test_progress_shows_the_name_of_a_runner_as_it_is(name, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    double_runner(name=name)  # brackets that close nothing were a MarkupError
    assert f"{name}: capturing" in capsys.readouterr().err


def test_a_pipe_gets_a_line_where_captures_take_seconds(capsys, monkeypatch):
    monkeypatch.setattr(rounds_module, "PROGRESS_SECONDS", 0)
    double_runner(config={"buckets": [2, 8]})
    first, second = capsys.readouterr().err.splitlines()
    assert first == "decode: capturing 8, 1 of 2, 0 s" and second.startswith("decode: capturing 2")


def test_lazy_captures_a_bucket_after_enough_batches_wanted_it():
    runner = double_runner(config={"capture": "lazy", "lazy_hits": 3})
    assert runner.stats().captures == 0
    for _ in range(3):
        assert torch.equal(runner.run({"x": rows_of_x(3)}), rows_of_x(3) * 2)
    assert runner.stats().captures == 1
    assert runner.can_run(4).ok
    assert runner.can_run(8).reason is Reason.NOT_CAPTURED
    runner.run({"x": rows_of_x(3)})
    stats = runner.stats()
    assert (stats.graph_steps, stats.eager) == (1, {"not_captured": 3})


def test_lazy_capture_of_a_small_bucket_first_leaves_room_for_the_largest():
    runner = double_runner(config={"capture": "lazy", "lazy_hits": 1})
    small = [runner.run({"x": rows_of_x(1)}) for _ in range(2)][-1]
    large = [runner.run({"x": rows_of_x(8)}) for _ in range(2)][-1]
    assert runner.stats().graph_steps == 2
    assert torch.equal(large, rows_of_x(8) * 2)
    assert small.data_ptr() == large.data_ptr()


def test_a_lazy_capture_does_not_overwrite_the_outputs_of_its_own_step():
    runner = double_runner(config={"capture": "lazy", "lazy_hits": 2})
    x = rows_of_x(2)
    for _ in range(4):  # eager, eager and capture, graph, graph: each fed with the one before
        x = runner.run({"x": x})
    assert torch.equal(x, rows_of_x(2) * 16)


def test_a_lazy_capture_does_not_overwrite_what_its_step_returned_of_its_own_memory():
    out = torch.zeros(8, 3)

    def step(batch):
        return torch.mul(batch.x, 2, out=out[: batch.tokens])

    runner = decode_of(step, (X,), config={"capture": "lazy", "lazy_hits": 1})
    assert runner.run({"x": rows_of_x(2)}).eq(rows_of_x(2) * 2).all()
    assert runner.stats().captures == 1


def test_a_lazy_capture_that_fails_leaves_the_step_and_the_bucket_eager(caplog):
    def step(batch):
        if dg.is_capturing():
            raise ValueError("cannot be captured")
        return batch.x * 2

    runner = decode_of(step, (X,), config={"capture": "lazy", "lazy_hits": 1})
    for _ in range(3):
        assert torch.equal(runner.run({"x": rows_of_x(2)}), rows_of_x(2) * 2)
    assert runner.stats().eager == {"not_captured": 1, "capture_failed": 2}
    assert "cannot be captured" in caplog.text
    assert "cannot be captured" in runner.explain()


def test_background_captures_one_bucket_per_idle_call():
    runner = double_runner(config={"capture": "background"})
    assert runner.run({"x": rows_of_x(8)}).shape == (8, 3)
    results = [runner.idle() for _ in range(6)]
    assert results == [True] * 4 + [False] * 2
    assert runner.can_run(8).ok and runner.can_run(1).ok
    assert runner.stats().eager == {"not_captured": 1}


def test_idle_captures_no_lazy_bucket_that_nobody_needed():
    runner = double_runner(config={"capture": "lazy", "lazy_hits": 2})
    assert not runner.idle()
    for _ in range(2):
        assert not runner.idle()
        runner.run({"x": rows_of_x(3)})
    assert runner.stats().captures == 1  # by the second run
    assert not runner.idle() and runner.stats().captures == 1


def test_idle_stops_at_a_bucket_that_cannot_be_captured():
    def step(batch):
        if dg.is_capturing() and batch.tokens == 8:
            raise ValueError("too large")
        return batch.x * 2

    runner = decode_of(step, (X,), config={"capture": "background"})
    with pytest.raises(ValueError, match="too large"):
        runner.idle()
    assert [runner.idle() for _ in range(4)] == [True, True, True, False]


def test_invalidate_destroys_the_old_graphs_before_anything_is_captured(monkeypatch):
    """FAULTS 10."""
    runner = double_runner()
    old = [weakref.ref(entry.captured) for entry in runner.graphs]
    view = runner.run({"x": rows_of_x(2)})
    runner.invalidate("weights")
    gc.collect()
    assert all(ref() is None for ref in old)
    assert runner.effective_policy == "disabled"
    assert torch.equal(runner.run({"x": rows_of_x(2)}), rows_of_x(2) * 2)
    assert runner.stats().eager == {"invalidated": 1}
    runner.capture()
    assert runner.run({"x": rows_of_x(2)}).data_ptr() == view.data_ptr()
    assert runner.stats().captures == 8


def test_invalidate_needs_no_reason():
    with decode_of(double, (X,), config={"buckets": [2]}, max_requests=2) as runner:
        runner.capture()
        runner.invalidate()
        assert runner.can_run(2).reason is Reason.INVALIDATED
        runner.capture()
        assert runner.can_run(2).ok


def test_invalidate_is_followed_by_lazy_captures_in_lazy_mode():
    runner = double_runner(config={"capture": "lazy", "lazy_hits": 1})
    for _ in range(2):
        runner.run({"x": rows_of_x(2)})
    runner.invalidate("weights")
    for _ in range(2):
        runner.run({"x": rows_of_x(2)})
    assert runner.stats().eager == {"not_captured": 1, "invalidated": 1}
    assert runner.stats().graph_steps == 2


def test_weights_that_changed_are_never_replayed():
    """FAULTS 10."""
    weight = torch.ones(3)
    epoch = [0]
    holder = {"weight": weight}

    def step(batch):
        return batch.x * holder["weight"]

    runner = decode_of(step, (X,), weights_epoch=lambda: epoch[0])
    decision = runner.can_run(2)
    assert decision.ok
    holder["weight"] = torch.full((3,), 5.0)
    epoch[0] += 1
    for given in ({"x": rows_of_x(2)}, None):
        with pytest.raises(dg.StateError, match="this rank decode .*weights changed.*invalidate"):
            runner.run(given, decision=decision)
    runner.capture()  # the graphs serve again when their weights are back
    assert runner.can_run(2).reason is Reason.WEIGHTS_CHANGED
    assert torch.equal(runner.run({"x": rows_of_x(2)}), rows_of_x(2) * 5)
    assert runner.stats().eager == {"weights_changed": 1}
    runner.invalidate("weights")
    runner.capture()
    assert torch.equal(runner.run({"x": rows_of_x(2)}), rows_of_x(2) * 5)
    assert runner.stats().graph_steps == 1


def test_strict_refuses_changed_weights():
    """FAULTS 10."""
    epoch = [0]
    runner = double_runner(weights_epoch=lambda: epoch[0], strict=True)
    runner.run({"x": rows_of_x(1)})
    epoch[0] = 1
    with pytest.raises(dg.StateError, match=r"weights changed; call invalidate\('weights'\)"):
        runner.run({"x": rows_of_x(1)})


def test_a_bound_tensor_that_moved_is_refused_until_invalidated():
    """FAULTS 9."""
    cache = torch.ones(3)
    runner = decode_of(lambda b: b.x * cache, (X,), bound={"cache": cache})
    cache.fill_(2)
    assert torch.equal(runner.run({"x": rows_of_x(2)}), rows_of_x(2) * 2)
    cache.data = torch.full((3,), 7.0)
    with pytest.raises(dg.StateError, match="bound tensor 'cache' has moved"):
        runner.run({"x": rows_of_x(2)})
    runner.invalidate("new cache")
    runner.capture()
    assert torch.equal(runner.run({"x": rows_of_x(2)}), rows_of_x(2) * 7)


def test_suspend_and_resume_keep_the_graphs():
    """FAULTS 10."""
    runner = double_runner()
    runner.suspend()
    runner.suspend()
    assert runner.can_run(2).reason is Reason.SUSPENDED
    assert runner.effective_policy == "disabled"
    runner.run({"x": rows_of_x(2)})
    runner.resume()
    runner.run({"x": rows_of_x(2)})
    stats = runner.stats()
    assert (stats.graph_steps, stats.eager, stats.captures) == (1, {"suspended": 1}, 4)


def test_decision_made_before_a_suspend_is_refused_until_it_resumes():
    runner = double_runner()
    runner.capture()
    decision, batch = runner.can_run(2), {"x": rows_of_x(2)}
    runner.suspend()
    for given in (batch, None):
        with pytest.raises(dg.StateError, match=r"suspended; call resume\(\), or decide again"):
            runner.run(given, decision=decision)
    runner.resume()
    assert torch.equal(runner.run(batch, decision=decision), batch["x"] * 2)


def test_suspend_gives_memory_back_and_resume_replays_without_a_capture():
    """FAULTS 10, 44."""
    runner = double_runner(config={"releasable": True})
    pool = runner.pool
    other = double_runner(pool=pool)
    held = pool.bytes
    x = rows_of_x(2)
    for cycle in range(3):
        held_by_the_caller = runner.run({"x": x})
        for _ in range(2):
            runner.suspend(release="memory")
        assert pool.bytes == 0 < held and held_by_the_caller.eq(x * 2).all()
        assert other.can_run(2).reason is Reason.EXECUTABLE_MEMORY
        for each in (runner, other):
            assert each.run({"x": x}).eq(x * 2).all()
        with pytest.MonkeyPatch.context() as patched, pytest.raises(dg.ResourceError):
            patched.setattr(pool.blocks, "restore", _without_memory)
            runner.resume()
        assert runner.can_run(2).reason is Reason.SUSPENDED
        runner.resume()
        assert pool.bytes == held
        assert other.run({"x": x}).eq(x * 2).all()
        assert runner.stats().captures == 4 and runner.stats().graph_steps == cycle + 1
        assert other.stats().eager == {"executable_memory": cycle + 1}
    with pytest.raises(dg.InputError, match="'memory' or None"):
        runner.suspend(release="everything")
    with pytest.raises(dg.CapabilityError, match="releasable=True"):
        double_runner().suspend(release="memory")


def test_a_decision_from_before_the_memory_was_given_back_is_refused():
    runner = double_runner(config={"releasable": True})
    other = double_runner(pool=runner.pool)
    strict = double_runner(pool=runner.pool, strict=True)
    x = rows_of_x(2)
    decision = other.can_run(2)
    runner.suspend(release="memory")
    with pytest.raises(dg.StateError, match="on this rank decode .* released the pool's memory"):
        other.run({"x": x}, decision=decision)
    for _ in range(2):
        with pytest.raises(dg.ResourceError, match=r"call resume\(\) on the runner"):
            strict.run({"x": x})
    runner.resume()
    for each in (other, strict):
        assert each.run({"x": x}).eq(x * 2).all()
        assert each.stats().graph_steps == 1


def test_a_dummy_step_without_memory_for_its_graph_runs_eagerly():
    runner = double_runner(config={"releasable": True})
    other = double_runner(pool=runner.pool, idle_dummy=True)
    runner.suspend(release="memory")
    assert other.run({"x": rows_of_x(0)}).shape == (0, 3)
    assert other.run(None, decision=other.can_run(2)) is None
    assert other.stats().eager == {"executable_memory": 2} and other.stats().idle_steps == 0


@pytest.mark.parametrize("capture", ["eager", "lazy", "background"])
def test_buckets_wait_while_another_runner_on_the_pool_sleeps(capture):
    runner = double_runner(config={"releasable": True})
    config = {"capture": capture, "lazy_hits": 1} if capture == "lazy" else {"capture": capture}
    other = double_runner(pool=runner.pool, captured=False, config=config)
    runner.suspend(release="memory")
    x = rows_of_x(2)
    for _ in range(3):
        assert other.run({"x": x}).eq(x * 2).all()
        assert capture == "eager" or not other.idle()
    with pytest.raises(dg.ResourceError, match="resume"):
        other.capture()
    assert {graph.state for graph in other.graphs} == {"pending"}
    runner.resume()
    other.capture(everything=True)
    assert other.run({"x": x}).eq(x * 2).all()
    assert other.stats().graph_steps == 1


def test_suspend_inside_a_step_is_refused_and_fifty_cycles_are_flat():
    """FAULTS 37, 38."""

    def prepare(batch):
        if sleepy:
            with pytest.raises(dg.StateError, match="inside its own step"):
                runner.suspend(release="memory")

    sleepy = False
    runner = double_runner(config={"releasable": True, "buckets": [2]}, prepare=prepare)
    held, x = runner.pool.bytes, rows_of_x(2)
    sleepy = True
    assert runner.run({"x": x}).eq(x * 2).all()
    sleepy = False
    for _ in range(50):
        runner.suspend(release="memory")
        runner.resume()
        assert runner.run({"x": x}).eq(x * 2).all()
    assert (runner.pool.bytes, runner.stats().captures) == (held, 1)
    assert runner.stats().executables.made == 51


def test_a_sampled_plan_counts_what_the_pool_has_already():
    alone = double_runner(captured=False).plan(sample=True)
    first = double_runner()
    second = double_runner(captured=False, pool=first.pool).plan(sample=True)
    assert alone.graph_bytes - second.graph_bytes == first.pool.bytes > 0


def _without_memory() -> None:
    raise dg.ResourceError("no memory")


def test_close_frees_the_graphs_and_refuses_every_later_call():
    """FAULTS 28."""
    runner = double_runner()
    graphs = [weakref.ref(entry.captured) for entry in runner.graphs]
    runner.run({"x": rows_of_x(2)})
    runner.close()
    runner.close()
    gc.collect()
    assert all(ref() is None for ref in graphs)
    for call in (
        lambda: runner.run({"x": rows_of_x(2)}),
        lambda: runner.capture(),
        lambda: runner.can_run(1),
        lambda: runner.invalidate("x"),
        lambda: runner.suspend(),
        lambda: runner.idle(),
        lambda: runner.prove(),
    ):
        with pytest.raises(dg.StateError, match="decode is closed; create a new runner"):
            call()
    assert runner.stats().graph_steps == 1


@pytest.mark.parametrize("call", ["close", "invalidate"])
def test_one_graph_that_fails_to_close_keeps_no_other(monkeypatch, call):
    runner = double_runner()
    first = list(runner.graphs)[-1]  # smallest first

    def fail():
        raise RuntimeError("the driver is gone")

    monkeypatch.setattr(first.captured, "close", fail)
    with pytest.raises(RuntimeError, match="the driver is gone"):
        getattr(runner, call)()
    assert not runner.graphs.captured
    getattr(runner, call)()


def test_a_runner_is_a_context_manager():
    with double_runner() as runner:
        runner.run({"x": rows_of_x(1)})
    with pytest.raises(dg.StateError):
        runner.capture()


def test_dropping_a_runner_frees_its_graphs_without_a_collection():
    gc.collect()
    gc.disable()
    try:
        runner = decode_of(double, (X,), config={"buckets": [2]}, max_requests=2)
        graph = weakref.ref(runner.graphs.captured[0].captured)
        pool = weakref.ref(runner.pool)
        runner.run({"x": rows_of_x(2)})
        runner.close()
        assert graph() is None
        del runner
        assert pool() is None
    finally:
        gc.enable()


def test_a_second_capture_call_captures_nothing_new(monkeypatch):
    recorder = Recorder(monkeypatch)
    runner = double_runner()
    runner.capture()
    assert recorder.sizes == [8, 4, 2, 1]


def kinds_alive():
    """Count the live objects that are devgraph's or torch's, by kind."""
    gc.collect()
    kinds = [type(o) for o in gc.get_objects()]
    ours = [k for k in kinds if str(k.__module__).startswith(("devgraph.", "torch"))]
    return collections.Counter(kind.__qualname__ for kind in ours)


def test_capture_restores_the_tensors_and_generators_that_the_step_names():
    count, noise = torch.zeros(()), torch.Generator().manual_seed(3)
    norm = torch.nn.BatchNorm1d(3)

    def step(batch):
        count.add_(1)
        return norm(batch.x) + torch.rand(3, generator=noise)

    before = [noise.get_state(), *(t.clone() for t in norm.state_dict().values())]
    runner = decode_of(step, (X,), config={"buckets": [2, 3]}, max_requests=3)
    runner.capture()
    assert count == 0
    for old, now in zip(before, [noise.get_state(), *norm.state_dict().values()], strict=True):
        assert torch.equal(old, now)
    runner.run({"x": rows_of_x(2)})
    assert count == 1
    assert norm.num_batches_tracked == 1


def test_thirty_captures_and_closes_hold_no_memory():
    pool = dg.get_backend("cpu").make_pool()

    def once():
        runner = decode_of(
            double, (X,), config={"buckets": [2], "warmup": 0}, max_requests=2, pool=pool
        )
        runner.run({"x": rows_of_x(1)})
        runner.close()

    for _ in range(3):
        once()
    before, size = kinds_alive(), pool.bytes
    for _ in range(30):
        once()
    # Objects of earlier tests may go meanwhile.
    assert kinds_alive() - before == collections.Counter()
    assert pool.bytes == size


def test_the_default_device_of_the_thread_does_not_matter():
    failures = []

    def work():
        try:
            with torch.device("meta"):
                runner = decode_of(lambda b: b.x * 2, (X,), config={"buckets": [2]}, max_requests=2)
                x = torch.ones(1, 3, device="cpu")
                assert runner.run({"x": x}).eq(2).all()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not failures


def test_capture_draws_no_random_numbers_of_the_program():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    runner = decode_of(lambda b: b.x + torch.rand(b.tokens, 3), (X,))
    assert torch.equal(torch.rand(2), expected)
    first = runner.run({"x": torch.zeros(2, 3)}, clone=True)
    second = runner.run({"x": torch.zeros(2, 3)}, clone=True)
    assert not torch.equal(first, second)


def test_one_step_serves_slots_of_two_dtypes_in_one_capture():
    runner = decode_of(lambda b: b.ids + b.rows, (IDS, ROWS))
    assert runner.run(cache_inputs(2)).dtype is torch.int64


# What graphs launch, under one budget.


def _no_memory_for_executables(monkeypatch, after=0):
    """Let all executables but the first ``after`` that are made from here on find no memory."""
    made, make = [], Tape.make

    def exhausted(tape):
        made.append(tape)
        if len(made) > after:
            raise MemoryError("no memory")
        make(tape)

    monkeypatch.setattr(Tape, "make", exhausted)


def test_executables_of_two_runners_of_a_pool_share_the_lowest_budget():
    pool = dg.get_backend("cpu").make_pool()
    first = double_runner(pool=pool, config={"executable_budget": 10**6})
    second = double_runner(pool=pool, config={"executable_budget": 0})
    for count in (1, 8, 1, 3):
        for runner in (first, second):
            assert torch.equal(runner.run({"x": rows_of_x(count)}), rows_of_x(count) * 2)
    found = first.stats().executables
    assert found == second.plan().executables
    assert (found.made, found.evicted, found.bytes, found.budget_bytes) == (8, 8, 0, 0)
    assert "executables 0 B of 0 B (made 8" in str(first.stats())
    assert "evicted 8" in str(first.plan())
    assert "devgraph_executables_made_total" in first.stats().to_prometheus()


def test_a_share_of_the_memory_is_a_budget_in_bytes(monkeypatch):
    backend = dg.get_backend("cpu")
    monkeypatch.setattr(backend, "memory_info", lambda: (1, 1000))
    assert double_runner(config={"executable_budget": 0.25}).stats().executables.budget_bytes == 250
    monkeypatch.setattr(backend, "memory_info", lambda: None)
    with pytest.raises(dg.ConfigError, match="Pass a number of bytes"):
        double_runner(config={"executable_budget": 0.25})


def test_pinned_buckets_keep_their_executables_over_a_recapture():
    runner = double_runner(config={"executable_budget": 0})
    runner.pin(8)
    with pytest.raises(dg.InputError, match="no bucket 3"):
        runner.pin(3)
    runner.invalidate("weights")
    runner.capture()
    before = runner.stats().executables.made
    for count in (8, 1, 8, 1):
        runner.run({"x": rows_of_x(count)})
    assert runner.stats().executables.made == before + 3
    runner.pin(pinned=False)
    for _ in range(3):
        runner.run({"x": rows_of_x(1)})
    assert runner.stats().executables.bytes == 0


def test_a_step_whose_executable_finds_no_memory_runs_eagerly(monkeypatch):
    """FAULTS 44."""
    runner = double_runner(config={"executable_budget": 0})
    with monkeypatch.context() as patched:
        _no_memory_for_executables(patched)
        assert torch.equal(runner.run({"x": rows_of_x(2)}), rows_of_x(2) * 2)
    assert torch.equal(runner.run({"x": rows_of_x(2)}), rows_of_x(2) * 2)
    stats = runner.stats()
    assert (stats.eager, stats.graph_steps) == ({"executable_memory": 1}, 1)


@pytest.mark.parametrize("debug", [False, True])
def test_a_step_without_memory_runs_on_the_data_that_it_was_given(monkeypatch, debug):
    """Of the last output and of static buffers, which the step has written by then."""
    runner = double_runner(config={"executable_budget": 0}, debug=debug)
    last = runner.run({"x": rows_of_x(2)})
    with monkeypatch.context() as patched:
        _no_memory_for_executables(patched)
        assert torch.equal(runner.run({"x": last}, clone=True), rows_of_x(2) * 4)
        given = runner.buffers["x"][3:6]
        given.copy_(rows_of_x(3))
        assert torch.equal(runner.run({"x": given}, clone=True), rows_of_x(3) * 2)
    assert runner.stats().eager == {"executable_memory": 2}


def test_strict_raises_where_an_executable_finds_no_memory(monkeypatch):
    """FAULTS 44."""
    runner = double_runner(config={"executable_budget": 0, "strict": True})
    with monkeypatch.context() as patched:
        _no_memory_for_executables(patched)
        with pytest.raises(dg.ResourceError, match="when there is memory"):
            runner.run({"x": rows_of_x(2)})
    assert torch.equal(runner.run({"x": rows_of_x(2)}), rows_of_x(2) * 2)


def test_a_step_that_ran_in_part_is_not_run_again_where_an_executable_finds_no_memory(monkeypatch):
    """FAULTS 44: it may have changed what an eager run would change once more."""
    total = torch.zeros(3)

    def step(batch):
        total.add_(1)
        dg.graph_break()
        return batch.x * 2

    runner = decode_of(
        step, (X,), config={"policy": "breakable", "executable_budget": 0, "buckets": [2]}
    )
    before = total.clone()
    with monkeypatch.context() as patched:
        _no_memory_for_executables(patched, after=1)
        with pytest.raises(dg.ResourceError, match="when there is memory"):
            runner.run({"x": rows_of_x(2)})
    assert torch.equal(total, before + 1)
    assert torch.equal(runner.run({"x": rows_of_x(2)}), rows_of_x(2) * 2)
    assert torch.equal(total, before + 2)


def test_a_lease_outlives_the_executable_that_wrote_it():
    """FAULTS 43."""
    runner = double_runner(config={"executable_budget": 0}, debug=True)
    out = runner.run({"x": rows_of_x(2)})
    assert runner.stats().executables.bytes == 0
    assert torch.equal(out.clone(), rows_of_x(2) * 2)


@pytest.mark.parametrize("policy", ["full", "breakable"])
def test_captures_leave_a_trace_for_each_bucket(tmp_path: Path, policy: str) -> None:
    options: dict[str, Any] = {"config": {"policy": policy, "buckets": [1, 4]}, "captured": False}
    runner = double_runner(variants=[{}, {"lora": True}], **options)
    runner.capture(profile=str(tmp_path / "traces"))
    found = sorted(path.name for path in (tmp_path / "traces").iterdir())
    assert found == [f"decode-{n}{v}.json" for n in (1, 4) for v in ("--lora-True", "")]
    events = json.loads((tmp_path / "traces" / "decode-4.json").read_text())["traceEvents"]
    assert any(event.get("name") == "aten::mul" for event in events)
    assert torch.equal(runner.run({"x": torch.ones(3, 3)}), torch.full((3, 3), 2.0))


def test_traces_that_cannot_be_written_are_refused_before_anything_is_captured(
    tmp_path: Path,
) -> None:
    runner = double_runner(captured=False)
    with pytest.raises(dg.InputTypeError, match="profile must be the path of a folder, got 3"):
        runner.capture(profile=3)  # type: ignore[arg-type]
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        runner.capture(profile=str(tmp_path / "file"))
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu) as profile:
        with pytest.raises(dg.StateError, match="under a torch profiler"):
            runner.capture(profile=str(tmp_path / "traces"))
        torch.ones(3).add(1)
    assert "aten::add" in [event.name for event in profile.events()]
    assert not runner.graphs.captured
