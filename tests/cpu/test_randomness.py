"""Random numbers in a recording: draws equal eager execution, and changes of states are refused."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import devgraph as dg
from devgraph.api.errors import CaptureError
from devgraph.cpu import randomness
from tests.support.cpu_capture import record, same


def _check(step: Any, *, warmup: int = 2) -> None:
    """Check replays of ``step`` against eager runs from the same state, and the state after."""
    x = torch.randn(64)
    torch.manual_seed(7)
    before = torch.get_rng_state()
    captured = dg.capture(step, x, backend="cpu", warmup=warmup)
    assert torch.equal(torch.get_rng_state(), before)
    for seed in (1, 2):
        x.copy_(torch.randn(64))
        torch.manual_seed(seed)
        expected = step(x)
        expected_state = torch.get_rng_state()
        torch.manual_seed(seed)
        got = captured.replay(x)
        assert torch.equal(torch.get_rng_state(), expected_state)
        assert all(same(left, right) for left, right in zip(got, expected, strict=True))


def test_draws_continue_from_the_state_of_the_caller() -> None:
    def step(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return F.dropout(x, 0.5), torch.rand(4) + x[:4]

    _check(step)
    _check(step, warmup=0)


class Checkpointed(torch.nn.Module):
    """A module whose backward restores the random state of its forward."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layer, self.dropout = torch.nn.Linear(8, 8), dropout

    def forward(self, x: torch.Tensor) -> Any:
        draw = lambda x: F.dropout(self.layer(x), self.dropout)  # noqa: E731
        return F.dropout(checkpoint(draw, x, use_reentrant=False), 0.2)


@pytest.mark.parametrize("dropout", [0.5, 0.0])
def test_checkpoint_that_draws_again_is_refused(dropout: float) -> None:
    """FAULTS 48."""
    module, x = Checkpointed(dropout), torch.randn(4, 8)
    step = dg.graphed(module, backend="cpu", strict=True)
    step(x).sum().backward()
    if dropout:
        with pytest.raises(CaptureError, match=r"sets its state.*preserve_rng_state=False"):
            step(x)
    else:
        step(x).sum().backward()
        assert step.stats()["replays"] == 1


def _seeded(x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(7)
    return torch.rand(4) + x[:4]


def _forked(x: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return torch.rand(4) + x[:4]


def _restored(x: torch.Tensor) -> torch.Tensor:
    state = torch.get_rng_state()
    first = torch.rand(4)
    dg.graph_break()
    torch.set_rng_state(state)
    return first + x[:4]


def _made(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand(4, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("policy", ["full", "breakable"])
@pytest.mark.parametrize("step", [_seeded, _forked, _restored, _made])
def test_change_of_a_state_is_refused(step: Any, policy: str) -> None:
    """FAULTS 48."""
    before = torch.get_rng_state()
    with pytest.raises(CaptureError, match=r"seeds a random generator.*Seed outside"):
        dg.capture(step, torch.zeros(4), backend="cpu", policy=policy)
    assert torch.equal(torch.get_rng_state(), before)


def test_state_of_a_generator_that_the_step_sets_is_refused() -> None:
    """FAULTS 48."""
    generator = torch.Generator().manual_seed(3)
    state = generator.get_state()

    def sets(x: torch.Tensor) -> torch.Tensor:
        generator.set_state(state)
        return x + torch.rand(3, generator=generator)

    with pytest.raises(dg.CaptureError, match="sets its state"):
        dg.capture(sets, torch.zeros(3), backend="cpu")


def test_fresh_generator_of_the_caller_advances_with_replays() -> None:
    generator, other = (torch.Generator().manual_seed(3) for _ in range(2))
    x = torch.zeros(3)
    captured = dg.capture(lambda x: x + torch.rand(3, generator=generator), x, backend="cpu")
    for _ in range(2):
        assert torch.equal(captured.replay(), torch.rand(3, generator=other))


def test_recordings_of_two_threads_leave_each_others_state_alone() -> None:
    inside, done = threading.Event(), threading.Event()
    tapes: list[Any] = []

    def other() -> None:
        assert inside.wait(30)
        tapes.append(record(lambda: F.dropout(torch.ones(64), 0.5)))
        done.set()

    def step() -> tuple[torch.Tensor, ...]:
        first = F.dropout(torch.ones(64), 0.5)
        inside.set()
        assert done.wait(30)
        return first, F.dropout(torch.ones(64), 0.5)

    thread = threading.Thread(target=other)
    thread.start()
    before = torch.get_rng_state()
    tape, (first, second) = record(step)
    thread.join()
    assert torch.equal(torch.get_rng_state(), before)
    tape.replay()
    torch.set_rng_state(before)
    assert same(first, F.dropout(torch.ones(64), 0.5))
    assert same(second, F.dropout(torch.ones(64), 0.5))


def test_claim_of_an_interrupted_recording_is_taken_over() -> None:
    dead = threading.Thread(target=lambda: None)
    dead.start()
    dead.join()
    for holder in (threading.get_ident(), dead.ident or 0):
        randomness._claims["default"] = holder  # as an interrupt before the release leaves it
        _check(lambda x: (torch.rand(4) + x[:4],))
        assert not randomness._claims
