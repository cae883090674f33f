"""What tests of the suite build with, on the CPU, for tests of code that sees no vendor."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import devgraph as dg
    from devgraph.testing.conformance.support import Kit


@pytest.fixture
def kit() -> Kit:
    import devgraph as dg
    from devgraph.testing.conformance.support import Kit

    return Kit(dg.get_backend("cpu"))


@pytest.fixture
def pool(kit: Kit) -> dg.Pool:
    return kit.backend.make_pool()
