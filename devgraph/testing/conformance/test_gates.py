"""Gates: steps that wait for the host and signal to the host."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch

import devgraph as dg
from devgraph.testing.conformance.support import POLICIES, WIDTH, Kit, beside, declares, runner_of
from devgraph.testing.conformance.test_memory import require_flat

pytestmark = declares("gates")

LAYERS = 3
NAMES = [f"kv.{layer}" for layer in range(LAYERS)]


def layers(x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    """In each layer, wait at the layer's gate and add a row of the cache."""
    for layer, name in enumerate(NAMES):
        dg.wait(name)
        x = x * 2 + cache[layer]
        dg.signal(name)
    return x


def open_all(gates: dg.Gates, epoch: int | None = None) -> None:
    for gate in gates.values():
        gate.open(epoch=epoch)


class Gated:
    """A captured step with a cache that another thread fills layer by layer."""

    def __init__(self, kit: Kit, **options: Any) -> None:
        self.kit = kit
        self.x, self.cache = kit.tensor(4, WIDTH), kit.tensor(LAYERS, 4, WIDTH, seed=1)
        options.setdefault("gate_timeout", 20.0)
        self.captured = kit.capture(layers, self.x, self.cache, **options)
        self.gates = self.captured.gates

    def fill(self, seed: int) -> torch.Tensor:
        """Write new inputs, and return the expected result of a replay."""
        self.kit.refill(self.x, seed)
        self.kit.refill(self.cache, seed + 1)
        return layers(self.x, self.cache)

    def check(self, seed: int) -> None:
        want = self.fill(seed)
        self.kit.same(self.captured.replay(), want)


@pytest.mark.parametrize("policy", POLICIES)
def test_gates_opened_before_a_launch_let_it_pass(kit: Kit, policy: str) -> None:
    gated = Gated(kit, policy=policy)
    assert list(gated.gates) == NAMES
    for epoch in (1, 2):
        open_all(gated.gates)
        gated.check(10 * epoch)
        assert [gate.wait() for gate in gated.gates.values()] == [epoch] * LAYERS


def fill_late(gated: Gated, rows: torch.Tensor, order: list[int]) -> None:
    """Copy rows into the cache in ``order``, and open each row's gate after its copy."""
    # Copy on a separate stream, because the copies must not wait for the replay.
    with gated.kit.own_stream():
        for layer in order:
            gated.cache[layer].copy_(rows[layer])
            gated.gates[NAMES[layer]].open_after()


@pytest.mark.parametrize("policy", POLICIES)
def test_replay_uses_no_data_that_comes_after_the_gate_was_opened(kit: Kit, policy: str) -> None:
    gated = Gated(kit, policy=policy)
    for epoch in range(1, 4):
        kit.refill(gated.x, epoch)
        gated.cache.fill_(float("nan"))
        rows = kit.tensor(LAYERS, 4, WIDTH, seed=50 + epoch)
        want = layers(gated.x, rows)
        kit.backend.synchronize()
        with beside(functools.partial(fill_late, gated, rows, [*range(LAYERS)])):
            got = gated.captured.replay()
        kit.same(got, want)


def test_gates_in_any_order_hold_and_leak_nothing(kit: Kit, devgraph_long: bool) -> None:
    """FAULTS 53."""
    gated, chance = Gated(kit), random.Random(5)
    rows = kit.tensor(LAYERS, 4, WIDTH, seed=50)
    want = layers(gated.x, rows)

    def cycle() -> None:
        gated.cache.fill_(float("nan"))
        kit.backend.synchronize()
        order = chance.sample(range(LAYERS), LAYERS)
        early = chance.randint(0, LAYERS)
        fill_late(gated, rows, order[:early])
        with beside(functools.partial(fill_late, gated, rows, order[early:])):
            got = gated.captured.replay()
        kit.same(got, want)

    require_flat(kit, cycle, 10_000 if devgraph_long else 150, warm=20, device_slack=2)


def test_signals_come_in_the_order_of_the_step(kit: Kit) -> None:
    gated = Gated(kit)
    seen: list[tuple[str, int]] = []

    def watch() -> None:
        for name, gate in gated.gates.items():
            gate.open()
            seen.append((name, gate.wait(timeout=20)))

    for _ in range(3):
        want = gated.fill(7)
        with beside(watch):
            got = gated.captured.replay()
        kit.same(got, want)
    assert seen == [(name, epoch) for epoch in (1, 2, 3) for name in NAMES]


def test_forgotten_gate_is_named_and_the_next_replay_works(kit: Kit) -> None:
    gated = Gated(kit, gate_timeout=0.3)
    gated.gates[NAMES[0]].open()
    with pytest.raises(dg.GateTimeoutError, match=rf"'{NAMES[1]}'.*replay 1"):
        gated.captured.replay()
        kit.backend.synchronize()
    with pytest.raises(dg.GateTimeoutError, match=NAMES[1]):
        gated.gates[NAMES[2]].wait(epoch=1)
    with pytest.raises(dg.GateError, match="has ended"):
        gated.gates[NAMES[2]].open(epoch=1)
    open_all(gated.gates)
    gated.check(3)
    assert gated.gates[NAMES[2]].wait() == 2


def test_open_of_an_open_epoch_does_nothing(kit: Kit) -> None:
    gated = Gated(kit, gate_timeout=0.3)
    for _ in range(2):
        open_all(gated.gates, epoch=1)
    gated.check(1)
    with pytest.raises(dg.GateError, match="has ended"):
        open_all(gated.gates, epoch=1)
    open_all(gated.gates, epoch=3)
    with pytest.raises(dg.GateTimeoutError, match="replay 2"):
        gated.captured.replay()
        kit.backend.synchronize()
    gated.check(2)


def test_two_opens_before_a_launch_open_two_replays(kit: Kit) -> None:
    gated = Gated(kit)
    for _ in range(2):
        open_all(gated.gates)
    for seed in (5, 6):
        gated.check(seed)
    with beside(lambda: open_all(gated.gates)):
        gated.captured.replay()
    kit.backend.synchronize()
    assert gated.gates[NAMES[0]].epoch == 3


def test_proof_opens_its_gates_and_is_no_epoch(kit: Kit) -> None:
    gated = Gated(kit)
    assert gated.captured.prove(cases=2).ok
    assert gated.gates[NAMES[0]].epoch == 0
    open_all(gated.gates)
    gated.check(8)


@dg.region(host_args=("scale",), mutates=("out",))
def scaled(x: torch.Tensor, out: torch.Tensor, *, scale: int) -> None:
    """Write the product of ``x`` and a host argument."""
    torch.mul(x, scale, out=out)


def gated_region(x: torch.Tensor, out: torch.Tensor, *, scale: int) -> torch.Tensor:
    dg.wait("before")
    scaled(x, out, scale=scale)
    dg.wait("after")
    return out + x


@pytest.mark.parametrize("policy", POLICIES)
def test_gates_work_beside_an_updated_region(kit: Kit, policy: str) -> None:
    x, out = kit.tensor(8), kit.tensor(8)
    captured = kit.capture(gated_region, x, out, host_args={"scale": 2}, policy=policy)
    for scale in kit.usable(policy, (2, 3, 2, 5)):
        open_all(captured.gates)
        kit.check(captured, gated_region, x, out, scale=scale)


@dg.no_graph
def waits_inside(x: torch.Tensor) -> torch.Tensor:
    """Wait at a gate in an eager body."""
    dg.wait("inside")
    return x + 1


def test_gate_in_the_body_of_a_break_waits_in_replays(kit: Kit) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        dg.wait("graph")
        return waits_inside(x * 2) * 3

    x = kit.tensor(8)
    captured = kit.capture(step, x, policy="breakable", gate_timeout=20.0)
    for seed in (1, 2):
        kit.refill(x, seed)
        with beside(lambda: open_all(captured.gates)):
            got = captured.replay()
        kit.same(got, step(x))


def gated_step(batch: Any) -> torch.Tensor:
    dg.wait("kv")
    out: torch.Tensor = batch.x * 2 + 1
    dg.signal("kv")
    return out


@pytest.mark.parametrize("policy", [*POLICIES, "disabled"])
def test_gates_of_a_runner_hold_for_all_buckets_and_eager_steps(kit: Kit, policy: str) -> None:
    runner = runner_of(kit, gated_step, config={"policy": policy}, gate_timeout=20.0)
    assert runner.gates["kv"].epoch == 0
    for epoch, rows in enumerate((4, 1, 3, 2), 1):
        if rows == 3:
            runner.suspend()
        x = kit.tensor(rows, WIDTH, seed=rows)
        with beside(lambda: runner.gates["kv"].open()):
            out = runner.run({"x": x})
        kit.same(out, x * 2 + 1)
        assert runner.gates["kv"].wait() == epoch
        runner.resume()
    assert policy == "disabled" or runner.prove().ok
    runner.gates["kv"].open(epoch=5)
    kit.same(runner.run({"x": x}), x * 2 + 1)


def test_each_iteration_of_a_loop_is_an_epoch(kit: Kit) -> None:
    loop = dg.Loop(steps=3, advance=lambda batch, out: batch.x.copy_(out))
    runner = runner_of(kit, gated_step, loop=loop, gate_timeout=20.0)
    x = kit.tensor(4, WIDTH).round()
    want = [x * 2 + 1]
    for _ in range(2):
        want.append(want[-1] * 2 + 1)

    def turns() -> None:
        for _ in range(3):
            runner.gates["kv"].open()

    for launch in (1, 2):
        with beside(turns):
            out = runner.run({"x": x}).outputs
        kit.same(out, torch.stack(want))
        assert runner.gates["kv"].epoch == 3 * launch
        assert runner.gates["kv"].wait(epoch=3 * launch) == 3 * launch
    reason = "gates" if kit.backend.capabilities.loops else "backend"
    assert runner.stats().updates[f"loops_unrolled_{reason}"] == 3


def test_closed_capture_leaves_the_device_usable(kit: Kit) -> None:
    gated = Gated(kit, gate_timeout=0.3)
    with pytest.raises(dg.GateTimeoutError):
        gated.captured.replay()
        gated.captured.close()
        kit.backend.synchronize()
    kit.works(kit.backend.make_pool())
