"""Memory stays flat over many replays, captures and closes; ``--devgraph-long`` for full length."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable

import pytest
import torch

import devgraph as dg
from devgraph.testing.conformance.support import POLICIES, Kit, declares

HOST_SLACK = 24 * 2**20
"""Bytes by which a process may grow without a leak: allocator caches and interpreter caches."""


def host_bytes() -> int:
    """Resident bytes of this process, or 0 where the system does not tell."""
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def taken(kit: Kit) -> tuple[int, int]:
    """Bytes of this process on the host, and on the device what torch's allocator reserved for it:
    others may use the device at the same time. The memory of a CPU is the host's."""
    gc.collect()
    kit.backend.synchronize()
    if kit.device.type == "cpu":
        return host_bytes(), 0
    return host_bytes(), int(kit.streams.memory_reserved(kit.device))


def require_flat(
    kit: Kit, cycle: Callable[[], object], times: int, *, warm: int = 5, device_slack: int = 8
) -> None:
    """Fail if ``times`` cycles, after some to get warm, let the host or the device grow by more
    than the slack, which is in MiB for the device."""
    for _ in range(warm):
        cycle()
    host, device = taken(kit)
    for _ in range(times):
        cycle()
    host_now, device_now = taken(kit)
    assert host_now - host <= HOST_SLACK, f"the host grew by {host_now - host} bytes"
    grown = device_now - device
    assert grown <= device_slack * 2**20, f"the device grew by {grown} bytes"


@dg.region()
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


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
    # 2 MiB: the granularity in which device allocators reserve.
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


def test_memory_is_given_back_with_the_pool(kit: Kit, devgraph_long: bool) -> None:
    """FAULTS 37."""
    if kit.backend.keeps_memory:
        pytest.skip("an earlier test left a capture that this backend cannot end: memory is kept")
    x = kit.tensor(1 << 18)

    def cycle() -> None:
        pool = kit.backend.make_pool()
        captured = kit.capture(step, x, pool=pool, warmup=1)
        captured.replay()
        captured.close()
        del captured, pool
        gc.collect()

    # Without giving back, 25 pools of at least 1 MiB each would exceed both slacks.
    require_flat(kit, cycle, 100 if devgraph_long else 25, warm=3)


@declares("region_update")
def test_memory_is_flat_over_many_updates(kit: Kit, devgraph_long: bool) -> None:
    """FAULTS 37."""

    @dg.region(host_args=("n",))
    def head(x: torch.Tensor, *, n: int) -> torch.Tensor:
        return x[:, :n].sum(1, keepdim=True) * 2

    def updated(x: torch.Tensor, *, n: int) -> torch.Tensor:
        for _ in range(4):
            x = head(x + 1, n=n) + x * 0.1
        return x

    x = kit.tensor(4096, 16)
    pool = kit.backend.make_pool(budget_bytes=1)
    captured = kit.capture(updated, x, host_args={"n": 3}, pool=pool)

    def cycle() -> None:
        for n in range(1, 12):
            captured.replay(n=n)

    require_flat(kit, cycle, 200 if devgraph_long else 15, warm=1, device_slack=16)
    kit.check(captured, updated, x, n=7)


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
