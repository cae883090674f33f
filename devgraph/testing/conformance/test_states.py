"""States of graphs, failed captures, and cleanup at the end of a process."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import devgraph as dg
from devgraph.testing.conformance.support import POLICIES, Kit, declares, same


def test_state_goes_from_empty_to_closed_and_may_be_ended_twice(kit: Kit) -> None:
    """FAULTS 28."""
    x = kit.tensor(4)
    graph = kit.backend.make_graph()
    assert graph.state == "empty"
    with kit.backend.capture_context(graph):
        assert graph.state == "capturing"
        y = x + 1
    assert graph.state == "ready"
    graph.replay()
    assert graph.state == "ready"
    for _ in range(2):
        graph.reset()
        assert graph.state == "empty"
    with kit.backend.capture_context(graph):
        y = x + 2
    graph.replay()
    kit.same(y, x + 2)
    for _ in range(2):
        graph.close()
        assert graph.state == "closed"


@declares("node_counts")
def test_info_counts_nodes(kit: Kit) -> None:
    x = kit.tensor(4)
    one, _ = kit.record(lambda: x.add_(1))
    three, _ = kit.record(lambda: x.add_(1).mul_(2).sub_(3))
    assert one.info().nodes == 1
    assert three.info().nodes == 3


@declares("node_counts")
def test_empty_capture_is_refused_and_the_next_one_works(kit: Kit) -> None:
    """FAULTS 26."""
    graph = kit.backend.make_graph()
    with (
        pytest.raises(dg.EmptyCaptureError, match="recorded no device work"),
        kit.backend.capture_context(graph),
    ):
        pass
    assert graph.state == "empty"
    x = kit.tensor(4)
    with kit.backend.capture_context(graph):
        y = x + 1
    graph.replay()
    kit.same(y, x + 1)


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("policy", POLICIES)
def test_destructors_raise_nothing_in_any_order(kit: Kit, policy: str) -> None:
    """FAULTS 27, 28."""
    x = kit.tensor(64)
    want = x * 2 + 1
    outputs = []
    for order in ("graph first", "pool first", "together"):
        pool = kit.backend.make_pool()
        captured = kit.capture(lambda x: x * 2 + 1, x, policy=policy, pool=pool)
        keep = captured.replay()  # still in flight when the graph is dropped
        if order == "graph first":
            del captured
            gc.collect()
            del pool
        elif order == "pool first":
            del pool
            gc.collect()
            captured.replay()
            del captured
        else:
            del captured, pool
        gc.collect()
        outputs.append(keep)
    kit.backend.synchronize()
    for keep in outputs:
        same(keep, want)


LEFT_BEHIND = """
import importlib
import sys
import torch
import devgraph as dg

for plugin in sys.argv[2:]:  # A plugin may register the backend.
    importlib.import_module(plugin)
try:
    backend = dg.get_backend(sys.argv[1])
except dg.BackendError:
    sys.exit(77)
host_args = {"n": 2} if backend.capabilities.region_update else {}

@dg.region(host_args=tuple(host_args))
def head(x, **host):
    return x[:, : host.get("n", 2)].sum(1)

def step(x, **host):
    return head(x * 2, **host) + 1

x = torch.ones(4, 8, device=backend.device)
pool = backend.make_pool()
kept = [dg.capture(step, x, policy=policy, host_args=host_args, backend=backend, pool=pool)
        for policy in ("full", "breakable")]
for captured in kept:
    captured.replay(**{name: 3 for name in host_args})
raw = backend.make_graph(pool)
with backend.capture_context(raw):
    y = x + 1
raw.replay()
decode = dg.DecodeRunner(
    lambda batch: batch.x * 2, [dg.InputSlot("x", ("tokens", 8), torch.float32, pad=dg.Pad.zero())],
    backend=backend, max_requests=2, progress=False)
decode.capture()
out = decode.run({"x": torch.ones(1, 8)})
print("done")
"""
"""A program that exits while graphs are alive and replays are in flight."""


def test_interpreter_exits_with_graphs_in_flight(kit: Kit, pytestconfig: pytest.Config) -> None:
    """FAULTS 28."""
    plugins = [name for name in pytestconfig.option.plugins if not name.startswith("no:")]
    done = subprocess.run(
        [sys.executable, "-c", LEFT_BEHIND, kit.backend.name, *plugins],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if done.returncode == 77:
        pytest.skip("this backend is not registered in new processes")
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


@pytest.mark.parametrize("policy", POLICIES)
def test_closed_capture_releases_the_bound_tensors(kit: Kit, policy: str) -> None:
    x = kit.tensor(4)
    bound = weakref.ref(x)
    captured = kit.capture(lambda x: x + 1, x, policy=policy)
    captured.replay()
    kit.backend.synchronize()
    captured.close()
    del x
    gc.collect()
    assert bound() is None, "_free of the graph must drop the recorded work"


@dg.region(host_args=("n",), mutates=("out",))
def scaled(x: torch.Tensor, out: torch.Tensor, *, n: int) -> None:
    out.copy_(x * n)


UPDATED = [
    pytest.param(how, marks=declares("region_update")) for how in ("update", "replay update")
]


@pytest.mark.parametrize("end", ["reset", "close"])
def test_graph_that_was_freed_releases_the_tensors_that_it_used(kit: Kit, end: str) -> None:
    used = [kit.tensor(4)]
    graph, _ = kit.record(lambda: used[0] + 1)
    kept: Any = StorageWeakRef(used.pop().untyped_storage())  # type: ignore[no-untyped-call]
    getattr(graph, end)()
    assert kept.expired(), "_free of the graph must drop the recorded work"


@pytest.mark.parametrize("how", ["nothing", "replay", "bound", *UPDATED])
def test_dropped_graph_is_freed_without_a_collection(kit: Kit, how: str) -> None:
    """Engines freeze their heap after startup, so the garbage collector would never free cycles."""
    x, out = kit.tensor(4), kit.tensor(4)

    def make() -> dg.DeviceGraph:
        if "update" in how:
            graph, _ = kit.record(lambda: scaled(x, out, n=2), host_args={"n": 2})
        else:
            graph, _ = kit.record(lambda: x + 1)
        if "replay" in how:
            graph.replay()
        if "bound" in how:
            graph.bound()()
        if "update" in how:
            graph.update(n=3)
        return graph

    make()  # The first call may import torch modules, which keep frames alive through exceptions.
    gc.disable()
    try:
        graph = make()
        kit.backend.synchronize()
        kept = weakref.ref(graph)
        del graph
        assert kept() is None, "the executable or a recording references its graph"
    finally:
        gc.enable()


def test_bound_steps_do_not_launch_a_cleared_graph(kit: Kit) -> None:
    """FAULTS 28."""
    body = dg.no_graph(lambda x: x * 2)
    captured = kit.capture(lambda x: body(x + 1) + 1, kit.tensor(4), policy="breakable")
    for _ in range(3):
        captured.replay()
    captured.segments[0].reset()
    with pytest.raises(dg.StateError, match="empty"):
        captured.replay()


KINDS = [ValueError, KeyboardInterrupt, GeneratorExit, SystemExit, dg.DeviceGraphError]


@pytest.mark.parametrize("kind", KINDS)
def test_exception_of_a_body_is_raised(kit: Kit, pool: dg.Pool, kind: type[BaseException]) -> None:
    """FAULTS 1."""
    x = kit.tensor(8)
    torch.rand(4, device=kit.device)
    state = kit.backend.get_rng_state()
    raised = kind("from the body")
    graph = kit.backend.make_graph(pool)
    with pytest.raises(kind) as caught, kit.backend.capture_context(graph):
        x + 1
        if kit.backend.capabilities.rng:
            torch.rand(64, device=kit.device)
        raise raised
    same(kit.backend.get_rng_state(), state, "the random state after the failure")
    first = torch.rand(8, device=kit.device)
    kit.backend.set_rng_state(state)
    same(torch.rand(8, device=kit.device), first, "the random numbers after the failure")
    assert caught.value is raised
    assert raised.__cause__ is None
    assert graph.state == "empty"
    assert graph.info().nodes in (0, None), "_abort or _free must drop the recorded work"
    with kit.backend.capture_context(graph):
        y = x * 3
    graph.replay()
    kit.same(y, x * 3)
    kit.works(pool)


def _failing_step(where: str, raised: BaseException) -> Callable[..., Any]:
    """Return a step with two segments and a break that raises ``raised`` at ``where``."""
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
    kit.same(x, before, "the bound tensor after the failure, when _abort has ended the recording,")
    same(kit.backend.get_rng_state(), state, "the random state after the failure")
    kit.works(pool)


def test_failed_captures_leak_nothing(kit: Kit, pool: dg.Pool) -> None:
    """FAULTS 1."""
    x = bound = kit.tensor(4096)
    before = bound.clone()
    graph, y = kit.record(lambda: (bound + 1) * 2, pool=pool)
    sizes = []
    for _ in range(8):
        with (
            pytest.raises(ValueError, match="body"),
            kit.backend.capture_context(kit.backend.make_graph(pool)),
        ):
            for _ in range(4):
                x = x + 1
            bound.add_(1)
            raise ValueError("body")
        gc.collect()
        sizes.append(pool.bytes)
    assert sizes[-1] <= sizes[1], f"bytes of the pool after each failure: {sizes}"
    kit.same(bound, before, "a tensor that the failed bodies write")
    kit.refill(bound, 8)
    graph.replay()
    kit.same(y, (bound + 1) * 2)
    kit.works(pool)


@pytest.mark.parametrize("method", ["_end", "_abort"])
def test_capture_whose_end_or_clean_up_fails_raises_the_first_error_and_the_next_works(
    kit: Kit, pool: dg.Pool, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """FAULTS 1, 2."""
    x = kit.tensor(8)
    graph = kit.backend.make_graph(pool)
    in_body, at_end = ValueError("in the body"), RuntimeError("at the end")
    real, called = getattr(type(graph), method), []

    def failing(self: dg.DeviceGraph) -> None:
        called.append(self)
        real(self)
        raise at_end

    monkeypatch.setattr(type(graph), method, failing)
    with pytest.raises((ValueError, RuntimeError)) as caught, kit.backend.capture_context(graph):
        x + 1
        if method == "_abort":
            raise in_body
    assert caught.value is (in_body if method == "_abort" else at_end)
    assert len(called) == 1, "the capture was ended twice"
    assert graph.state == "empty"
    monkeypatch.undo()
    kit.works(pool)


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
@pytest.mark.parametrize("policy", ["full", "breakable"])
@pytest.mark.parametrize("read", ["item", "nonzero", "raise"])
def test_error_of_a_capture_keeps_no_frame_of_its_step(kit: Kit, policy: str, read: str) -> None:
    """Autograd nodes in a frame would run later backward passes on the capture's stream."""

    class Local:
        pass

    locals_of_steps: list[weakref.ref[Local]] = []

    def step(x: torch.Tensor) -> torch.Tensor:
        local = Local()
        locals_of_steps.append(weakref.ref(local))
        if read == "raise":
            raise ArithmeticError
        HOST_READS[read](x * 2)
        return x

    x = kit.tensor(8)
    gc.disable()
    try:
        with contextlib.suppress(dg.HostReadError, ArithmeticError):
            kit.capture(step, x, policy=policy)
        assert locals_of_steps
        assert not [local for local in locals_of_steps if local() is not None]
    finally:
        gc.enable()


@declares("refuses_host_reads")
@pytest.mark.parametrize("name", HOST_READS)
def test_host_read_in_a_captured_body_is_refused(kit: Kit, pool: dg.Pool, name: str) -> None:
    """FAULTS 23."""
    x = kit.tensor(8)
    read = HOST_READS[name]
    read(x)  # Initialize libraries before the capture.
    graph = kit.backend.make_graph(pool)
    with pytest.raises(dg.HostReadError) as caught, kit.backend.capture_context(graph):
        read(x * 2)
    assert __file__ in str(caught.value), "the error does not name the user's line"
    assert "@dg." in str(caught.value), "the error does not suggest a mark"
    assert graph.state == "empty"
    kit.works(pool)
