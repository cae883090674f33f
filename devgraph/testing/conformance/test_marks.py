"""What the marks mean outside a capture and under each policy."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import devgraph as dg
from devgraph.testing.conformance.support import BREAKING, POLICIES, Kit, same


@dg.region()
def doubled(x: torch.Tensor) -> torch.Tensor:
    """A region that nothing on the host decides."""
    return x * 2


@dg.no_graph(fake=torch.empty_like)
def summed_on_host(x: torch.Tensor) -> torch.Tensor:
    """Work that no capture can hold."""
    return x + float(x.detach().cpu().sum())


def test_marks_call_straight_through_outside_a_capture(kit: Kit) -> None:
    x = kit.tensor(8)
    same(doubled(x), x * 2)
    same(summed_on_host(x), x + float(x.cpu().sum()))
    dg.graph_break()
    assert not dg.is_capturing()
    assert doubled.__name__ == "doubled"
    assert doubled.__doc__ == "A region that nothing on the host decides."


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


def _chain(x: torch.Tensor) -> torch.Tensor:
    h = doubled(x + 1)
    h = h * h
    return doubled(h) - 3


def _with_breaks(x: torch.Tensor) -> torch.Tensor:
    h = x + 1
    dg.graph_break()
    h = h * 2
    dg.graph_break()
    dg.graph_break()
    return h - 1


@pytest.mark.parametrize("step", [_chain, _with_breaks])
@pytest.mark.parametrize("policy", POLICIES)
def test_replay_equals_eager_under_every_policy(
    kit: Kit, policy: str, step: Callable[..., Any]
) -> None:
    x = kit.tensor(8)
    captured = kit.capture(step, x, policy=policy)
    for seed in (20, 21):
        kit.check(captured, step, x, seed=seed)


def test_full_is_one_segment_whatever_is_marked(kit: Kit) -> None:
    x = kit.tensor(8)
    for step in (_chain, _with_breaks):
        captured = kit.capture(step, x, policy="full")
        assert len(captured.segments) == 1
        assert captured.info().segments == 1
        assert "policy full" in captured.explain()


@pytest.mark.parametrize("policy", BREAKING)
def test_breakable_alternates_graphs_and_eager_segments(kit: Kit, policy: str) -> None:
    captured = kit.capture(_chain, kit.tensor(8), policy=policy)
    kinds = [isinstance(segment, dg.DeviceGraph) for segment in captured.segments]
    assert kinds == [True, False, True, False, True]
    assert captured.info().segments == 5
    assert captured.info().regions == 2
    assert captured.explain().count("doubled") == 2
    for segment in captured.segments:
        assert callable(segment.replay)
        assert callable(segment.reset)


@pytest.mark.parametrize("policy", BREAKING)
def test_graph_break_splits_and_empty_segments_are_dropped(kit: Kit, policy: str) -> None:
    captured = kit.capture(_with_breaks, kit.tensor(8), policy=policy)
    graphs = [s for s in captured.segments if s.info().nodes != 0]
    # Who cannot count nodes cannot tell that the fourth is empty either.
    assert len(graphs) == (3 if kit.backend.capabilities.node_counts else 4)


@pytest.mark.parametrize("policy", BREAKING)
def test_step_that_is_one_region_has_one_eager_segment(kit: Kit, policy: str) -> None:
    """FAULTS 26."""
    x = kit.tensor(8)
    captured = kit.capture(doubled, x, policy=policy)
    assert [isinstance(s, dg.DeviceGraph) for s in captured.segments].count(False) == 1
    kit.check(captured, doubled, x)


@pytest.mark.parametrize("policy", BREAKING)
def test_adjacent_breaks_and_a_break_at_each_end_are_right(kit: Kit, policy: str) -> None:
    """FAULTS 26."""

    def step(x: torch.Tensor) -> torch.Tensor:
        h = summed_on_host(doubled(x))
        return doubled(summed_on_host(h))

    x = kit.tensor(8)
    captured = kit.capture(step, x, policy=policy)
    kit.check(captured, step, x)


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


@pytest.mark.parametrize("policy", BREAKING)
def test_hook_runs_before_each_break_of_a_breakable_capture(kit: Kit, policy: str) -> None:
    calls = []
    captured = kit.capture(
        _chain, kit.tensor(4), policy=policy, before_break=lambda: calls.append(1)
    )
    assert len(calls) == 2
    captured.replay()
    assert len(calls) == 2


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("around", ["region", "capture"])
def test_region_runs_again_under_the_autocast_of_capture(
    kit: Kit, policy: str, around: str
) -> None:
    x, w = kit.tensor(4, 16), kit.tensor(16, 16, seed=1)
    autocast = functools.partial(torch.autocast, kit.device.type, torch.bfloat16)

    @dg.region(fake=lambda x, w: torch.empty_like(x))
    def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x @ w).float()

    def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with autocast(enabled=around == "region"):
            return product(x * 2, w) + 1

    with autocast(enabled=around == "capture"):
        captured = kit.capture(step, x, w, policy=policy)
    for seed in (5, 6):
        kit.refill(x, seed)
        with autocast(enabled=around == "capture"):
            got, want = captured.replay(), step(x, w)
        kit.same(got, want)
