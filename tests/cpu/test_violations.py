"""What a recording refuses, with the line: host reads, sizes that depend on data, no shapes."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import devgraph as dg
from devgraph.api.errors import CaptureError, HostReadError
from tests.support.cpu_capture import check_replays, record
from tests.support.refusals import READS, SHAPES, UNSUPPORTED, X, branch


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("name", [*READS, *SHAPES])
def test_host_read_is_refused_with_the_line(name: str, mode: Callable[[], Any]) -> None:
    fn, words = {**READS, **SHAPES}[name]
    with mode(), pytest.raises(HostReadError, match=words) as caught:
        record(fn, X)
    text = str(caught.value)
    line = fn.__code__.co_firstlineno + (fn is branch)
    assert f"{fn.__code__.co_filename}:{line}" in text or name == "deepcopy"
    assert "@dg.region" in text and "@dg.no_graph" in text and "breakable" in text


def test_refusal_names_the_innermost_line_of_the_user() -> None:
    with pytest.raises(HostReadError, match=r"in branch: if x\.sum\(\) > 0:"):
        record(lambda x: F.relu(branch(x)), X)


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_has_no_fixed_memory_is_refused(name: str) -> None:
    fn, words = UNSUPPORTED[name]
    with torch.inference_mode(), pytest.raises(CaptureError, match=words) as caught:
        record(fn, X)
    assert fn.__code__.co_filename in str(caught.value)


def test_resize_to_the_same_shape_is_no_resize() -> None:
    _, out = record(lambda x: (x * 2).resize_(4), X)
    assert out.shape == (4,)


def test_moves_that_a_device_makes_on_itself_are_no_host_reads() -> None:
    where = "cpu"

    def step(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first, *_ = x.tensor_split([1, 3])
        return x.to(where) + 1, x.to(x.device) * 2, x.to(x) - 1, copy.copy(x * 3), first.clone()

    check_replays(step, lambda seed: [X * seed])


def test_operation_without_known_shapes_is_refused() -> None:
    """It refuses scratch data, so that its shapes cannot be learnt."""

    def compute(x: torch.Tensor) -> torch.Tensor:
        if x.dtype is torch.int64:
            raise ValueError("no integers that mean nothing")
        return x + 1

    with torch.library._scoped_library("devgraph_test", "DEF") as library:
        library.define("opaque(Tensor x) -> Tensor")
        library.impl("opaque", compute, "CPU")
        check_replays(torch.ops.devgraph_test.opaque, lambda seed: [X * seed])
        with pytest.raises(CaptureError, match="register_fake"):
            record(torch.ops.devgraph_test.opaque, X.long())


def test_shape_errors_of_the_user_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError) as caught:
        record(lambda x: x + torch.ones(3), X)
    assert not isinstance(caught.value, CaptureError)


def test_a_host_read_in_a_region_is_not_told_to_move_into_one() -> None:
    @dg.region()
    def inner(x: torch.Tensor) -> torch.Tensor:
        return x * x.sum().tolist()

    with pytest.raises(HostReadError, match=r"Region \S*inner is part of the graph.*breakable"):
        dg.capture(inner, X, backend="cpu")
    assert dg.capture(inner, X, backend="cpu", policy="breakable").prove().ok


def _grown(x: torch.Tensor) -> torch.Tensor:
    out = (x * 2).resize_(6)
    out[4:] = 1
    return out * 3


def _out_of_sort(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    values, order = torch.empty(0), torch.empty(0, dtype=torch.int64)
    torch.sort(x, out=(values, order))
    return values + 1, order


def _out_of_other_size(x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(2)
    torch.cat([x, x], out=out.resize_(0))
    return out.add_(1)


RESIZED = (_grown, _out_of_sort, _out_of_other_size, lambda x: (x * 1).resize_(2).add_(1))


@pytest.mark.parametrize("fn", RESIZED)
def test_tensor_that_the_step_made_may_be_resized(fn: Any) -> None:
    check_replays(fn, lambda seed: [X * seed])


SPARSE = torch.eye(4).to_sparse().coalesce()


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: torch.mv(SPARSE, x),
        lambda x: torch.sparse.mm(SPARSE, x.view(4, 1)) + SPARSE.to_dense(),
        lambda x: SPARSE.values() * x,
    ],
)
def test_sparse_state_may_be_read(fn: Any) -> None:
    check_replays(fn, lambda seed: [X * seed])


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantized_argument_keeps_its_scale() -> None:
    def quantized(seed: int, scale: float) -> torch.Tensor:
        return torch.quantize_per_tensor(X * seed, scale, 0, torch.qint8)

    captured = dg.capture(lambda q: q.dequantize() * 2, quantized(1, 0.5), backend="cpu")
    for seed in (2, 3):
        given = quantized(seed, 0.5)
        assert torch.equal(captured.replay(given), given.dequantize() * 2)
    with pytest.raises(dg.InputError, match=r"scale=0\.25"):
        captured.replay(quantized(2, 0.25))


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev, torch.func.hessian])
def test_backward_that_torch_computes_from_data_is_refused_unless_eager_needs_no_data(
    transform: Any,
) -> None:
    """Under any dispatch mode torch takes another formula, whose last bits differ."""
    x = torch.tensor([0.3, -1.2, 0.7])
    with pytest.raises(HostReadError, match=r"the backward of prod\(\)"):
        record(lambda x: torch.autograd.grad(x.prod(), x), x.clone().requires_grad_())
    value = torch.tensor(2.0, requires_grad=True)
    with pytest.raises(HostReadError, match=r"masked_fill\(\) with a tensor"):
        record(lambda v: torch.autograd.grad(x.masked_fill(x > 0, v).sum(), v), value)
    if transform is torch.func.jacrev:
        with pytest.raises(HostReadError, match=r"the backward of prod\(\)"):
            record(transform(torch.prod), x)
    else:
        check_replays(transform(torch.prod), lambda seed: [x * seed])


def test_optimizer_that_reads_numbers_is_refused_with_options_that_do_not() -> None:
    weight, rate = torch.nn.Parameter(torch.ones(3)), torch.tensor(0.5)

    def step(x: torch.Tensor, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        optimizer.zero_grad()
        loss = (weight * x).square().sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    for kind in (torch.optim.SGD, torch.optim.Adam):
        with pytest.raises(HostReadError, match=r"fused=True .* on a device capturable=True"):
            record(lambda x, kind=kind: step(x, kind([weight], lr=rate)), X)
        optimizer = kind([weight], lr=rate, fused=True)
        captured = dg.capture(lambda x, fused=optimizer: step(x, fused), X[:3], backend="cpu")
        assert captured.prove().ok
        rate.zero_()  # as a scheduler does
        before = weight.detach().clone()
        captured.replay()
        assert torch.equal(weight, before)
        rate.fill_(0.5)


def test_coroutine_may_run_in_a_loop_and_the_refusal_of_asyncio_run_says_so() -> None:
    async def doubled(x: torch.Tensor) -> torch.Tensor:
        await asyncio.sleep(0)
        return x * 2

    # asyncio.run() does this in the main thread, where it replaces the handler of SIGINT.
    formatted = types.FunctionType((lambda x: repr(x)).__code__, {"__name__": "asyncio.runners"})
    with pytest.raises(HostReadError, match=r"use asyncio\.new_event_loop\(\) and run_until"):
        record(formatted, X)
    with contextlib.closing(asyncio.new_event_loop()) as loop:
        check_replays(lambda x: loop.run_until_complete(doubled(x)), lambda seed: [X * seed])
