"""Regions as task groups over the simulated driver."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import devgraph as dg
from tests.sim.ascend import Driver

pytest_plugins = ["tests.sim.ascend.plugin"]
pytestmark = [
    pytest.mark.npu,
    pytest.mark.filterwarnings("ignore:Cannot create tensor with internal format"),
]

HEADS, SIZE, ROWS = 2, 8, 16


def attention_of(version: int) -> Callable[..., torch.Tensor]:
    """Return torch_npu's fused attention of a version as a region, as an engine would mark it."""
    import torch_npu

    suffix = "_v2" if version == 2 else ""
    operator = getattr(torch_npu, f"npu_fused_infer_attention_score{suffix}").out
    name = "actual_seq_kvlen" if version == 2 else "actual_seq_lengths_kv"
    heads, scale = ("num_query_heads", "softmax_scale") if suffix else ("num_heads", "scale")
    fixed: dict[str, Any] = {"input_layout": "BNSD", heads: HEADS, scale: 0.5}

    def attend(
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        out: torch.Tensor,
        sums: torch.Tensor,
        lengths: tuple[int, ...],
    ) -> None:
        options = {**fixed, name: list(lengths)}
        operator(query, keys, values, **options, workspace=None, out=[out, sums])

    # Two names, because a region receives a host value only by its own name.
    @dg.region(host_args=("first",), mutates=("out",))
    def one(q: Any, k: Any, v: Any, out: Any, sums: Any, *, first: tuple[int, ...]) -> None:
        attend(q, k, v, out, sums, first)

    @dg.region(host_args=("second",), mutates=("out",))
    def two(q: Any, k: Any, v: Any, out: Any, sums: Any, *, second: tuple[int, ...]) -> None:
        attend(q, k, v, out, sums, second)

    def step(
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        first: tuple[int, ...],
        second: tuple[int, ...],
    ) -> torch.Tensor:
        middle, out = torch.empty_like(query), torch.empty_like(query)
        sums = torch.empty(1, dtype=torch.float32, device=query.device)
        one(query, keys, values, middle, sums, first=first)
        two(middle, keys, values, out, sums, second=second)
        return out * 2

    return step


@pytest.mark.parametrize("version", [1, 2])
def test_operator_that_torch_npu_can_update_by_itself_is_a_region_like_any_other(
    driver: Driver, version: int
) -> None:
    generator = torch.Generator().manual_seed(1)
    shapes = ((2, HEADS, 1, SIZE), (2, HEADS, ROWS, SIZE), (2, HEADS, ROWS, SIZE))
    tensors = [torch.randn(s, generator=generator).half().npu() for s in shapes]
    step, host = attention_of(version), {"first": (4, 4), "second": (4, 4)}
    with dg.capture(step, *tensors, backend="npu", host_args=host) as captured:
        with driver.counting() as moved:
            for first, second in (((3, 9), (16, 1)), ((5, 5), (2, 7)), ((16, 16), (1, 1))):
                for _ in range(2):
                    out = captured.replay(first=first, second=second)
                    assert torch.equal(out, step(*tensors, first=first, second=second))
        assert moved["replays"] == 6
        # Each key was tried once; its second replay ran no host code.
        assert moved["group_updates"] == 6


@dg.region(host_args=("scale",), mutates=("out",))
def draw(q: torch.Tensor, out: torch.Tensor, *, scale: float) -> None:
    torch.mul(torch.rand_like(q), scale, out=out)


def test_region_that_draws_random_numbers_is_refused_at_capture(driver: Driver) -> None:
    def step(q: torch.Tensor, *, scale: float) -> torch.Tensor:
        out = torch.empty_like(q)
        draw(q, out, scale=scale)
        return out

    with pytest.raises(dg.CaptureError, match=r"region .*draw would not follow the replays"):
        dg.capture(step, torch.ones(4).npu(), backend="npu", host_args={"scale": 2.0})
