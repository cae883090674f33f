"""What the marks mean outside a capture and under each policy."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import devgraph as dg
from devgraph.testing.conformance.support import Kit, same

POLICIES = ("full", "breakable")


@dg.region()
def doubled(x: torch.Tensor) -> torch.Tensor:
    """A region that nothing on the host decides."""
    return x * 2


@dg.no_graph
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


def test_breakable_alternates_graphs_and_eager_segments(kit: Kit) -> None:
    captured = kit.capture(_chain, kit.tensor(8), policy="breakable")
    kinds = [isinstance(segment, dg.DeviceGraph) for segment in captured.segments]
    assert kinds == [True, False, True, False, True]
    assert captured.info().segments == 5
    assert captured.info().regions == 2
    assert captured.explain().count("doubled") == 2
    for segment in captured.segments:
        assert callable(segment.replay)
        assert callable(segment.reset)


def test_graph_break_splits_and_empty_segments_are_dropped(kit: Kit) -> None:
    captured = kit.capture(_with_breaks, kit.tensor(8), policy="breakable")
    graphs = [s for s in captured.segments if s.info().nodes != 0]
    assert len(graphs) == 3


def test_step_that_is_one_region_has_one_eager_segment(kit: Kit) -> None:
    """FAULTS 26."""
    x = kit.tensor(8)
    captured = kit.capture(doubled, x, policy="breakable")
    assert [isinstance(s, dg.DeviceGraph) for s in captured.segments].count(False) == 1
    kit.check(captured, doubled, x)


def test_adjacent_breaks_and_a_break_at_each_end_are_right(kit: Kit) -> None:
    """FAULTS 26."""

    def step(x: torch.Tensor) -> torch.Tensor:
        h = summed_on_host(doubled(x))
        return doubled(summed_on_host(h))

    x = kit.tensor(8)
    captured = kit.capture(step, x, policy="breakable")
    kit.check(captured, step, x)


def test_no_graph_is_refused_under_full_and_names_the_way_out(kit: Kit, pool: dg.Pool) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return summed_on_host(x + 1) * 2

    x = kit.tensor(8)
    with pytest.raises(dg.NotCapturableError, match="summed_on_host.*breakable") as caught:
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
    assert len(eager) == (policy == "breakable")
    kit.check(captured, step, x)


def test_no_graph_inside_a_region_is_absorbed_by_a_break_and_refused_in_a_graph(kit: Kit) -> None:
    x = kit.tensor(8)
    step = _nested(summed_on_host)
    captured = kit.capture(step, x, policy="breakable")
    kit.check(captured, step, x)
    with pytest.raises(dg.NotCapturableError, match=r"summed_on_host.*inside region .*outer"):
        kit.capture(step, x, policy="full")


def test_break_inside_a_region_does_nothing(kit: Kit) -> None:
    @dg.region()
    def body(x: torch.Tensor) -> torch.Tensor:
        h = x + 1
        dg.graph_break()
        return h * 2

    x = kit.tensor(8)
    for policy in POLICIES:
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


RESULTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "tensor": lambda x: x * 2,
    "tuple": lambda x: (x * 2, x + 1),
    "dict": lambda x: {"a": x * 2, "b": [x + 1, None]},
    "none": lambda x: None,
    "empty tuple": lambda x: (),
    "argument": lambda x: x,
    "view of the argument": lambda x: x[2:],
    "transposed": lambda x: (x.view(2, 4) * 2).t(),
    "number": lambda x: (x * 2, 7),
    "integer tensor": lambda x: (x > 0).to(torch.int64),
}


def _use(result: Any, x: torch.Tensor) -> torch.Tensor:
    """Work after a break that reads every tensor the break returned."""
    total = x.clone()
    leaves = torch.utils._pytree.tree_leaves(result)
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            total = total + leaf.to(total.dtype).sum()
    return total


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", RESULTS)
def test_result_of_a_region_reaches_the_work_after_it(kit: Kit, policy: str, name: str) -> None:
    body = dg.region()(RESULTS[name])

    def step(x: torch.Tensor) -> Any:
        h = x + 1
        result = body(h)
        return _use(result, h), result

    x = kit.tensor(8)
    captured = kit.capture(step, x, policy=policy)
    for seed in (40, 41):
        kit.check(captured, step, x, seed=seed)


CHANGED: dict[str, Callable[[torch.Tensor], Any]] = {
    "shape": lambda x: (x * 2)[:1],
    "dtype": lambda x: (x * 2).to(torch.float16),
    "stride": lambda x: (x * 2).t(),
    "structure": lambda x: (x * 2, x),
    "none": lambda x: None,
    "number": lambda x: 3.0,
}


@pytest.mark.parametrize("mark", [dg.region(), dg.no_graph], ids=["region", "no_graph"])
@pytest.mark.parametrize("name", CHANGED)
def test_result_of_another_layout_at_replay_is_refused(
    kit: Kit, name: str, mark: Callable[..., Any]
) -> None:
    """FAULTS 24."""
    wrong = []

    @mark
    def body(x: torch.Tensor) -> Any:
        return CHANGED[name](x) if wrong else x * 2

    def step(x: torch.Tensor) -> Any:
        return body(x + 1) + 1

    x = kit.tensor(4, 4)
    captured = kit.capture(step, x, policy="breakable")
    wrong.append(1)
    with pytest.raises(dg.RegionError, match="body"):
        captured.replay()
    wrong.clear()
    kit.check(captured, step, x)


@pytest.mark.parametrize("first", [None, 7, ()], ids=str)
def test_result_that_was_no_tensor_at_capture_must_stay_so(kit: Kit, first: Any) -> None:
    """FAULTS 24."""
    wrong = []

    @dg.no_graph
    def body(x: torch.Tensor) -> Any:
        return x * 2 if wrong else first

    def step(x: torch.Tensor) -> Any:
        h = x + 1
        body(h)
        return h * 2

    x = kit.tensor(4)
    captured = kit.capture(step, x, policy="breakable")
    wrong.append(1)
    with pytest.raises(dg.RegionError, match="body"):
        captured.replay()
    wrong.clear()
    kit.check(captured, step, x)


def test_view_of_another_argument_at_replay_is_refused(kit: Kit) -> None:
    """FAULTS 24."""
    wrong = []

    @dg.region()
    def body(x: torch.Tensor) -> Any:
        return x[1:3] if wrong else x[0:2]

    def step(x: torch.Tensor) -> Any:
        return body(x + 1) * 2

    x = kit.tensor(4)
    captured = kit.capture(step, x, policy="breakable")
    wrong.append(1)
    with pytest.raises(dg.RegionError, match="body"):
        captured.replay()
    wrong.clear()
    kit.check(captured, step, x)


def test_exception_in_a_break_stops_the_replay_and_the_next_one_is_right(kit: Kit) -> None:
    """FAULTS 25."""
    failing: list[Exception] = []
    reached = torch.zeros(4, device=kit.device)

    @dg.no_graph
    def body(x: torch.Tensor) -> torch.Tensor:
        if failing:
            raise failing[0]
        return x * 2

    def step(x: torch.Tensor) -> torch.Tensor:
        h = body(x + 1)
        reached.add_(1)
        return h + 3

    x = kit.tensor(4)
    captured = kit.capture(step, x, policy="breakable")
    reached.zero_()
    failing.append(ValueError("from the break"))
    with pytest.raises(ValueError, match="from the break") as caught:
        captured.replay()
    assert caught.value is failing[0]
    kit.backend.synchronize()
    same(reached, torch.zeros(4), "a segment behind the break that raised")
    graphs = [s for s in captured.segments if isinstance(s, dg.DeviceGraph)]
    assert {str(graph.state) for graph in graphs} == {"ready"}
    failing.clear()
    kit.refill(x, 9)
    out = captured.replay()
    kit.backend.synchronize()
    same(out, (x + 1) * 2 + 3)


def test_break_sees_inputs_written_by_the_segment_before_it(kit: Kit) -> None:
    seen = []

    @dg.no_graph
    def body(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.detach().cpu().clone())
        return x * 2

    def step(x: torch.Tensor) -> torch.Tensor:
        return body(x + 1) * 3

    x = kit.tensor(4)
    captured = kit.capture(step, x, policy="breakable", warmup=0)
    same(seen[-1], (x + 1).cpu(), "what the break saw at capture")
    kit.refill(x, 9)
    captured.replay()
    kit.backend.synchronize()
    same(seen[-1], (x + 1).cpu(), "what the break saw at replay")


def test_capture_stub_runs_instead_of_the_body_while_capturing(kit: Kit) -> None:
    calls: list[str] = []

    def stub(x: torch.Tensor) -> torch.Tensor:
        calls.append("stub")
        return torch.zeros_like(x)

    @dg.no_graph(capture_stub=stub)
    def body(x: torch.Tensor) -> torch.Tensor:
        calls.append("body")
        return x * 2

    def step(x: torch.Tensor) -> torch.Tensor:
        h: torch.Tensor = body(x + 1)
        return h * 3

    x = kit.tensor(4)
    captured = kit.capture(step, x, policy="breakable", warmup=1)
    assert calls == ["body", "stub"]
    kit.check(captured, step, x)


def test_break_runs_in_the_gradient_mode_of_capture(kit: Kit) -> None:
    seen = []

    @dg.no_graph
    def body(x: torch.Tensor) -> torch.Tensor:
        seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
        return x * 2

    def step(x: torch.Tensor) -> torch.Tensor:
        h: torch.Tensor = body(x + 1)
        return h * 3

    x = kit.tensor(4)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            captured = kit.capture(step, x, policy="breakable")
            expected = (torch.is_grad_enabled(), torch.is_inference_mode_enabled())
        seen.clear()
        captured.replay()
        assert seen == [expected]
        assert torch.is_grad_enabled()


def test_python_values_given_to_a_break_are_kept(kit: Kit) -> None:
    @dg.region()
    def body(x: torch.Tensor, scale: float, *rest: int, names: tuple[str, ...] = ()) -> Any:
        return x * scale + sum(rest) + len(names)

    def step(x: torch.Tensor) -> Any:
        return body(x + 1, 2.5, 1, 2, names=("a", "b")) * 2

    x = kit.tensor(4)
    for policy in POLICIES:
        captured = kit.capture(step, x, policy=policy)
        kit.check(captured, step, x)


def test_hook_runs_before_each_break_of_a_breakable_capture(kit: Kit) -> None:
    calls = []
    captured = kit.capture(
        _chain, kit.tensor(4), policy="breakable", before_break=lambda: calls.append(1)
    )
    assert len(calls) == 2
    captured.replay()
    assert len(calls) == 2
