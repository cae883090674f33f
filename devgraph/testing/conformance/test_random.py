"""Random numbers inside graphs (capability ``rng``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import devgraph as dg
from devgraph.testing.conformance.support import POLICIES, Kit, copied, declares, same


def _dropout(x: torch.Tensor) -> torch.Tensor:
    return F.dropout(x, 0.5, training=True) + 1


def _drawn(x: torch.Tensor) -> Any:
    return torch.rand_like(x) + x, torch.randn(x.shape, device=x.device), x * 2


def _in_place(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x).uniform_(0, 1) + torch.empty_like(x).exponential_()


@dg.region(fake=torch.empty_like)
def _shifted(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand_like(x)


def _around_a_break(x: torch.Tensor) -> torch.Tensor:
    shifted: torch.Tensor = _shifted(x + torch.rand_like(x))
    return shifted * torch.rand_like(x)


DRAWS: list[Callable[[torch.Tensor], Any]] = [_dropout, _drawn, _in_place, _around_a_break]


@declares("rng")
def test_bound_replay_draws_what_eager_steps_draw(kit: Kit) -> None:
    x = kit.tensor(64)
    graph, y = kit.record(lambda: _dropout(x))
    native = graph.bound()
    state = kit.backend.get_rng_state()
    eager = [_dropout(x) for _ in range(3)]
    kit.backend.set_rng_state(state)
    for want in eager:
        native()
        kit.same(y, want)


@declares("rng")
@pytest.mark.parametrize("step", DRAWS)
@pytest.mark.parametrize("policy", POLICIES)
def test_replays_draw_what_eager_steps_draw(
    kit: Kit, policy: str, step: Callable[..., Any]
) -> None:
    x = kit.tensor(64)
    captured = kit.capture(step, x, policy=policy)
    state = kit.backend.get_rng_state()
    eager = [copied(step(x)) for _ in range(3)]
    after = torch.rand(4, device=kit.device)
    kit.backend.set_rng_state(state)
    for index, want in enumerate(eager):
        kit.same(captured.replay(), want, f"replay {index}")
    same(torch.rand(4, device=kit.device), after, "what is drawn after the replays")


@declares("rng")
def test_every_replay_draws_other_numbers(kit: Kit) -> None:
    x = kit.tensor(64)
    graph, y = kit.record(lambda: torch.rand_like(x))
    seen = []
    for _ in range(4):
        graph.replay()
        kit.backend.synchronize()
        seen.append(tuple(y.tolist()))
    assert len(set(seen)) == 4


def test_random_numbers_are_replayed_or_refused(kit: Kit, pool: dg.Pool) -> None:
    """FAULTS 22."""
    x = kit.tensor(16)
    if kit.backend.capabilities.rng:
        captured = kit.capture(_dropout, x, pool=pool)
        assert captured.prove(cases=1).ok
        return
    state = kit.backend.get_rng_state()
    with pytest.raises(dg.CaptureError, match=r"dropout|random|rand"):
        kit.capture(_dropout, x, pool=pool)
    same(kit.backend.get_rng_state(), state, "the random state after the refusal")
    kit.works(pool)
