"""Regions as task groups over the simulated driver."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import devgraph as dg
from devgraph.api.policy.job import UpdateBudget
from tests.sim.ascend import Driver
from tests.support.interrupts import OPERATIONS, Bench, interrupted
from tests.support.npu_steps import picky_step, step, wanted

pytest_plugins = ["tests.sim.ascend.plugin"]

HEADS, SIZE, ROWS = 2, 8, 16


def attention_of(version: int) -> Callable[..., torch.Tensor]:
    """Return torch_npu's fused attention of a version as a region, as an engine would mark it."""
    import torch_npu

    suffix = "_v2" if version == 2 else ""
    operator = getattr(torch_npu, f"npu_fused_infer_attention_score{suffix}").out
    name = "actual_seq_kvlen" if version == 2 else "actual_seq_lengths_kv"
    heads, scale = ("num_query_heads", "softmax_scale") if suffix else ("num_heads", "scale")
    fixed: dict[str, Any] = {"input_layout": "BNSD", heads: HEADS, scale: 0.5}

    def attend(
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        out: torch.Tensor,
        sums: torch.Tensor,
        lengths: tuple[int, ...],
    ) -> None:
        options = {**fixed, name: list(lengths)}
        operator(query, keys, values, **options, workspace=None, out=[out, sums])

    # Two names, because a region receives a host value only by its own name.
    @dg.region(host_args=("first",), mutates=("out",))
    def one(q: Any, k: Any, v: Any, out: Any, sums: Any, *, first: tuple[int, ...]) -> None:
        attend(q, k, v, out, sums, first)

    @dg.region(host_args=("second",), mutates=("out",))
    def two(q: Any, k: Any, v: Any, out: Any, sums: Any, *, second: tuple[int, ...]) -> None:
        attend(q, k, v, out, sums, second)

    def step(
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        first: tuple[int, ...],
        second: tuple[int, ...],
    ) -> torch.Tensor:
        middle, out = torch.empty_like(query), torch.empty_like(query)
        sums = torch.empty(1, dtype=torch.float32, device=query.device)
        one(query, keys, values, middle, sums, first=first)
        two(middle, keys, values, out, sums, second=second)
        return out * 2

    return step


@pytest.mark.parametrize("version", [1, 2])
def test_operator_that_torch_npu_can_update_by_itself_is_a_region_like_any_other(
    driver: Driver, version: int
) -> None:
    generator = torch.Generator().manual_seed(1)
    shapes = ((2, HEADS, 1, SIZE), (2, HEADS, ROWS, SIZE), (2, HEADS, ROWS, SIZE))
    tensors = [torch.randn(s, generator=generator).half().npu() for s in shapes]
    step, host = attention_of(version), {"first": (4, 4), "second": (4, 4)}
    with dg.capture(step, *tensors, backend="npu", host_args=host) as captured:
        with driver.counting() as moved:
            for first, second in (((3, 9), (16, 1)), ((5, 5), (2, 7)), ((16, 16), (1, 1))):
                for _ in range(2):
                    out = captured.replay(first=first, second=second)
                    assert torch.equal(out, step(*tensors, first=first, second=second))
        assert moved["replays"] == 6
        # Each key was tried once; its second replay ran no host code.
        assert moved["group_updates"] == 6


@dg.region(host_args=("scale",), mutates=("out",))
def draw(q: torch.Tensor, out: torch.Tensor, *, scale: float) -> None:
    torch.mul(torch.rand_like(q), scale, out=out)


def test_region_that_draws_random_numbers_is_refused_at_capture(driver: Driver) -> None:
    def step(q: torch.Tensor, *, scale: float) -> torch.Tensor:
        out = torch.empty_like(q)
        draw(q, out, scale=scale)
        return out

    with pytest.raises(dg.CaptureError, match=r"region .*draw again, where random numbers"):
        dg.capture(step, torch.ones(4).npu(), backend="npu", host_args={"scale": 2.0})


def test_replay_returns_before_its_update_is_done(
    driver: Driver, backend: Any, captured: Any
) -> None:
    backend.try_new_values = False
    before = driver.counter("task_updates")
    with driver.setting(hold_updates=1):
        out = captured.replay(factor=5.0)
        assert driver.counter("task_updates") == before
    backend.synchronize()
    assert driver.counter("task_updates") == before + 3
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


def _right_beside_held_replays(
    driver: Driver, backend: Any, captured: Any, *, updates: int
) -> bool:
    """Run two steps whose replays start only when ``updates`` task updates were done."""
    factors, before = [1.0, 4.0], driver.counter("task_updates")
    with driver.setting(hold_replays=1):
        results = [captured.replay(factor=factor).clone() for factor in factors]
        while driver.counter("task_updates") < before + updates:
            time.sleep(0.001)
    backend.synchronize()
    return all(
        torch.equal(result.cpu(), wanted(captured.x, factor))
        for factor, result in zip(factors, results, strict=True)
    )


def test_update_never_overtakes_the_previous_replay(
    driver: Driver, backend: Any, captured: Any
) -> None:
    backend.try_new_values = False
    assert _right_beside_held_replays(driver, backend, captured, updates=3)


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
from tests.npu.test_task_groups import _right_beside_held_replays, step

backend = dg.get_backend("npu")
backend.try_new_values = False
captured = dg.capture(step, torch.arange(8.0).to("npu"), backend=backend, host_args={"factor": 2.0})
captured.x = torch.arange(8.0)
captured.replay(factor=3.0)
backend.synchronize()
print("with the fence", _right_beside_held_replays(driver, backend, captured, updates=3))
real = TaskGroups._work

def unfenced(self, *args, **kwargs):
    launches, self._launches = self._launches, 0
    work = real(self, *args, **kwargs)
    self._launches = launches
    return work

TaskGroups._work, backend.channel.timeout = unfenced, 1.0
try:
    print("without it", _right_beside_held_replays(driver, backend, captured, updates=6))
except (dg.UpdateError, RuntimeError) as error:
    print("without it", False)
os._exit(0)
"""
    )
    assert "with the fence True" in said
    assert "without it False" in said


@pytest.mark.parametrize("waits", ["synchronize", "replay"])
def test_lost_record_of_an_event_is_a_typed_error_and_the_device_goes_on(
    driver: Driver, backend: Any, captured: Any, waits: str
) -> None:
    driver.set(lose_record_in=2)
    captured.replay(factor=4.0)
    timeout, backend.channel.timeout = backend.channel.timeout, 0.5
    with pytest.raises(dg.UpdateError, match="record of an event was lost"):
        if waits == "synchronize":
            backend.synchronize()
        else:
            while True:
                captured.replay(factor=4.0)
    backend.channel.timeout = timeout
    assert any("record was lost" in line for line in driver.report())
    graph = captured.segments[0]
    assert graph.state == "dirty"
    with pytest.raises(dg.StateError, match="reset"):
        captured.replay(factor=4.0)
    x = torch.ones(4).to("npu")
    with dg.capture(step, x, backend=backend, host_args={"factor": 2.0}) as again:
        assert torch.equal(again.replay(factor=3.0).cpu(), wanted(x, 3.0))


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


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    "name", ["replay", "replay in segments", "replay of a graph", "update", "run", "close"]
)
def test_interrupt_anywhere_in_a_step_leaves_the_next_right(
    driver: Driver, backend: Any, name: str
) -> None:
    """FAULTS 40. A launch without its records would wait for ever, and a key that the groups do
    not hold would be another's numbers."""
    backend.channel.timeout = 5.0  # a device that waits is given back, and the graph dirty
    bench = Bench(backend=backend)
    for place in itertools.count(1):
        n = place % 9 + 1
        if not interrupted(lambda n=n: OPERATIONS[name][0](bench, n), place):
            break
        bench.check(n)
    assert place > 20


def test_refused_update_that_was_told_is_not_raised_by_another_graphs_capture(
    driver: Driver, backend: Any
) -> None:
    seen: set[int] = set()

    @dg.region(host_args=("n",))
    def spoiled(x: torch.Tensor, *, n: int) -> torch.Tensor:
        seen.add(n)
        # 3 needs other kernels, and so does every value after it: the update cannot be undone.
        return (x + n) * n if 3 in seen else x + n

    x = torch.ones(4).to("npu")
    fn = lambda x, *, n: spoiled(x, n=n) * 2  # noqa: E731
    budget = UpdateBudget(copies=0, may_capture=lambda: False)
    with dg.capture(fn, x, backend=backend, host_args={"n": 2}, budget=budget) as captured:
        captured.replay(n=2)
        with pytest.raises(dg.UpdateTopologyError):
            captured.replay(n=3)
        assert captured.segments[0].state == "dirty"
        with dg.capture(step, x, backend=backend, host_args={"factor": 2.0}) as other:
            assert torch.equal(other.replay(factor=3.0).cpu(), wanted(x, 3.0))
