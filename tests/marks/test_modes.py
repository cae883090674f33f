"""The modes of a capture, where marked code runs again."""

from __future__ import annotations

import pytest
import torch

import devgraph as dg

POLICIES = ("full", "breakable", "piecewise")

WIDTH = 8


@pytest.mark.parametrize("policy", POLICIES)
def test_trainable_region_is_captured_and_proven_under_an_outer_autocast(policy: str):
    linear = torch.nn.Linear(WIDTH, WIDTH)

    @dg.region
    def project(x):
        return linear(x)

    def step(x):
        return project(x * 2) + 1

    x = torch.randn(4, WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        captured = dg.capture(step, x, policy=policy, backend="cpu")
        x.copy_(torch.randn(4, WIDTH))
        assert torch.equal(captured.replay(), step(x))
        with torch.no_grad():
            linear.weight.fill_(1.0)
            torch.clear_autocast_cache()
        assert torch.equal(captured.replay(), step(x))
    assert captured.prove().ok
    captured.close()


@pytest.mark.parametrize("policy", ["full", "breakable"])
def test_torch_works_on_after_a_region_raised_in_an_inference_block(policy: str):
    runs = []

    @dg.region
    def body(x):
        runs.append(1)
        if len(runs) == 2:
            raise MemoryError("out of memory")
        return x * 2

    def step(x):
        with torch.inference_mode():
            return body(x + 1) + 1

    x = torch.randn(3)
    with pytest.raises(MemoryError):
        dg.capture(step, x, policy=policy, backend="cpu", warmup=1)
    assert torch.equal(x + 1, x.clone().add_(1))
    with dg.capture(step, x, policy=policy, backend="cpu") as captured:
        assert torch.equal(captured.replay(), step(x))
