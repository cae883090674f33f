"""Ranks: handshake, lockstep capture, common buckets, votes, idle ranks, every way to fail.

The ranks of the first half are threads with a backend instance each, those of the second half real
processes over gloo: whatever happens, every one of them ends within the timeout, with a common
result or with an error that names the rank at fault.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
import pytest
import torch
import torch.distributed as dist

import devgraph as dg
from devgraph import Reason
from devgraph.runners import RankGroup
from devgraph.runners import capturing as rounds
from devgraph.runners import ranks as ranks_module
from tests.sim import ascend
from tests.support.rank_clock import Waiting
from tests.support.runner_steps import (
    IDS,
    ROWS,
    CacheStep,
    X,
    cache_inputs,
    decode_of,
    double,
    double_runner,
    encode_alone,
    encoder_items,
    encoder_of,
    rows_of_x,
)

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not hasattr(os, "fork"), reason="needs torch.distributed and fork"
)

ROOT = Path(__file__).parents[2]
SCENARIOS = ROOT / "tests" / "support" / "rank_scenarios.py"
LIMIT_S = 300.0
"""A rank that runs longer hangs. Generous: the processors may be busy."""

TIMEOUT_S = 3.0
"""What ranks wait for each other where one of them does not come."""

PATIENT_S = 60.0
"""... and where all of them come, however busy the processors are."""

Ranks = Callable[..., dict[int, dict[str, Any]]]


def in_ranks(size, work, *, timeout_s=PATIENT_S, vote=None, absent=(), within=PATIENT_S):
    """Run ``work(rank, group)`` on ``size`` threads; return results or exceptions by rank.

    Args:
        within: the seconds that none of them may wait longer in all.
    """
    store, clock = dist.HashStore(), Waiting([0.0] * size)
    results: list[Any] = [None] * size
    for rank in absent:
        clock.leave(rank)

    def run(rank):
        clock.enter(rank)
        group = RankGroup(store, rank, size=size, timeout_s=timeout_s, vote=vote)
        try:
            results[rank] = work(rank, group)
        except BaseException as error:
            results[rank] = error
        finally:
            clock.leave(rank)

    threads = [threading.Thread(target=run, args=(r,)) for r in range(size) if r not in absent]
    with mock.patch.object(ranks_module, "time", clock):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
            assert not thread.is_alive(), "a rank hangs"
    assert max(clock.now) < within
    return results


def ranked(group, step=double, slots=(X,), **options):
    return decode_of(step, slots, group=group, backend=type(dg.get_backend("cpu"))(), **options)


def states(runner):
    return {b.bucket: b.state for b in runner.plan().buckets}


def test_threads_that_are_alike_capture_and_run_the_same_graphs():
    def work(rank, group):
        runner = ranked(group)
        decision = runner.agree(runner.can_run(1 + rank))
        out = runner.run({"x": rows_of_x(1 + rank)}, decision=decision)
        return decision.bucket, torch.equal(out, rows_of_x(1 + rank) * 2), states(runner)

    results = in_ranks(4, work)
    assert results == [(4, True, dict.fromkeys((8, 4, 2, 1), "captured"))] * 4


def test_ranks_that_run_each_pack_together_agree_on_it():
    def work(rank, group):
        epoch = [0]
        runner = encoder_of(
            group=group, backend=type(dg.get_backend("cpu"))(), weights_epoch=lambda: epoch[0]
        )
        items = encoder_items((16, 16, 9))
        epoch[0] = int(rank == 1)
        outputs = runner.run(items)
        alone = [encode_alone(item) for item in items]
        torch.testing.assert_close(outputs, alone, rtol=0, atol=0)
        return runner.stats().eager

    assert in_ranks(2, work) == [{"voted_eager": 2}, {"weights_changed": 2}]


def test_a_rank_with_other_buckets_is_named_with_both_values_on_every_rank():
    def work(rank, group):
        ranked(group, config={"buckets": [2, 4] if rank == 2 else [1, 4]})

    for error in in_ranks(4, work):
        assert isinstance(error, dg.AgreementError)
        assert "rank 2 has buckets=[2, 4], others [1, 4]" in str(error)
        assert "rank 2 has mode.buckets=[2, 4], others [1, 4]" in str(error)
        assert "lazy_hits" not in str(error)  # only the keys that differ


def test_a_rank_on_another_backend_is_refused():
    def work(rank, group):
        backend = type(dg.get_backend("cpu"))()
        if rank == 1:
            backend.name = "other"
        decode_of(double, (X,), group=group, backend=backend)

    for error in in_ranks(3, work):
        assert isinstance(error, dg.AgreementError)
        assert 'rank 1 has backend="other", others "cpu"' in str(error)


def test_missing_ranks_are_named_within_the_timeout():
    results = in_ranks(
        4, lambda rank, group: ranked(group), timeout_s=0.5, absent=(1, 3), within=0.6
    )
    for rank in (0, 2):
        assert isinstance(results[rank], dg.AgreementError)
        assert "for ranks 1, 3, which did not arrive" in str(results[rank])


def fail_capture(monkeypatch, should_fail):
    """Let ``should_fail(step function, count of captures of this thread)`` raise instead."""
    real = rounds.capture
    counts = threading.local()

    def capture(fn, **options):
        counts.n = getattr(counts, "n", 0) + 1
        error = should_fail(counts.n)
        if error is not None:
            raise error
        return real(fn, **options)

    monkeypatch.setattr(rounds, "capture", capture)


@pytest.mark.parametrize("moment", ["before", "during"])
def test_a_rank_out_of_memory_at_its_third_bucket_drops_it_everywhere(monkeypatch, moment):
    broken = threading.local()
    if moment == "before":
        fail_capture(
            monkeypatch,
            lambda n: dg.ResourceError("no streams") if n == 3 and broken.rank == 1 else None,
        )

    def work(rank, group):
        broken.rank = rank

        def step(batch):  # fails while the others wait for it at the end of a warm-up
            if moment == "during" and rank == 1 and batch.tokens == 2:
                raise torch.OutOfMemoryError("no memory")
            return batch.x * 2

        runner = ranked(group, step)
        out = runner.run({"x": rows_of_x(4)})
        return states(runner), torch.equal(out, rows_of_x(4) * 2), runner.explain()

    results = in_ranks(4, work)
    kept = {8: "captured", 4: "captured"}
    assert results[1][0] == {**kept, 2: "out_of_memory", 1: "out_of_memory"}
    for rank in (0, 2, 3):
        assert results[rank][0] == {**kept, 2: "ranks_dropped", 1: "ranks_dropped"}
        assert "rank 1: out_of_memory" in results[rank][2]
    assert all(result[1] for result in results)


def test_ranks_capture_all_after_one_had_no_memory_for_the_first_bucket(monkeypatch):
    taken = rounds.capture
    short = threading.Event()

    def capture(step, **options):
        captured = taken(step, **options)
        if threading.current_thread().name == "short" and not short.is_set():
            short.set()
            captured.close()
            raise dg.ResourceError("no streams left")
        return captured

    monkeypatch.setattr(rounds, "capture", capture)

    def work(rank, group):
        if rank == 1:
            threading.current_thread().name = "short"
        runner = ranked(group)
        first = len(runner.graphs.captured)
        runner.invalidate()
        runner.capture()
        return first, states(runner)

    assert in_ranks(2, work) == [(0, dict.fromkeys((8, 4, 2, 1), "captured"))] * 2


def test_a_rank_may_look_at_the_outputs_before_the_others():
    def work(rank, group):
        runner = ranked(group, captured=False)
        if rank:
            runner.plan(sample=True)
        runner.capture()
        return states(runner)

    assert in_ranks(2, work) == [dict.fromkeys((8, 4, 2, 1), "captured")] * 2


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_rank_whose_lender_knows_its_outputs_meets_the_others_as_often(ahead):
    def work(rank, group):
        backend = type(dg.get_backend("cpu"))()
        variants = [{}, {"lora": True}, {"lora": False}]
        lender = decode_of(double, (X,), backend=backend, variants=variants, captured=False)
        if rank == ahead:
            lender.capture()
        runner = decode_of(double, (X,), backend=backend, group=group, share=lender)
        decision = runner.agree(runner.can_run(2))
        return decision.ok, torch.equal(runner.run({"x": rows_of_x(2)}), rows_of_x(2) * 2)

    assert in_ranks(2, work, timeout_s=TIMEOUT_S) == [(True, True)] * 2


def test_lenders_that_look_at_other_variants_are_told():
    def work(rank, group):
        backend = type(dg.get_backend("cpu"))()
        variants = [{}, {"lora": True}][: 1 + rank]
        lender = decode_of(double, (X,), backend=backend, variants=variants)
        decode_of(double, (X,), backend=backend, group=group, share=lender)

    for error in in_ranks(2, work):
        assert isinstance(error, dg.AgreementError) and "share=" in str(error)


def test_a_rank_that_needs_a_run_before_its_capture_warms_up_with_all():
    runs = {}

    def work(rank, group):
        seen = runs.setdefault(rank, [])

        def step(batch):
            seen.append((batch.tokens, dg.is_capturing()))
            if rank == 1 and batch.tokens == 4 and (4, False) not in seen:
                raise RuntimeError("not set up")
            return batch.x * 2

        return states(ranked(group, step, config={"buckets": [2, 4, 8], "warmup": 0}))

    assert in_ranks(3, work) == [dict.fromkeys((8, 4, 2), "captured")] * 3
    warmed = [(8, False), (8, True), (4, True), (4, False), (4, False), (4, True), (2, True)]
    assert list(runs.values()) == [warmed] * 3


@pytest.mark.parametrize("moment", ["warm-up", "recording"])
def test_a_rank_that_raises_in_capture_stops_all_ranks_with_its_text(moment):
    def work(rank, group):
        def step(batch):
            recording = dg.is_capturing()
            if rank == 2 and batch.tokens == 4 and recording == (moment == "recording"):
                raise KeyError("layer 7")
            return batch.x * 2

        runner = ranked(group, step, captured=False, config={"warmup": 2})
        try:
            runner.capture()
        finally:
            assert runner.can_run(8).ok

    results = in_ranks(4, work, within=5)
    assert isinstance(results[2], KeyError)
    for rank in (0, 1, 3):
        assert isinstance(results[rank], dg.AgreementError), results[rank]
        assert "rank 2 could not capture 4: it raised KeyError" in str(results[rank])


def test_a_spent_budget_on_one_rank_ends_the_capture_on_all():
    def work(rank, group):
        return states(
            ranked(
                group,
                prepare=lambda batch: time.sleep(0.05 if rank == 0 else 0),
                config={"time_budget_s": 0.03, "warmup": 2},
            )
        )

    results = in_ranks(2, work)
    assert set(results[0].values()) == {"captured", "time_budget"}
    captured = [bucket for bucket, state in results[0].items() if state == "captured"]
    assert captured == [bucket for bucket, state in results[1].items() if state == "captured"]


def test_a_step_runs_in_a_graph_only_if_every_rank_can():
    def work(rank, group):
        runner = ranked(group)
        seen = []
        for sizes in ((2, 3), (2, 20), (9, 9), (1, 8)):
            mine = runner.can_run(sizes[rank])
            decision = runner.agree(mine)
            out = runner.run({"x": rows_of_x(sizes[rank])}, decision=decision)
            assert torch.equal(out, rows_of_x(sizes[rank]) * 2)
            seen.append((decision.ok, decision.bucket, decision.reason.value))
        return seen, runner.stats().eager

    first, second = in_ranks(2, work)
    assert first[0] == [
        (True, 4, "graph"),
        (False, None, "voted_eager"),
        (False, None, "over_largest_bucket"),
        (True, 8, "graph"),
    ]
    assert second[0][1] == (False, None, "over_largest_bucket")
    assert first[1] == {"voted_eager": 1, "over_largest_bucket": 1}
    assert second[1] == {"over_largest_bucket": 2}


def test_an_idle_rank_takes_part_on_pad_values():
    def work(rank, group):
        step = CacheStep()
        runner = ranked(group, step, (IDS, ROWS))
        for count in (3, 20):  # in a graph, and eagerly
            busy = rank == 0
            decision = runner.agree(runner.can_run(count) if busy else None)
            runner.run(cache_inputs(count) if busy else None, decision=decision)
        nothing = runner.agree(None)
        assert runner.run(None, decision=nothing) is None
        return step.cache[:31].any().item(), runner.stats()

    busy, idle = in_ranks(2, work)
    assert busy[0] and not idle[0]
    assert idle[1].idle_steps == idle[1].graph_steps == 1
    assert idle[1].eager == {"voted_eager": 1, "empty_batch": 1}


@pytest.mark.parametrize("why", ["suspended", "weights_changed"])
def test_an_idle_rank_that_cannot_launch_keeps_the_others_from_it(why):
    def work(rank, group):
        epoch = [0]
        runner = ranked(group, weights_epoch=lambda: epoch[0])
        if rank:
            epoch[0] = 1
            if why == "suspended":
                runner.suspend()
        for busy in (not rank, False):
            decision = runner.agree(runner.can_run(2) if busy else None)
            runner.run({"x": rows_of_x(2)} if busy else None, decision=decision)
        return runner.stats().eager

    assert in_ranks(2, work) == [{"voted_eager": 1, "empty_batch": 1}, {why: 1, "empty_batch": 1}]


def test_gate_that_one_rank_forgot_makes_the_step_invalid_on_all_ranks():
    """FAULTS 53."""

    def gated(batch):
        dg.wait("kv")
        return batch.x * 2

    def work(rank, group):
        runner, errors = ranked(group, gated, gate_timeout=0.05), []
        for _ in range(3):
            try:
                decision = runner.agree(runner.can_run(2))
                if errors or not rank:
                    runner.gates["kv"].open()
                runner.run({"x": rows_of_x(2)}, decision=decision)
            except dg.GateTimeoutError as error:
                errors.append(str(error))
        return errors

    late, others = in_ranks(2, work)[::-1]
    assert len(late) == 2 and late[0] == late[1] and "'kv'" in late[0]
    assert len(others) == 1 and "on another rank" in others[0]


@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize("idle", [False, True])
def test_changed_state_of_one_rank_ends_the_step_on_all_ranks(idle, bound):
    def work(rank, group):
        scales = {"factor": torch.tensor(2.0)}
        given = {"bound": scales} if bound else {}
        runner = ranked(group, lambda batch: batch.x * scales["factor"], **given)
        if rank:
            scales["factor"] = torch.tensor(3.0)
        with pytest.raises(dg.StateError) as caught:
            runner.agree(None if rank and idle else runner.can_run(2))
        runner.invalidate()
        decision = runner.agree(runner.can_run(2))
        return str(caught.value), runner.run({"x": rows_of_x(2)}, decision=decision).shape[0]

    (other, eager), (own, _) = in_ranks(2, work)
    assert "on another rank" in other and "'factor'" in own and eager == 2


def _noting(group, **options):
    """Return a runner of one bucket, and the shapes that its step is run with from now on."""
    shapes = []

    def step(batch):
        shapes.append(tuple(batch.x.shape))
        return batch.x * 2

    runner = ranked(group, step, config={"buckets": [4]}, **options)
    shapes.clear()
    return runner, shapes


def test_a_strict_rank_without_requests_refuses_what_the_others_refuse():
    def work(rank, group):
        runner, shapes = _noting(group, strict=True)
        decision = runner.agree(None if rank else runner.can_run(9))
        with pytest.raises(dg.DeviceGraphError) as caught:
            runner.run(None if rank else {"x": rows_of_x(9)}, decision=decision)
        return type(caught.value).__name__, shapes

    assert in_ranks(2, work) == [("InputError", []), ("AgreementError", [])]


@pytest.mark.parametrize("leave", ["suspend", "invalidate"])
def test_an_idle_dummy_runs_in_the_same_way_on_all_ranks(leave):
    def work(rank, group):
        runner, shapes = _noting(group, idle_dummy=True)
        if rank:
            getattr(runner, leave)()
        decision = runner.agree(runner.can_run(0))
        runner.run({"x": rows_of_x(0)}, decision=decision)
        return decision.ok, runner.stats().idle_steps, shapes

    first, second = in_ranks(2, work)
    assert first == second
    assert first[::2] == (False, [(1, 3)])


def test_an_idle_rank_without_graphs_votes_against_them():
    def work(rank, group):
        runner, shapes = _noting(group)
        if rank:
            runner.invalidate()
        decision = runner.agree(None if rank else runner.can_run(3))
        runner.run(None if rank else {"x": rows_of_x(3)}, decision=decision)
        return decision.ok, shapes

    assert in_ranks(2, work) == [(False, [(3, 3)]), (False, [(1, 3)])]


def test_a_rank_whose_memory_another_runner_gave_back_keeps_the_others_from_graphs():
    def work(rank, group):
        runner = ranked(group, config={"releasable": True})
        if rank:
            runner.pool.release()
        for busy in (True, not rank):
            decision = runner.agree(runner.can_run(2) if busy else None)
            runner.run({"x": rows_of_x(2)} if busy else None, decision=decision)
        return runner.stats().eager

    assert in_ranks(2, work) == [{"voted_eager": 2}, {"executable_memory": 2}]


@pytest.mark.parametrize("why", ["suspended", "executable_memory", "weights_changed"])
def test_a_decision_that_is_old_keeps_the_others_from_graphs(why):
    def work(rank, group):
        epoch = [0]
        runner = ranked(group, config={"releasable": True}, weights_epoch=lambda: epoch[0])
        decision = runner.can_run(2)
        if rank and why == "suspended":
            runner.suspend()
        elif rank and why == "executable_memory":
            runner.pool.release()
        epoch[0] = int(rank and why == "weights_changed")
        out = runner.run({"x": rows_of_x(2)}, decision=runner.agree(decision))
        return torch.equal(out, rows_of_x(2) * 2), runner.stats().eager

    assert in_ranks(2, work) == [(True, {"voted_eager": 1}), (True, {why: 1})]


@pytest.mark.parametrize("why", ["memory", "folder"])
def test_a_rank_that_cannot_begin_a_capture_is_named_at_once(why, tmp_path):
    file = tmp_path / "file"
    file.write_text("")

    def work(rank, group):
        runner = ranked(group, config={"releasable": True})
        runner.invalidate()
        if rank and why == "memory":
            runner.pool.release()
        with pytest.raises((dg.DeviceGraphError, OSError)) as refused:
            runner.capture(profile=str(file) if rank and why == "folder" else None)
        runner.pool.restore()
        runner.capture()
        decision = runner.agree(runner.can_run(2))
        return decision.ok, f"{refused.typename}: {refused.value}"

    kind = {"memory": "ExecutableError", "folder": "FileExistsError"}[why]
    (first, heard), (second, said) = in_ranks(2, work)
    assert first and second and said.startswith(kind)
    assert heard.startswith(f"AgreementError: rank 1 of decode/1 raised {kind}")


def test_a_rank_with_an_empty_batch_takes_part_in_an_eager_step():
    def work(rank, group):
        runs = []
        runner = ranked(group, step=lambda batch: runs.append(0) or batch.x * 2)
        runs.clear()
        decision = runner.agree(runner.can_run(0 if rank else 9))
        runner.run(None if rank else {"x": rows_of_x(9)}, decision=decision)
        return len(runs), decision.reason.value

    assert in_ranks(2, work) == [(1, "over_largest_bucket"), (1, "voted_eager")]


def test_an_idle_rank_follows_the_variant_of_the_others():
    def work(rank, group):
        runner = ranked(group, variants=[{}, {"lora": True}])
        mine = runner.can_run(2, variant={"lora": True}) if rank else None
        decision = runner.agree(mine)
        inputs = {"x": rows_of_x(2)} if rank else None
        runner.run(inputs, variant={"lora": True}, decision=decision)
        return {b.key: b.hits for b in runner.stats().buckets if b.hits}

    assert in_ranks(2, work) == [{"2 (lora=True)": 1}] * 2


def test_ranks_that_want_different_variants_are_refused_everywhere():
    def work(rank, group):
        runner = ranked(group, variants=[{}, {"lora": True}])
        runner.agree(runner.can_run(2, variant={"lora": True} if rank else {}))

    for error in in_ranks(2, work):
        assert isinstance(error, dg.AgreementError)
        assert "different variants in one step: {} and {'lora': True}" in str(error)


def test_the_engine_may_bring_its_own_vote():
    votes = threading.Barrier(2)
    cast: list[list[int]] = []

    def vote(values):
        cast.append(values)
        votes.wait(60)
        lowest = [min(column) for column in zip(*cast[-2:], strict=True)]
        votes.wait(60)
        return lowest

    def work(rank, group):
        runner = ranked(group)
        return runner.agree(runner.can_run(1 + 3 * rank)).bucket

    assert in_ranks(2, work, vote=vote) == [4, 4]
    assert len(cast) == 2


def test_a_vote_that_fails_names_this_rank():
    def vote(values):
        raise RuntimeError("connection closed by peer")

    def work(rank, group):
        runner = ranked(group)
        runner.agree(runner.can_run(1))

    for rank, error in enumerate(in_ranks(2, work, vote=vote)):
        assert isinstance(error, dg.AgreementError)
        assert f"failed on rank {rank}" in str(error)


def test_many_votes_leave_no_keys_behind():
    store = dist.HashStore()
    groups = [RankGroup(store, rank, size=2, timeout_s=PATIENT_S) for rank in range(2)]

    def work(rank):
        for index in range(50):
            assert groups[rank].minimum("t", (index, -index)) == [index, -index]

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert store.num_keys() <= 5


def left(runner):
    return [b.bucket for b in runner.plan().buckets if b.state == "pending"]


def test_background_captures_are_steps_of_all_ranks():
    def work(rank, group):
        runner = ranked(group, config={"capture": "background"})
        busy = [runner.idle(ready=rank != turn) for turn in range(3)]
        seen = []
        while runner.idle():
            seen.append(left(runner))
            decision = runner.agree(runner.can_run(8))
            out = runner.run({"x": rows_of_x(8)}, decision=decision)
            assert decision.ok and torch.equal(out, rows_of_x(8) * 2)
        return busy, seen, states(runner)

    expected = [False] * 3, [[4, 2, 1], [2, 1], [1], []], dict.fromkeys((8, 4, 2, 1), "captured")
    assert in_ranks(3, work) == [expected] * 3


def test_a_bucket_that_one_rank_wanted_is_captured_lazily_on_all():
    def work(rank, group):
        runner = ranked(group, config={"capture": "lazy", "lazy_hits": 2})
        for _ in range(3):
            mine = runner.can_run(2) if rank == 1 else None
            decision = runner.agree(mine)
            runner.run({"x": rows_of_x(2)} if rank == 1 else None, decision=decision)
        assert runner.stats().captures == 0, "a rank captured alone"
        assert runner.idle() and not runner.idle()
        return left(runner), runner.agree(runner.can_run(2)).ok

    assert in_ranks(3, work) == [([8, 4, 1], True)] * 3


@pytest.mark.parametrize("budget", ["memory", "time"])
def test_a_capture_between_steps_keeps_the_budgets_on_all_ranks(budget):
    def work(rank, group):
        key = {"memory": "graph_budget_bytes", "time": "time_budget_s"}[budget]
        runner = ranked(group, config={"capture": "background"})
        assert runner.idle()
        if rank == 1:  # is over its budget from here on
            tight = {key: 1 if budget == "memory" else 1e-9}
            runner._scheduler._config = attrs.evolve(runner._config, **tight)
        assert runner.idle()
        return states(runner)

    first, second = in_ranks(2, work)
    assert first[4] == "ranks_dropped" and second[4] == f"{budget}_budget"
    assert first[8] == second[8] == "captured" and first[2] == second[2] == "pending"


def test_a_bucket_that_raised_in_one_rank_between_steps_waits_for_the_next_capture():
    def work(rank, group):
        broken = [rank == 1]
        is_broken = broken.count  # state that the step does not name

        def step(batch):
            if is_broken(True) and batch.tokens == 4 and dg.is_capturing():
                raise KeyError("layer 7")
            return batch.x * 2

        runner = ranked(group, step, config={"capture": "background"})
        seen = []
        for _ in range(5):
            try:
                seen.append(runner.idle())
            except (KeyError, dg.AgreementError) as error:
                seen.append(str(error))
        reason = runner.can_run(4).reason
        broken[0] = False
        runner.capture(everything=True)
        return seen, reason, states(runner)

    results = in_ranks(2, work)
    text = "rank 1 could not capture 4: it raised KeyError: 'layer 7'"
    assert results[0][:2] == ([True, text, True, True, False], Reason.RANKS_DROPPED)
    assert results[1][:2] == ([True, "'layer 7'", True, True, False], Reason.CAPTURE_FAILED)
    assert [result[2] for result in results] == [dict.fromkeys((8, 4, 2, 1), "captured")] * 2


def test_a_rank_that_does_not_come_to_a_capture_is_named():
    def work(rank, group):
        runner = ranked(group, config={"capture": "background"})
        group.timeout_s = 0.5
        if rank != 2:
            runner.idle()

    for error in in_ranks(3, work)[:2]:
        assert isinstance(error, dg.AgreementError)
        assert "for rank 2, which did not arrive" in str(error)


def test_ranks_with_different_buckets_left_are_refused():
    def work(rank, group):
        runner = ranked(group, config={"capture": "background"})
        runner.idle()
        if rank == 1:
            runner.invalidate("weights")
        runner.idle()

    for error in in_ranks(2, work):
        assert isinstance(error, dg.AgreementError)
        assert "different buckets left to capture" in str(error)


def test_ranks_that_capture_different_buckets_are_told_at_once():
    def work(rank, group):
        runner = ranked(group)
        if rank == 1:
            runner.invalidate("weights")
        runner.capture()

    for error in in_ranks(2, work):
        assert isinstance(error, dg.AgreementError)
        assert "to_capture=" in str(error) and '["8", "4", "2", "1"]' in str(error)
        assert "call invalidate() and capture() together" in str(error)


def test_a_rank_at_another_vote_is_told():
    """Where the vote is the engine's, or an all-reduce, values of any two calls would mix."""
    meet, cast = threading.Barrier(2, timeout=LIMIT_S), [[], []]

    def work(rank, group):
        def vote(values):
            cast[rank] = values
            meet.wait()
            lowest = [min(column) for column in zip(*cast, strict=True)]
            meet.wait()
            return lowest

        runner = ranked(group, config={"capture": "background"})
        group._vote = lambda tag, values: vote(values)
        runner.agree(None) if rank else runner.idle()

    for error in in_ranks(2, work):
        assert isinstance(error, dg.AgreementError)
        assert "another rank votes on a different tag" in str(error)


def test_a_first_look_at_the_outputs_that_fails_is_heard_by_all_ranks():
    def work(rank, group):
        def step(batch):
            if rank == 1:
                raise KeyError("layer 7")
            return batch.x * 2

        runner = ranked(group, step, config={"capture": "lazy"}, captured=False)
        runner.capture()

    results = in_ranks(2, work)
    assert isinstance(results[1], KeyError)
    assert "rank 1: raised KeyError: 'layer 7'" in str(results[0])


def test_a_group_of_one_needs_nobody():
    runner = ranked(RankGroup(dist.HashStore(), 0, size=1))
    assert runner.agree(runner.can_run(2)).bucket == 2
    assert runner.agree(runner.can_run(99)).reason is Reason.OVER_LARGEST_BUCKET
    assert runner.agree(None).reason is Reason.EMPTY_BATCH


def test_a_decision_of_another_runner_is_no_vote():
    other = double_runner(variants=[{"lora": True}])
    decision = other.can_run(2, variant={"lora": True})
    pair = RankGroup(dist.HashStore(), 0, size=2, timeout_s=10)
    for runner in (double_runner(), ranked(pair, captured=False)):
        with pytest.raises(dg.InputError, match=r"graph 2 \(lora=True\), which decode does not"):
            runner.agree(decision)


@pytest.mark.parametrize(
    ("rank", "size", "timeout_s", "text"),
    [
        (2, 2, 1, "rank 2 is not in a group of 2"),
        (-1, 2, 1, "rank must be at least 0"),
        ("0", 2, 1, "rank must be an int"),
        (0, None, 1, "size must be an int"),
        (0, 2, 0, "timeout_s must be greater than 0"),
        (0, 2, float("nan"), "timeout_s must be greater than 0"),
        (0, 2, None, "timeout_s must be seconds"),
    ],
)
def test_an_impossible_group_is_refused(rank, size, timeout_s, text):
    with pytest.raises(dg.ConfigError, match=text):
        RankGroup(dist.HashStore(), rank, size=size, timeout_s=timeout_s)


def test_a_vote_that_cannot_be_called_is_refused():
    with pytest.raises(dg.ConfigTypeError, match="vote must be a function"):
        RankGroup(dist.HashStore(), 0, size=2, vote=[1])


def test_several_ranks_need_a_store() -> None:
    with pytest.raises(dg.ConfigError, match="a group of 2 ranks needs a store"):
        RankGroup(None, 0, size=2)


def test_waiting_ends_when_the_work_is_done():
    done = threading.Event()
    threading.Timer(0.05, done.set).start()
    RankGroup(dist.HashStore(), 0, size=2).wait(done.is_set, "step")
    assert done.is_set()


def test_waiting_for_a_device_names_the_rank_that_is_gone_on_every_rank():
    def work(rank, group):
        group.wait(lambda: False, "step")

    results = in_ranks(4, work, timeout_s=0.3, absent=(2,), within=1)
    for rank in (0, 1, 3):
        assert isinstance(results[rank], dg.AgreementError)
        assert "for 'step'" in str(results[rank])
        assert "for rank 2, which did not arrive" in str(results[rank])


def test_a_stuck_device_is_told_from_a_rank_that_is_gone():
    def work(rank, group):
        group.wait(lambda: False, "step")

    for error in in_ranks(2, work, timeout_s=0.3):
        assert isinstance(error, dg.AgreementError)
        assert "although every rank answers" in str(error)


def test_a_rank_that_gives_up_waiting_takes_the_patient_ones_along():
    def work(rank, group):
        group.timeout_s = 0.3 if rank == 0 else 60.0
        group.wait(lambda: False, "step")

    results = in_ranks(3, work, within=5)
    assert all(isinstance(error, dg.AgreementError) for error in results)


def test_a_rank_that_exits_after_the_roll_call_is_named():
    def vote(values):
        raise ProcessLookupError("the process of rank 1 has exited")

    def work(rank, group):
        group.minimum("step/vote", [1])

    for error in in_ranks(2, work, vote=vote, timeout_s=0.3):
        assert "the process of rank 1 has exited). Restart all ranks." in str(error)


def test_a_failed_vote_names_the_rank_that_is_gone():
    def vote(values):
        raise RuntimeError("connection closed by peer")

    def work(rank, group):
        group.minimum("step/vote", [1])

    results = in_ranks(3, work, vote=vote, timeout_s=0.3, absent=(1,))
    for rank in (0, 2):
        assert f"the vote 'step/vote' failed on rank {rank} (connection closed" in str(
            results[rank]
        )
        assert "for rank 1, which did not arrive" in str(results[rank])


def test_a_warm_up_that_never_ends_on_a_device_is_noticed():
    """As when another rank dies before its part of a collective in the warm-up."""

    def work(rank, group):
        runner = ranked(group, captured=False)
        if rank == 1:
            runner._scheduler._begin(runner._scheduler.pending)
            return
        runner.backend.fence = lambda: lambda: False
        runner.capture()

    results = in_ranks(2, work, timeout_s=0.3)
    assert isinstance(results[0], dg.AgreementError)
    assert "for rank 1, which did not arrive" in str(results[0])


def test_the_barrier_after_a_warm_up_waits_for_the_device_on_this_thread():
    """A backend lets one thread at a time have the device: another one would wait for this."""
    threads = []

    def work(rank, group):
        runner = ranked(group, captured=False)
        backend = runner.backend
        wait = backend.synchronize
        backend.synchronize = lambda: (threads.append(threading.current_thread()), wait())
        runner.capture()
        return threading.current_thread()

    assert set(in_ranks(2, work)) == set(threads)


def test_groups_made_one_after_the_other_do_not_meet_each_others_values(tmp_path):
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(tmp_path / "s"), 1), rank=0, world_size=1
    )
    try:
        first, second = (RankGroup.from_process_group() for _ in range(2))
        assert first.gather("t", "a") == ["a"]
        assert not second._has("devgraph/t/1/0")
        assert second.gather("t", "b") == ["b"]
    finally:
        dist.destroy_process_group()


def test_a_group_that_cannot_talk_on_the_host_is_refused(monkeypatch):
    monkeypatch.setattr(dist, "get_backend", lambda group: "nccl")
    with pytest.raises(dg.ConfigError, match=r"new_group\(backend='gloo'\)"):
        RankGroup.from_process_group()


class Prepared:
    """The prepared process that forks ranks; see ``rank_scenarios.py``."""

    def __init__(self) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        self.environment = environment
        self._process = subprocess.Popen(
            [sys.executable, str(SCENARIOS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert self._read() == "ready\n"

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def run(
        self,
        scenario: str,
        *,
        size: int = 4,
        timeout_s: float = PATIENT_S,
        ranks: list[int] | None = None,
        folder: Path | None = None,
        stuck: int | None = None,
    ) -> dict[int, dict[str, Any]]:
        """Run a scenario; return what each rank returned (value) or raised (error), and its end.

        Args:
            stuck: a rank that never ends by itself; it is killed when the others have ended.
        """
        assert self._process.stdin is not None
        wanted = {
            "scenario": scenario,
            "size": size,
            "timeout_s": timeout_s,
            "limit_s": LIMIT_S,
            "ranks": list(range(size)) if ranks is None else ranks,
            "stuck": stuck,
            "folder": None if folder is None else str(folder),
        }
        self._process.stdin.write(json.dumps(wanted) + "\n")
        self._process.stdin.flush()
        return {int(rank): found for rank, found in json.loads(self._read()).items()}

    def close(self) -> None:
        self._process.communicate(timeout=300)


@pytest.fixture(scope="module")
def prepared() -> Iterator[Prepared]:
    process = Prepared()
    yield process
    process.close()


def survivors(found: dict[int, dict[str, Any]], *gone: int) -> list[str]:
    """Return the errors of all ranks but ``gone``, which ended before a patient one would."""
    for rank, result in found.items():
        assert result["end"] != "hang", f"rank {rank} hangs"
        if rank not in gone:
            assert "error" in result, f"rank {rank} ended without an error: {result}"
            assert result["waited"] < PATIENT_S
    return [result["error"] for rank, result in found.items() if rank not in gone]


def test_ranks_that_are_alike_capture_and_run_the_same_graphs(prepared):
    found = prepared.run("agree")
    captured = dict.fromkeys(("8", "4", "2", "1"), "captured")
    for rank, result in found.items():
        assert "error" not in result, result
        value = result["value"]
        assert (value["bucket"], value["right"], value["states"]) == (4, True, captured)
        assert value["idle_steps"] == int(rank == 3)
        assert value["wrote"] == (rank != 3)


@pytest.mark.parametrize("path", ["gloo", "two hosts"])
def test_ranks_agree_in_the_same_way_over_every_path_of_votes(prepared, path):
    here, there = (
        {rank: found["value"] for rank, found in prepared.run(f"agree over {name}").items()}
        for name in (path, "shared memory")
    )
    assert here == there
    assert all(value["right"] for value in here.values())


def test_ranks_without_shared_memory_vote_over_the_group_or_refuse(monkeypatch, tmp_path):
    """FAULTS 55."""
    monkeypatch.setattr(ranks_module, "_host_id", lambda: "")
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(tmp_path / "s"), 1), rank=0, world_size=1
    )
    try:
        RankGroup.from_process_group()
        with pytest.raises(dg.ConfigError, match="the host of rank 0 has no shared memory"):
            RankGroup.from_process_group(shared=True)
        with pytest.raises(dg.ConfigError, match="shared must be True, False or 'auto'"):
            RankGroup.from_process_group(shared="yes")
    finally:
        dist.destroy_process_group()


def test_another_bucket_list_is_named_on_every_rank(prepared):
    """FAULTS 30."""
    for error in survivors(prepared.run("other_buckets")):
        assert "rank 2 has buckets=[2, 8], others [1, 2, 4, 8]" in error


def test_a_rank_that_does_not_come_is_named_within_the_timeout(prepared):
    """FAULTS 30."""
    for error in survivors(prepared.run("missing", timeout_s=TIMEOUT_S), 2):
        assert error.startswith("AgreementError")
        assert "for rank 2, which did not arrive" in error


def test_a_rank_out_of_memory_at_its_third_bucket_leaves_common_buckets(prepared):
    """FAULTS 3."""
    found = prepared.run("fail_third")
    kept = {"8": "captured", "4": "captured"}
    for rank, result in found.items():
        assert "error" not in result, result
        value = result["value"]
        reason = "out_of_memory" if rank == 1 else "ranks_dropped"
        assert value["states"] == {**kept, "2": reason, "1": reason}
        assert value["right"]
        assert value["eager"] == {}  # a dropped bucket's batches use the next larger graph
        assert rank == 1 or "rank 1: out_of_memory" in value["explained"]


def test_a_rank_that_raises_at_its_third_bucket_stops_all_ranks(prepared):
    """FAULTS 30."""
    found = prepared.run("break_third")
    assert "KeyError: 'layer 7'" in survivors({1: found.pop(1)})[0]
    for error in survivors(found):
        assert "rank 1 could not capture 2: it raised KeyError: 'layer 7'" in error


@pytest.mark.parametrize(("scenario", "victim"), [("killed_last", 3), ("killed_first", 0)])
def test_a_rank_that_is_killed_in_capture_is_named(prepared, scenario, victim):
    """FAULTS 30."""
    found = prepared.run(scenario, timeout_s=TIMEOUT_S)
    assert found[victim]["end"] == "exit -9"
    for error in survivors(found, victim):
        assert error.startswith("AgreementError")
        assert f"rank {victim}" in error


@pytest.mark.parametrize(
    ("scenario", "stuck", "end"),
    [("exit_before_vote", None, "exit 0"), ("stuck_before_vote", 1, "stuck")],
)
@pytest.mark.parametrize("path", ["shared memory", "gloo", "two hosts"])
def test_a_rank_that_does_not_vote_is_named(prepared, scenario, stuck, end, path):
    """FAULTS 30, 55."""
    found = prepared.run(f"{scenario} over {path}", timeout_s=TIMEOUT_S, stuck=stuck)
    assert found.pop(1)["end"] == end
    for error in survivors(found):
        assert error.startswith("AgreementError")
        assert "decode/vote" in error
        assert "for rank 1, which did not arrive" in error


def test_a_device_that_waits_for_a_rank_that_left_is_noticed(prepared):
    """FAULTS 30."""
    (error,) = survivors(prepared.run("stuck_device", timeout_s=TIMEOUT_S, size=2), 1)
    assert error.startswith("AgreementError: rank 0 waited ")
    assert "for rank 1, which did not arrive" in error


def test_ranks_meet_in_a_collective_between_segments(prepared):
    found = prepared.run("meet_in_a_collective", size=2)
    assert [found[rank].get("value", found[rank]) for rank in (0, 1)] == [1.0, None]


def test_ranks_prove_a_step_with_a_collective_together(prepared):
    found = prepared.run("prove_together", size=2)
    for rank in (0, 1):
        assert "error" not in found[rank], found[rank]["error"]
        value = found[rank]["value"]
        assert "graphs equal eager bit for bit" in value["right"]
        assert value["cases"] == 4
        assert "every element in every case" in value["causes"][0]


def test_a_rank_that_proves_alone_says_so_after_the_timeout(prepared):
    (error,) = survivors(prepared.run("prove_alone", timeout_s=TIMEOUT_S, size=2), 1)
    assert error.startswith("AgreementError")
    assert "for rank 1, which did not arrive" in error


def test_ranks_share_the_items_of_an_encoder_out_by_tokens(prepared):
    found = prepared.run("shared_items", size=2)
    for rank in (0, 1):
        assert "error" not in found[rank], found[rank]["error"]
        value = found[rank]["value"]
        assert value["right"] == [7, 1, 0]
        assert value["rows"] == [38, 42, 42]  # of 76 rows half each, and then the one item twice


def test_a_rank_that_fails_on_its_items_is_named_by_the_others(prepared):
    """FAULTS 30: they waited in a collective of the device until its timeout."""
    found = prepared.run("failing_items", size=2)
    values = [found[rank].get("value", found[rank]) for rank in (0, 1)]
    assert [error.split(",")[0] for error in values[0]] == [
        "AgreementError: rank 1 raised KeyError: 'layer 7'",
        "AgreementError: rank 1 raised InputError: missing inputs x",
        "AgreementError: rank 1 has items of [9",
    ]
    assert values[1][0] == "KeyError: 'layer 7'"
    assert values[1][1].startswith("InputError: ")
    assert values[1][2].startswith("AgreementError: rank 0 has items of [9, 3, 20] rows")


def test_ranks_capture_while_serving_together(prepared):
    """An all-reduce between segments: a rank that captured or replayed alone would wait."""
    found = prepared.run("capture_while_serving", size=3)
    for result in found.values():
        assert "error" not in result, result
        value = result["value"]
        assert value["captured"] == [False, True, True, False]
        assert value["sums"] == [6.0] * 4
        assert value["eager"] == {"not_captured": 3}


def test_a_rank_that_is_killed_before_a_capture_while_serving_is_named(prepared):
    """FAULTS 30."""
    found = prepared.run("killed_while_serving", size=3, timeout_s=TIMEOUT_S)
    assert found.pop(2)["end"] == "exit -9"
    for error in survivors(found):
        assert error.startswith("AgreementError")
        assert "rank 2" in error


def test_two_groups_of_one_world_agree_apart(prepared):
    """FAULTS 55."""
    found = prepared.run("pairs")
    assert [found[rank].get("value", found[rank]) for rank in range(4)] == [
        [0, 2, 2, 2],
        [1, 2, 2, 2],
        [0, 2, 4, 3],
        [1, 2, 4, 3],
    ]


def test_a_collective_of_the_host_inside_a_graph_is_refused(prepared):
    for error in survivors(prepared.run("full_collective", size=2)):
        assert "all_reduce" in error or "allreduce" in error


def test_two_backends_in_one_group_are_refused(prepared):
    """FAULTS 31."""
    for error in survivors(prepared.run("two_vendors")):
        assert 'rank 3 has backend="second", others "cpu"' in error


def check_mixed(found: dict[int, dict[str, Any]], second: str) -> None:
    values = []
    for rank, result in found.items():
        assert "error" not in result, result["error"]
        value = result["value"]
        assert value["backend"] == (second if rank > 1 else "cpu")
        assert value["policies"] == ["full" if rank > 1 else "breakable", "full"]
        assert value["graphs"]["prefill"] == 1
        assert value["graphs"]["decode"] == 7
        values.append(value["tokens"])
    assert values == [values[0]] * 4
    assert len({token for tokens in values[0] for token in tokens}) > 8


def test_two_groups_on_two_backends_generate_the_same_tokens_from_one_mode_string(prepared):
    check_mixed(prepared.run("mixed_second"), "second")


@pytest.mark.skipif(
    bool(ascend.unavailable_reason()), reason=f"no simulation: {ascend.unavailable_reason()}"
)
def test_groups_on_the_reference_and_the_simulated_driver_generate_the_same_tokens(
    prepared, tmp_path
):
    ascend.build()  # once, not in two processes at the same time
    script, rest = str(SCENARIOS), ["4", str(LIMIT_S), str(tmp_path)]
    alone = [
        subprocess.Popen(
            [sys.executable, script, "mixed_npu", str(rank), *rest],
            env={**prepared.environment, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        )
        for rank in (2, 3)
    ]
    try:
        found = prepared.run("mixed_npu", ranks=[0, 1], folder=tmp_path)
        for process in alone:
            process.wait(LIMIT_S)
    finally:
        for process in alone:
            process.kill()
            process.wait()
    for rank in (2, 3):
        found[rank] = json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8"))
    check_mixed(found, "npu")
