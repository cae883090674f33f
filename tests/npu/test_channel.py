"""Updates beside replays on the real torch_npu over the simulated driver."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import devgraph as dg
from devgraph.npu.channel import Job, UpdateChannel
from tests.sim.ascend import Driver

pytest_plugins = ["tests.sim.ascend.plugin"]
pytestmark = [
    pytest.mark.npu,
    pytest.mark.filterwarnings("ignore:Cannot create tensor with internal format"),
]


@dg.region(host_args=("factor",), mutates=("out",))
def scale(x: torch.Tensor, out: torch.Tensor, *, factor: float) -> None:
    torch.mul(x, factor, out=out)


def step(x: torch.Tensor, *, factor: float) -> torch.Tensor:
    out = torch.empty_like(x)
    for _ in range(3):
        scale(x, out, factor=factor)
        x = out + 1
    return x


def wanted(x: torch.Tensor, factor: float) -> torch.Tensor:
    x = x.cpu()
    for _ in range(3):
        x = x * factor + 1
    return x


@dg.region(host_args=("n",), mutates=("out",))
def picky(x: torch.Tensor, out: torch.Tensor, *, n: int) -> None:
    if n > 9:
        raise ValueError(f"{n} is too many")
    torch.mul(x, float(n), out=out)


def picky_step(x: torch.Tensor, *, n: int) -> torch.Tensor:
    out = torch.empty_like(x)
    picky(x, out, n=n)
    return out + 1


@pytest.fixture
def backend(driver: Driver) -> Iterator[Any]:
    """The backend, with what a test sets taken back and without graphs of other tests."""
    backend: Any = dg.get_backend("npu")
    kept = {n: getattr(backend, n) for n in ("replay_first", "try_new_values")}
    timeout = backend.channel.timeout
    yield backend
    for name, value in kept.items():
        setattr(backend, name, value)
    backend.channel.timeout = timeout


@pytest.fixture
def captured(backend: Any) -> Iterator[Any]:
    x = torch.arange(8.0).to("npu")
    with dg.capture(step, x, backend=backend, host_args={"factor": 2.0}) as captured:
        captured.x = x
        captured.replay(factor=3.0)
        backend.synchronize()
        yield captured


def test_replay_returns_before_its_delayed_update_is_done(
    driver: Driver, backend: Any, captured: Any
) -> None:
    backend.try_new_values = False
    driver.set(update_delay_ms=100)  # of each of the three regions
    begun = time.perf_counter()
    out = captured.replay(factor=5.0)
    returned = time.perf_counter() - begun
    before = driver.counter("task_updates")
    backend.synchronize()
    done = time.perf_counter() - begun
    assert returned < 0.1, f"the replay returned after {returned:.3f} s"
    assert done >= 0.3, f"three delayed updates were done after {done:.3f} s"
    assert driver.counter("task_updates") > before
    assert torch.equal(out.cpu(), wanted(captured.x, 5.0))


@pytest.mark.parametrize("tried", [True, False], ids=["tried", "trusted"])
@pytest.mark.parametrize("replay_first", [True, False], ids=["replay-first", "update-first"])
def test_five_hundred_random_steps_are_right_with_delayed_updates(
    driver: Driver, backend: Any, captured: Any, replay_first: bool, tried: bool
) -> None:
    """Nothing waits for the device between the steps, so that updates run beside replays."""
    backend.replay_first, backend.try_new_values = replay_first, tried
    driver.set(update_delay_ms=1)
    draw = random.Random(7)
    total = 500 if replay_first and not tried else 100
    factors = [draw.randrange(1, 40) / 8 for _ in range(total)]
    results = [captured.replay(factor=factor).clone() for factor in factors]
    backend.synchronize()
    for factor, result in zip(factors, results, strict=True):
        assert torch.equal(result.cpu(), wanted(captured.x, factor))


def _steps(backend: Any, captured: Any) -> list[bool]:
    factors = [1.0, 4.0, 2.0, 7.0, 3.0, 6.0]
    results = [captured.replay(factor=factor).clone() for factor in factors]
    backend.synchronize()
    return [
        torch.equal(result.cpu(), wanted(captured.x, factor))
        for factor, result in zip(factors, results, strict=True)
    ]


def test_update_never_overtakes_the_previous_replay(
    driver: Driver, backend: Any, captured: Any
) -> None:
    backend.try_new_values = False
    driver.set(replay_delay_ms=20)  # a slow replay is what an update could overtake
    assert all(_steps(backend, captured))


def test_update_without_the_fence_is_caught_by_the_same_steps(run_python: Any) -> None:
    """The ordering test would notice if the ordering were gone.

    In a process of its own: two records are one credit, so replays may wait for ever.
    """
    said = run_python(
        """
from tests.sim.ascend import activate
driver = activate()
import os, torch
import devgraph as dg
from devgraph.npu.task_groups import TaskGroups
from tests.npu.test_channel import _steps, step

backend = dg.get_backend("npu")
backend.try_new_values, backend.channel.timeout = False, 1.0
captured = dg.capture(step, torch.arange(8.0).to("npu"), backend=backend, host_args={"factor": 2.0})
captured.x = torch.arange(8.0)
captured.replay(factor=3.0)
backend.synchronize()
driver.set(replay_delay_ms=20, sync_timeout_ms=5000)
print("with the fence", all(_steps(backend, captured)))
real = TaskGroups._job

def unfenced(self, *args, **kwargs):
    self._fenced = True
    return real(self, *args, **kwargs)

TaskGroups._job = unfenced
try:
    print("without it", all(_steps(backend, captured)))
except (dg.UpdateError, RuntimeError) as error:
    print("without it", False)
os._exit(0)
"""
    )
    assert "with the fence True" in said
    assert "without it False" in said


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


@pytest.mark.parametrize("waits", ["synchronize", "replay"])
def test_lost_record_of_an_event_is_a_typed_error_and_the_device_goes_on(
    driver: Driver, backend: Any, captured: Any, waits: str
) -> None:
    backend.channel.timeout = 0.5
    driver.set(lose_record_in=2)
    begun = time.perf_counter()
    captured.replay(factor=4.0)
    with pytest.raises(dg.UpdateError, match="record of an event was lost"):
        if waits == "synchronize":
            backend.synchronize()
        else:
            while time.perf_counter() - begun < 5:
                captured.replay(factor=4.0)
                time.sleep(0.1)
    assert time.perf_counter() - begun < 5
    assert any("record was lost" in line for line in driver.report())
    graph = captured.segments[0]
    assert graph.state == "dirty"
    with pytest.raises(dg.StateError, match="reset"):
        captured.replay(factor=4.0)
    x = torch.ones(4).to("npu")
    with dg.capture(step, x, backend=backend, host_args={"factor": 2.0}) as again:
        assert torch.equal(again.replay(factor=3.0).cpu(), wanted(x, 3.0))


def test_dead_update_thread_is_a_typed_error_at_the_next_replay(
    driver: Driver, backend: Any, captured: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = threading.Thread(target=lambda: None)
    dead.start()
    dead.join()
    begun = time.perf_counter()
    with monkeypatch.context() as patch:
        patch.setattr(backend.channel, "_thread", dead)
        with driver.counting() as moved, pytest.raises(dg.UpdateError, match="update thread"):
            captured.replay(factor=4.0)
        assert moved["replays"] == 0  # a replay would wait for ever
    assert time.perf_counter() - begun < 5
    assert torch.equal(captured.replay(factor=5.0).cpu(), wanted(captured.x, 5.0))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_thread_that_dies_with_an_update_in_hand_is_a_typed_error(
    driver: Driver, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.ones(8).to("npu")
    channel = UpdateChannel(backend.namespace, backend.device.index, 2.0)
    monkeypatch.setattr(backend, "channel", channel)
    with dg.capture(step, x, backend=backend, host_args={"factor": 2.0}) as captured:
        captured.replay(factor=3.0)
        backend.synchronize()

        def die(self: Job) -> None:
            raise SystemExit

        monkeypatch.setattr(Job, "run", die)
        begun = time.perf_counter()
        with pytest.raises(dg.UpdateError, match="has ended"):
            captured.replay(factor=4.0)
        assert time.perf_counter() - begun < 5


def test_error_of_a_trusted_update_is_raised_by_the_next_call_of_the_graph(
    driver: Driver, backend: Any
) -> None:
    backend.try_new_values = False

    x = torch.ones(4).to("npu")
    with dg.capture(picky_step, x, backend=backend, host_args={"n": 2}) as captured:
        assert captured.replay(n=3).tolist() == [4.0] * 4
        captured.replay(n=10)
        with pytest.raises(ValueError, match="10 is too many"):
            captured.replay(n=3)
        assert captured.segments[0].state == "dirty"
    backend.synchronize()


def test_repeated_key_sends_its_signal_and_runs_no_host_code(
    driver: Driver, backend: Any, captured: Any
) -> None:
    captured.replay(factor=3.0)
    backend.synchronize()
    with driver.counting() as moved:
        for _ in range(4):
            captured.replay(factor=3.0)
        backend.synchronize()
    assert moved["replays"] == 4
    assert moved.get("group_updates", 0) == 0
    assert moved["value_waits"] == 12  # three events a replay, each signalled again
