"""Gates on Ascend: epochs, forgotten gates and memory over the simulated driver."""

from __future__ import annotations

import gc
import random
import threading
import time
from typing import Any

import pytest
import torch

import devgraph as dg
from devgraph.npu import gates

pytest_plugins = ["tests.sim.ascend.plugin"]

NAMES = [f"kv.{layer}" for layer in range(3)]


def step(x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    for layer, name in enumerate(NAMES):
        dg.wait(name)
        x = x * 2 + cache[layer]
        dg.signal(name)
    return x


class Gated:
    def __init__(self, backend: Any, timeout: float) -> None:
        self.x, self.cache = torch.ones(4).to("npu"), torch.ones(3, 4).to("npu")
        self.captured = dg.capture(step, self.x, self.cache, backend=backend, gate_timeout=timeout)
        self.gates = self.captured.gates


def test_replays_ahead_of_gates_that_open_in_random_order(backend):
    gated, rng = Gated(backend, 20.0), random.Random(7)
    done: list[torch.Tensor] = []
    for first in range(1, 61, 6):
        epochs = range(first, first + 6)
        done += [gated.captured.replay().clone() for _ in epochs]
        opens = [(name, epoch) for name in NAMES for epoch in epochs]
        rng.shuffle(opens)
        for name, epoch in opens:
            gated.gates[name].open(epoch=epoch)
        assert gated.gates[NAMES[2]].wait(epoch=epochs[-1]) == epochs[-1]
    backend.synchronize()
    assert all(out.tolist() == [15.0] * 4 for out in done)


def test_device_waits_for_a_gate_and_memory_is_freed_only_afterwards(backend):
    gated = Gated(backend, 20.0)
    pool = backend.make_pool()
    other = dg.capture(lambda x: x + 1, gated.x, backend=backend, pool=pool)
    gated.captured.replay()
    other.close()
    del other, pool
    gc.collect()  # freeing the pool waits for the device with the GIL held
    assert gated.gates[NAMES[0]].epoch == 1 and not gated.gates.idle
    threading.Timer(0.05, lambda: [gate.open() for gate in gated.gates.values()]).start()
    backend.synchronize()
    assert gated.gates.idle


def test_forgotten_gate_of_a_closed_capture_releases_the_device(backend):
    gated = Gated(backend, 0.2)
    started = time.monotonic()
    gated.captured.replay()
    gated.captured.close()
    with pytest.raises(dg.GateTimeoutError, match="kv.0"):
        backend.synchronize()
    assert time.monotonic() - started < 10
    assert (torch.ones(2, device="npu") + 1).tolist() == [2.0, 2.0]


def test_driver_without_waits_for_values_declares_no_gates(backend, monkeypatch):
    calls = {**gates._CALLS, "aclrtOfTheFuture": ()}
    monkeypatch.setattr(gates, "_CALLS", calls)
    assert gates.gate_calls() is None


def test_failed_call_raises_with_the_code_of_the_driver(backend):
    channel: Any = backend.make_gate_channel(None)
    channel._calls = {**channel._calls, "aclrtValueWrite": lambda *args: 507015}
    with pytest.raises(dg.DeviceGraphError, match="error code is 507015") as caught:
        channel.end(1)
    assert backend.lost_reason(caught.value)
