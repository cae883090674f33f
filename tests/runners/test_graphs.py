"""What is known of graphs: times, ranges and traces of them, and what is kept for later starts."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import devgraph as dg
from devgraph import Reason
from devgraph.runners.graphs import BOUNDS, MOST_OPEN, Timing
from tests.support.runner_steps import X, decode_of, double, double_runner, rows_of_x


class Watch:
    """A backend whose replays take as long as a test says, once the device has come there."""

    def __init__(self) -> None:
        self.done: list[float] = []
        self.begun = 0

    def stopwatch(self) -> Callable[[], Callable[[], float | None]]:
        at, self.begun = self.begun, self.begun + 1
        return lambda: lambda: self.done[at] if at < len(self.done) else None


def _times(watch: Watch, replays: int) -> Timing:
    timing = Timing(watch)  # type: ignore[arg-type]
    run = timing.over(lambda values: None)
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
    watch.done = [1e-3] * 5 * MOST_OPEN
    timing = _times(watch, 2 * MOST_OPEN)
    assert timing.times.count > MOST_OPEN


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


def test_replays_have_ranges_in_a_profile() -> None:
    plain, ranged = double_runner(), double_runner(ranges=True, name="target")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for runner in (plain, ranged):
            runner.run({"x": torch.ones(3, 3)})
    names = [event.name for event in profile.events()]
    assert names.count("target 4") == 1 and not any(name.startswith("decode") for name in names)


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
        with pytest.raises(dg.StateError, match="inside a profile of torch"):
            runner.capture(profile=str(tmp_path / "traces"))
        torch.ones(3).add(1)
    assert "aten::add" in [event.name for event in profile.events()]
    assert not runner.graphs.captured


def test_ranges_are_yes_or_no() -> None:
    with pytest.raises(dg.ConfigTypeError, match="ranges"):
        double_runner(ranges="yes")


def captured_in_order(runner):
    """Return the buckets in the order in which ``idle`` captures them."""
    order: list[int] = []
    while runner.idle():
        order += {graph.key.bucket for graph in runner.graphs.captured} - {*order}
    return order


def background(path, step=double, **options):
    config = {"capture": "background", "learned": str(path)}
    return decode_of(step, (X,), config=config, **options)


def serve(runner, *sizes):
    for size in sizes:
        assert torch.equal(runner.run({"x": rows_of_x(size)}), rows_of_x(size) * 2)


def test_the_next_start_captures_in_the_order_of_use(tmp_path):
    path = tmp_path / "buckets.json"
    with background(path) as first:
        assert captured_in_order(first) == [8, 4, 2, 1], "nothing was learnt"
        serve(first, 2, 2, 2, 1, 4, 4)
    with background(path) as second:
        serve(second, 1)
        assert captured_in_order(second) == [2, 4, 1, 8]


def test_a_bucket_that_could_not_be_captured_comes_last(tmp_path):
    def step(batch):
        if broken and batch.tokens == 8 and dg.is_capturing():
            raise torch.OutOfMemoryError("no memory")
        return batch.x * 2

    broken, path = True, tmp_path / "buckets.json"
    with background(path, step) as first:
        captured_in_order(first)
        assert first.can_run(8).reason is Reason.OUT_OF_MEMORY
        serve(first, 1)
    broken = False
    with background(path, step) as second:
        assert captured_in_order(second) == [1, 4, 2, 8]


def test_runners_of_other_names_learn_apart_in_one_file(tmp_path):
    path = tmp_path / "buckets.json"
    for name, size in (("draft", 1), ("target", 4)):
        with background(path, name=name) as runner:
            serve(runner, size)
    assert len(json.loads(path.read_text())) == 2
    for name, size in (("draft", 1), ("target", 4)):
        with background(path, name=name) as runner:
            assert captured_in_order(runner)[0] == size


@pytest.mark.parametrize("text", ["{", "[1]", '{"a": 1}', "\udcff", "[" * 100_000])
def test_a_file_that_makes_no_sense_is_as_if_nothing_was_learnt(tmp_path, text):
    path = tmp_path / "buckets.json"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with background(path) as runner:
        assert captured_in_order(runner) == [8, 4, 2, 1]
        serve(runner, 1)
    with background(path) as runner:
        assert captured_in_order(runner)[0] == 1


def test_a_file_that_cannot_be_written_is_only_said(tmp_path, caplog):
    with caplog.at_level(logging.WARNING), background(tmp_path / "no" / "folder.json") as runner:
        serve(runner, 1)
    assert "what was learnt of the buckets is not kept" in caplog.text
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", ["a\0b", "/", "a" * 300])
def test_a_path_of_no_file_is_only_said_and_the_graphs_are_closed(path, caplog):
    runner = background(path)
    serve(runner, 1)
    captured_in_order(runner)
    with caplog.at_level(logging.WARNING):
        runner.close()
    assert "what was learnt of the buckets is not kept" in caplog.text
    assert not runner.graphs.captured


def test_what_is_no_regular_file_is_neither_read_nor_replaced(tmp_path, monkeypatch, caplog):
    """A device was read without end, and replaced by a file."""
    monkeypatch.chdir(tmp_path)  # names of sockets are short
    with socket.socket(socket.AF_UNIX) as made:
        made.bind("learned")
        with caplog.at_level(logging.WARNING), background("learned") as runner:
            serve(runner, 1)
        assert "learned is no regular file" in caplog.text
        assert Path("learned").is_socket()
    assert [each.name for each in tmp_path.iterdir()] == ["learned"]


def test_a_runner_that_served_nothing_keeps_what_was_known(tmp_path):
    path = tmp_path / "buckets.json"
    with background(path) as runner:
        serve(runner, 2)
    before = path.read_text()
    background(path).close()
    assert path.read_text() == before


def test_a_file_without_background_captures_is_reported():
    with pytest.warns(dg.DeviceGraphWarning, match="learned='f' has no effect"):
        double_runner(config={"learned": "f"})
