"""Fixtures of the suite: a kit for the backend under test, and a pool."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import devgraph as dg
from devgraph.api.backend import Backend
from devgraph.testing.conformance.support import Kit


@pytest.fixture
def kit(devgraph_backend: Backend) -> Iterator[Kit]:
    """Yield the kit of the backend under test; fail if the test leaves a capture unfinished."""
    kit = Kit(devgraph_backend)
    yield kit
    assert not dg.is_capturing(), "the test left this thread inside a capture"


@pytest.fixture
def pool(kit: Kit) -> dg.Pool:
    return kit.backend.make_pool()
