"""Deliberately broken CUDA backends: the conformance suite must catch each of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch

import devgraph as dg
from devgraph.api.executable import Recordings
from devgraph.api.torchlike.base import TorchPool
from devgraph.api.torchlike.recording import RegionPattern
from devgraph.cuda.runtime import Runtime
from devgraph.testing.conformance import test_pool, test_update
from devgraph.testing.conformance.support import Kit
from tests.support.device_kit import on

backend, _ = on("cuda")

pytestmark = pytest.mark.cuda


def caught(test: Callable[..., None], kit: Kit, *args: Any, **kwargs: Any) -> bool:
    """Whether a test of the suite fails."""
    try:
        test(kit, *args, **kwargs)
    except (Exception, pytest.fail.Exception):
        return True
    return False


@pytest.fixture
def kit(be: Any) -> Iterator[Kit]:
    yield Kit(be)


def alias_everything(self: TorchPool, tensor: torch.Tensor) -> torch.Tensor:
    """Weak break inputs: memory from outside is not kept alive."""
    storage = tensor.untyped_storage()
    bare = torch._C._construct_storage_from_data_pointer(  # type: ignore[attr-defined]
        storage.data_ptr(), tensor.device, storage.nbytes()
    )
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(bare, tensor.storage_offset(), tensor.shape, tensor.stride())


def test_weak_break_inputs_are_caught(kit: Kit) -> None:
    test = test_pool.test_breaks_keep_outside_tensors_alive
    assert not caught(test, kit, kit.backend.make_pool())
    with mock.patch.object(TorchPool, "alias", alias_everything):
        assert caught(test, kit, kit.backend.make_pool())


def test_update_of_the_wrong_region_is_caught(kit: Kit) -> None:
    test = test_update.test_each_region_gets_its_own_argument
    match = RegionPattern.match

    def rotated(self: RegionPattern, *args: Any) -> Any:
        region_of = {
            known.node: number
            for number, region in enumerate(self.regions)
            for known in region.nodes
        }
        found = itertools.groupby(match(self, *args), lambda update: region_of[update.node])
        regions = [list(updates) for _, updates in found]
        turned = [*regions[1:], *regions[:1]]
        return [
            mine._replace(params=other.params) if mine.kind == other.kind else mine
            for region, others in zip(regions, turned, strict=True)
            for mine, other in zip(region, others, strict=True)
        ]

    assert not caught(test, kit)
    with mock.patch.object(RegionPattern, "match", rotated):
        assert caught(test, kit)


def test_recordings_that_outlive_a_reset_are_caught(kit: Kit) -> None:
    test = test_update.test_reset_forgets_recordings
    assert not caught(test, kit, kit.backend.make_pool())
    with mock.patch.object(Recordings, "drop", lambda *_: None):
        assert caught(test, kit, kit.backend.make_pool())


def test_recordings_that_allocate_from_the_graphs_memory_are_caught(kit: Kit) -> None:
    test = test_update.test_region_temporaries_do_not_touch_the_memory_of_the_graph
    assert not caught(test, kit, kit.backend.make_pool())

    def in_the_graphs_memory(self: Any) -> Any:
        return torch.cuda.use_mem_pool(self._memory, self.backend.device)

    with mock.patch.object(TorchPool, "region_memory", in_the_graphs_memory):
        assert caught(test, kit, kit.backend.make_pool())


def test_update_that_is_applied_half_is_caught(kit: Kit) -> None:
    test = test_update.test_update_is_seen_by_the_next_replay_and_by_later_ones
    both = test_update.test_each_region_gets_its_own_argument
    write = Runtime.write

    def half(self: Runtime, updates: Any, executable: int) -> None:
        write(self, updates[: len(updates) // 2], executable)

    assert not caught(both, kit)
    with mock.patch.object(Runtime, "write", half):
        assert caught(test, kit) or caught(both, kit)


def test_kit_runs_on_the_device(kit: Kit) -> None:
    assert isinstance(kit.backend.make_graph(), dg.DeviceGraph)
    assert kit.backend.capabilities.region_update
