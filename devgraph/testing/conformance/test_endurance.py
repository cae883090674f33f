"""Memory stays flat over many replays, captures and closes; ``--devgraph-long`` for full length."""

from __future__ import annotations

import gc
import os

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


class Meter:
    """Growth of memory since the start, on the host and on the device.

    On the device it is what torch's allocator reserved for this process: others may use the device
    at the same time, and the memory of a CPU is the host's.
    """

    def __init__(self, kit: Kit) -> None:
        self._kit = kit
        self._host, self._device = self._now()

    def _now(self) -> tuple[int, int]:
        gc.collect()
        self._kit.backend.synchronize()
        if self._kit.device.type == "cpu":
            return host_bytes(), 0
        return host_bytes(), int(self._kit.streams.memory_reserved(self._kit.device))

    def check(self, device_slack: int) -> None:
        """Fail if the host or the device grew by more than its slack."""
        host, device = self._now()
        assert host - self._host <= HOST_SLACK, f"the host grew by {host - self._host} bytes"
        assert device - self._device <= device_slack, (
            f"the device grew by {device - self._device} bytes"
        )


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
    for _ in range(50):
        captured.replay()
    meter = Meter(kit)
    before = captured.pool.bytes
    for _ in range(10_000 if devgraph_long else 500):
        captured.replay()
    # 2 MiB: the granularity in which device allocators reserve.
    meter.check(device_slack=2 * 2**20)
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
    meter = Meter(kit)
    for _ in range(100 if devgraph_long else 15):
        cycle()
    meter.check(device_slack=8 * 2**20)
    assert pool.bytes <= before


def test_memory_is_given_back_with_the_pool(kit: Kit, devgraph_long: bool) -> None:
    """FAULTS 37."""
    x = kit.tensor(1 << 18)

    def cycle() -> None:
        pool = kit.backend.make_pool()
        captured = kit.capture(step, x, pool=pool, warmup=1)
        captured.replay()
        captured.close()
        del captured, pool
        gc.collect()

    for _ in range(3):
        cycle()
    meter = Meter(kit)
    for _ in range(100 if devgraph_long else 25):
        cycle()
    # Without giving back, 25 pools of at least 1 MiB each would exceed both slacks.
    meter.check(device_slack=8 * 2**20)


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
    keys = range(1, 12)
    for n in keys:
        captured.replay(n=n)
    meter = Meter(kit)
    for _ in range(200 if devgraph_long else 15):
        for n in keys:
            captured.replay(n=n)
    meter.check(device_slack=16 * 2**20)
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

    for _ in range(5):
        cycle()
    meter = Meter(kit)
    for _ in range(30):
        cycle()
    meter.check(device_slack=8 * 2**20)
    wrong.clear()
    kit.check(captured, broken, x)
