"""Loads the simulated driver when pytest loads this plugin: ``pytest -p tests.sim.ascend.activated``.

For sessions whose tests know nothing of the simulation, such as the conformance suite.
"""

from __future__ import annotations

from tests.sim import ascend

ascend.activate().set(sync_timeout_ms=20_000)
