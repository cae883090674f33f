"""pytest plugin: "rocm" means the ROCm backend over a stand-in for libamdhip64.

The shim where torch sees an NVIDIA GPU, the fake elsewhere. ``DEVGRAPH_HIP_SIM`` = "fake" or
"shim" chooses. Load it with ``-p tests.sim.hip.plugin``; it must not be loaded on AMD hardware,
where "rocm" is the real thing.
"""

from __future__ import annotations

import os

import pytest
import torch

from devgraph.api.registry import register
from tests.sim.hip.backend import FakeBackend, ShimBackend
from tests.sim.hip.device import Recorder
from tests.sim.hip.fake import Fake

__all__ = ["pytest_configure", "pytest_unconfigure"]

_recorder = pytest.StashKey[Recorder]()


def pytest_configure(config: pytest.Config) -> None:
    chosen = os.environ.get("DEVGRAPH_HIP_SIM", "shim" if torch.cuda.is_available() else "fake")
    if chosen == "shim":
        register("rocm", ShimBackend)
        return
    backend = FakeBackend(Fake())
    register("rocm", lambda: backend)
    config.stash[_recorder] = Recorder(backend.namespace)
    config.stash[_recorder].__enter__()


def pytest_unconfigure(config: pytest.Config) -> None:
    recorder = config.stash.get(_recorder, None)
    if recorder is not None:
        recorder.__exit__(None, None, None)
