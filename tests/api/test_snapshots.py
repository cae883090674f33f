"""Snapshots: contents of tensors and states of generators, saved and restored."""

from __future__ import annotations

import pytest
import torch

import devgraph as dg
from devgraph.api.errors import CaptureError
from devgraph.api.snapshots import Snapshot, hash_of, same_bytes

TENSORS = {
    "contiguous": lambda: torch.randn(3, 4),
    "transposed": lambda: torch.randn(3, 4).t(),
    "expanded": lambda: torch.randn(1, 4).expand(3, 4),
    "windows": lambda: torch.randn(8).unfold(0, 3, 1),
    "conjugate": lambda: torch.randn(4, dtype=torch.complex64).conj(),
    "bytes": lambda: torch.arange(5, dtype=torch.uint8),
    "eight bits": lambda: torch.randn(4).to(torch.float8_e4m3fn),
    "empty": lambda: torch.empty(0),
}


@pytest.mark.parametrize("name", TENSORS)
def test_contents_of_any_layout_are_restored(name: str) -> None:
    """FAULTS 47."""
    tensor = TENSORS[name]()
    before = tensor.clone()
    snapshot = Snapshot(dg.get_backend("cpu"), [("t", tensor)])
    tensor.untyped_storage().fill_(1)
    snapshot.restore()
    assert same_bytes(tensor, before)


def test_generators_are_restored() -> None:
    own = torch.Generator().manual_seed(3)
    snapshot = Snapshot(dg.get_backend("cpu"), [], [own])
    first = torch.rand(2), torch.rand(2, generator=own)
    snapshot.restore()
    assert all(map(torch.equal, first, (torch.rand(2), torch.rand(2, generator=own))))


def test_tensor_above_the_limit_is_hashed_and_its_rows_can_be_saved() -> None:
    large, small = torch.randn(100, 4), torch.randn(4)
    snapshot = Snapshot(dg.get_backend("cpu"), [("large", large), ("small", small)], limit=64)
    digest = hash_of(large)
    snapshot.save_rows(torch.tensor([3, 200]))
    large[3], small[0] = 7, 7
    assert not torch.equal(hash_of(large), digest)
    with pytest.raises(CaptureError, match="wrote large"):
        snapshot.require_unwritten()
    snapshot.restore()
    snapshot.require_unwritten()
    assert torch.equal(hash_of(large), digest)
