"""Memory that results share, layouts that change in place, and values that are equal but differ."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import devgraph as dg
from devgraph.testing.conformance.support import POLICIES, Kit, declares

FACTORS = (2, 3, 5, 3)


def check(kit: Kit, step: Any, x: torch.Tensor, policy: str) -> dg.Captured:
    """Capture with the factor 2, and compare replays with eager for all factors."""
    captured = kit.capture(step, x, policy=policy, host_args={"factor": 2})
    for seed, factor in enumerate(kit.usable(policy, FACTORS)):
        kit.check(captured, step, x, seed=seed, factor=factor)
    return captured


@pytest.mark.parametrize("policy", POLICIES)
def test_results_of_a_region_that_share_memory_go_on_sharing_it(kit: Kit, policy: str) -> None:
    """FAULTS 41."""

    @dg.region(host_args=("factor",))
    def body(x: torch.Tensor, *, factor: int) -> Any:
        y = x * factor
        return y[1:], y, y[::2]

    def step(x: torch.Tensor, *, factor: int) -> Any:
        tail, whole, even = body(x + 1, factor=factor)
        tail.add_(100)
        even.mul_(2)
        return whole + 0

    check(kit, step, kit.tensor(6), policy)


@pytest.mark.parametrize("policy", ["full", "breakable"])
@pytest.mark.parametrize("inference", [False, True])
def test_view_of_a_closed_over_tensor_goes_on_sharing_its_memory(
    kit: Kit, policy: str, inference: bool
) -> None:
    """FAULTS 41."""
    with torch.inference_mode(inference):
        held: torch.Tensor = kit.tensor(4)

        @dg.region(host_args=("factor",))
        def body(x: torch.Tensor, *, factor: int) -> torch.Tensor:
            held.copy_(x * factor)
            return held[:2]

        def step(x: torch.Tensor, *, factor: int) -> torch.Tensor:
            body(x + 1, factor=factor).add_(100)
            return held + 0

        check(kit, step, kit.tensor(4), policy)


@pytest.mark.parametrize("policy", ["full", "breakable"])
def test_result_that_a_region_also_keeps_is_seen_where_it_is_kept(kit: Kit, policy: str) -> None:
    """FAULTS 41."""
    kept = {}

    @dg.region(host_args=("factor",))
    def body(x: torch.Tensor, *, factor: int) -> torch.Tensor:
        kept["last"] = x * factor
        return kept["last"]

    def step(x: torch.Tensor, *, factor: int) -> torch.Tensor:
        body(x + 1, factor=factor).add_(100)
        return kept["last"] + 0

    try:
        check(kit, step, kit.tensor(4), policy)
    except (dg.CaptureError, dg.UpdateTopologyError):
        # A device's update adds the copy to where it is kept, and a graph holds no room for it.
        if policy != "full":
            raise


@declares("region_update")
def test_result_is_never_written_into_the_input_that_was_the_output_at_capture(kit: Kit) -> None:
    """FAULTS 41."""

    @dg.region(host_args=("factor",))
    def body(x: torch.Tensor, out: torch.Tensor, *, factor: int) -> torch.Tensor:
        out.copy_(x * factor)
        return x if factor == 1 else out * 1

    x, out = kit.tensor(4), kit.tensor(4)
    captured = kit.capture(
        lambda x, out, *, factor: body(x, out, factor=factor),
        x,
        out,
        host_args={"factor": 1},
        budget=dg.UpdateBudget(misses=0),
    )
    before = x.clone()
    for _ in range(2):
        with pytest.raises(dg.RegionError):
            captured.replay(factor=3)
        assert torch.equal(x, before)
    captured.replay(factor=1)
    assert torch.equal(out, x)


@pytest.mark.parametrize("policy", POLICIES)
def test_layout_that_changes_in_place_after_a_use_is_that_of_the_use(kit: Kit, policy: str) -> None:
    """FAULTS 42."""

    @dg.region(host_args=("factor",))
    def body(x: torch.Tensor, *, factor: int) -> torch.Tensor:
        return x * factor

    def step(x: torch.Tensor, *, factor: int) -> Any:
        view = x[:]
        result = body(view, factor=factor)
        used = view + 1, result + 1
        view.t_()
        result.t_()
        return (*used, view * 2, result * 2)

    check(kit, step, kit.tensor(2, 3), policy)


@pytest.mark.parametrize("warmup", [0, 1, 2])
@pytest.mark.parametrize("policy", ["full", "breakable"])
@pytest.mark.parametrize("inside", [False, True])
def test_step_that_changes_the_layout_of_an_argument_is_refused_and_undone(
    kit: Kit, pool: dg.Pool, policy: str, warmup: int, inside: bool
) -> None:
    """FAULTS 42."""
    turn = dg.region(lambda x: x.t_() * 1) if inside else lambda x: x.t_() * 1
    x = kit.tensor(2, 3)
    before = x.clone()
    with pytest.raises(dg.CaptureError, match="in place"):
        kit.capture(lambda x: turn(x) + 1, x, policy=policy, warmup=warmup, pool=pool)
    assert x.shape == (2, 3) and torch.equal(x, before)
    kit.works(pool)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("copies", [0, 4])
def test_expanded_results_and_outputs_equal_eager(kit: Kit, policy: str, copies: int) -> None:
    """FAULTS 21."""

    @dg.region(host_args=("factor",))
    def body(x: torch.Tensor, *, factor: int) -> torch.Tensor:
        for _ in range(factor):
            x = x + 1
        return x.expand(3, 4)

    def step(x: torch.Tensor, *, factor: int) -> Any:
        y = body(x, factor=factor)
        return y[:1].expand(5, 4), y

    x = kit.tensor(1, 4)
    captured = kit.capture(
        step, x, policy=policy, host_args={"factor": 2}, budget=dg.UpdateBudget(copies=copies)
    )
    for seed, factor in enumerate(kit.usable(policy, FACTORS)):
        kit.check(captured, step, x, seed=seed, factor=factor)
