"""The policy ``compiled`` (devgraph/api/policy/compiled.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

import devgraph as dg
from devgraph.cpu.backend import CpuBackend


@attrs.define
class Scale:
    """An object that a marked function is given."""

    value: Tensor


@dg.region(host_args=("length",), mutates=("out",))
def prefix(x: Tensor, out: Tensor, *, length: int) -> None:
    out.copy_(x[:, :length].sum(1, keepdim=True).expand_as(out))


@dg.region()
def scaled(x: Tensor, by: Scale) -> Tensor:
    return x * by.value


def layered(layers: int = 3) -> Callable[..., Any]:
    """Return a step of equal layers, each with a region in the middle, and one of another kind."""
    torch.manual_seed(0)
    weights = [torch.nn.Linear(8, 8) for _ in range(layers)]
    by = Scale(torch.full((8,), 0.5))

    def step(x: Tensor, *, length: int) -> dict[str, Any]:
        for weight in weights:
            h = torch.nn.functional.silu(weight(x))
            out = torch.empty_like(h)
            prefix(h, out, length=length)
            x = x + out * 2
        return {"y": scaled(x, by) + 1, "layers": layers}

    return step


def captured(step: Callable[..., Any], *args: Any, **options: Any) -> dg.Captured:
    return dg.capture(step, *args, policy="compiled", backend="cpu", **options)


@torch.no_grad()
def test_step_is_one_graph_that_follows_host_arguments_bit_for_bit() -> None:
    step, x = layered(), torch.randn(4, 8)
    with captured(step, x, host_args={"length": 2}) as capture:
        for length in (2, 5, 2, 8):
            x.normal_()
            got, want = capture.replay(length=length), step(x, length=length)
            assert torch.equal(got["y"], want["y"])
            assert got["layers"] == 3
        assert capture.exact
        assert len(capture.segments) == 1


@torch.no_grad()
def test_equal_pieces_are_compiled_once() -> None:
    with captured(layered(5), torch.randn(4, 8), host_args={"length": 2}) as capture:
        stats = capture.stats()
    assert (stats["pieces"], stats["pieces_compiled"], stats["pieces_shared"]) == (7, 4, 3)


@pytest.mark.slow
@torch.no_grad()
def test_pieces_of_inductor_give_what_the_step_gives_to_rounding() -> None:
    step, x = layered(2), torch.randn(4, 8)
    with captured(step, x, compiler="inductor", host_args={"length": 2}) as capture:
        for length in (2, 5):
            x.normal_()
            torch.testing.assert_close(capture.replay(length=length), step(x, length=length))
        assert not capture.exact


@pytest.mark.slow
def test_runner_whose_outputs_lie_in_one_memory_is_compiled_by_inductor() -> None:
    def forward(batch: Any) -> dict[str, Tensor]:
        logits = torch.nn.functional.silu(batch.x) * 3
        return {"logits": logits, "tokens": logits.argmax(-1)}

    with dg.DecodeRunner(
        forward,
        inputs=[dg.InputSlot("x", ("tokens", 8), torch.float32, pad=dg.Pad.zero())],
        outputs=dg.OutputSlot(rows="requests"),
        config={"policy": "compiled", "compiler": "inductor", "buckets": [2]},
        backend="cpu",
        max_requests=2,
    ) as runner:
        runner.capture()
        x = torch.randn(2, 8)
        out = runner.run({"x": x})
        torch.testing.assert_close(out["logits"], torch.nn.functional.silu(x) * 3)
        assert torch.equal(out["tokens"], x.argmax(-1))
        assert runner.stats().graph_steps == 1


def test_work_past_the_operators_of_torch_is_refused() -> None:
    held = torch.zeros(4)
    memory = held.numpy()

    def step(x: Tensor) -> Tensor:
        held.zero_()
        memory[:] += 3
        return held + x

    with pytest.raises(dg.CaptureError, match="other than operators of torch"):
        captured(step, torch.ones(4))


def test_step_that_returns_something_else_each_time_is_captured() -> None:
    count = torch.zeros(1)

    def step(x: Tensor) -> Tensor:
        return x + count.add_(1) ** 3

    with captured(step, torch.ones(1)) as capture:
        first = float(capture.replay())
        assert float(capture.replay()) > first


def test_marked_function_that_no_graph_holds_is_refused() -> None:
    @dg.no_graph
    def read(x: Tensor) -> Tensor:
        return x * float(x.sum())

    with pytest.raises(dg.NotCapturableError, match="read is marked @dg.no_graph"):
        captured(lambda x: read(x + 1), torch.ones(2))


def test_host_argument_outside_of_a_region_is_refused() -> None:
    with pytest.raises(dg.FrozenValueError, match="length"):
        captured(lambda x, *, length: x * min(length, 4), torch.ones(2), host_args={"length": 2})


def test_backend_that_captures_no_compiled_pieces_refuses_it() -> None:
    backend = CpuBackend()
    backend.capabilities = attrs.evolve(backend.capabilities, piecewise=False)
    with pytest.raises(dg.CapabilityError, match="piecewise; use 'full'"):
        dg.capture(lambda x: x + 1, torch.ones(2), policy="compiled", backend=backend)
