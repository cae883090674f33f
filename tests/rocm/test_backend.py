"""Captures that cannot be ended, and what the backend tells, on the fake runtime."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import devgraph as dg
from devgraph.api.torchlike.node_calls import RuntimeCallError
from tests.support.fake_hip import (
    assert_usable,
    captured,
    check,
    noise,
    on_fake,
    scaled,
    step,
)

# Captures that cannot be ended.


def fork_and_forget(be: Any, x: torch.Tensor) -> torch.Tensor:
    side = be.namespace.Stream()
    side.wait_stream(be.namespace.current_stream())
    with be.namespace.stream(side):
        return x * 2


@pytest.mark.parametrize("raising", [False, True], ids=["alone", "with an error"])
def test_capture_with_an_unjoined_fork_is_ended_once_and_its_stream_retired(raising: bool):
    with on_fake() as be:
        pool = be.make_pool()
        stuck = pool.stream
        graph = be.make_graph(pool)
        expected: Any = ZeroDivisionError if raising else dg.UnjoinedStreamError
        with pytest.raises(expected), be.capture_context(graph):
            fork_and_forget(be, noise() + 1)
            if raising:
                raise ZeroDivisionError
        assert graph.state == "empty"
        assert stuck.cuda_stream in be.retired
        assert pool.stream != stuck
        assert be.fake.get("second_ends") == 0
        x = noise()
        for _ in range(40):  # torch hands out the retired stream again; nobody takes it
            with dg.capture(lambda x: x * 2, x, backend=be) as cap:
                assert torch.equal(cap.replay(), x * 2)
                assert cap.pool.stream != stuck
        with captured(be, step, x, pool=pool) as cap:
            for n in (2, 3, 5):
                check(cap, step, x, n=n)


def test_invalid_capture_is_undone_by_one_end_of_torch(caplog: pytest.LogCaptureFixture):
    """torch 2.15 refuses a second end of one capture."""
    with on_fake(quiet=0) as be:
        pool = be.make_pool()
        captured(be, step, noise(), pool=pool).close()
        handle, uses = pool.handle, pool.uses
        graph = be.make_graph(pool)
        with pytest.raises(ZeroDivisionError), be.capture_context(graph):
            with pytest.raises(RuntimeError):
                be.namespace.synchronize()
            raise ZeroDivisionError
        assert (pool.handle, pool.uses) == (handle, uses)
        assert not caplog.records
        assert_usable(be)


def test_capture_that_cannot_be_ended_leaves_its_arguments_as_they_were():
    """Their contents are put back by work that a stuck stream would never do."""
    with on_fake() as be, be.namespace.stream(be.namespace.Stream()):
        x, want = torch.ones(4), torch.ones(4)

        def loose(x: torch.Tensor) -> torch.Tensor:
            x.mul_(3)
            return fork_and_forget(be, x)

        with pytest.raises(dg.CaptureError):
            dg.capture(loose, x, backend=be)
        assert torch.equal(x, want)
        x.add_(1)  # on the stream of the caller, which is part of no capture
        assert torch.equal(x, want + 1)
        assert_usable(be)


def test_work_off_a_stuck_stream_is_never_on_it():
    """torch hands out its streams in turn, the stuck one as well."""
    with on_fake() as be:
        stuck = be.namespace.Stream()
        be.runtime.begin_capture(stuck.cuda_stream)
        with be.namespace.stream(stuck):
            for _ in be.namespace._streams:
                with be.on_working_stream():
                    assert be.namespace.current_stream() != stuck
        be.runtime.end_capture(stuck.cuda_stream)


@pytest.mark.parametrize("how", ["region", "graph_break"])
def test_break_on_a_side_stream_is_refused(how: str):
    """FAULTS 15. A capture ends on the stream that it began on."""
    with on_fake() as be:
        side = be.namespace.Stream()

        def inside(x: torch.Tensor, *, n: int) -> torch.Tensor:
            here = be.namespace.current_stream()
            side.wait_stream(here)
            with be.namespace.stream(side):
                if how == "graph_break":
                    dg.graph_break()
                out = scaled(x * 2, n=n)
            here.wait_stream(side)
            return out

        x = noise()
        want = x.clone()
        with pytest.raises(dg.UnjoinedStreamError, match="another stream is current"):
            captured(be, inside, x, policy="breakable")
        assert torch.equal(x, want)
        assert_usable(be)


def test_region_that_forks_and_forgets_is_refused():
    with on_fake() as be:

        @dg.region(host_args=("n",))
        def loose(x: torch.Tensor, *, n: int) -> torch.Tensor:
            return fork_and_forget(be, x) * n

        with pytest.raises(dg.CaptureError):
            captured(be, lambda x, *, n: loose(x, n=n), noise(), warmup=0)
        assert_usable(be)


def test_region_that_forgets_to_join_for_a_new_value_is_refused_and_its_stream_retired():
    """FAULTS 15."""
    with on_fake() as be:

        @dg.region(host_args=("n",))
        def loose(x: torch.Tensor, *, n: int) -> torch.Tensor:
            return (fork_and_forget(be, x) if n > 3 else x * 2) * n

        def step(x: torch.Tensor, *, n: int) -> torch.Tensor:
            return loose(x, n=n)

        x = noise()
        with captured(be, step, x) as cap:
            for n in (2, 3, 5, 2, 4, 3):
                if n <= 3:
                    check(cap, step, x, n=n)
                    continue
                stuck = cap.pool.stream
                with pytest.raises(dg.UpdateError, match="must join every stream"):
                    cap.replay(n=n)
                assert stuck.cuda_stream in be.retired
                assert cap.pool.stream != stuck
        assert_usable(be)


@pytest.mark.parametrize("policy", ["full", "breakable"])
def test_error_of_a_step_stays_the_one_that_is_raised_whatever_fails_behind_it(policy: str):
    """FAULTS 1: a fault at the first call behind it, at the second and so on."""
    calls = 0
    while True:
        with on_fake() as be:
            calls += 1
            x, pool = noise(), be.make_pool()

            def failing(x: torch.Tensor, *, n: int, be: Any = be, at: int = calls) -> torch.Tensor:
                x = step(x, n=n)
                if dg.is_capturing():
                    be.fake.set(fail_call_in=at)
                    raise ZeroDivisionError
                return x

            with pytest.raises(ZeroDivisionError):
                captured(be, failing, x, policy=policy, pool=pool)
            left = be.fake.get("fail_call_in")
            be.fake.set(fail_call_in=0)
            with captured(be, step, x, policy=policy, pool=pool) as cap:
                check(cap, step, x, n=3)
            if left:
                break
    assert calls > 5


def test_stream_that_is_stuck_takes_no_other_along(monkeypatch: pytest.MonkeyPatch):
    """Work of a stream that joined a dead capture would never run."""
    with on_fake() as be:
        x, pool = noise(), be.make_pool()
        captured(be, step, x, pool=pool).close()
        user, call = be.namespace.Stream(), be.runtime.call

        def refusing(name: str, *args: Any) -> None:
            if name == "StreamEndCapture":
                monkeypatch.undo()
                be.fake.set(fail_call_in=1)
            call(name, *args)

        with be.namespace.stream(user):
            monkeypatch.setattr(be.runtime, "call", refusing)
            with pytest.raises(RuntimeCallError):
                captured(be, step, x, pool=pool)
            assert not be.runtime.capturing([user.cuda_stream])
            with captured(be, step, x, pool=pool) as cap:
                for n in (2, 3, 2):
                    check(cap, step, x, n=n)


def test_process_whose_streams_are_all_stuck_says_so():
    with on_fake() as be:
        be.retired.update(stream.cuda_stream for stream in be.namespace._streams)
        with pytest.raises(dg.BackendUnavailableError, match="Start a new process"):
            be.make_pool().stream  # noqa: B018


# Other things.


def test_capture_in_another_thread_is_recorded():
    with on_fake() as be:
        x, found = noise(), []

        def work() -> None:
            with captured(be, step, x) as cap:
                found.append(torch.equal(cap.replay(n=3), step(x, n=3)))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert found == [True]


def test_sticky_errors_mean_that_the_device_is_lost():
    with on_fake() as be:
        lost = RuntimeCallError("hipGraphLaunch failed (719: hipErrorLaunchFailure, x)", 719)
        assert be.lost_reason(lost) == "hipGraphLaunch failed (719: hipErrorLaunchFailure, x)"
        assert be.lost_reason(RuntimeCallError("out of memory", 2)) is None
        assert be.lost_reason(ValueError("no code")) is None
