"""Loads the simulated driver: ``pytest -p tests.sim.ascend.activated``.

For sessions whose tests know nothing of the simulation, such as the conformance suite.
"""

from __future__ import annotations

import pytest

from tests.sim import ascend
from tests.support.heap import frozen_heap

__all__ = ["frozen_heap", "pytest_configure"]

if ascend.unavailable_reason() is None:  # else the tests are skipped and say it
    ascend.activate()


def pytest_configure(config: pytest.Config) -> None:
    """Let pass what torch_npu itself warns about (``x % 2`` does, with its own defaults)."""
    config.addinivalue_line("filterwarnings", "ignore:Cannot create tensor with internal format")
