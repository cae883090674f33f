"""Marks inside a capture: transforms, errors that the step catches, contexts."""

from __future__ import annotations

import pytest
import torch

import devgraph as dg

POLICIES = ("full", "breakable", "piecewise")


def test_context_that_may_change_inside_is_refused_where_it_makes_a_key():
    class Step:
        scale = 2.0

    current = Step()

    @dg.region(context=lambda: current)
    def scaled(x, *, context):
        return x * context.scale

    x = torch.ones(2)
    with pytest.raises(dg.HostArgumentError, match=r"the context of .*scaled is a Step.*identity"):
        dg.capture(scaled, x, backend="cpu")
    with dg.capture(lambda x: scaled(x) + 1, x, backend="cpu", policy="breakable") as captured:
        current.scale = 5.0
        assert torch.equal(captured.replay(), x * 5 + 1)


@dg.region(host_args=("n",))
def scaled_rows(x: torch.Tensor, *, n: int) -> torch.Tensor:
    """A region that returns a new tensor."""
    return x * n


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("transform", ["vmap", "grad"])
def test_region_inside_a_transform_is_refused_by_name(policy: str, transform: str):
    def vmap(x, *, n):
        return torch.vmap(lambda row: scaled_rows(row, n=n))(x)

    def grad(x, *, n):
        return torch.func.grad(lambda y: scaled_rows(y, n=n).sum())(x)

    step = {"vmap": vmap, "grad": grad}[transform]
    with pytest.raises(
        dg.CaptureError,
        match=rf"scaled_rows was called inside a transform .* in <lambda>.*{transform}",
    ):
        dg.capture(step, torch.ones(3, 4), policy=policy, backend="cpu", host_args={"n": 2})


def test_region_without_host_values_may_lie_inside_a_transform_in_one_graph():
    @dg.region
    def doubled(x):
        return x * 2

    x = torch.randn(3, 4)
    with dg.capture(torch.vmap(doubled), x, policy="full", backend="cpu") as captured:
        x.copy_(torch.randn(3, 4))
        assert torch.equal(captured.replay(), x * 2)


@pytest.mark.parametrize("policy", POLICIES)
def test_transform_inside_a_region_is_right(policy: str):
    @dg.region(host_args=("n",))
    def rows(x, *, n):
        return torch.vmap(lambda row: row * n + row.sum())(x)

    def step(x, *, n):
        return rows(x, n=n) + 1

    x = torch.randn(3, 4)
    with dg.capture(step, x, policy=policy, backend="cpu", host_args={"n": 2}) as captured:
        x.copy_(torch.randn(3, 4))
        assert torch.equal(captured.replay(n=5), step(x, n=5))


@pytest.mark.parametrize(
    ("policy", "kind", "message"),
    [
        ("full", dg.CaptureError, "fast raised NotImplementedError"),
        ("breakable", dg.CaptureError, "fast raised NotImplementedError"),
        ("piecewise", NotImplementedError, "too small"),  # no trace holds the step's except
    ],
)
def test_step_that_catches_what_a_region_raises_is_refused(
    policy: str, kind: type[Exception], message: str
):
    @dg.region(host_args=("n",), fake=lambda y, *, n: torch.empty_like(y))
    def fast(y, *, n):
        raise NotImplementedError("too small")

    def step(x, n):
        y = x + 1
        try:
            y = fast(y, n=n)
        except NotImplementedError:
            y = y * 7
        return y + 1

    x = torch.ones(2)
    with pytest.raises(kind, match=message):
        dg.capture(step, x, policy=policy, backend="cpu", host_args={"n": 2})
    with dg.capture(lambda x: x + 1, x, policy=policy, backend="cpu") as captured:
        assert torch.equal(captured.replay(), x + 1)
