"""Host arguments: every value that a replay is given is the one that its regions see."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import devgraph as dg
from devgraph.testing.conformance.support import POLICIES, Kit, same


@dg.region(host_args=("length",))
def prefix_sum(x: torch.Tensor, *, length: int) -> torch.Tensor:
    """Sum of the first ``length`` columns: another kernel argument for each length."""
    return x[:, :length].sum(1)


def step(x: torch.Tensor, *, length: int) -> torch.Tensor:
    """One region between two pieces of captured work."""
    return prefix_sum(x * 2, length=length) + 1


LENGTHS = (3, 5, 1, 8, 5, 3)


@pytest.mark.parametrize("policy", POLICIES)
def test_replay_equals_eager_for_every_host_argument(kit: Kit, policy: str) -> None:
    x = kit.tensor(4, 8)
    captured = kit.capture(step, x, policy=policy, host_args={"length": 3})
    for seed, length in enumerate(kit.usable(policy, LENGTHS)):
        kit.check(captured, step, x, seed=seed, length=length)


def test_changed_host_argument_is_applied_or_refused_but_never_ignored(kit: Kit) -> None:
    x = kit.tensor(4, 8)
    captured = kit.capture(step, x, host_args={"length": 3})
    if kit.backend.capabilities.region_update:
        kit.check(captured, step, x, length=6)
    else:
        with pytest.raises(dg.UpdateUnsupportedError, match="breakable"):
            captured.replay(length=6)
    kit.check(captured, step, x, length=3)


@pytest.mark.parametrize("policy", POLICIES)
def test_ambient_context_is_read_once_per_replay_on_the_replaying_thread(
    kit: Kit, policy: str
) -> None:
    ambient = threading.local()
    reads = []

    def snapshot() -> int:
        reads.append(threading.get_ident())
        return int(ambient.length)

    @dg.region(context=snapshot)
    def body(x: torch.Tensor, *, context: int = 0) -> torch.Tensor:
        return x[:, :context].sum(1)

    def ambiently(x: torch.Tensor) -> Any:
        h = x * 2
        return body(h), body(h + 1)

    x = kit.tensor(4, 8)
    ambient.length = 3
    captured = kit.capture(ambiently, x, policy=policy)
    for length in kit.usable(policy, (3, 5, 8, 3)):
        ambient.length = length
        reads.clear()
        out = captured.replay()
        assert reads == [threading.get_ident()]
        kit.backend.synchronize()
        h = x * 2
        same(out, (h[:, :length].sum(1), (h + 1)[:, :length].sum(1)))
