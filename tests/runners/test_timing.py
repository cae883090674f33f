"""Device times of replays: counted when read, printed as a histogram."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from devgraph.runners.timing import BOUNDS, MAX_UNREAD, ReplayTimer
from tests.support.runner_steps import double_runner


class Watch:
    """A backend whose replays take as long as a test says, once the device has come there."""

    def __init__(self) -> None:
        self.done: list[float] = []
        self.begun = 0

    def stopwatch(self) -> Callable[[], Callable[[], float | None]]:
        at, self.begun = self.begun, self.begun + 1
        return lambda: lambda: self.done[at] if at < len(self.done) else None


def _times(watch: Watch, replays: int) -> ReplayTimer:
    timing = ReplayTimer(watch)  # type: ignore[arg-type]
    run = timing.timed(lambda values: None)
    for _ in range(replays):
        run({})
    return timing


def test_times_are_counted_when_the_device_has_come_there() -> None:
    watch = Watch()
    timing = _times(watch, 3)
    timing.read()
    assert timing.times.count == 0
    watch.done += [1e-5, 3e-4]
    timing.read()
    assert (timing.times.count, timing.times.seconds) == (2, pytest.approx(3.1e-4))
    watch.done.append(60.0)
    timing.read()
    bins = timing.times.bins
    assert bins[0] == bins[BOUNDS.index(5e-4)] == bins[-1] == 1 and sum(bins) == 3


def test_times_that_nobody_asks_for_do_not_pile_up() -> None:
    watch = Watch()
    watch.done = [1e-3] * 5 * MAX_UNREAD
    timing = _times(watch, 2 * MAX_UNREAD)
    assert timing.times.count > MAX_UNREAD


def test_prometheus_text_holds_a_histogram() -> None:
    runner = double_runner()
    runner.stats(timing=True)
    for _ in range(2):
        runner.run({"x": torch.ones(3, 3)})
    assert "replay_seconds" not in double_runner().stats().to_prometheus()
    text = runner.stats(timing=True).to_prometheus()
    assert "# TYPE devgraph_replay_seconds histogram" in text
    assert 'bucket="4",le="+Inf"} 2' in text


def test_an_invalidated_runner_is_timed_on() -> None:
    runner = double_runner()
    runner.stats(timing=True)
    runner.run({"x": torch.ones(4, 3)})
    runner.invalidate("weights")
    runner.capture()
    runner.run({"x": torch.ones(4, 3)})
    counts = [b.times.count for b in runner.stats(timing=True).buckets if b.times]
    assert sum(counts) == 2
