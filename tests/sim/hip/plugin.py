"""pytest plugin: "rocm" means the ROCm backend over a stand-in for libamdhip64.

The shim where torch sees an NVIDIA GPU, the fake elsewhere. ``DEVGRAPH_HIP_SIM`` = "fake" or
"shim" chooses. Load it with ``-p tests.sim.hip.plugin``; it must not be loaded on AMD hardware,
where "rocm" is the real thing. Python processes that a test starts have the stand-in as well.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from devgraph.api.backend import Backend
from devgraph.api.registry import register

__all__ = ["pytest_configure", "register_stand_in"]


def _make() -> Backend:
    # Imported here: a process that never asks for the backend shall not wait for torch.
    import torch

    from tests.sim.hip.backend import FakeBackend, ShimBackend
    from tests.sim.hip.fake import Fake

    chosen = os.environ.get("DEVGRAPH_HIP_SIM", "shim" if torch.cuda.is_available() else "fake")
    return ShimBackend() if chosen == "shim" else FakeBackend(Fake())


def register_stand_in() -> None:
    """Make "rocm" the stand-in, when it is first asked for."""
    register("rocm", _make)


def pytest_configure(config: pytest.Config) -> None:
    register_stand_in()
    here = Path(__file__).resolve().parent
    inherited = [str(here / "inherited"), str(here.parents[2])]
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join([*inherited, *(p for p in known if p)])
