"""The backend of torch's accelerator over the graph that torch_npu registers with torch."""

from __future__ import annotations

import pytest
import torch

import devgraph as dg
from devgraph.api import registry
from devgraph.api.torchlike.accelerator import AcceleratorBackend

pytestmark = pytest.mark.npu


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> AcceleratorBackend:
    if not hasattr(torch.accelerator, "Graph"):
        pytest.skip("torch.accelerator.Graph came with torch 2.12")
    monkeypatch.setattr(registry, "names", lambda: ["cpu"])  # as if npu had no room
    return AcceleratorBackend()


def test_steps_are_captured_and_replayed(backend: AcceleratorBackend):
    x = torch.ones(8, device=backend.device)
    pool = backend.make_pool()
    with dg.capture(lambda x: (x * 2 + 1).relu(), x, backend=backend, pool=pool) as captured:
        for value in (1.0, -3.0, 5.0):
            x.fill_(value)
            assert torch.equal(captured.replay().cpu(), (x * 2 + 1).relu().cpu())


def test_failed_capture_leaves_nothing(backend: AcceleratorBackend):
    x = torch.ones(8, device=backend.device)
    graph = backend.make_graph()
    with pytest.raises(ValueError, match="of the step"), backend.capture_context(graph):
        x + 1
        raise ValueError("of the step")
    assert graph.state == "empty"
    with backend.capture_context(graph):
        x.add_(1)
    graph.replay()
    assert torch.equal(x.cpu(), torch.full((8,), 2.0))
