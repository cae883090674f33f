"""Random numbers in a recording: draws and changes of the state equal eager execution."""

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


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_dropout_has_one_mask(reentrant: bool) -> None:
    def step(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        leaf = x.clone().requires_grad_()
        hidden = leaf
        for _ in range(2):
            hidden = checkpoint(lambda h: F.dropout(h, 0.5) * 2, hidden, use_reentrant=reentrant)
        (grad,) = torch.autograd.grad(hidden.sum(), leaf) if not reentrant else (None,)
        if grad is None:
            hidden.sum().backward()
            grad = leaf.grad
        return hidden.detach() * 1, grad * 1, F.dropout(x, 0.5)

    _check(step)


class Checkpointed(torch.nn.Module):
    """A module whose backward draws the mask of its forward again."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> Any:
        draw = lambda x: F.dropout(self.layer(x), 0.5)  # noqa: E731
        return F.dropout(checkpoint(draw, x, use_reentrant=False), 0.2)


def test_backward_graph_restores_the_random_state_of_its_forward() -> None:
    modules = [Checkpointed() for _ in range(2)]
    modules[1].load_state_dict(modules[0].state_dict())
    step = dg.graphed(modules[0], backend="cpu")
    for seed in range(4):
        x = torch.randn(4, 8)
        for module in modules:
            torch.manual_seed(seed)
            module.zero_grad()
            module(x).square().sum().backward()
        assert same(modules[0].layer.weight.grad, modules[1].layer.weight.grad)
    assert step.stats()["replays"] == 3 and step.prove().ok


@pytest.mark.parametrize("is_drawn", [True, False])
def test_state_of_an_earlier_segment_is_restored_or_refused(is_drawn: bool) -> None:
    """A replay saves a state at a draw, so that one without a draw in its segment is refused."""

    def step(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        state = torch.get_rng_state()
        first = torch.rand(4) if is_drawn else x * 2
        dg.graph_break()
        second = torch.rand(4)
        torch.set_rng_state(state)
        return first, second, torch.rand(4)

    x = torch.randn(4)
    if not is_drawn:
        with pytest.raises(CaptureError, match="sets the state of a random generator"):
            dg.capture(step, x, backend="cpu", policy="breakable")
        return
    captured = dg.capture(step, x, backend="cpu", policy="breakable")
    for seed in range(3):
        torch.manual_seed(seed)
        want = step(x)
        torch.manual_seed(seed)
        assert all(same(*pair) for pair in zip(captured.replay(), want, strict=True))


@pytest.mark.parametrize("warmup", [0, 2])
def test_seeding_in_the_step_is_repeated_by_replays(warmup: int) -> None:
    def step(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first = torch.rand(4)
        torch.manual_seed(7)
        return first, torch.rand(4) + x[:4]

    _check(step, warmup=warmup)
    _check(lambda x: (torch.manual_seed(7), torch.rand(4) + x[:4])[1:], warmup=warmup)


def test_forked_random_state_is_joined_again() -> None:
    def step(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.random.fork_rng():
            torch.manual_seed(3)
            inside = torch.rand(4) + x[:4]
        return inside, torch.rand(4)

    _check(step)


def test_state_from_outside_is_refused() -> None:
    torch.rand(3)
    state = torch.get_rng_state()

    def step() -> torch.Tensor:
        torch.set_rng_state(state)
        return torch.rand(4)

    before = torch.get_rng_state()
    torch.rand(2)
    after = torch.get_rng_state()
    with pytest.raises(CaptureError, match="sets the state of a random generator"):
        record(step)
    assert torch.equal(torch.get_rng_state(), after) and not torch.equal(before, after)


def test_generator_that_was_used_before_advances_with_replays() -> None:
    generator = torch.Generator().manual_seed(3)
    torch.rand(2, generator=generator)
    state = generator.get_state()
    tape, out = record(lambda: torch.rand(8, generator=generator))
    assert torch.equal(generator.get_state(), state)
    expected = torch.Generator().set_state(state)
    for _ in range(2):
        tape.replay()
        assert torch.equal(out, torch.rand(8, generator=expected))


def test_generator_of_the_step_is_seeded_by_replays() -> None:
    def step(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        numbers = []
        for seed in (3, 4, 3):
            generator = torch.Generator().manual_seed(seed)
            numbers += [torch.rand(4, generator=generator), torch.rand(4, generator=generator)]
        return (*numbers, torch.rand(4) + x[:4])

    _check(step)


def test_generator_of_the_caller_that_the_step_seeds_is_refused() -> None:
    generator = torch.Generator()

    def step() -> torch.Tensor:
        return torch.rand(8, generator=generator.manual_seed(3))

    with pytest.raises(CaptureError, match="a generator of the caller that the step seeds"):
        record(step)


def test_state_of_a_generator_that_the_step_sets_is_refused() -> None:
    """FAULTS 48."""
    generator = torch.Generator().manual_seed(3)
    torch.rand(1, generator=generator)
    state = generator.get_state()

    def sets(x: torch.Tensor) -> torch.Tensor:
        generator.set_state(state)
        return x + torch.rand(3, generator=generator)

    with pytest.raises(dg.CaptureError, match="set"):
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
        randomness._claim["default"] = holder  # as an interrupt before the release leaves it
        _check(lambda x: (torch.manual_seed(7), torch.rand(4) + x[:4])[1:])
        assert not randomness._claim


def _clone_of_a_clone(generator: torch.Generator) -> list[torch.Tensor]:
    clone = generator.clone_state()
    first = torch.rand(2, generator=clone)
    inner = clone.clone_state()
    return [first, *(torch.rand(2, generator=g) for g in (inner, clone, generator))]


def _clone_between_draws(generator: torch.Generator) -> list[torch.Tensor]:
    first, clone = torch.rand(3, generator=generator), generator.clone_state()
    return [first, *(torch.rand(3, generator=g) for g in (generator, clone, clone, generator))]


def _copied_state(generator: torch.Generator) -> list[torch.Tensor]:
    copied = torch.Generator()
    copied.set_state(generator.get_state())
    return [torch.rand(3, generator=g) for g in (copied, generator)]


@pytest.mark.parametrize("policy", ["full", "breakable"])
@pytest.mark.parametrize("draws", [_clone_of_a_clone, _clone_between_draws, _copied_state])
@pytest.mark.parametrize("default", [False, True])
def test_clone_continues_from_its_generator(policy: str, draws: Any, default: bool) -> None:
    """FAULTS 48."""
    generator = torch.default_generator if default else torch.Generator().manual_seed(0)
    captured = dg.capture(lambda: draws(generator), backend="cpu", policy=policy)
    for _ in range(3):
        before = generator.get_state()
        got, after = [t.clone() for t in captured.replay()], generator.get_state()
        generator.set_state(before)
        assert all(map(torch.equal, got, draws(generator)))
        assert torch.equal(after, generator.get_state())


def test_clone_that_outlives_the_step_is_refused() -> None:
    """FAULTS 48."""
    generator, kept = torch.Generator().manual_seed(0), {"clone": torch.Generator()}

    def step() -> torch.Tensor:
        kept["clone"] = generator.clone_state()
        return torch.rand(2, generator=kept["clone"])

    with pytest.raises(dg.CaptureError, match="generator"):
        dg.capture(step, backend="cpu")
