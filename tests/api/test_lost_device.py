"""A device in a sticky error state: every later call says so at once (FAULTS 34)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import devgraph as dg
from devgraph.cpu.backend import CpuBackend


class Fragile(CpuBackend):
    """The CPU reference, on which an error with the text "sticky" loses the device."""

    def lost_reason(self, error: BaseException) -> str | None:
        return "illegal address" if "sticky" in str(error) else None


@pytest.fixture
def backend() -> Fragile:
    return Fragile()


def _breaks(failing: list[str]) -> Any:
    @dg.no_graph
    def body(x: torch.Tensor) -> torch.Tensor:
        if failing:
            raise RuntimeError(failing[0])
        return x * 2

    return lambda x: body(x + 1) + 1


def test_every_later_call_fails_fast(backend: Fragile):
    """FAULTS 34."""
    failing: list[str] = []
    x = torch.ones(4)
    pool = backend.make_pool()
    captured = dg.capture(_breaks(failing), x, policy="breakable", backend=backend, pool=pool)
    whole = dg.capture(lambda x: x * 3, x, backend=backend, pool=pool)
    other = dg.capture(lambda x: x * 3, x, policy="breakable", backend=backend)
    other.replay()
    graph = backend.make_graph()
    with backend.capture_context(graph):
        y = x + 1
    runner = dg.DecodeRunner(
        lambda batch: batch.x * 2,
        [dg.InputSlot("x", ("tokens",), torch.float32, pad=dg.Pad.zero())],
        backend=backend,
        max_requests=2,
        progress=False,
    )
    runner.capture()
    runner.run({"x": x[:2]})
    graph.replay()

    failing.append("a sticky error")
    with pytest.raises(dg.DeviceLost, match="illegal address") as first:
        captured.replay()
    assert isinstance(first.value.__cause__, RuntimeError)
    failing.clear()
    y.zero_()
    with pytest.raises(dg.DeviceLost, match="start a new process"):
        graph.replay()
    assert torch.equal(y, torch.zeros(4))
    for call in (
        captured.replay,
        whole.replay,
        other.replay,
        graph.update,
        lambda: runner.run({"x": x[:2]}),
        lambda: runner.run({"x": x}),
        lambda: runner.can_run(requests=1),
        runner.capture,
        lambda: dg.capture(lambda x: x + 1, x, backend=backend),
        lambda: backend.capture_context(backend.make_graph()).__enter__(),
    ):
        with pytest.raises(dg.DeviceLost):
            call()
    for thing in (captured, whole, other, graph, runner):
        thing.close()
    graph.close()


def test_loss_during_a_capture_or_an_eager_step_is_found(backend: Fragile):
    """FAULTS 34."""
    with pytest.raises(dg.DeviceLost) as caught:
        dg.capture(_breaks(["sticky"]), torch.ones(4), policy="breakable", backend=backend)
    assert isinstance(caught.value.__cause__, RuntimeError)

    other = Fragile()

    def forward(batch: Any) -> torch.Tensor:
        raise RuntimeError("sticky")

    runner = dg.DecodeRunner(
        forward,
        [dg.InputSlot("x", ("tokens",), torch.float32, pad=dg.Pad.zero())],
        config="disabled",
        backend=other,
        max_requests=2,
    )
    for _ in range(2):
        with pytest.raises(dg.DeviceLost):
            runner.run({"x": torch.ones(2)})


def test_other_errors_lose_nothing(backend: Fragile):
    failing = ["harmless"]
    x = torch.ones(4)
    step = _breaks([])
    with pytest.raises(RuntimeError, match="harmless"):
        dg.capture(_breaks(failing), x, policy="breakable", backend=backend)
    with dg.capture(step, x, policy="breakable", backend=backend) as captured:
        assert captured.prove().ok
    assert not backend.lost
