"""Graph memory by an engine's handles."""

from __future__ import annotations

from typing import Any

from devgraph.integrations.engine.memory import GraphMemory


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
