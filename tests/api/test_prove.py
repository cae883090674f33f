"""What a proof says of the data that it had."""

from __future__ import annotations

import types
from typing import Any

import torch

import devgraph as dg
from devgraph.testing.conformance.support import Kit


def test_proof_without_bound_tensors_says_that_the_data_was_the_same():
    batch = types.SimpleNamespace(x=torch.ones(2))
    with dg.capture(lambda batch: batch.x * 2, batch, backend="cpu") as captured:
        report = captured.prove()
        assert report.varied == 0
        assert "on the same data: no argument is a tensor" in str(report)
    with dg.capture(lambda x: x * 2, batch.x, backend="cpu") as captured:
        report = captured.prove()
        assert report.varied == 1
        assert str(report) == "3 replays equal eager bit for bit"


def test_prove_finds_a_branch_on_data_that_was_frozen(kit: Kit) -> None:
    flag = {"negate": False}
    x = kit.tensor(8)

    def step(x: torch.Tensor) -> torch.Tensor:
        return -x if flag["negate"] else x + 0.0

    captured = kit.capture(step, x)
    assert captured.prove().ok
    flag["negate"] = True
    assert not captured.prove().ok


def test_prove_without_cases_is_not_ok(kit: Kit) -> None:
    captured = kit.capture(lambda x: x + 1, kit.tensor(8))
    assert not captured.prove(cases=0).ok
    assert not captured.prove(host_args=[]).ok


def test_prove_runs_every_set_of_host_arguments(kit: Kit) -> None:
    seen = []

    @dg.region(host_args=("n",))
    def body(x: torch.Tensor, *, n: int) -> torch.Tensor:
        seen.append(n)
        return x[:n].sum() + x

    def step(x: torch.Tensor, *, n: int) -> Any:
        return body(x * 2, n=n)

    captured = kit.capture(step, kit.tensor(8), policy="breakable", host_args={"n": 2})
    seen.clear()
    report = captured.prove(cases=2, host_args=[{"n": 3}, {"n": 7}])
    assert report.cases == 4
    assert report.ok, str(report)
    assert set(seen) == {3, 7}
