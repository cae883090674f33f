"""Fixtures of all tests. ``kit`` is the backend under test, and ``cpu_kit`` the CPU reference."""

from __future__ import annotations

import gc
import os
import sys
import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.support.heap import frozen_heap, thawed_heap

if TYPE_CHECKING:
    import devgraph as dg
    from devgraph.api.backend import Backend
    from devgraph.testing.conformance.support import Kit

# The store of torch looks up the name of each client in its only thread. A name server that loses a
# query would block all ranks for seconds, so tests use the names in /etc/hosts alone.
os.environ.setdefault("RES_OPTIONS", "attempts:0")

__all__ = ["cpu_kit", "frozen_heap", "kit", "leaves_the_process_as_it_was", "pool", "thawed_heap"]


@pytest.fixture
def kit(devgraph_backend: Backend) -> Kit:
    from devgraph.testing.conformance.support import Kit

    return Kit(devgraph_backend)


@pytest.fixture
def cpu_kit() -> Kit:
    import devgraph as dg
    from devgraph.testing.conformance.support import Kit

    return Kit(dg.get_backend("cpu"))


@pytest.fixture
def pool(kit: Kit) -> dg.Pool:
    return kit.backend.make_pool()


@pytest.fixture(autouse=True)
def leaves_the_process_as_it_was() -> Iterator[None]:
    """Fail the test that leaves a session or a mode behind, in place of all that come after it."""
    yield
    left = _left_behind()
    if left:
        # What a failed test was doing is held by its traceback, which Python keeps.
        trace = getattr(sys, "last_traceback", None)
        traceback.clear_frames(trace)
        for frame, _ in traceback.walk_tb(trace):
            frame.f_locals  # noqa: B018  # a copy, which is renewed here
        gc.enable()
        gc.collect()
        pytest.fail(f"the test left {', '.join(left)}")


def _left_behind() -> list[str]:
    found = {"the collector off": not gc.isenabled()}
    if "devgraph.api.device" in sys.modules:
        import torch

        import devgraph as dg
        from devgraph.api.process import identity

        devices = list(identity.devices)
        found |= {
            "this thread inside a capture": dg.is_capturing(),
            "a session open": any(
                one.capture_lock.is_recording_here or one.capture_lock.is_held_here
                for one in devices
            ),
            "modes of torch": bool(
                torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack()
            ),
            "gradients off": not torch.is_grad_enabled() or torch.is_inference_mode_enabled(),
            "autocast's cache off": not torch.is_autocast_cache_enabled(),
            "another default dtype": torch.get_default_dtype() is not torch.float32,
        }
    return [name for name, is_left in found.items() if is_left]
