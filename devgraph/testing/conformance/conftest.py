"""Fixtures of the suite: the backend under test, and what tests build with on its device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import devgraph as dg
from devgraph.api.backend import Backend
from devgraph.testing.conformance.support import Kit


@pytest.fixture
def kit(devgraph_backend: Backend) -> Iterator[Kit]:
    """Tensors, captures and comparisons on the device of the backend under test."""
    kit = Kit(devgraph_backend)
    yield kit
    assert not dg.is_capturing(), "the test left this thread inside a capture"


@pytest.fixture
def pool(kit: Kit) -> dg.Pool:
    """A pool of its own for each test."""
    return kit.backend.make_pool()
