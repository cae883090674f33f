"""What is remembered of the shapes that operations give."""

from __future__ import annotations

import torch

from devgraph.cpu.memory import BlockPool
from devgraph.cpu.recorder import Knowledge, Recorder


def test_metadata_forgets_at_its_limit() -> None:
    knowledge = Knowledge()
    knowledge.metadata.LIMIT = 10
    for size in range(1, 40):
        with Recorder(BlockPool(), knowledge=knowledge):
            torch.ones(size) + 1
    assert len(knowledge.metadata._known) <= 10
