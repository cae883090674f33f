"""The ROCm backend over whichever stand-in fits this machine."""

from __future__ import annotations

import os

from devgraph.api.backend import Backend

__all__ = ["make"]


def make() -> Backend:
    """Return the ROCm backend over the shim where torch sees a GPU, over the fake elsewhere."""
    # Imported here: a process that never asks for the backend shall not wait for torch.
    import torch

    from tests.sim.hip.backend import FakeBackend, ShimBackend
    from tests.sim.hip.fake import Fake

    chosen = os.environ.get(
        "DEVGRAPH_TEST_HIP_SIM", "shim" if torch.cuda.is_available() else "fake"
    )
    return ShimBackend() if chosen == "shim" else FakeBackend(Fake())
