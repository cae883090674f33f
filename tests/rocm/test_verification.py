"""What HIP runtimes do wrong with executables, ordered from the fake one by one."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

import devgraph as dg
from devgraph.api.torchlike import node_graph as nodegraph
from devgraph.api.torchlike.node_calls import DriverMemoryError, RuntimeCallError
from devgraph.rocm import verification
from devgraph.rocm.verification import LEAK_BUDGET_BYTES, LEAKED_BYTES_PER_NODE
from tests.support.fake_hip import (
    assert_usable,
    captured,
    check,
    noise,
    on_fake,
    recorded,
    scaled,
    step,
)


def test_runtime_is_tried_before_the_first_capture_that_may_have_a_region(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(verification, "marked_with_context", set())
    with on_fake() as be:
        x = noise()
        with dg.capture(lambda x: x + 1, x, backend=be) as captured:
            captured.replay()
        assert be.verification.updates is None
        monkeypatch.undo()

        @dg.region(context=lambda: 3)
        def scaled_by(x: torch.Tensor, *, context: int) -> torch.Tensor:
            return x * context

        with dg.capture(lambda x: scaled_by(x) + 1, x, backend=be) as captured:
            assert be.verification.updates
            assert torch.equal(captured.replay(), x * 3 + 1)


# Stale packets.


def test_stale_executable_is_detected_by_its_first_replay_and_refused():
    with on_fake() as be:
        x = noise()
        graph, out = recorded(be, step, x)
        graph.replay()
        assert torch.equal(out, step(x, n=2))
        with be.fake.with_settings(stale=-1):
            graph.update(n=3)
        with pytest.raises(dg.UpdateError, match=r"recording 1 instead of 2|0 instead of 2"):
            graph.replay()
        assert graph.state == "dirty"
        with pytest.raises(dg.StateError, match="reset"):
            graph.replay()
        graph.reset()


@pytest.mark.parametrize("replayed", [False, True])
def test_verification_that_was_interrupted_is_made_by_the_next_replay(
    replayed: bool, monkeypatch: pytest.MonkeyPatch
):
    def interrupt(pool: dg.Pool) -> torch.Tensor:
        raise KeyboardInterrupt

    with on_fake() as be:
        graph, _ = recorded(be, step, noise())
        if replayed:
            graph.replay()
        with be.fake.with_settings(stale=-1):
            graph.update(n=3)
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(be.verification, "word_of", interrupt)
                graph.replay()
        assert graph.state == "ready"
        with pytest.raises(dg.UpdateError, match="with earlier parameters"):
            graph.replay()


def test_executable_at_the_address_of_one_that_is_gone_is_verified(
    monkeypatch: pytest.MonkeyPatch,
):
    with on_fake() as be:
        x = noise()
        graph, out = recorded(be, step, x)
        graph.replay()
        for n in (3, 2, 3, 2, 3):  # until the keys have executables
            graph.update(n=n)
            graph.replay()
            assert torch.equal(out, step(x, n=n))
        recording = graph.pool.recordings.get(graph, graph.key)
        address = recording.executable
        assert address
        monkeypatch.setattr(be.runtime, "destroy_executable", lambda executable: None)
        monkeypatch.setattr(be.runtime, "instantiate", lambda made: address)
        recording.shrink()
        monkeypatch.setattr(verification.VerifiedUpdates, "deserves_executable", lambda *_: True)
        graph.update(n=2)
        graph.replay()
        graph.update(n=3)
        assert recording.executable == address
        looked: list[int] = []
        word = be.verification.word_of(graph.pool)
        monkeypatch.setattr(be.verification, "word_of", lambda _: looked.append(1) or word)
        graph.replay()
        assert looked
        assert torch.equal(out, step(x, n=3))


@pytest.mark.parametrize("launched", [True, False])
def test_executable_that_was_made_anew_is_verified_again(
    launched: bool, monkeypatch: pytest.MonkeyPatch
):
    with on_fake() as be:
        x = noise()
        graph, out = recorded(be, step, x)
        graph.replay()
        monkeypatch.setattr(verification.VerifiedUpdates, "deserves_executable", lambda *_: False)
        for n in (3, 5, 3, 5):
            graph.update(n=n)
            graph.replay()
            assert torch.equal(out, step(x, n=n))
        # The next write makes it anew, and only that one.
        monkeypatch.setattr(verification, "LEAK_BUDGET_BYTES", graph.update_strategy.leaked_bytes)
        before = graph.update_strategy.leaked_bytes
        with be.fake.with_settings(stale=-1):
            graph.update(n=3)
            assert graph.update_strategy.leaked_bytes < before
            if not launched:
                graph.update(n=5)
            with pytest.raises(dg.UpdateError, match="with earlier parameters"):
                graph.replay()


def test_executable_that_the_budget_dropped_is_verified_when_it_is_made_again():
    with on_fake() as be:
        x = noise()
        graph, out = recorded(be, step, x)
        graph.update(n=3)
        graph.replay()
        for drop in (False, True):
            if drop:
                graph.pool.recordings.drop_own(graph)
            graph.replay()
            assert torch.equal(out, step(x, n=3))
        graph.pool.recordings.drop_own(graph)
        with (
            be.fake.with_settings(stale=-1),
            pytest.raises(dg.UpdateError, match="earlier parameters"),
        ):
            graph.replay()
        assert graph.state == "dirty"


def test_executable_that_is_made_again_as_captured_is_not_taken_for_stale():
    with on_fake() as be:
        x = noise()
        graph, out = recorded(be, step, x)
        for n in (3, 2, 3, 2):
            graph.pool.recordings.drop_own(graph)
            graph.update(n=n)
            for _ in range(2):
                graph.replay()
                assert torch.equal(out, step(x, n=n))


def test_runtime_that_was_found_stale_writes_into_no_executable_again():
    with on_fake() as be:
        x = noise()
        graph, _ = recorded(be, step, x)
        graph.replay()
        with be.fake.with_settings(stale=-1):
            graph.update(n=3)
        with pytest.raises(dg.UpdateError, match="builds an executable for every key"):
            graph.replay()
        be.fake.set(stale=-1)  # it would be wrong again
        before = be.fake.get("writes")
        with captured(be, step, x) as cap:
            for n in (2, 3, 5, 3, 2, 7):
                check(cap, step, x, n=n)
            assert cap.stats()["copies"] == 0
        assert be.fake.get("writes") == before


def test_runtime_that_never_updates_is_found_out_before_the_first_capture():
    with on_fake(stale=-1) as be:
        x = noise()
        with captured(be, step, x) as cap:
            assert be.verification.updates is False
            probing = be.fake.get("writes")
            for n in (2, 3, 5, 3, 2):
                check(cap, step, x, n=n)
        assert be.fake.get("writes") == probing


@pytest.mark.parametrize("stale", [-1, 0])
def test_graph_that_draws_random_numbers_draws_new_ones_whatever_it_launches(stale: int):
    def noisy(x: torch.Tensor, *, n: int) -> torch.Tensor:
        return scaled(x, n=n) + torch.rand(4, 8)

    with on_fake(stale=stale) as be:
        x, generator = noise(), be.namespace.default_generators[0]
        graph, out = recorded(be, noisy, x)
        before = generator.offset
        for launch, n in enumerate((2, 3, 5, 3, 5, 3, 2), 1):
            graph.update(n=n)
            torch.manual_seed(launch)
            graph.replay()
            torch.manual_seed(launch)
            assert torch.equal(out, noisy(x, n=n))
            assert generator.offset == before + 4 * launch
        own = [recording.executable for recording in graph.pool.recordings.kept()]
        assert any(own)
        graph.close()


def test_executable_that_still_holds_its_capture_is_not_taken_for_stale():
    """Keys that need another kernel get executables of their own, and nothing is written."""

    @dg.region(host_args=("n",))
    def switching(x: torch.Tensor, *, n: int) -> torch.Tensor:
        return x * n if n < 10 else x + n

    with on_fake() as be:
        x = noise()
        with captured(be, switching, x) as cap:
            check(cap, switching, x, n=2)
            before = be.fake.get("writes")
            for n in (12, 13, 2, 12, 2):
                check(cap, switching, x, n=n)
            assert be.fake.get("writes") == before
            for n in (3, 2, 12, 2, 3):
                check(cap, switching, x, n=n)
            assert be.fake.get("writes") > before
            assert cap.stats()["copies"] == 0


@pytest.mark.parametrize("known", [False, True])
def test_no_memory_for_an_executable_that_a_key_needs_leaves_the_graph_as_it_was(
    known: bool, monkeypatch: pytest.MonkeyPatch
):
    @dg.region(host_args=("n",))
    def switching(x: torch.Tensor, *, n: int) -> torch.Tensor:
        return x * n if n < 10 else x + n

    def exhausted(graph: int) -> int:
        raise DriverMemoryError("hipGraphInstantiateWithFlags failed (2: out of memory)", 2)

    with on_fake() as be:
        x = noise()
        graph, out = recorded(be, switching, x)
        graph.replay()
        if known:
            graph.update(n=12)
            recording = graph.pool.recordings.get(graph, graph.key)
            graph.update(n=2)
            recording.shrink()
        with monkeypatch.context() as patch:
            patch.setattr(be.runtime, "instantiate", exhausted)
            with pytest.raises(dg.ResourceError, match="launch it again when there is memory"):
                graph.update(n=12)
        for n in (2, 12):
            graph.replay()
            assert torch.equal(out, switching(x, n=n))
            graph.update(n=12)


def test_executable_that_cannot_be_freed_is_told_and_the_replay_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def refused(executable: int) -> None:
        raise RuntimeCallError("hipGraphExecDestroy failed (1: invalid value)", 1)

    with on_fake() as be:
        x = noise()
        with captured(be, step, x) as cap:
            for n in (2, 3, 2, 3):  # until they have executables
                check(cap, step, x, n=n)
            with monkeypatch.context() as patch:
                patch.setattr(be.runtime, "destroy_executable", refused)
                cap.pool.recordings.limit(0)
                check(cap, step, x, n=2)
        assert "was not freed" in caplog.text


def test_one_stale_packet_is_found_by_prove():
    """The word after the regions covers executables; a single node needs a comparison."""
    with on_fake() as be:
        x = noise()
        with captured(be, step, x) as cap:
            check(cap, step, x, n=2)
            be.fake.set(stale=1)
            report = cap.prove(host_args=[{"n": 3}])
            assert not report.ok
            assert "n" in str(report.failures[0])


# Leaks.


def test_executable_is_made_anew_before_updates_have_leaked_their_budget(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(nodegraph, "_USES_WHEN_FULL", 10**6)
    budget = LEAK_BUDGET_BYTES // 8
    monkeypatch.setattr(verification, "LEAK_BUDGET_BYTES", budget)
    with on_fake() as be:
        x = noise()
        pool = be.make_pool()
        cap = captured(be, step, x, pool=pool)
        graph = cap.segments[0]
        for n in (2, 3):
            check(cap, step, x, n=n)
        pool.recordings.budget_bytes = pool.recordings.bytes  # no room for executables
        limit = budget // LEAKED_BYTES_PER_NODE
        each = be.fake.get("leaked_slots")
        assert 0 < each < limit
        made, most = be.fake.get("instantiated"), 0
        turns = 4 * limit // each
        for turn in range(turns):
            cap.replay(n=2 + turn % 2)
            most = max(most, be.fake.get("leaked_slots"))
            assert graph.update_strategy.leaked_bytes <= budget
        assert most <= limit
        assert 3 <= be.fake.get("instantiated") - made <= 8
        for n in (2, 3, 2):
            check(cap, step, x, n=n)
        cap.close()


def test_everything_is_given_back_when_captures_close():
    with on_fake() as be:
        x = noise()
        kept_alive = be.make_pool()
        captured(be, step, x, pool=kept_alive).close()
        gc.collect()
        graphs, executables = be.fake.get("live_graphs"), be.fake.get("live_execs")
        for _ in range(5):
            with captured(be, step, x, pool=kept_alive) as cap:
                for n in (2, 3, 5, 3, 5, 2):
                    cap.replay(n=n)
                assert be.fake.get("live_execs") > executables
            del cap
        gc.collect()
        assert be.fake.get("live_graphs") == graphs
        assert be.fake.get("live_execs") == executables


# Parameter memory.


def test_borrowed_parameters_live_as_long_as_what_launches_them():
    """Release 6.3.1 kept the caller's pointers; the fake poisons what is destroyed."""
    with on_fake(borrow=1) as be:
        x = noise()
        pool = be.make_pool()
        with captured(be, step, x, pool=pool) as cap:
            for n in (2, 3, 5, 3, 5, 7, 2, 9):
                check(cap, step, x, n=n)
                gc.collect()
            pool.recordings.budget_bytes = 1  # every recording but the one in use goes
            for n in (11, 3, 5, 5, 2, 3, 9, 9, 3):
                check(cap, step, x, n=n)
                gc.collect()
            assert pool.recordings.evictions > 0


# Writes and executables that are refused.


@pytest.mark.parametrize("at", [1, 2, 4])
def test_write_that_is_refused_raises_its_error_and_makes_the_graph_dirty(at: int):
    with on_fake() as be:
        x = noise()
        graph, _ = recorded(be, step, x)
        graph.replay()
        be.fake.set(refuse_write_at=at)
        with pytest.raises(RuntimeCallError, match=r"hipGraphExec\w+ failed \(2: hipErrorOut"):
            graph.update(n=3)
        assert graph.state == "dirty"
        graph.reset()
        assert_usable(be)


def test_probe_that_a_passing_fault_stopped_is_made_again(monkeypatch: pytest.MonkeyPatch):
    """One refusal that has nothing to do with updates must not cost the process its updates."""
    with on_fake() as be:

        def refuse(executable: int, stream: int) -> Any:
            raise RuntimeCallError("no memory for a launch", 2)

        with monkeypatch.context() as patched, pytest.raises(RuntimeCallError, match="no memory"):
            patched.setattr(be.runtime, "bound", refuse)
            captured(be, step, noise())
        assert_usable(be)
        assert be.verification.updates


def test_executable_that_is_refused_is_done_without():
    with on_fake() as be:
        x = noise()
        with captured(be, step, x) as cap:
            for n in (2, 3, 5):
                check(cap, step, x, n=n)
            be.fake.set(refuse_instantiate=1)
            for n in (3, 5, 3):
                check(cap, step, x, n=n)  # by an update
        assert_usable(be)
