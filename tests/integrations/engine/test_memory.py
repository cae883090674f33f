"""Graph memory by an engine's handles, and weak outputs in it."""

from __future__ import annotations

import types
from typing import Any

import torch

from devgraph.integrations.engine.memory import GraphMemory, weak


def test_bytes_are_counted_while_pools_are_made() -> None:
    memory, kept = GraphMemory(lambda: ""), []

    class Pool:
        bytes = 4

        def __hash__(self) -> int:
            put()  # as another thread does, any time
            return id(self)

        def __eq__(self, other: object) -> bool:
            return self is other

    def put() -> None:
        pool: Any = Pool()
        kept.append(pool)
        memory._pools[len(kept)] = pool

    put()
    put()
    assert memory.bytes == 8


def test_output_in_other_memory_than_the_pools_is_kept() -> None:
    """A tensor on the host does not outlive its owner, whatever graphs of a device do."""

    class Pool:
        backend = types.SimpleNamespace(device=types.SimpleNamespace(type="abacus"))

        def bare(self, tensor: torch.Tensor) -> None:
            raise AssertionError("the host's memory is not the pool's")

    here: Any = torch.ones(2)
    pool: Any = Pool()
    assert weak(pool, (here, 3))[0] is here
