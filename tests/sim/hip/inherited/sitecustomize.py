"""Makes "rocm" the stand-in in processes that a test starts: see ``tests.sim.hip.plugin``."""

from __future__ import annotations

from tests.sim.hip.plugin import register_stand_in

register_stand_in()
