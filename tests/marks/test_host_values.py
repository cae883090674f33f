"""Tracked values: consumed, copied, compared, and which of them are keys of their own."""

from __future__ import annotations

import copy
import enum
import pickle
from typing import Any

import pytest
import torch

import devgraph as dg

POLICIES = ("full", "breakable", "piecewise")

WIDTH = 8


class Mode(enum.Enum):
    CAUSAL = 1


@pytest.mark.parametrize("value", [None, Mode.CAUSAL], ids=["none", "enum"])
def test_host_argument_that_code_compares_with_is_is_refused(value: Any):
    with pytest.raises(dg.HostArgumentError, match="'is', which cannot be noticed"):
        dg.capture(lambda x, *, n: x * 2, torch.ones(2), backend="cpu", host_args={"n": value})


def test_default_that_code_compares_with_is_must_be_passed_to_each_replay():
    @dg.region(host_args=("n",))
    def scaled(x, *, n):
        return x * n

    def step(x, *, n=None):
        return scaled(x, n=7 if n is None else n)

    x = torch.ones(2)
    with dg.capture(step, x, backend="cpu", host_args={"n": 2}) as captured:
        with pytest.raises(dg.HostArgumentError, match="missing host arguments: n"):
            captured.replay()
        assert torch.equal(captured.replay(n=3), step(x, n=3))


@pytest.mark.parametrize("policy", POLICIES)
def test_host_argument_behind_a_tuple_is_named_where_torch_takes_it(policy: str):
    def step(x, *, kv_len):
        return x + torch.full((WIDTH,), kv_len)

    with pytest.raises(dg.FrozenValueError, match="host argument 'kv_len' was consumed by torch's"):
        dg.capture(step, torch.ones(WIDTH), backend="cpu", policy=policy, host_args={"kv_len": 3})


def test_copy_of_a_tracked_value_is_still_tracked_and_pickling_one_is_refused():
    @dg.region(host_args=("n",))
    def scaled(x, *, n):
        return x * n

    def step(x, *, n):
        return scaled(x, n=copy.deepcopy(copy.copy(n)))

    x = torch.ones(2)
    with dg.capture(step, x, backend="cpu", host_args={"n": 2}) as captured:
        assert torch.equal(captured.replay(n=3), step(x, n=3))
    with pytest.raises(dg.FrozenValueError, match="pickle"):
        dg.capture(lambda x, *, n: pickle.dumps(n), x, backend="cpu", host_args={"n": 2})


@dg.region(host_args=("scales",), reduce={"scales": tuple})
def by_kind(x: torch.Tensor, *, scales: tuple[Any, ...]) -> torch.Tensor:
    """A multiplication whose factor depends on the kind of the value, not on its size alone."""
    factor = {bool: 3.0, int: 5.0}.get(type(scales[0]), 1.0)
    return x * factor / scales[0]


def by_kind_step(x: torch.Tensor, *, scales: Any) -> torch.Tensor:
    return by_kind(x + 1, scales=scales) * 2


def test_values_that_python_calls_equal_are_keys_of_their_own() -> None:
    x = torch.randn(4, WIDTH)
    cap = dg.capture(by_kind_step, x, backend="cpu", host_args={"scales": [1]})
    for scales in ([1], [True], [1.0], [1], [-1.0], [True, 1], [True, True], [1, True]):
        x.copy_(torch.randn(x.shape))
        assert torch.equal(cap.replay(scales=scales), by_kind_step(x, scales=scales)), scales
    assert cap.stats()["misses"] == 6  # [1] came back


def test_tensor_as_a_host_value_is_refused() -> None:
    table = torch.randn(4)

    def capture(context: Any) -> None:
        @dg.region(context=context, mutates=("out",))
        def read(x: torch.Tensor, out: torch.Tensor, *, context: Any) -> None:
            out.copy_(x + table)

        dg.capture(read, torch.randn(4), torch.zeros(4), backend="cpu")

    with pytest.raises(dg.HostArgumentError, match="context of .*read is a Tensor.*ordinary arg"):
        capture(lambda: table)
    with pytest.raises(
        dg.HostArgumentError, match="context of .*read is a tuple.*data can change unnoticed"
    ):
        capture(lambda: ("x", table))


def test_signed_zeros_are_keys_of_their_own() -> None:
    @dg.region(host_args=("scale",))
    def scaled(x: torch.Tensor, *, scale: float) -> torch.Tensor:
        return x * scale

    x = torch.ones(4)
    cap = dg.capture(
        lambda x, *, scale: scaled(x, scale=scale) + -0.0,
        x,
        backend="cpu",
        host_args={"scale": 0.0},
    )
    signs = [bool(torch.signbit(cap.replay(scale=scale))[0]) for scale in (-0.0, 0.0, -0.0)]
    assert signs == [True, False, True]
