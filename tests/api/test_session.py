"""The one way to record, and how a fault in it is undone."""

from __future__ import annotations

import contextlib
import gc
import weakref
from typing import Any

import pytest
import torch

import devgraph as dg
from devgraph.api.executable import Executable
from devgraph.api.session import session
from devgraph.cpu.backend import CpuBackend, CpuGraph


@pytest.fixture
def backend() -> CpuBackend:
    backend = dg.get_backend("cpu")
    assert isinstance(backend, CpuBackend)
    return backend


def _free(backend: CpuBackend) -> bool:
    """Whether nothing of a session is left: locks, the thread's scope, the collector."""
    return (
        not (
            dg.is_capturing() or backend.capture_lock.recording or backend.capture_lock.is_held_here
        )
        and gc.isenabled()
    )


def test_session_records_graphs_one_after_the_other(backend: CpuBackend) -> None:
    pool, x = backend.make_pool(), torch.ones(4)
    graphs, outputs = [], []
    with session(pool) as recording:
        for factor in (2, 3):
            recording.begin(backend.make_graph(pool))
            outputs.append(x * factor)
            graphs.append(recording.end())
    for graph, output, factor in zip(graphs, outputs, (2, 3), strict=True):
        graph.replay()
        assert torch.equal(output, x * factor)
    assert _free(backend)


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()])
@pytest.mark.parametrize("when", ["before", "recording", "between", "second"])
def test_failure_empties_every_graph_of_the_block(
    backend: CpuBackend, error: BaseException, when: str
) -> None:
    pool, x = backend.make_pool(), torch.ones(4)
    graphs = [backend.make_graph(pool) for _ in range(2)]
    undone: list[str] = []

    def reach(place: str) -> None:
        if place == when:
            raise error

    with pytest.raises(type(error)) as raised, session(pool) as recording:
        reach("before")
        recording.on_failure(lambda: undone.append("mine"))
        recording.begin(graphs[0])
        x + 1
        reach("recording")
        recording.end()
        reach("between")
        recording.begin(graphs[1])
        reach("second")
    assert raised.value is error
    assert [graph.state for graph in graphs] == ["empty", "empty"]
    assert undone == ([] if when == "before" else ["mine"])
    assert _free(backend)
    with backend.capture_context(graphs[0]):
        y = x + 2
    graphs[0].replay()
    assert torch.equal(y, x + 2)


def test_failure_in_a_block_leaves_what_was_recorded_before_it(backend: CpuBackend) -> None:
    pool, x = backend.make_pool(), torch.ones(4)
    graphs = [backend.make_graph(pool) for _ in range(2)]
    with session(pool) as outer:
        outer.begin(graphs[0])
        y = x + 1
        outer.end()
        with pytest.raises(ValueError), outer.recording(None):
            outer.begin(graphs[1])
            raise ValueError
        assert [graph.state for graph in graphs] == ["ready", "empty"]
    graphs[0].replay()
    assert torch.equal(y, x + 1)


def test_graph_that_is_refused_keeps_what_it_has(backend: CpuBackend) -> None:
    x = torch.ones(4)
    graph = backend.make_graph()
    with backend.capture_context(graph):
        y = x + 1
    with pytest.raises(dg.StateError, match="ready"), session(graph.pool) as recording:
        recording.begin(graph)
    graph.replay()
    assert torch.equal(y, x + 1)


@pytest.mark.parametrize("how", ["capture_context", "full", "breakable"])
def test_interrupted_begin_and_end_leave_nothing_open(
    backend: CpuBackend, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver's own call is done, and what called it is not told."""
    x = torch.ones(4)

    def record() -> Any:
        if how == "capture_context":
            with backend.capture_context(backend.make_graph()):
                x + 1
            return None
        return dg.capture(lambda x: x + 1, x, policy=how, backend=backend)

    for name in ("_begin", "_end"):
        real = getattr(CpuGraph, name)

        def interrupted(self: CpuGraph, *args: Any, real: Any = real) -> Executable:
            real(self, *args)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(CpuGraph, name, interrupted)
            record()
        assert _free(backend)
        record()


@pytest.mark.parametrize("policy", ["full", "breakable"])
def test_compiled_function_in_the_step_is_right_on_the_reference(policy: str):
    compiled = torch.compile(lambda x: x * 2, fullgraph=True, backend="eager")
    x = torch.randn(3)
    with dg.capture(
        lambda x: compiled(x) + 1, x, policy=policy, backend="cpu", warmup=1
    ) as captured:
        x.copy_(torch.randn(3))
        assert torch.equal(captured.replay(), x * 2 + 1)


def test_mark_inside_a_function_compiled_as_one_graph_is_refused():
    @dg.region
    def doubled(x):
        return x * 2

    compiled = torch.compile(lambda x: doubled(x) + 1, fullgraph=True, backend="eager")
    with pytest.raises(dg.CaptureError, match="Pass the function itself"):
        dg.capture(lambda x: compiled(x) + 1, torch.randn(3), backend="cpu")


@pytest.mark.parametrize("policy", ["full", "breakable"])
def test_typed_error_for_a_vendors_own_keeps_no_frame_of_the_step(monkeypatch, policy):
    backend = dg.get_backend("cpu")
    monkeypatch.setattr(
        type(backend), "is_host_read", lambda self, error: isinstance(error, ArithmeticError)
    )
    seen = []

    class Local:
        pass

    def step(x):
        local = Local()
        seen.append(weakref.ref(local))
        raise ArithmeticError("operation not permitted")

    gc.disable()
    try:
        with contextlib.suppress(dg.HostReadError):
            dg.capture(step, torch.ones(3), backend=backend, policy=policy)
        assert seen and not any(local() for local in seen)
    finally:
        gc.enable()
