"""pytest plugin: "rocm" means the ROCm backend over a stand-in for libamdhip64.

The shim where torch sees an NVIDIA GPU, the fake elsewhere. ``DEVGRAPH_TEST_HIP_SIM`` = "fake" or
"shim" chooses. Load it with ``-p tests.sim.hip.plugin``; it must not be loaded on AMD hardware,
where "rocm" is the real thing. Python processes that a test starts have the stand-in as well.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from devgraph.api.registry import register
from tests.sim.hip.standin import make

__all__ = ["pytest_configure"]


def pytest_configure(config: pytest.Config) -> None:
    register("rocm", make, replace=True)
    here = Path(__file__).resolve().parent
    inherited = [str(here / "inherited"), str(here.parents[2])]
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join([*inherited, *(p for p in known if p)])
