"""Outputs of captures that share a pool: each has memory that no other capture writes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import devgraph as dg

POLICIES = ("full", "breakable", "piecewise")


@dg.region(host_args=("n",), fake=lambda x, **_: torch.empty_like(x))
def scaled(x: torch.Tensor, *, n: int) -> torch.Tensor:
    return x * n


def long_step(x: torch.Tensor, *, n: int) -> torch.Tensor:
    for _ in range(3):
        x = scaled(x * 2 + 1, n=n) @ torch.eye(16)
    return x.tanh()


def step(x: torch.Tensor, *, n: int) -> dict[str, torch.Tensor]:
    y = scaled(x + 1, n=n) * 2
    return {"whole": y, "part": y[:, 1::3], "row": y[0].expand(3, 16), "input": x}


def check(captured: dg.Captured, x: torch.Tensor, n: int) -> None:
    got, want = captured.outputs, step(x, n=n)
    for name, tensor in want.items():
        assert torch.equal(got[name], tensor), name
        assert got[name].stride() == tensor.stride(), name
    assert got["input"] is x
    assert got["part"].data_ptr() == got["whole"].data_ptr() + 4
    assert got["row"].data_ptr() == got["whole"].data_ptr()


@pytest.mark.parametrize("second", POLICIES)
@pytest.mark.parametrize("first", POLICIES)
def test_outputs_outlive_replays_of_a_capture_that_was_made_before(first: str, second: str) -> None:
    backend = dg.get_backend("cpu")
    pool = backend.make_pool()
    x, y = torch.randn(8, 16), torch.randn(4, 16)
    earlier = dg.capture(long_step, x, policy=first, backend=backend, pool=pool, host_args={"n": 2})
    later = dg.capture(step, y, policy=second, backend=backend, pool=pool, host_args={"n": 2})
    for n in (2, 3, 2):
        later.replay(n=n)
        assert torch.equal(earlier.replay(n=n), long_step(x, n=n))
        check(later, y, n)
        y.add_(1)
        later.replay(n=5 - n)
        check(later, y, 5 - n)
        assert torch.equal(earlier.outputs, long_step(x, n=n))


@pytest.mark.parametrize(("misses", "copies"), [(0, 4), (8, 0), (8, 4)])
def test_outputs_in_a_shared_pool_are_those_of_copies_and_of_the_broken_form(
    misses: int, copies: int
) -> None:
    @dg.region(host_args=("n",))
    def uneven(x: torch.Tensor, *, n: int) -> torch.Tensor:
        return x.sin() if n > 2 else x * n + 1

    def uneven_step(x: torch.Tensor, *, n: int) -> torch.Tensor:
        return uneven(x * 2, n=n)

    backend, x = dg.get_backend("cpu"), torch.randn(4, 16)
    pool, budget = backend.make_pool(), dg.UpdateBudget(misses=misses, copies=copies)
    earlier, later = (
        dg.capture(uneven_step, x, backend=backend, pool=pool, host_args={"n": 2}, budget=budget)
        for _ in range(2)
    )
    for n in (2, 3, 1, 3, 4):
        later.replay(n=n)
        assert torch.equal(earlier.replay(n=2), uneven_step(x, n=2))
        assert torch.equal(later.outputs, uneven_step(x, n=n))


@pytest.mark.parametrize("second", ["full", "breakable"])
def test_output_of_one_row_has_memory_that_no_other_capture_writes(second: str) -> None:
    """A capture may give dimensions of size one other strides than a warm-up run does."""

    def one_row(x: torch.Tensor) -> torch.Tensor:
        return torch.sort(x[::2], -1)[0]

    def with_temporaries(x: torch.Tensor) -> torch.Tensor:
        return (x * 2 + 1).tanh() * (x - 3)

    backend, x = dg.get_backend("cpu"), torch.randn(2, 8)
    pool = backend.make_pool()
    earlier = dg.capture(with_temporaries, x, backend=backend, pool=pool)
    later = dg.capture(one_row, x, policy=second, backend=backend, pool=pool)
    out = later.replay()
    want = one_row(x)
    for _ in range(2):
        x.normal_()
        assert torch.equal(earlier.replay(), with_temporaries(x))
        assert torch.equal(out, want)


def test_outputs_of_a_capture_keep_nothing_of_its_warm_up() -> None:
    backend, weight = dg.get_backend("cpu"), torch.randn(16, 16, requires_grad=True)
    pool = backend.make_pool()
    x = torch.randn(4, 16)
    with dg.capture(lambda v: v + 1, x, backend=backend, pool=pool):
        captured = dg.capture(lambda v: v @ weight, x, backend=backend, pool=pool)
    assert captured.outputs.grad_fn is None
    x.add_(1)
    assert torch.equal(captured.replay(), x @ weight)


def test_budget_of_another_kind_is_refused() -> None:
    with pytest.raises(dg.InputTypeError, match="UpdateBudget"):
        dg.capture(torch.relu, torch.ones(4), backend="cpu", budget=5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("limits", "kind"),
    [
        ({"misses": -1}, dg.InputError),
        ({"misses": 1.5}, dg.InputTypeError),
        ({"copies": "4"}, dg.InputTypeError),
        ({"copy_seconds": float("nan")}, dg.InputError),
        ({"copy_seconds": "2"}, dg.InputTypeError),
        ({"may_capture": False}, dg.InputTypeError),
    ],
)
def test_limit_that_is_none_is_refused_and_named(limits: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind, match=next(iter(limits))):
        dg.UpdateBudget(**limits)
