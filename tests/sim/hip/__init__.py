"""Stand-ins for libamdhip64; see README.md."""

from __future__ import annotations

from tests.sim.hip.build import build, unavailable_reason
from tests.sim.hip.fake import Fake

__all__ = ["Fake", "build", "unavailable_reason"]
