"""Epochs, timeouts and errors of gates, on the CPU reference and on a device that runs behind."""

from __future__ import annotations

import random
import signal
import threading
import time

import pytest
import torch

import devgraph as dg
from devgraph.api.environment import TIMEOUT_VARIABLE
from devgraph.api.gates import Gates
from devgraph.api.marks.gates import entered_gates, turns
from devgraph.testing.conformance.test_gates import beside
from tests.support.gate_device import GatedBackend, GateDevice
from tests.support.runner_steps import X, decode_of

NAMES = ("a", "b", "c")


def step(x):
    for name in NAMES:
        dg.wait(name)
        x = x + 1
    dg.signal("done")
    return x


@pytest.fixture
def captured():
    x = torch.zeros(3)
    with dg.capture(step, x, backend="cpu", gate_timeout=5.0) as captured:
        yield captured


def open_waits(gates, epoch=None):
    for name in NAMES:
        gates[name].open(epoch=epoch)


def test_marks_do_nothing_in_eager_code():
    assert step(torch.zeros(1)).item() == 3


def test_unknown_gate_is_refused_with_the_nearest_name(captured):
    with pytest.raises(dg.InputError, match=r"no gate 'dome'.*Did you mean 'done'"):
        captured.gates["dome"]
    assert "dome" not in captured.gates
    for act in captured.gates["done"].open, captured.gates["done"].open_after:
        with pytest.raises(dg.InputError, match=r"no dg.wait\('done'\). Known: a, b"):
            act()
    with pytest.raises(dg.InputError, match=r"no dg.signal\('a'\). Known: done"):
        captured.gates["a"].wait()
    assert list(captured.gates) == [*NAMES, "done"]


def test_two_threads_open_two_replays(captured):
    threads = [threading.Thread(target=open_waits, args=(captured.gates,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for _ in range(2):
        assert captured.replay().tolist() == [3, 3, 3]
    assert captured.gates["a"].open() == 3


def test_two_threads_open_one_epoch_once(captured):
    """FAULTS 53."""
    with beside(lambda: open_waits(captured.gates, epoch=1)):
        open_waits(captured.gates, epoch=1)
    captured.replay()
    assert captured.gates["b"].open() == 2


def test_interrupt_while_waiting_leaves_the_capture_usable(captured):
    # Workers of xdist ignore the signal. interrupt_main() would not end a wait for a lock.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.05, signal.pthread_kill, (threading.get_ident(), signal.SIGINT))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            captured.replay()
    finally:
        signal.signal(signal.SIGINT, before)
    timer.join()
    with pytest.raises(dg.GateError, match="ended without the signal"):
        captured.gates["done"].wait(epoch=1)
    open_waits(captured.gates)
    assert captured.replay().tolist() == [3, 3, 3]
    assert captured.gates["done"].wait() == 2


def test_other_replays_of_the_pool_wait_behind_a_closed_gate(captured):
    x = torch.ones(2)
    other = dg.capture(lambda x: x * 2, x, backend="cpu", pool=captured.pool)
    with beside(captured.replay):
        while not captured.gates.epoch:
            time.sleep(0.001)
        with beside(other.replay):
            open_waits(captured.gates)
    assert other.outputs.tolist() == [2, 2]


def test_error_of_the_step_ends_its_epoch():
    x, index = torch.zeros(3), torch.zeros(1, dtype=torch.int64)

    def failing(x, index):
        dg.wait("a")
        out = x[index]
        dg.wait("b")
        return out

    captured = dg.capture(failing, x, index, backend="cpu", gate_timeout=5.0)
    captured.gates["a"].open()
    index.fill_(7)
    with pytest.raises(IndexError):
        captured.replay()
    index.fill_(1)
    assert [captured.gates[name].open() for name in "ab"] == [2, 2]
    assert captured.replay().tolist() == [0]


def test_wait_mark_of_its_own_timeout_overrides_that_of_the_capture():
    def hurried(x):
        dg.wait("a", timeout=0.05)
        return x + 1

    captured = dg.capture(hurried, torch.zeros(1), backend="cpu", gate_timeout=60)
    with pytest.raises(dg.GateTimeoutError, match=r"0\.05 s"):
        captured.replay()


def test_timeout_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv(TIMEOUT_VARIABLE, "0.05")
    with pytest.raises(dg.GateTimeoutError, match=r"0\.05 s"):
        dg.capture(step, torch.zeros(1), backend="cpu").replay()
    monkeypatch.setenv(TIMEOUT_VARIABLE, "soon")
    with pytest.raises(dg.InputError, match="soon"):
        dg.capture(step, torch.zeros(1), backend="cpu")
    monkeypatch.setenv(TIMEOUT_VARIABLE, "0")
    with pytest.raises(dg.InputError, match=f"{TIMEOUT_VARIABLE} must be more than 0 seconds"):
        dg.capture(step, torch.zeros(1), backend="cpu")


@pytest.mark.parametrize("timeout", [0, -1, float("inf")])
def test_timeout_that_is_no_time_is_refused(timeout):
    with pytest.raises(dg.InputError):
        dg.capture(step, torch.zeros(1), backend="cpu", gate_timeout=timeout)


def test_signal_that_never_comes_times_out_on_the_host(captured):
    with pytest.raises(dg.GateTimeoutError, match="did not signal 'done' within 0.01 s"):
        captured.gates["done"].wait(timeout=0.01)


def test_wait_returns_each_replay_once_and_skips_missed_ones(captured):
    for _ in range(3):
        open_waits(captured.gates)
        captured.replay()
    assert captured.gates["done"].wait() == 3
    with pytest.raises(dg.GateTimeoutError, match="replay 4"):
        captured.gates["done"].wait(timeout=0.01)


# A device that runs behind the host.


class Behind:
    """Gates on a ``GateDevice``, with a graph that waits at each of them in each turn."""

    def __init__(self, timeout=10.0, loop=1):
        self.gates = gates = Gates(GatedBackend(), "a step", timeout=timeout, turns=loop)
        self.device: GateDevice = gates.channel
        self.loop = loop
        with gates.recording(), entered_gates(gates):
            for _ in turns(loop):
                for name in (*NAMES, "done"):
                    gates.reach("signal" if name == "done" else "wait", name, None, recording=True)
        self.recorded, self.graph = gates.recorded, self.device.recorded

    def launch(self):
        with self.gates.launch(self.recorded):
            for node in self.graph:
                node()

    def check(self, launches):
        """Fail unless every launch passed every gate in order."""
        self.device.synchronize()
        places = [p * self.loop + turn for turn in range(self.loop) for p in range(len(NAMES))]
        want = [(launch, place) for launch in range(1, launches + 1) for place in places]
        assert self.device.passed == want


def test_launches_ahead_of_their_gates_pass_one_after_another():
    behind = Behind()
    for _ in range(3):
        behind.launch()
    for epoch in (2, 1, 3):
        open_waits(behind.gates, epoch)
    behind.check(3)


def test_early_open_of_a_later_launch_does_not_let_an_earlier_one_pass():
    """FAULTS 53."""
    behind = Behind()
    for _ in range(2):
        behind.launch()
    open_waits(behind.gates, epoch=2)
    time.sleep(0.05)
    assert not behind.device.passed
    open_waits(behind.gates, epoch=1)
    behind.check(2)


def test_gate_opened_during_a_begin_is_not_issued_before_its_launch_has_begun():
    """The driver may wait for all work in ``begin``, including a stream that waits for it."""
    behind = Behind()
    begin, issued = behind.device.begin, []

    def open_meanwhile(*args):
        open_waits(behind.gates)
        issued.extend(behind.device._opens)
        begin(*args)

    behind.device.begin = open_meanwhile
    behind.launch()
    behind.check(1)
    assert not issued


def test_forgotten_gate_of_a_device_is_opened_and_reported():
    behind = Behind(timeout=0.1)
    behind.launch()
    behind.gates["a"].open()
    behind.check(1)
    with pytest.raises(dg.GateTimeoutError, match=r"'b'.*replay 1"):
        behind.launch()
    open_waits(behind.gates)
    behind.launch()
    behind.check(2)
    behind.gates.check()


def test_eager_steps_on_a_device_wait_at_closed_gates_only():
    behind = Behind()
    behind.gates["a"].open()

    def step():
        with behind.gates.launch():
            dg.wait("a")
            dg.wait("b")
            dg.signal("done")

    step()
    time.sleep(0.05)
    assert not behind.device.passed
    behind.gates["b"].open()
    assert behind.gates["done"].wait() == 1
    assert behind.device.passed == [(1, 1)]
    open_waits(behind.gates)
    behind.launch()
    behind.device.synchronize()
    assert behind.device.passed[1:] == [(2, 0), (2, 1), (2, 2)]


def test_eager_step_without_marks_is_no_epoch():
    behind = Behind()
    open_waits(behind.gates)
    with behind.gates.launch():
        pass
    assert behind.gates.epoch == 0
    behind.launch()
    behind.check(1)


def test_stream_that_never_finishes_is_named():
    behind = Behind(timeout=0.1)
    finished = threading.Event()
    behind.launch()
    for name in NAMES:
        behind.gates[name].open_after(finished.is_set)
    behind.device.synchronize()
    with pytest.raises(dg.GateTimeoutError, match="stream of its open_after"):
        behind.gates.check()


def test_gates_open_behind_their_stream():
    behind = Behind()
    finished = threading.Event()
    for name in NAMES:
        behind.gates[name].open_after(finished.is_set)
    behind.launch()
    time.sleep(0.05)
    assert not behind.device.passed
    finished.set()
    behind.check(1)


def test_stream_opens_gates_of_a_step_that_runs():
    behind = Behind()
    finished = threading.Event()
    behind.launch()
    while not behind.device.begun:
        time.sleep(0.001)
    for name in NAMES:
        assert behind.gates[name].open_after(finished.is_set) == 1
    assert behind.gates["a"].open_after(finished.is_set) == 2
    time.sleep(0.05)
    assert not behind.device.passed
    finished.set()
    behind.check(1)


def test_turns_are_epochs():
    behind = Behind(loop=2)
    for epoch in (1, 2, 3):
        open_waits(behind.gates, epoch)
    behind.launch()
    behind.launch()
    assert behind.gates.epoch == 4
    open_waits(behind.gates, 4)
    behind.check(2)


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_random_order_of_opens_never_hangs_and_never_starts_early(count):
    behind, chance = Behind(timeout=60), random.Random(5)
    opens = [(epoch, name) for epoch in range(1, count + 1) for name in NAMES]
    near = sorted(opens, key=lambda item: item[0] + 4 * chance.random())

    def open_near():
        for epoch, name in near:
            while behind.gates.epoch < epoch - 5:
                time.sleep(0)
            behind.gates[name].open(epoch=epoch)

    with beside(open_near):
        for launch in range(count):
            while behind.device.done < launch - 6:
                time.sleep(0)
            behind.launch()
    behind.check(count)
    assert len(behind.gates._launches) < 20 and not behind.gates._ahead


# Runners.


def gated(batch):
    dg.wait("kv")
    dg.signal("kv")
    return batch.x * 2


def inputs(rows):
    return {"x": torch.randn(rows, 3)}


def test_emulated_steps_wait_like_graphs():
    runner = decode_of(gated, [X], config={"policy": "full", "emulate": True}, gate_timeout=5.0)
    for epoch in (1, 2):
        data = inputs(2)
        with beside(runner.gates["kv"].open):
            assert torch.equal(runner.run(data), data["x"] * 2)
        assert runner.gates["kv"].wait() == epoch


def test_step_on_pad_values_is_no_epoch():
    runner = decode_of(gated, [X], idle_dummy=True, gate_timeout=5.0)
    runner.run(inputs(0))
    runner.run(inputs(0))
    assert runner.gates["kv"].epoch == 0
    runner.suspend()
    runner.run(inputs(0))
    assert runner.gates["kv"].epoch == 0


def test_runner_that_is_not_captured_takes_any_name_before_its_first_step():
    runner = decode_of(gated, [X], captured=False, gate_timeout=5.0)
    runner.gates["kv"].open()
    data = inputs(2)
    assert torch.equal(runner.run(data), data["x"] * 2)
    runner.capture()
    with pytest.raises(dg.InputError, match="no gate 'other'"):
        runner.gates["other"]


def test_forgotten_gate_of_a_runner_is_named_and_the_next_step_works():
    """FAULTS 53."""
    runner = decode_of(gated, [X], gate_timeout=0.05, name="prefill")
    with pytest.raises(dg.GateTimeoutError, match=r"'kv' of prefill.*replay 1"):
        runner.run(inputs(2))
    runner.gates["kv"].open()
    data = inputs(3)
    assert torch.equal(runner.run(data), data["x"] * 2)


def test_runner_without_gates_counts_no_epochs():
    runner = decode_of(lambda batch: batch.x * 2, [X])
    runner.run(inputs(2))
    runner.suspend()
    runner.run(inputs(2))
    assert not runner.gates
