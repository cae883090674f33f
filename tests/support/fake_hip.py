"""The ROCm backend over the fake libamdhip64, for tests that order faults from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import devgraph as dg
from devgraph.api.policy.job import UpdateBudget
from tests.sim.hip import Fake, unavailable_reason
from tests.sim.hip.backend import FakeBackend

__all__ = [
    "KEEP_ALL",
    "assert_usable",
    "captured",
    "check",
    "noise",
    "on_fake",
    "recorded",
    "scaled",
    "step",
]

if reason := unavailable_reason():
    pytest.skip(f"the fake libamdhip64 cannot be built: {reason}", allow_module_level=True)

KEEP_ALL = UpdateBudget(misses=10**6)
"""Every new key is recorded at once."""


@contextmanager
def on_fake(variant: str = "fake", **settings: int) -> Iterator[Any]:
    """A new backend over the fake with ``settings``, which are undone at the end."""
    fake = Fake(variant)
    fake.set(second_ends=0, second_begins=0)
    with fake.with_settings(**settings):
        backend = FakeBackend(fake)
        yield backend
        assert not dg.is_capturing()
        again = fake.get("second_ends") + fake.get("second_begins")
        assert again == 0, "a stuck stream was used again, which crashes on 7.2"
    fake.close()


@dg.region(host_args=("n",))
def scaled(x: torch.Tensor, *, n: int) -> torch.Tensor:
    """One kernel whose argument depends on ``n``."""
    return x * n


def step(x: torch.Tensor, *, n: int) -> torch.Tensor:
    """Three calls of a region with other work between them."""
    for layer in range(3):
        x = scaled(x + layer, n=n) * 0.25
    return x


def check(cap: dg.Captured, fn: Callable[..., Any], x: torch.Tensor, **host: Any) -> None:
    """Fail unless a replay with new data in ``x`` equals ``fn`` run eagerly, bit for bit."""
    x.copy_(torch.randn(x.shape))
    want = fn(x, **host).clone()
    cap.outputs.fill_(float("nan"))
    got = cap.replay(**host)
    assert torch.equal(got, want), f"differs from eager with {host}"


def noise() -> torch.Tensor:
    return torch.randn(4, 8)


def captured(be: Any, fn: Callable[..., Any], x: torch.Tensor, **options: Any) -> dg.Captured:
    options.setdefault("budget", KEEP_ALL)
    return dg.capture(fn, x, backend=be, host_args={"n": 2}, **options)


def recorded(be: Any, fn: Callable[..., Any], x: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """Capture ``fn`` with the raw calls; return graph and output."""
    graph = be.make_graph()
    with be.capture_context(graph, host_args={"n": 2}):
        out = fn(x, n=2)
    return graph, out


def assert_usable(be: Any) -> None:
    """Fail unless a new capture on this backend is right, and right again after updates."""
    x = noise()
    with captured(be, step, x) as cap:
        for n in (2, 3, 5, 3, 2):
            check(cap, step, x, n=n)
