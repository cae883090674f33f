"""Outputs of an engine's steps: in graph memory, and in the buffers that all shapes share."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch._C._dynamo.guards import GlobalStateGuard

import devgraph as dg
from devgraph.integrations.engine.steps import SharedOutputs, copy_into, engine_session, weak


@pytest.mark.parametrize("autocast", [False, True])
def test_capture_of_an_engine_changes_no_setting_that_a_compiled_function_checks(
    autocast: bool,
) -> None:
    """SGLang's draft models call functions that they compiled in the warm-up."""
    backend = dg.get_backend("cpu")
    compiled = GlobalStateGuard()
    block = engine_session(backend.make_pool())
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), block:
        assert torch.is_autocast_cache_enabled() is not autocast
        assert autocast or compiled.check()


@pytest.mark.parametrize("rows", [1, 3])
def test_fewer_rows_than_in_the_warm_up_are_refused_and_not_repeated(rows: int) -> None:
    targets = SharedOutputs().views(torch.zeros(4, 2), rows=None, capacity=None)
    with pytest.raises(dg.CapabilityError, match=rf"\({rows}, 2\).*\(4, 2\)"):
        copy_into(targets, torch.ones(rows, 2))
    assert torch.equal(copy_into(targets, torch.ones(5, 2)), torch.ones(4, 2))


def test_output_in_other_memory_than_the_pools_is_kept() -> None:
    """A tensor on the host does not outlive its owner, whatever graphs of a device do."""

    class Pool:
        backend = types.SimpleNamespace(device=types.SimpleNamespace(type="abacus"))

        def bare(self, tensor: torch.Tensor) -> None:
            raise AssertionError("the host's memory is not the pool's")

    here: Any = torch.ones(2)
    pool: Any = Pool()
    assert weak(pool, (here, 3))[0] is here
