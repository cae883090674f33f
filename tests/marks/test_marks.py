"""Marks: how they are written, what can be marked, and how arguments arrive."""

from __future__ import annotations

import contextlib
import contextvars
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import devgraph as dg

POLICIES = ("full", "breakable", "piecewise")


@pytest.mark.parametrize("policy", POLICIES)
def test_positional_arguments_before_a_host_argument_by_keyword_all_arrive(policy: str):
    @dg.region(host_args=("n",), derive={"half": lambda n: n // 2})
    def total(x, *rest, n, half):
        return x * n + sum(rest) + half

    def step(x, *, n):
        return total(x, 1.0, 10.0, n=n) + 1

    x = torch.randn(2)
    with dg.capture(step, x, policy=policy, backend="cpu", host_args={"n": 4}) as captured:
        want = x * 6 + 11.0 + 3 + 1
        assert torch.equal(captured.replay(n=6), want)
        assert torch.equal(step(x, n=6), want)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("failing", ["derive", "context", "reduce"])
def test_rule_that_raises_at_a_replay_is_named_and_the_next_one_is_right(policy: str, failing: str):
    wrong = []

    def rule(where, value):
        if wrong == [where]:
            raise ZeroDivisionError(where)
        return value

    @dg.region(
        host_args=("n",),
        derive={"half": lambda n: rule("derive", n // 2)},
        context=lambda: rule("context", 3),
        reduce={"n": lambda n: rule("reduce", n)},
    )
    def scaled(x, *, n, half, context):
        return x * n + half + context

    def step(x, *, n):
        return scaled(x * 2, n=n) + 1

    x = torch.randn(2)
    with dg.capture(step, x, policy=policy, backend="cpu", host_args={"n": 4}) as captured:
        wrong.append(failing)
        with pytest.raises(ZeroDivisionError, match=failing) as caught:
            captured.replay(n=6)
        assert "the mark of" in caught.value.__notes__[0]
        assert "scaled" in caught.value.__notes__[0]
        wrong.clear()
        assert torch.equal(captured.replay(n=6), step(x, n=6))


def test_host_argument_by_position_before_nameless_ones_is_refused():
    @dg.region(host_args=("n",))
    def total(x, n, *rest):
        return x * n + sum(rest)

    @dg.region(host_args=("n",))
    def scaled(x, n, y, /):
        return x * n + y

    x = torch.randn(2)
    for step in (lambda x, n: total(x, n, 1.0), lambda x, n: scaled(x, n, x)):
        with pytest.raises(dg.HostArgumentError, match="'n' by position.*keyword"):
            dg.capture(step, x, backend="cpu", host_args={"n": 4})


def test_what_can_be_marked_needs_parameters_and_no_module():
    with pytest.raises(dg.InputTypeError, match="Mark a function of your own"):
        dg.region(torch.relu)
    with pytest.raises(dg.InputTypeError, match="int.* has no signature"):
        dg.region(host_args="n", derive={"half": int})(lambda x, *, n, half: x)
    names: dict[str, Any] = {}
    exec("def f(x):\n    return x * 2", names)
    assert torch.equal(dg.region(names["f"])(torch.ones(2)), torch.full((2,), 2.0))


def test_marks_are_written_with_and_without_arguments():
    calls = []

    @dg.region
    def bare(x: Any) -> Any:
        return x + 1

    @dg.region()
    def called(x: Any) -> Any:
        return x * 2

    @dg.region(context=lambda: 3)
    def ambient(x: Any, *, context: int) -> Any:
        return x * context

    @dg.no_graph
    def eager(x: Any) -> Any:
        calls.append(dg.is_capturing())
        return x - float(x.sum())

    def fn(x: Any) -> Any:
        x = eager(ambient(called(bare(x))))
        dg.graph_break()
        calls.append(dg.is_capturing())
        return x / 2

    x = torch.ones(3)
    with dg.capture(fn, x, policy="breakable", backend="cpu", warmup=0) as cap:
        assert calls == [False, True]
        assert torch.equal(cap.replay(), fn(x))


def test_function_that_works_after_it_returned_is_refused():
    def parts(x):
        yield x

    async def later(x):
        return x

    for fn in (parts, later):
        for mark in (dg.region, dg.no_graph):
            with pytest.raises(dg.InputTypeError, match="is a generator or async"):
                mark(fn)


@pytest.mark.parametrize("kind", [dg.no_graph, dg.region])
@pytest.mark.parametrize("policy", ["full", "breakable"])
def test_mark_in_another_thread_of_the_step_is_refused(policy: str, kind: Any):
    """FAULTS 49. The break was made in the wrong thread, and the capture hung."""

    @kind
    def doubled(x):
        return x * 2

    def step(x):
        if threading.current_thread() is not threading.main_thread() or not dg.is_capturing():
            return doubled(x) + 1
        results = []
        context = contextvars.copy_context()

        def work():
            with contextlib.suppress(dg.CaptureError):
                results.append(context.run(doubled, x))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join(60)
        assert not thread.is_alive()
        return x + 1

    x = torch.randn(3)
    with pytest.raises(dg.CaptureError, match="doubled was called in thread"):
        dg.capture(step, x, policy=policy, backend="cpu")
    with dg.capture(lambda x: x * 3, x, policy=policy, backend="cpu") as captured:
        assert torch.equal(captured.replay(), x * 3)


def test_thread_with_a_copied_context_calls_marks_after_the_capture():
    @dg.no_graph
    def doubled(x):
        return x * 2

    contexts = []

    def step(x):
        contexts.append(contextvars.copy_context())
        return x + 1

    x = torch.randn(3)
    with dg.capture(step, x, backend="cpu", warmup=0), ThreadPoolExecutor(1) as pool:
        assert torch.equal(pool.submit(contexts[0].run, doubled, x).result(), x * 2)
        pool.submit(contexts[0].run, dg.graph_break).result()
