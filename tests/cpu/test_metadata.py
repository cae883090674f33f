"""What is remembered of the shapes that operations give."""

from __future__ import annotations

import pytest
import torch

import devgraph as dg
from devgraph.cpu.backend import CpuBackend
from devgraph.cpu.memory import BlockPool
from devgraph.cpu.recorder import Knowledge, Recorder


def test_metadata_forgets_at_its_limit() -> None:
    knowledge = Knowledge()
    knowledge.metadata.LIMIT = 10
    for size in range(1, 40):
        with Recorder(BlockPool(), knowledge=knowledge):
            torch.ones(size) + 1
    assert len(knowledge.metadata._known) <= 10


def test_nothing_is_made_before_the_first_operation() -> None:
    """Fake tensors import torch's compiler: a second or two that ``devgraph plan`` need not pay."""
    knowledge = CpuBackend().knowledge
    assert "_mode" not in vars(knowledge.metadata)
    with Recorder(BlockPool(), knowledge=knowledge):
        torch.ones(3) + 1
    assert "_mode" in vars(knowledge.metadata)


def test_dtypes_that_torch_computes_and_cannot_tell_are_refused_by_name() -> None:
    numbers, one = torch.randn(4, dtype=torch.complex64), torch.ones(()).to(torch.float8_e4m3fn)
    assert (numbers + one).dtype is torch.complex64
    with pytest.raises(dg.CaptureError, match=r"cannot tell what aten\.add.* returns without"):
        dg.capture(lambda x, y: x + y, numbers, one, backend="cpu")
