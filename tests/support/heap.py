"""The heap of a test session, which full collections need not search again and again."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

__all__ = ["frozen_heap", "thawed_heap"]


@pytest.fixture(scope="module", autouse=True)
def frozen_heap() -> Iterator[None]:
    """Exempt the modules and the objects that exist before a test file from full collections.

    With torch's compiler imported, a collection takes 0.3 s without it, and tests make thousands.
    """
    gc.collect()
    gc.freeze()
    yield


@pytest.fixture
def thawed_heap() -> Iterator[None]:
    """Exempt no object, as in a program that froze none."""
    gc.unfreeze()
    yield
    gc.unfreeze()
    gc.freeze()
