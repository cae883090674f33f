"""Updates beside replays on the real torch_npu over the simulated driver."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import devgraph as dg
from devgraph.npu.channel import Job, UpdateChannel
from tests.sim.ascend import Driver
from tests.support.npu_steps import step, wanted

pytest_plugins = ["tests.sim.ascend.plugin"]


def test_graphs_of_two_models_share_one_update_order(driver: Driver, backend: Any) -> None:
    """A main and a draft model take turns on one stream, each with values of its own."""
    backend.try_new_values = False
    driver.set(update_delay_ms=2, replay_delay_ms=2)
    xs = [torch.arange(8.0).to("npu"), torch.ones(8).to("npu")]
    graphs = [dg.capture(step, x, backend=backend, host_args={"factor": 2.0}) for x in xs]
    draw = random.Random(3)
    turns = [(draw.randrange(2), draw.randrange(1, 9) / 2) for _ in range(60)]
    results = [graphs[which].replay(factor=factor).clone() for which, factor in turns]
    backend.synchronize()
    for (which, factor), result in zip(turns, results, strict=True):
        assert torch.equal(result.cpu(), wanted(xs[which], factor))
    for graph in graphs:
        graph.close()


def test_dead_update_thread_is_a_typed_error_at_the_next_replay(
    driver: Driver, backend: Any, captured: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(backend.channel, "_running", False)
        with driver.counting() as moved, pytest.raises(dg.UpdateError, match="update thread"):
            captured.replay(factor=4.0)
        assert moved["replays"] == 0  # a replay would wait for ever
    assert torch.equal(captured.replay(factor=5.0).cpu(), wanted(captured.x, 5.0))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_thread_that_dies_with_an_update_in_hand_is_a_typed_error(
    driver: Driver, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.ones(8).to("npu")
    channel = UpdateChannel(backend.namespace, backend.device.index, 600.0)
    monkeypatch.setattr(backend, "channel", channel)
    with dg.capture(step, x, backend=backend, host_args={"factor": 2.0}) as captured:
        captured.replay(factor=3.0)
        backend.synchronize()

        def die(self: Job) -> None:
            raise SystemExit

        monkeypatch.setattr(Job, "run", die)
        with pytest.raises(dg.UpdateError, match="has ended"):  # long before the timeout
            captured.replay(factor=4.0)


class Namespace:
    """As much of torch.npu as a channel needs."""

    def SyncLaunchStream(self, index: int) -> object:
        return object()

    def set_device(self, index: int) -> None:
        """Nothing to set."""

    def stream(self, stream: object) -> Any:
        return threading.Lock()  # any context manager


def test_jobs_run_in_the_order_they_were_queued_and_raise_where_they_are_awaited():
    channel, ran = UpdateChannel(Namespace(), 0, 60.0), []
    channel.start()
    jobs = [channel.submit(lambda i=i: ran.append(i)) for i in range(50)]

    def fail() -> None:
        raise ValueError("no")

    last = channel.submit(fail)
    channel.finish(jobs[-1], "the update")
    assert ran == list(range(50))
    with pytest.raises(ValueError, match="no"):
        channel.finish(last, "the update")


def test_job_that_hangs_is_a_typed_error_within_the_timeout():
    channel, hold = UpdateChannel(Namespace(), 0, 0.3), threading.Event()
    channel.start()
    job = channel.submit(hold.wait)
    with pytest.raises(dg.UpdateError, match=r"not issued within 0\.3 s"):
        channel.finish(job, "the update")
    assert not channel.quiet
    hold.set()


class Replay:
    """Regions whose replay is under way until somebody says otherwise."""

    def __init__(self) -> None:
        self.over = False

    def settled(self) -> bool:
        return self.over


def test_settling_waits_for_every_replay_and_returns_them():
    channel, replays = UpdateChannel(Namespace(), 0, 5.0), [Replay(), Replay()]
    for replay in replays:
        channel.watch(replay)
    replays[0].over = True
    timer = threading.Timer(0.1, lambda: setattr(replays[1], "over", True))
    timer.start()
    assert set(channel.settle()) == set(replays)
    assert replays[1].over
    channel.unwatch(replays[0])
    assert channel.watched() == [replays[1]]


def test_watched_replays_may_change_while_another_thread_looks(switching_threads: None):
    channel, replays, end = UpdateChannel(Namespace(), 0, 5.0), [Replay() for _ in range(200)], []

    def launch() -> None:
        while not end:
            for replay in replays:
                channel.watch(replay)
            for replay in replays:
                channel.unwatch(replay)

    thread = threading.Thread(target=launch)
    thread.start()
    try:
        for _ in range(20_000):
            channel.watched()
    finally:
        end.append(True)
        thread.join()


@pytest.fixture
def switching_threads() -> Iterator[None]:
    """Let threads interrupt each other all the time."""
    old = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(old)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_channel_whose_thread_ended_refuses_at_once():
    class Ending(Namespace):
        def set_device(self, index: int) -> None:
            raise SystemExit

    channel = UpdateChannel(Ending(), 3, 5.0)
    channel.start()
    channel._thread.join()
    with pytest.raises(dg.UpdateError, match="update thread of npu:3 has ended"):
        channel.submit(lambda: None)
