"""Results that share memory, and constant memory use over replays, captures and failures."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

import devgraph as dg
from devgraph.testing.conformance.support import POLICIES, Kit, declares
from devgraph.testing.conformance.test_marks import doubled
from devgraph.testing.conformance.test_update import layers

FACTORS = (2, 3, 5, 3)


def check(kit: Kit, step: Any, x: torch.Tensor, policy: str) -> dg.Captured:
    """Capture with factor 2, and compare replays with eager runs for all factors."""
    captured = kit.capture(step, x, policy=policy, host_args={"factor": 2})
    for seed, factor in enumerate(kit.usable(policy, FACTORS)):
        kit.check(captured, step, x, seed=seed, factor=factor)
    return captured


@pytest.mark.parametrize("policy", POLICIES)
def test_results_that_share_memory_keep_sharing_it(kit: Kit, policy: str) -> None:
    """FAULTS 41."""

    @dg.region(host_args=("factor",))
    def body(x: torch.Tensor, *, factor: int) -> Any:
        y = x * factor
        return y[1:], y, y[::2]

    def step(x: torch.Tensor, *, factor: int) -> Any:
        tail, whole, even = body(x + 1, factor=factor)
        tail.add_(100)
        even.mul_(2)
        return whole + 0

    check(kit, step, kit.tensor(6), policy)


@pytest.mark.parametrize("policy", ["full", "breakable"])
@pytest.mark.parametrize("inference", [False, True])
def test_view_of_a_closed_over_tensor_shares_memory(kit: Kit, policy: str, inference: bool) -> None:
    """FAULTS 41."""
    with torch.inference_mode(inference):
        held: torch.Tensor = kit.tensor(4)

        @dg.region(host_args=("factor",))
        def body(x: torch.Tensor, *, factor: int) -> torch.Tensor:
            held.copy_(x * factor)
            return held[:2]

        def step(x: torch.Tensor, *, factor: int) -> torch.Tensor:
            body(x + 1, factor=factor).add_(100)
            return held + 0

        check(kit, step, kit.tensor(4), policy)


@pytest.mark.parametrize("policy", ["full", "breakable"])
def test_result_that_a_region_also_stores_is_refused(kit: Kit, policy: str) -> None:
    """FAULTS 41."""
    stored: dict[str, torch.Tensor] = {}

    @dg.region(host_args=("factor",))
    def body(x: torch.Tensor, *, factor: int) -> torch.Tensor:
        stored["last"] = x * factor
        return stored["last"]

    def step(x: torch.Tensor, *, factor: int) -> torch.Tensor:
        return body(x + 1, factor=factor) + 1

    with pytest.raises(dg.RegionError, match=r"body.*return a clone\(\)"):
        kit.capture(step, kit.tensor(4), policy=policy, host_args={"factor": 2})


@declares("region_update")
def test_result_is_never_written_into_the_input_that_was_the_output_at_capture(kit: Kit) -> None:
    """FAULTS 41."""

    @dg.region(host_args=("factor",))
    def body(x: torch.Tensor, out: torch.Tensor, *, factor: int) -> torch.Tensor:
        out.copy_(x * factor)
        return x if factor == 1 else out * 1

    x, out = kit.tensor(4), kit.tensor(4)
    captured = kit.capture(
        lambda x, out, *, factor: body(x, out, factor=factor),
        x,
        out,
        host_args={"factor": 1},
        budget=dg.UpdateBudget(misses=0),
    )
    before = x.clone()
    for _ in range(2):
        with pytest.raises(dg.RegionError):
            captured.replay(factor=3)
        assert torch.equal(x, before)
    captured.replay(factor=1)
    assert torch.equal(out, x)


@pytest.mark.parametrize("policy", POLICIES)
def test_layout_change_after_a_use_does_not_affect_it(kit: Kit, policy: str) -> None:
    """FAULTS 42."""

    @dg.region(host_args=("factor",))
    def body(x: torch.Tensor, *, factor: int) -> torch.Tensor:
        return x * factor

    def step(x: torch.Tensor, *, factor: int) -> Any:
        view = x[:]
        result = body(view, factor=factor)
        used = view + 1, result + 1
        view.t_()
        result.t_()
        return (*used, view * 2, result * 2)

    check(kit, step, kit.tensor(2, 3), policy)


@pytest.mark.parametrize("warmup", [0, 1, 2])
@pytest.mark.parametrize("policy", ["full", "breakable"])
@pytest.mark.parametrize("inside", [False, True])
def test_step_that_changes_the_layout_of_an_argument_is_refused_and_undone(
    kit: Kit, pool: dg.Pool, policy: str, warmup: int, inside: bool
) -> None:
    """FAULTS 42."""
    turn = dg.region(lambda x: x.t_() * 1) if inside else lambda x: x.t_() * 1
    x = kit.tensor(2, 3)
    before = x.clone()
    with pytest.raises(dg.CaptureError, match="in place"):
        kit.capture(lambda x: turn(x) + 1, x, policy=policy, warmup=warmup, pool=pool)
    assert x.shape == (2, 3) and torch.equal(x, before)
    kit.works(pool)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("copies", [0, 4])
def test_expanded_results_and_outputs_equal_eager(kit: Kit, policy: str, copies: int) -> None:
    """FAULTS 21."""

    @dg.region(host_args=("factor",))
    def body(x: torch.Tensor, *, factor: int) -> torch.Tensor:
        for _ in range(factor):
            x = x + 1
        return x.expand(3, 4)

    def step(x: torch.Tensor, *, factor: int) -> Any:
        y = body(x, factor=factor)
        return y[:1].expand(5, 4), y

    x = kit.tensor(1, 4)
    captured = kit.capture(
        step, x, policy=policy, host_args={"factor": 2}, budget=dg.UpdateBudget(copies=copies)
    )
    for seed, factor in enumerate(kit.usable(policy, FACTORS)):
        kit.check(captured, step, x, seed=seed, factor=factor)


HOST_SLACK = 24 * 2**20
"""Growth in bytes that does not count as a leak: caches of allocators and of the interpreter."""


def host_bytes() -> int:
    """Return the resident bytes of this process, or 0 if the system does not report them."""
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def taken(kit: Kit) -> tuple[int, int]:
    """Return the memory use of this process on the host and on the device, in bytes.

    Device memory is read from torch's allocator, because other processes may use the device. It is
    0 on a CPU.
    """
    gc.collect()
    kit.backend.synchronize()
    if kit.device.type == "cpu":
        return host_bytes(), 0
    return host_bytes(), int(kit.streams.memory_reserved(kit.device))


def require_flat(
    kit: Kit, cycle: Callable[[], object], times: int, *, warm: int = 5, device_slack: int = 8
) -> None:
    """Run ``times`` cycles after a warm-up; fail if host memory grows beyond ``HOST_SLACK``.

    ``device_slack`` is the limit for device memory in MiB.
    """
    for _ in range(warm):
        cycle()
    host, device = taken(kit)
    for _ in range(times):
        cycle()
    cause = f"in {times} cycles, so _free of the graph or its pool keeps memory"
    host_now, device_now = taken(kit)
    assert host_now - host <= HOST_SLACK, f"the host grew by {host_now - host} bytes {cause}"
    grown = device_now - device
    assert grown <= device_slack * 2**20, f"the device grew by {grown} bytes {cause}"


def step(x: torch.Tensor) -> torch.Tensor:
    for _ in range(4):
        x = doubled(x + 1) * 0.25
    return x


@pytest.mark.parametrize("policy", POLICIES)
def test_memory_is_flat_over_many_replays(kit: Kit, policy: str, devgraph_long: bool) -> None:
    """FAULTS 37."""
    x = kit.tensor(1 << 14)
    captured = kit.capture(step, x, policy=policy)
    before = captured.pool.bytes
    times = 10_000 if devgraph_long else 500
    # Device allocators reserve memory in units of 2 MiB.
    require_flat(kit, captured.replay, times, warm=50, device_slack=2)
    assert captured.pool.bytes == before
    kit.check(captured, step, x)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("end", ["close", "drop"])
def test_memory_is_flat_over_many_captures(
    kit: Kit, pool: dg.Pool, policy: str, end: str, devgraph_long: bool
) -> None:
    """FAULTS 37."""
    x = kit.tensor(1 << 16)

    def cycle() -> None:
        captured = kit.capture(step, x, policy=policy, pool=pool, warmup=1)
        kit.check(captured, step, x)
        if end == "close":
            captured.close()

    for _ in range(5):
        cycle()
    gc.collect()
    before = pool.bytes
    require_flat(kit, cycle, 100 if devgraph_long else 15, warm=0)
    assert pool.bytes <= before


def test_memory_is_freed_with_the_pool(kit: Kit, devgraph_long: bool) -> None:
    """FAULTS 37."""
    if kit.backend.keeps_memory:
        pytest.skip("this backend could not end the capture of an earlier test and keeps memory")
    x = kit.tensor(1 << 18)

    def cycle() -> None:
        pool = kit.backend.make_pool()
        captured = kit.capture(step, x, pool=pool, warmup=1)
        captured.replay()
        captured.close()
        del captured, pool
        gc.collect()

    # If pools leaked, 25 pools of at least 1 MiB each would exceed both limits.
    require_flat(kit, cycle, 100 if devgraph_long else 25, warm=3)


@declares("region_update")
def test_memory_is_flat_over_many_updates(kit: Kit, devgraph_long: bool) -> None:
    """FAULTS 37."""
    x = kit.tensor(4096, 16)
    pool = kit.backend.make_pool()
    pool.limit(1)
    captured = kit.capture(layers, x, host_args={"n": 3}, pool=pool)

    def cycle() -> None:
        for n in range(1, 12):
            captured.replay(n=n)

    require_flat(kit, cycle, 200 if devgraph_long else 15, warm=1, device_slack=16)
    kit.check(captured, layers, x, n=7)


@pytest.mark.parametrize("failing", ["capture", "replay"])
def test_memory_is_flat_over_many_failures(kit: Kit, pool: dg.Pool, failing: str) -> None:
    """FAULTS 37."""
    wrong: list[int] = []

    @dg.no_graph
    def body(x: torch.Tensor) -> torch.Tensor:
        if wrong:
            raise ValueError("from the break")
        return x * 2

    def broken(x: torch.Tensor) -> torch.Tensor:
        return body(x + 1) * 3

    x = kit.tensor(1 << 16)
    captured = kit.capture(broken, x, policy="breakable", pool=pool)
    wrong.append(1)

    def cycle() -> None:
        with pytest.raises(ValueError, match="from the break"):
            if failing == "capture":
                kit.capture(broken, x, policy="breakable", pool=pool, warmup=0)
            else:
                captured.replay()

    require_flat(kit, cycle, 30)
    wrong.clear()
    kit.check(captured, broken, x)
