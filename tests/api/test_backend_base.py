"""What the base class of backends does with threads and with what a vendor raises."""

from __future__ import annotations

import threading
from typing import Any

import attrs
import pytest
import torch

import devgraph as dg
from devgraph.cpu.backend import CpuBackend


class Alone(CpuBackend):
    """The CPU reference as a device on which nothing may run beside a capture."""

    capabilities = attrs.evolve(CpuBackend.capabilities, concurrent_threads=False)


def test_replays_of_every_pool_wait_for_a_capture_where_threads_may_not_mix():
    """FAULTS 16."""
    backend = Alone()
    x = torch.ones(4)
    captured = dg.capture(lambda x: x * 3, x, backend=backend)
    graph = backend.make_graph()
    with backend.capture_context(graph):
        x + 1
    order: list[str] = []
    threads = [
        threading.Thread(target=lambda: (captured.replay(), order.append("captured"))),
        threading.Thread(target=lambda: (graph.replay(), order.append("graph"))),
    ]
    with backend.capture_context(backend.make_graph()):
        x + 2
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(0.1)
        order.append("the capture ended")
    for thread in threads:
        thread.join(30)
    assert order[0] == "the capture ended"
    assert sorted(order[1:]) == ["captured", "graph"]


def test_steps_with_breaks_are_captured_where_threads_may_not_mix():
    backend = Alone()

    @dg.no_graph
    def body(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    x = torch.ones(4)
    with dg.capture(lambda x: body(x + 1) + 1, x, policy="breakable", backend=backend) as captured:
        assert captured.prove().ok


class Strict(CpuBackend):
    """Calls a RuntimeError with the text "capturing" a read of device data, as a driver would."""

    def is_host_read(self, error: BaseException) -> bool:
        return "capturing" in str(error)


def _reads(x: torch.Tensor) -> float:
    if dg.is_capturing():
        raise RuntimeError("operation not permitted when stream is capturing\nand more lines")
    return 1.0


@pytest.mark.parametrize("policy", ["full", "breakable"])
def test_host_read_that_a_driver_refuses_names_the_line_and_suggests_a_mark(policy: str):
    """FAULTS 23."""
    with pytest.raises(dg.HostReadError) as caught:
        dg.capture(lambda x: x * _reads(x), torch.ones(4), policy=policy, backend=Strict())
    text = str(caught.value)
    assert f"{__file__}:" in text
    assert "in _reads: raise RuntimeError" in text
    assert "@dg.no_graph" in text
    assert text.endswith("(operation not permitted when stream is capturing)")
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_other_errors_of_a_driver_stay_what_they_are():
    """FAULTS 1."""
    failure = RuntimeError("out of something")

    def step(x: torch.Tensor) -> Any:
        raise failure

    with pytest.raises(RuntimeError) as caught:
        dg.capture(step, torch.ones(4), backend=Strict(), warmup=0)
    assert caught.value is failure
