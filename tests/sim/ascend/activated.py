"""Loads the simulated driver: ``pytest -p tests.sim.ascend.activated``.

For sessions whose tests know nothing of the simulation, such as the conformance suite.
"""

from __future__ import annotations

import pytest

from tests.sim import ascend
from tests.support.heap import frozen_heap

__all__ = ["frozen_heap", "pytest_collection_modifyitems", "pytest_configure"]

WITHOUT_KERNELS = {
    "test_buffers_and_written_tensors_are_put_back": "batch norm in training",
    "test_state_is_put_back_after_a_failed_capture": "batch norm in training",
}
"""Tests of operators that have no simulated kernel. Their error would end the driver's thread."""

if ascend.unavailable_reason() is None:  # else the tests are skipped and say it
    ascend.activate()


def pytest_configure(config: pytest.Config) -> None:
    """Let pass what torch_npu itself warns about (``x % 2`` does, with its own defaults)."""
    config.addinivalue_line("filterwarnings", "ignore:Cannot create tensor with internal format")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        operator = WITHOUT_KERNELS.get(getattr(item, "originalname", ""))
        if operator is not None:
            item.add_marker(pytest.mark.skip(f"the simulated driver has no kernel of {operator}"))
