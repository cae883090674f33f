"""``prove`` tells a right capture from a wrong one."""

from __future__ import annotations

import pytest
import torch

from devgraph.testing.conformance.support import POLICIES, Kit, same


@pytest.mark.parametrize("policy", POLICIES)
def test_prove_is_ok_for_a_right_capture(kit: Kit, policy: str) -> None:
    x, w = kit.tensor(4, 16), kit.tensor(16, 16, seed=1)
    captured = kit.capture(lambda x, w: {"y": torch.relu(x @ w)}, x, w, policy=policy)
    report = captured.prove(cases=3)
    assert report.ok, str(report)
    assert report.cases == 3
    assert report.failures == ()


@pytest.mark.parametrize("policy", POLICIES)
def test_bound_views_of_any_layout_are_read_where_they_lie(kit: Kit, policy: str) -> None:
    base = kit.tensor(4, 4)
    row = base[0]
    views = [base.t(), base[::2, 1:], row.expand(3, 4), row[:, None].expand(4, 2), base[1, 2]]
    captured = kit.capture(lambda *views: [view * 2 for view in views], *views, policy=policy)
    kit.refill(base, 7)
    kit.same(captured.replay(), [view * 2 for view in views])
    assert captured.prove(cases=2).ok
    same(captured.replay(), [view * 2 for view in views])


@pytest.mark.parametrize("policy", POLICIES)
def test_prove_finds_a_frozen_number_and_names_the_output(kit: Kit, policy: str) -> None:
    factor = [2.0]

    def step(x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"right": x + 1, "wrong": x * factor[0]}

    captured = kit.capture(step, kit.tensor(8), policy=policy)
    factor[0] = 3.0
    report = captured.prove(cases=2)
    assert not report.ok
    assert len(report.failures) == 2
    assert {failure.where for failure in report.failures} == {"output ['wrong']"}
    assert "wrong" in str(report)


@pytest.mark.parametrize("policy", POLICIES)
def test_prove_finds_a_written_argument_that_differs(kit: Kit, policy: str) -> None:
    step_size = [1.0]

    def step(x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        count.add_(step_size[0])
        return x + 1

    captured = kit.capture(step, kit.tensor(8), kit.tensor(4, seed=1), policy=policy)
    step_size[0] = 2.0
    report = captured.prove(cases=1)
    assert [failure.where.split()[0] for failure in report.failures] == ["argument"]


@pytest.mark.parametrize("policy", POLICIES)
def test_prove_gives_bound_tensors_their_data_back(kit: Kit, policy: str) -> None:
    x, count = kit.tensor(8), kit.tensor(4, seed=1)
    before = x.clone(), count.clone()

    def step(x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        count.add_(1)
        return x * 2

    captured = kit.capture(step, x, count, policy=policy)
    assert captured.prove(cases=2).ok
    kit.same((x, count), before, "the bound tensors after prove")
