"""Faults whose error text only CUDA's own runtime can show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import devgraph as dg
from tests.support.device_kit import on

backend, _ = on("cuda")

pytestmark = pytest.mark.cuda

READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "nonzero": lambda x: x.nonzero(),
    "cpu": lambda x: x.cpu(),
    "print": lambda x: print(x),
    "synchronize": lambda x: torch.cuda.synchronize(),
}


@pytest.mark.parametrize("policy", ["full", "breakable"])
@pytest.mark.parametrize("name", READS)
def test_host_read_names_the_line_and_suggests_a_mark(be: Any, name: str, policy: str):
    """FAULTS 23."""
    x = torch.ones(8, device=be.device)

    def step(x: torch.Tensor) -> torch.Tensor:
        if dg.is_capturing():
            READS[name](x * 2)
        return x + 1

    READS[name](x)
    with pytest.raises(dg.HostReadError) as caught:
        dg.capture(step, x, policy=policy, backend=be)
    assert __file__ in str(caught.value)
    assert "@dg.no_graph" in str(caught.value)
    assert caught.value.__cause__ is not None
    captured = dg.capture(lambda x: x * 2, x, policy=policy, backend=be)
    assert captured.prove().ok
