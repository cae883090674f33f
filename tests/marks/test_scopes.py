"""Marks inside a capture: transforms, errors that the step catches, contexts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import devgraph as dg
from devgraph.testing.conformance.support import POLICIES, Kit, same
from devgraph.testing.conformance.test_marks import doubled, summed_on_host


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


def test_marks_call_straight_through_outside_a_capture(kit: Kit) -> None:
    x = kit.tensor(8)
    same(doubled(x), x * 2)
    same(summed_on_host(x), x + float(x.cpu().sum()))
    dg.graph_break()
    assert not dg.is_capturing()
    assert doubled.__name__ == "doubled"
    assert doubled.__doc__ == "Double ``x`` in a region without host arguments."


@pytest.mark.parametrize("policy", POLICIES)
def test_is_capturing_is_true_in_the_step_and_false_in_a_break(kit: Kit, policy: str) -> None:
    seen: list[tuple[str, bool]] = []

    @dg.region()
    def body(x: torch.Tensor) -> torch.Tensor:
        seen.append(("region", dg.is_capturing()))
        return x + 1

    def step(x: torch.Tensor) -> torch.Tensor:
        seen.append(("step", dg.is_capturing()))
        return body(x * 2) * 3

    kit.capture(step, kit.tensor(4), policy=policy, warmup=1)
    inside = policy == "full"
    if policy == "piecewise":  # The step's own code runs while it is traced.
        assert set(seen) == {("step", True), ("region", False)}
    else:
        assert seen == [("step", False), ("region", False), ("step", True), ("region", inside)]
    assert not dg.is_capturing()


def test_is_capturing_is_per_thread(kit: Kit) -> None:
    seen = []
    x = kit.tensor(4)
    with kit.backend.capture_context(kit.backend.make_graph()):
        x + 1
        thread = threading.Thread(target=lambda: seen.append(dg.is_capturing()))
        thread.start()
        thread.join()
        seen.append(dg.is_capturing())
    assert seen == [False, True]


def test_no_graph_is_refused_under_full_and_names_the_way_out(kit: Kit, pool: dg.Pool) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return summed_on_host(x + 1) * 2

    x = kit.tensor(8)
    with pytest.raises(dg.NotCapturableError, match=r"summed_on_host.*breakable") as caught:
        kit.capture(step, x, pool=pool)
    assert "piecewise" in str(caught.value)
    captured = kit.capture(step, x, policy="breakable", pool=pool)
    kit.check(captured, step, x)


def test_no_graph_is_refused_in_a_raw_capture(kit: Kit) -> None:
    x = kit.tensor(8)
    graph = kit.backend.make_graph()
    with (
        pytest.raises(dg.NotCapturableError, match="summed_on_host"),
        kit.backend.capture_context(graph),
    ):
        summed_on_host(x + 1)
    assert graph.state == "empty"


def _nested(inner: Callable[..., Any]) -> Callable[..., Any]:
    @dg.region()
    def outer(x: torch.Tensor) -> torch.Tensor:
        h: torch.Tensor = inner(x + 1)
        return h + 1

    def step(x: torch.Tensor) -> torch.Tensor:
        h: torch.Tensor = outer(x * 3)
        return h * 2

    return step


@pytest.mark.parametrize("policy", POLICIES)
def test_mark_inside_a_marked_function_is_absorbed(kit: Kit, policy: str) -> None:
    x = kit.tensor(8)
    step = _nested(doubled)
    captured = kit.capture(step, x, policy=policy)
    eager = [s for s in captured.segments if not isinstance(s, dg.DeviceGraph)]
    assert len(eager) == (policy != "full")
    kit.check(captured, step, x)


def test_no_graph_inside_a_region_is_absorbed_by_a_break_and_refused_in_a_graph(kit: Kit) -> None:
    x = kit.tensor(8)
    step = _nested(summed_on_host)
    captured = kit.capture(step, x, policy="breakable")
    kit.check(captured, step, x)
    with pytest.raises(dg.NotCapturableError, match=r"summed_on_host.*inside region .*outer"):
        kit.capture(step, x, policy="full")


@pytest.mark.parametrize("policy", POLICIES)
def test_break_inside_a_region_does_nothing(kit: Kit, policy: str) -> None:
    @dg.region()
    def body(x: torch.Tensor) -> torch.Tensor:
        h = x + 1
        dg.graph_break()
        return h * 2

    x = kit.tensor(8)
    captured = kit.capture(body, x, policy=policy)
    kit.check(captured, body, x)


@pytest.mark.parametrize("policy", POLICIES)
def test_region_that_mutates_an_argument_writes_it_at_every_replay(kit: Kit, policy: str) -> None:
    @dg.region(mutates=("out",))
    def write(x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(x * 3)

    def step(x: torch.Tensor) -> torch.Tensor:
        h = x + 1
        out = torch.empty_like(h)
        write(h, out)
        return out * 2

    x = kit.tensor(8)
    captured = kit.capture(step, x, policy=policy)
    for seed in (30, 31):
        kit.check(captured, step, x, seed=seed)
