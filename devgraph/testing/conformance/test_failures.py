"""A failed capture changes nothing: the first exception is raised and the next capture works."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

import devgraph as dg
from devgraph.testing.conformance.support import POLICIES, Kit, declares, same

KINDS = [ValueError, KeyboardInterrupt, GeneratorExit, SystemExit, dg.DeviceGraphError]


def _usable(kit: Kit, pool: dg.Pool) -> None:
    """Fail unless eager work, random numbers and new captures of ``pool`` are right."""
    assert not dg.is_capturing()
    assert gc.isenabled()
    x = kit.tensor(32)
    same((x + 1).cpu(), x.cpu() + 1, "eager work after the failure")
    torch.rand(4, device=kit.device)
    kit.works(pool)


@pytest.mark.parametrize("kind", KINDS)
def test_exception_in_a_captured_body_is_raised_unchanged(
    kit: Kit, pool: dg.Pool, kind: type[BaseException]
) -> None:
    """FAULTS 1."""
    x = kit.tensor(8)
    raised = kind("from the body")
    graph = kit.backend.make_graph(pool)
    with pytest.raises(kind) as caught, kit.backend.capture_context(graph):
        x + 1
        raise raised
    assert caught.value is raised
    assert raised.__cause__ is None
    assert graph.state == "empty"
    assert graph.info().nodes in (0, None)
    with kit.backend.capture_context(graph):
        y = x * 3
    graph.replay()
    kit.same(y, x * 3)
    _usable(kit, pool)


def _failing_step(where: str, raised: BaseException) -> Callable[..., Any]:
    """A step of two segments and a break that raises ``raised`` at ``where``."""
    warm: list[int] = []

    @dg.region()
    def eager(x: torch.Tensor) -> torch.Tensor:
        if where == "eager body" and warm:
            raise raised
        return x + 1

    def step(x: torch.Tensor) -> torch.Tensor:
        if where == "warm-up":
            raise raised
        if where == "first segment" and dg.is_capturing():
            x * 2
            raise raised
        x = eager(x.add_(1))
        y = x * 2
        if where == "last segment" and dg.is_capturing():
            raise raised
        warm.append(1)
        return y

    return step


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, GeneratorExit])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("where", ["warm-up", "first segment", "eager body", "last segment"])
def test_exception_in_a_captured_step_leaves_nothing_behind(
    kit: Kit, pool: dg.Pool, where: str, policy: str, kind: type[BaseException]
) -> None:
    """FAULTS 1."""
    x = kit.tensor(8)
    before, state = x.clone(), kit.backend.get_rng_state()
    raised = kind("from the step")
    step = _failing_step(where, raised)
    with pytest.raises(kind) as caught:
        kit.capture(step, x, policy=policy, pool=pool, warmup=1)
    assert caught.value is raised
    kit.same(x, before, "the bound tensor after the failure")
    same(kit.backend.get_rng_state(), state, "the random state after the failure")
    _usable(kit, pool)


@declares("rng")
def test_random_numbers_of_a_failed_capture_are_not_spent(kit: Kit, pool: dg.Pool) -> None:
    """FAULTS 1."""
    torch.rand(4, device=kit.device)
    state = kit.backend.get_rng_state()
    graph = kit.backend.make_graph(pool)
    with pytest.raises(ValueError, match="body"), kit.backend.capture_context(graph):
        torch.rand(64, device=kit.device)
        raise ValueError("body")
    same(kit.backend.get_rng_state(), state, "the random state")
    first = torch.rand(8, device=kit.device)
    kit.backend.set_rng_state(state)
    same(torch.rand(8, device=kit.device), first, "the random numbers after the failure")


def test_graphs_of_the_pool_survive_a_failed_capture(kit: Kit, pool: dg.Pool) -> None:
    """FAULTS 1."""
    x = kit.tensor(64)
    graph, y = kit.record(lambda: (x + 1) * 2, pool=pool)
    with (
        pytest.raises(ValueError, match="body"),
        kit.backend.capture_context(kit.backend.make_graph(pool)),
    ):
        x * 5
        raise ValueError("body")
    kit.refill(x, 8)
    graph.replay()
    kit.same(y, (x + 1) * 2)


def test_many_failed_captures_take_no_memory(kit: Kit, pool: dg.Pool) -> None:
    """FAULTS 1."""
    x = kit.tensor(4096)
    sizes = []
    for _ in range(8):
        with (
            pytest.raises(ValueError, match="body"),
            kit.backend.capture_context(kit.backend.make_graph(pool)),
        ):
            for _ in range(4):
                x = x + 1
            raise ValueError("body")
        gc.collect()
        sizes.append(pool.bytes)
    assert sizes[-1] <= sizes[1], f"bytes of the pool after each failure: {sizes}"
    _usable(kit, pool)


def _let_fail(
    monkeypatch: pytest.MonkeyPatch, graph: dg.DeviceGraph, method: str, failure: Exception
) -> list[dg.DeviceGraph]:
    """Let a method of the graph's class raise behind what it does; return whose it was, in turn."""
    real, called = getattr(type(graph), method), []

    def failing(self: dg.DeviceGraph) -> None:
        called.append(self)
        real(self)
        raise failure

    monkeypatch.setattr(type(graph), method, failing)
    return called


def test_failed_end_of_a_capture_is_raised_and_the_next_capture_works(
    kit: Kit, pool: dg.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FAULTS 2."""
    x = kit.tensor(8)
    graph = kit.backend.make_graph(pool)
    failure = RuntimeError("the end of the capture failed")
    ends = _let_fail(monkeypatch, graph, "_end", failure)
    with pytest.raises(RuntimeError) as caught, kit.backend.capture_context(graph):
        x + 1
    assert caught.value is failure
    assert len(ends) == 1, "the capture was ended twice"
    assert graph.state == "empty"
    monkeypatch.undo()
    _usable(kit, pool)


def test_exception_of_the_body_stays_when_cleaning_up_fails_too(
    kit: Kit, pool: dg.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FAULTS 1, 2."""
    x = kit.tensor(8)
    graph = kit.backend.make_graph(pool)
    _let_fail(monkeypatch, graph, "_abort", RuntimeError("cleaning up failed"))
    with pytest.raises(ValueError, match="from the body"), kit.backend.capture_context(graph):
        x + 1
        raise ValueError("from the body")
    assert graph.state == "empty"
    monkeypatch.undo()
    _usable(kit, pool)


HOST_READS: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda x: x.sum().item(),
    "float": lambda x: float(x.sum()),
    "int": lambda x: int(x.sum()),
    "bool": lambda x: bool(x.sum() > 0),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "repr": lambda x: repr(x),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "unique": lambda x: torch.unique(x),
    "equal": lambda x: torch.equal(x, x + 1),
}


@declares("refuses_host_reads")
@pytest.mark.parametrize("name", HOST_READS)
def test_host_read_in_a_captured_body_is_refused(kit: Kit, pool: dg.Pool, name: str) -> None:
    """FAULTS 23."""
    x = kit.tensor(8)
    read = HOST_READS[name]
    read(x)  # libraries set themselves up
    graph = kit.backend.make_graph(pool)
    with pytest.raises(Exception) as caught, kit.backend.capture_context(graph):
        read(x * 2)
    if isinstance(caught.value, dg.HostReadError):
        assert __file__ in str(caught.value), "the error does not name the user's line"
        assert "@dg." in str(caught.value), "the error does not suggest a mark"
    assert graph.state == "empty"
    _usable(kit, pool)
