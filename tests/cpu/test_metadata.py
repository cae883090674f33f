"""What is remembered of the shapes that operations give."""

from __future__ import annotations

import torch

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
