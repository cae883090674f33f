"""Policy ``breakable``: what breaks return, see and raise.

Whether the memory between its segments is right is a vendor's, and so the suite's:
``devgraph/testing/conformance/test_pool.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import devgraph as dg
from devgraph.api.capture import capture
from devgraph.api.errors import (
    NotCapturableError,
)
from devgraph.api.marks.marks import no_graph, region
from devgraph.cpu.backend import CpuBackend
from devgraph.testing.conformance.support import BREAKING, POLICIES, Kit
from devgraph.testing.conformance.test_memory import check
from tests.support.cpu_capture import same


@pytest.fixture
def backend() -> CpuBackend:
    return CpuBackend()


def test_no_graph_function_breaks_or_is_refused(backend: CpuBackend) -> None:
    @no_graph
    def host_sum(x: torch.Tensor) -> torch.Tensor:
        return x * float(x.sum())

    def step(x: torch.Tensor) -> torch.Tensor:
        return host_sum(x + 1) * 2

    x = torch.randn(4)
    with pytest.raises(NotCapturableError):
        capture(step, x, backend=backend)
    cap = capture(step, x, backend=backend, policy="breakable")
    assert len(cap.segments) == 3
    x.copy_(torch.randn(4))
    assert same(cap.replay(), step(x))


def test_break_inside_the_users_own_mode(backend: CpuBackend) -> None:
    @region
    def middle(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    def step(x: torch.Tensor) -> torch.Tensor:
        with torch.device("cpu"), torch.autocast("cpu", dtype=torch.bfloat16):
            y = middle(x @ x) @ x
        return y + torch.ones(4, 4)

    x = torch.randn(4, 4)
    with torch.inference_mode():
        cap = capture(step, x, backend=backend, policy="breakable")
        x.copy_(torch.randn(4, 4))
        cap.replay()
    assert torch._C._len_torch_function_stack() == 0


@pytest.mark.parametrize("runs_before", [0, 1, 2])
def test_autocast_caches_as_before_when_a_body_between_graphs_raises(
    backend: CpuBackend, runs_before: int
) -> None:
    runs: list[int] = []

    @region
    def body(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        if len(runs) > runs_before:
            raise KeyError("of the body")
        return x * 2

    def step(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return body(x + 1) * 3

    with pytest.raises(KeyError):
        capture(step, torch.randn(4), policy="breakable", backend=backend, warmup=2)
    assert torch.is_autocast_cache_enabled()


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
    if policy == "piecewise" and name == "dict":
        with pytest.raises(dg.CaptureError, match=r"returned a dict.*tuple"):
            kit.capture(step, x, policy=policy)
        return
    captured = kit.capture(step, x, policy=policy)
    for seed in (40, 41):
        kit.check(captured, step, x, seed=seed)


def _twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


CHANGED: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[torch.Tensor], Any]]] = {
    "shape": (_twice, lambda x: (x * 2)[:1]),
    "dtype": (_twice, lambda x: (x * 2).to(torch.float16)),
    "stride": (_twice, lambda x: (x * 2).t()),
    "device": (_twice, lambda x: (x * 2).to("meta")),
    "structure": (_twice, lambda x: (x * 2, x)),
    "none": (_twice, lambda x: None),
    "number": (_twice, lambda x: 3.0),
    "none before": (lambda x: None, _twice),
    "number before": (lambda x: 7, _twice),
    "nothing before": (lambda x: (), _twice),
    "view of another argument": (lambda x: x[0:2], lambda x: x[1:3]),
}
"""What a marked function returns at the capture, and then at a replay."""


@pytest.mark.parametrize("mark", [dg.region(), dg.no_graph], ids=["region", "no_graph"])
@pytest.mark.parametrize("name", CHANGED)
@pytest.mark.parametrize("policy", BREAKING)
def test_result_of_another_layout_at_replay_is_refused(
    kit: Kit, policy: str, name: str, mark: Callable[..., Any]
) -> None:
    """FAULTS 24."""
    results, wrong = CHANGED[name], [0]

    @mark
    def body(x: torch.Tensor) -> Any:
        return results[wrong[-1]](x)

    def step(x: torch.Tensor) -> Any:
        h = x + 1
        return _use(body(h), h)

    x = kit.tensor(4, 4)
    if policy == "piecewise" and name == "number before":
        with pytest.raises(dg.CaptureError, match=r"returned a int.*tuple"):
            kit.capture(step, x, policy=policy)
        return
    captured = kit.capture(step, x, policy=policy)
    wrong.append(1)
    with pytest.raises(dg.RegionError, match="body"):
        captured.replay()
    wrong.pop()
    kit.check(captured, step, x)


@pytest.mark.parametrize("policy", BREAKING)
def test_exception_in_a_break_stops_the_replay_and_the_next_one_is_right(
    kit: Kit, policy: str
) -> None:
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
    captured = kit.capture(step, x, policy=policy)
    reached.zero_()
    failing.append(ValueError("from the break"))
    with pytest.raises(ValueError, match="from the break") as caught:
        captured.replay()
    assert caught.value is failing[0]
    kit.same(reached, torch.zeros(4), "a segment behind the break that raised")
    graphs = [s for s in captured.segments if isinstance(s, dg.DeviceGraph)]
    assert {str(graph.state) for graph in graphs} == {"ready"}
    failing.clear()
    kit.refill(x, 9)
    kit.same(captured.replay(), (x + 1) * 2 + 3)


@pytest.mark.parametrize("policy", BREAKING)
def test_capture_stub_runs_instead_of_the_body_while_capturing(kit: Kit, policy: str) -> None:
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
    captured = kit.capture(step, x, policy=policy, warmup=1)
    assert calls[-1] == "stub"
    assert set(calls[:-1]) == {"body"}
    kit.check(captured, step, x)


@pytest.mark.parametrize("reads", [False, True])
def test_segments_run_in_a_capture_only_before_a_body_that_reads_them(
    kit: Kit, reads: bool
) -> None:
    count = kit.tensor(1)
    count.zero_()

    @dg.no_graph(capture_stub=torch.zeros_like)
    def costly(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    seen: list[float] = []

    @dg.no_graph
    def reading(x: torch.Tensor) -> torch.Tensor:
        seen.append(count.item())
        return x * 3

    def step(x: torch.Tensor) -> torch.Tensor:
        count.add_(1)
        h: torch.Tensor = costly(x + count)
        h = h + count.add_(1)
        return reading(h) + 1 if reads else h + 1

    x = kit.tensor(4)
    captured = kit.capture(step, x, policy="breakable", warmup=0)
    assert seen == [2.0] * reads
    kit.same(count, torch.zeros(1), "what the capture put back")
    kit.same(captured.replay(), ((x + 1) * 2 + 2) * (3 if reads else 1) + 1)


@pytest.mark.parametrize("policy", BREAKING)
def test_break_runs_in_the_gradient_mode_of_capture(kit: Kit, policy: str) -> None:
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
            captured = kit.capture(step, x, policy=policy)
            expected = (torch.is_grad_enabled(), torch.is_inference_mode_enabled())
        seen.clear()
        captured.replay()
        assert seen == [expected]
        assert torch.is_grad_enabled()


@pytest.mark.parametrize("policy", POLICIES)
def test_python_values_given_to_a_break_are_kept(kit: Kit, policy: str) -> None:
    @dg.region()
    def body(x: torch.Tensor, scale: float, *rest: int, names: tuple[str, ...] = ()) -> Any:
        return x * scale + sum(rest) + len(names)

    def step(x: torch.Tensor) -> Any:
        return body(x + 1, 2.5, 1, 2, names=("a", "b")) * 2

    x = kit.tensor(4)
    captured = kit.capture(step, x, policy=policy)
    kit.check(captured, step, x)


@pytest.mark.parametrize("policy", BREAKING)
@pytest.mark.parametrize("first", ["argument", "new"])
def test_result_that_shares_memory_for_some_values_only_is_refused(
    kit: Kit, policy: str, first: str
) -> None:
    """FAULTS 41."""

    @dg.region(host_args=("factor",))
    def body(x: torch.Tensor, *, factor: int) -> torch.Tensor:
        return x if factor == 1 else x * factor

    def step(x: torch.Tensor, *, factor: int) -> torch.Tensor:
        return body(x, factor=factor) + 1

    x = kit.tensor(4)
    before = x.clone()
    at_capture, later = (1, 2) if first == "argument" else (2, 1)
    captured = kit.capture(step, x, policy=policy, host_args={"factor": at_capture})
    with pytest.raises(dg.RegionError, match="body"):
        captured.replay(factor=later)
    assert torch.equal(x, before)
    kit.check(captured, step, x, factor=at_capture)


@pytest.mark.parametrize("policy", POLICIES)
def test_strides_that_address_nothing_may_differ(kit: Kit, policy: str) -> None:
    """FAULTS 24."""

    @dg.region(host_args=("factor",))
    def body(x: torch.Tensor, *, factor: int) -> torch.Tensor:
        return (x * factor).as_strided((1, 4), (factor + 4, 1))

    def step(x: torch.Tensor, *, factor: int) -> torch.Tensor:
        return body(x, factor=factor) + 1

    check(kit, step, kit.tensor(4), policy)


def test_note_of_an_error_names_the_segment_among_equal_ones(backend: CpuBackend) -> None:
    calls: list[int] = []

    @no_graph
    def tick() -> None:
        calls.append(1)
        if len(calls) == 4:
            raise ValueError("late")

    def step(x: torch.Tensor) -> torch.Tensor:
        tick()
        y = x * 2
        tick()
        return y + 1

    x = torch.ones(3)
    for waits in (False, True):
        calls.clear()
        captured = capture(step, x, policy="breakable", backend=backend, warmup=0, check=waits)
        with pytest.raises(ValueError, match="late") as raised:
            captured.replay()
        assert "in segment 2 of 4" in raised.value.__notes__[0]


def test_break_that_returns_a_sparse_tensor_is_refused(backend: CpuBackend) -> None:
    @no_graph
    def sparse(x: torch.Tensor) -> torch.Tensor:
        return x.to_sparse()

    with pytest.raises(dg.RegionError, match="returned a torch.sparse_coo tensor"):
        capture(lambda x: sparse(x) * 2, torch.eye(3), policy="breakable", backend=backend)


def hooked(note):
    def step(x, w):
        hidden = x * w
        hidden.register_hook(lambda gradient: note(gradient))
        (hidden * hidden).sum().backward()
        gradient, w.grad = w.grad.clone(), None
        return gradient

    return step


def checkpointed(note):
    def step(x, w):
        block = lambda x: (note(x * w), torch.tanh(x * w))[1]  # noqa: E731
        checkpoint(block, x, use_reentrant=False).sum().backward()
        gradient, w.grad = w.grad.clone(), None
        return gradient

    return step


@pytest.mark.parametrize("build", [hooked, checkpointed])
@pytest.mark.parametrize("how", ["no_graph", "graph_break"])
def test_break_inside_a_backward_pass_is_refused(build, how: str):
    """Replays returned NaN, and later captures of the process raised IndexError."""

    @dg.no_graph
    def marked(gradient):
        return None

    note = marked if how == "no_graph" else lambda gradient: dg.graph_break()
    x, w = torch.randn(3), torch.randn(3, requires_grad=True)
    with pytest.raises(dg.CaptureError, match="in a backward pass"):
        dg.capture(build(note), x, w, policy="breakable", backend="cpu")
    step = build(lambda gradient: None)
    w.grad = None
    with dg.capture(step, x, w, policy="breakable", backend="cpu") as captured:
        x.copy_(torch.randn(3))
        assert torch.equal(captured.replay(), step(x, w))


@pytest.mark.parametrize("policy", ["full", "breakable"])
def test_backward_pass_through_a_result_at_a_fixed_address_is_refused(policy: str):
    @dg.region(host_args=("n",))
    def scaled(x, *, n):
        return x * n

    def step(x, w, *, n):
        (scaled(x * w, n=n) + w).sum().backward()
        gradient, w.grad = w.grad.clone(), None
        return gradient

    x, w = torch.randn(3), torch.randn(3, requires_grad=True)
    with pytest.raises(dg.CaptureError, match="a backward pass reached the result of"):
        dg.capture(step, x, w, policy=policy, backend="cpu", host_args={"n": 2})


def test_eager_segment_of_a_closed_capture_is_refused():
    @dg.no_graph
    def logged(x):
        return x + 1

    captured = dg.capture(lambda x: logged(x * 2) * 3, torch.ones(2), policy="breakable")
    [segment] = [s for s in captured.segments if not isinstance(s, dg.DeviceGraph)]
    captured.close()
    with pytest.raises(dg.StateError, match="was reset; capture again"):
        segment.replay()
