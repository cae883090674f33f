"""The backend that the tests of this room share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch

import devgraph as dg
from tests.sim.ascend import Driver
from tests.support.npu_steps import step


@pytest.fixture
def backend(driver: Driver) -> Iterator[Any]:
    """The backend, without graphs of other tests, and with what a test sets taken back."""
    backend: Any = dg.get_backend("npu")
    backend.synchronize()
    # Memory is kept for ever once a test left a capture that nothing could end.
    names = "replay_first try_new_values attention_version stream_limit streams".split()
    names += ["channel", "keeps_memory"]
    kept, timeout = {name: getattr(backend, name) for name in names}, backend.channel.timeout
    backend.streams, backend.keeps_memory = WeakKeyDictionary(), False
    yield backend
    for name, value in kept.items():
        setattr(backend, name, value)
    backend.channel.timeout = timeout
    backend.synchronize()


@pytest.fixture
def captured(backend: Any) -> Iterator[Any]:
    x = torch.arange(8.0).to("npu")
    with dg.capture(step, x, backend=backend, host_args={"factor": 2.0}) as captured:
        captured.x = x
        captured.replay(factor=3.0)
        backend.synchronize()
        yield captured
