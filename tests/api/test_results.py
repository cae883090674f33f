"""The layout check of results at fixed addresses, and outputs that are moved out of a pool."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import devgraph as dg
from devgraph.api.results import Outputs, ResultCheck


@pytest.mark.parametrize(
    "value",
    [
        None,
        torch.zeros(2, 4),
        torch.zeros(2, 3, dtype=torch.int32),
        torch.zeros(3, 2).t(),
        torch.zeros(2, 3).to_sparse(),
    ],
    ids=["None", "shape", "dtype", "strides", "sparse"],
)
def test_another_layout_is_refused_with_both_layouts(value: Any) -> None:
    check = ResultCheck("the step", "at warm-up it returned", dg.ConfigError, "for 3 rows")
    with pytest.raises(
        dg.ConfigError, match=r"the step returned .* for 3 rows; at warm-up it returned .*\(2, 3\)"
    ):
        check.layout(value, torch.zeros(2, 3))


def test_strides_of_a_target_that_only_receives_copies_are_free() -> None:
    ResultCheck("the step").layout(torch.zeros(3, 2).t(), torch.zeros(2, 3), strides=False)


def test_outputs_of_a_second_capture_are_moved_out_of_the_pool() -> None:
    pool = dg.get_backend("cpu").make_pool()
    x = torch.arange(4.0)
    with (
        dg.capture(lambda x: (x * 2 + 1) * 3, x, backend="cpu", pool=pool) as first,
        dg.capture(lambda x: x - 1, x, backend="cpu", pool=pool, warmup=1) as second,
    ):
        x.add_(5)
        later = second.replay()
        expected = x - 1
        first.replay()
        assert torch.equal(later, expected)


def test_targets_that_share_memory_are_not_written_from_separate_results() -> None:
    pool = dg.get_backend("cpu").make_pool()
    base = torch.zeros(4)
    with pytest.raises(dg.RegionError, match=r"Return a clone\(\)"):
        Outputs(pool, [base]).deliver((base[:2], base[2:]), (torch.ones(2), torch.ones(2)))


def test_containers_of_outputs_that_the_caller_changed_are_restored() -> None:
    x, one = torch.ones(3), torch.ones(1)
    captured = dg.capture(lambda x: {"y": x * 2, "z": [x + 1, one * 1]}, x, backend="cpu")
    changed = captured.replay()
    changed["z"].append(1)
    changed["z"][1] = torch.zeros(1)
    del changed["y"]
    for _ in range(2):
        outputs = captured.replay()
        assert [*outputs] == ["y", "z"]
        assert len(outputs["z"]) == 2
        assert torch.equal(outputs["y"], x * 2)
        assert torch.equal(outputs["z"][1], one)


@pytest.mark.parametrize("policy", ["full", "piecewise"])
def test_iterator_in_outputs_is_refused(policy: str) -> None:
    def step(x: torch.Tensor) -> Any:
        return torch.tanh(x), iter([x * 2])

    with pytest.raises(dg.CaptureError, match=r"exhaust\. Return a list|piecewise"):
        dg.capture(step, torch.ones(3), policy=policy, backend="cpu")
