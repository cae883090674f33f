"""Gates on HIP: whether a runtime captures waits for values, and replays over the fake library."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

import devgraph as dg
from devgraph.rocm.gates import captures_values
from tests.sim.hip import unavailable_reason
from tests.sim.hip.backend import FakeBackend
from tests.sim.hip.fake import Fake

pytestmark = pytest.mark.skipif(
    unavailable_reason() is not None, reason=f"no fake library: {unavailable_reason()}"
)


def step(x: torch.Tensor) -> torch.Tensor:
    dg.wait("a")
    x = x * 2
    dg.signal("b")
    return x


def test_runtime_that_runs_captured_waits_at_once_breaks_at_gates():
    fake = Fake()
    with fake.with_settings(captures_values=0):
        backend = FakeBackend(fake)
        assert not backend.capabilities.gates
        x = torch.ones(4)
        with pytest.raises(dg.CaptureError, match="dg.wait or dg.signal .* 'full'"):
            dg.capture(step, x, backend=backend, policy="full")
        captured = dg.capture(step, x, backend=backend, policy="breakable")
        assert captured.stats()["gates_in_breaks"] == 2
        captured.gates["a"].open()
        assert captured.replay().tolist() == [2.0] * 4


@pytest.mark.parametrize("nth", range(1, 9))
def test_failed_probe_means_no_gates(nth: int):
    fake = Fake()
    runtime = FakeBackend(fake).runtime
    with fake.with_settings(fail_call_in=nth):
        assert not captures_values(runtime, torch.device("cpu"))
    assert captures_values(runtime, torch.device("cpu"))


def test_runtime_without_the_functions_has_no_gates():
    runtime: Any = FakeBackend(Fake()).runtime
    runtime.missing = frozenset({"hipStreamWaitValue32"})
    assert not captures_values(runtime, torch.device("cpu"))


def test_replay_waits_for_the_gates_of_its_own_epoch():
    x = torch.ones(4)
    captured = dg.capture(step, x, backend=FakeBackend(Fake()), gate_timeout=20.0)
    for epoch in range(1, 20):
        x.fill_(epoch)
        opened: list[float] = []

        def open_late(epoch: int = epoch, opened: list[float] = opened) -> None:
            time.sleep(0.002)
            opened.append(time.monotonic())
            captured.gates["a"].open(epoch=epoch)

        thread = threading.Thread(target=open_late)
        thread.start()
        out = captured.replay()
        assert opened and time.monotonic() >= opened[0]
        thread.join()
        assert out.tolist() == [2.0 * epoch] * 4
        assert captured.gates["b"].wait() == epoch
