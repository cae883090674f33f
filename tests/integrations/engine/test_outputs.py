"""Outputs of an engine's steps in the buffers that all shapes share."""

from __future__ import annotations

import pytest
import torch

import devgraph as dg
from devgraph.integrations.engine.outputs import SharedOutputs, copy_into


@pytest.mark.parametrize("rows", [1, 3])
def test_fewer_rows_than_in_the_warm_up_are_refused_and_not_repeated(rows: int) -> None:
    places = SharedOutputs().places(torch.zeros(4, 2), rows=None, capacity=None)
    with pytest.raises(dg.CapabilityError, match=rf"\({rows}, 2\).*\(4, 2\)"):
        copy_into(places, torch.ones(rows, 2))
    assert torch.equal(copy_into(places, torch.ones(5, 2)), torch.ones(4, 2))
