"""Faults whose error text only CUDA's own runtime can show."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

import devgraph as dg
from tests.support.device_kit import on

backend, _ = on("cuda")

pytestmark = pytest.mark.cuda

READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "nonzero": lambda x: x.nonzero(),
    "cpu": lambda x: x.cpu(),
    "print": lambda x: print(x),
    "synchronize": lambda x: torch.cuda.synchronize(),
}


@pytest.mark.parametrize("policy", ["full", "breakable"])
@pytest.mark.parametrize("name", READS)
def test_host_read_names_the_line_and_suggests_a_mark(be: Any, name: str, policy: str):
    """FAULTS 23."""
    x = torch.ones(8, device=be.device)

    def step(x: torch.Tensor) -> torch.Tensor:
        if dg.is_capturing():
            READS[name](x * 2)
        return x + 1

    READS[name](x)
    with pytest.raises(dg.HostReadError) as caught:
        dg.capture(step, x, policy=policy, backend=be)
    assert __file__ in str(caught.value)
    assert "@dg.no_graph" in str(caught.value)
    assert caught.value.__cause__ is not None
    captured = dg.capture(lambda x: x * 2, x, policy=policy, backend=be)
    assert captured.prove().ok


@pytest.mark.parametrize("gradient", [False, True])
def test_graphed_call_in_a_capture_by_torch_becomes_part_of_it(be: Any, gradient: bool):
    net = torch.nn.Linear(8, 8, device=be.device)
    step = dg.graphed(lambda x: net(x).relu(), backend=be)
    x = torch.randn(4, 8, device=be.device)
    graph = torch.cuda.CUDAGraph()
    net(x).relu().sum().backward()  # torch's capture cannot make the handles of cuBLAS
    with torch.set_grad_enabled(gradient):
        for calls in range(3):  # an eager call, a capture and a replay
            for _ in range(calls):
                step(x)
            gc.collect()  # CUDA cannot free graphs during a capture
            with torch.cuda.graph(graph):
                y = step(x)
            x.normal_()
            graph.replay()
            assert torch.equal(y, net(x).relu())
            graph.reset()
        assert torch.equal(step(x), net(x).relu())


def test_replay_and_capture_in_a_capture_by_torch_are_refused(be: Any):
    x = torch.randn(8, device=be.device)
    captured = dg.capture(lambda x: x * 2, x, backend=be)
    captured.replay()
    for use in (captured.replay, lambda: dg.capture(lambda x: x * 3, x, backend=be)):
        with (
            torch.cuda.graph(torch.cuda.CUDAGraph()),
            pytest.raises(dg.NestedCaptureError, match="by other code"),
        ):
            x.add(1)  # torch warns of an empty graph
            use()
    new = torch.randn(8, device=be.device)
    assert torch.equal(captured.replay(new), new * 2)


def test_runner_draws_from_a_generator_that_its_step_names(be: Any):
    noise = torch.Generator(be.device).manual_seed(3)
    runner = dg.DecodeRunner(
        lambda batch: batch.x + torch.rand(2, device=be.device, generator=noise),
        [dg.InputSlot("x", ("tokens",), torch.float32, pad=dg.Pad.zero())],
        config={"buckets": [2]},
        max_requests=2,
        backend=be,
    )
    runner.capture()
    outputs = [runner.run({"x": torch.zeros(2, device=be.device)}).clone() for _ in range(2)]
    twin = torch.Generator(be.device).manual_seed(3)
    eager = [torch.rand(2, device=be.device, generator=twin) for _ in range(2)]
    assert torch.equal(torch.stack(outputs), torch.stack(eager))
    assert runner.stats().graph_steps == 2


@pytest.mark.parametrize("policy", ["full", "breakable", "piecewise"])
def test_tensors_of_another_gpu_are_refused(be: Any, policy: str):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    other = torch.device("cuda", (be.device.index + 1) % torch.cuda.device_count())
    here, there = torch.randn(8, device=be.device), torch.randn(8, device=other)
    with pytest.raises(dg.InputError, match=f"x is on {other}.*captures work on {be.device}"):
        dg.capture(lambda x: x * 2, there, backend=be, policy=policy)
    with pytest.raises(dg.InputError, match=f"an output is on {other}"):
        dg.capture(lambda x: (x * 2, there * 2), here, backend=be, policy=policy)
