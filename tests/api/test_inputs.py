"""New inputs of a replay: checked, copied in and written back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import devgraph as dg
from devgraph.testing.conformance.support import Kit


def test_inputs_are_read_before_any_is_written(kit: Kit) -> None:
    x, y = kit.tensor(3), kit.tensor(3, seed=1)
    captured = kit.capture(lambda x, y: (x * 1, y * 1), x, y)
    old = x.clone(), y.clone()
    got = captured.replay(y, x)
    kit.same(got[0], old[1])
    kit.same(got[1], old[0])


def test_inputs_by_name_and_by_place_are_the_same(kit: Kit) -> None:
    captured = kit.capture(lambda x, y: x - y, kit.tensor(3), kit.tensor(3, seed=1))
    x, y = kit.tensor(3, seed=2), kit.tensor(3, seed=3)
    kit.same(captured.replay(x, y=y), x - y)
    with pytest.raises(dg.InputError, match="given twice"):
        captured.replay(x, x=x)
    with pytest.raises(dg.HostArgumentError, match="z"):
        captured.replay(x, z=y)


@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(4),
        torch.zeros(3, dtype=torch.float64),
        [torch.zeros(3)],
        None,
        3.0,
        torch.zeros(3).to_sparse(),
    ],
    ids=["shape", "dtype", "list", "none", "number", "sparse"],
)
def test_misfit_is_refused_and_changes_nothing(kit: Kit, value: Any) -> None:
    """FAULTS 7."""
    x = kit.tensor(3)
    captured, before = kit.capture(lambda x: x * 2, x), x.clone()
    with pytest.raises(dg.InputError, match="x"):
        captured.replay(value)
    kit.same(x, before)


def test_tensors_that_share_memory_need_data_that_shares_it(kit: Kit) -> None:
    memory = kit.tensor(6)
    captured = kit.capture(lambda x, y: x * 2 + y, memory[:4], memory[2:])
    new = kit.tensor(6, seed=5)
    kit.same(captured.replay(new[:4], new[2:]), new[:4] * 2 + new[2:])
    with pytest.raises(dg.InputError, match="share memory"):
        captured.replay(kit.tensor(4), kit.tensor(4, seed=2))
