"""The states of a graph, what each of them refuses, and what leads out of it."""

from __future__ import annotations

import functools
import gc
import os
import signal
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import devgraph as dg
from devgraph.testing.conformance.steps import WIDTH, runner_of
from devgraph.testing.conformance.support import POLICIES, Kit, declares, same


def test_state_goes_from_empty_to_closed(kit: Kit) -> None:
    x = kit.tensor(4)
    graph = kit.backend.make_graph()
    assert graph.state == "empty"
    with kit.backend.capture_context(graph):
        assert graph.state == "capturing"
        y = x + 1
    assert graph.state == "ready"
    graph.replay()
    assert graph.state == "ready"
    graph.reset()
    assert graph.state == "empty"
    with kit.backend.capture_context(graph):
        y = x + 2
    graph.replay()
    kit.same(y, x + 2)
    graph.close()
    assert graph.state == "closed"


@pytest.mark.parametrize("call", ["replay", "update"])
def test_empty_graph_refuses_and_names_the_way_out(kit: Kit, call: str) -> None:
    graph = kit.backend.make_graph()
    with pytest.raises(dg.StateError, match=r"empty.*capture_context"):
        getattr(graph, call)()
    assert graph.state == "empty"


@pytest.mark.parametrize("call", ["replay", "update", "reset"])
def test_closed_graph_refuses_and_names_the_way_out(kit: Kit, call: str) -> None:
    """FAULTS 28."""
    x = kit.tensor(4)
    graph, _ = kit.record(lambda: x + 1)
    graph.close()
    with pytest.raises(dg.StateError, match=r"closed.*make_graph"):
        getattr(graph, call)()
    with (
        pytest.raises(dg.StateError, match=r"closed.*make_graph"),
        kit.backend.capture_context(graph),
    ):
        pytest.fail("the body ran")
    assert graph.state == "closed"


def test_reset_and_close_can_be_called_twice(kit: Kit) -> None:
    """FAULTS 28."""
    x = kit.tensor(4)
    graph, _ = kit.record(lambda: x + 1)
    graph.reset()
    graph.reset()
    assert graph.state == "empty"
    graph.close()
    graph.close()
    assert graph.state == "closed"


def test_ready_graph_is_not_captured_over(kit: Kit) -> None:
    x = kit.tensor(4)
    graph, y = kit.record(lambda: x + 1)
    with (
        pytest.raises(dg.StateError, match=r"ready.*reset"),
        kit.backend.capture_context(graph),
    ):
        pytest.fail("the body ran")
    kit.refill(x, 5)
    graph.replay()
    kit.same(y, x + 1)


def _captured(kit: Kit, x: torch.Tensor) -> Any:
    return kit.capture(lambda x: pytest.fail("the inner body ran"), x)


def _raw(kit: Kit) -> None:
    with kit.backend.capture_context(kit.backend.make_graph()):
        pytest.fail("the inner body ran")


INSIDE = """own.replay own.update own.reset own.close other.replay other.update captured.replay
    capture raw-capture""".split()


@pytest.mark.parametrize("use", INSIDE)
def test_use_inside_a_capture_is_refused_and_the_capture_goes_on(kit: Kit, use: str) -> None:
    """FAULTS 13."""
    x = kit.tensor(4)
    other, outside = kit.record(lambda: x + 1)
    captured = kit.capture(lambda x: x + 1, x)
    own = kit.backend.make_graph()
    named = {"own": own, "other": other, "captured": captured}
    uses: dict[str, Callable[[], object]] = {
        "capture": lambda: _captured(kit, x),
        "raw-capture": lambda: _raw(kit),
    }
    with kit.backend.capture_context(own):
        y = x + 1
        with pytest.raises((dg.StateError, dg.NestedCaptureError)) as caught:
            if use in uses:
                uses[use]()
            else:
                who, call = use.split(".")
                getattr(named[who], call)()
        assert use.startswith("own") or isinstance(caught.value, dg.NestedCaptureError)
        z = y * 2
    kit.refill(x, 5)
    other.replay()
    own.replay()
    kit.same((outside, z), (x + 1, (x + 1) * 2))
    kit.check(captured, lambda x: x + 1, x)


def test_capture_in_the_eager_body_of_a_break_is_refused(kit: Kit) -> None:
    """FAULTS 13."""
    refused: list[dg.NestedCaptureError] = []

    @dg.no_graph
    def body(x: torch.Tensor) -> torch.Tensor:
        if not refused:
            with pytest.raises(dg.NestedCaptureError, match="eager body") as caught:
                _captured(kit, x)
            refused.append(caught.value)
        return x * 2

    def step(x: torch.Tensor) -> torch.Tensor:
        return body(x + 1) + 1

    x = kit.tensor(4)
    captured = kit.capture(step, x, policy="breakable", warmup=0)
    assert len(refused) == 1
    kit.check(captured, step, x)


def test_expired_graph_is_stale_until_reset(kit: Kit) -> None:
    x = kit.tensor(4)
    graph, _ = kit.record(lambda: x + 1)
    graph.expire()
    assert graph.state == "stale"
    with pytest.raises(dg.StateError, match=r"stale.*reset"):
        graph.replay()
    graph.reset()
    with kit.backend.capture_context(graph):
        y = x - 1
    graph.replay()
    kit.same(y, x - 1)


def test_info_counts_what_was_captured(kit: Kit) -> None:
    x = kit.tensor(4)
    graph, _ = kit.record(lambda: (x + 1) * 2)
    info = graph.info()
    assert info.state == "ready"
    assert info.segments == 1
    assert info.regions == 0
    assert info.recordings == 0
    assert info.bytes >= 0
    assert info.capture_seconds > 0
    assert info.nodes is None or info.nodes >= 2
    graph.close()
    assert graph.info().state == "closed"
    assert "closed" in repr(graph)


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


@declares("node_counts")
@pytest.mark.parametrize("policy", POLICIES)
def test_step_without_device_work_is_refused(kit: Kit, policy: str) -> None:
    """FAULTS 26."""
    with pytest.raises(dg.EmptyCaptureError):
        kit.capture(lambda: None, policy=policy)


def _in_child(work: Callable[[], object]) -> str:
    """Run ``work`` in a forked child and return the name of what it raised, and its text."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        # Forking with threads is what is tested; the child only calls Python code.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        signal.alarm(60)  # ends a child that waits for what no thread of it will do
        told = "nothing was raised"
        try:
            work()
        except BaseException as error:
            told = f"{type(error).__name__}: {error}"
        os.write(writer, told.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answers:
        told = answers.read()
    os.waitpid(child, 0)
    return told


def test_bound_replay_is_for_ready_graphs(kit: Kit) -> None:
    x = kit.tensor(4)
    graph = kit.backend.make_graph()
    with pytest.raises(dg.StateError, match="capture into it first"):
        graph.bound()
    graph, _ = kit.record(lambda: x + 1)
    graph.close()
    with pytest.raises(dg.StateError, match="closed"):
        graph.bound()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.parametrize("call", ["replay", "update", "reset"])
def test_forked_child_is_refused_and_the_parent_goes_on(kit: Kit, call: str) -> None:
    """FAULTS 29."""
    x = kit.tensor(4)
    graph, y = kit.record(lambda: x + 1)
    assert _in_child(getattr(graph, call)).startswith("StateError: ")
    kit.refill(x, 5)
    graph.replay()
    kit.same(y, x + 1)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_forked_child_cannot_replay_a_captured_step(kit: Kit) -> None:
    """FAULTS 29."""
    captured = kit.capture(lambda x: x + 1, kit.tensor(4))
    assert _in_child(captured.replay).startswith("StateError: ")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_forked_child_waits_for_no_lock_of_another_thread(kit: Kit, pool: dg.Pool) -> None:
    """FAULTS 39."""
    replaying, forked = threading.Event(), threading.Event()
    held = [False]

    @dg.no_graph
    def body(x: torch.Tensor) -> torch.Tensor:
        if held[0]:
            replaying.set()
            forked.wait(60)
        return x * 2

    def step(x: torch.Tensor) -> torch.Tensor:
        return body(x + 1) + 1

    x = kit.tensor(WIDTH)
    row = x[None]  # a device may refuse even this in a child
    captured = kit.capture(step, x, policy="breakable", pool=pool)
    graphs = [kit.record(lambda: x + 1, pool=pool)[0]]
    runner = runner_of(
        kit, lambda batch: step(batch.x), pool=pool, max_requests=1, config="breakable"
    )
    held[0] = True
    thread = threading.Thread(target=captured.replay)
    thread.start()
    try:
        assert replaying.wait(60)
        uses: list[Callable[[], object]] = [
            captured.replay,
            captured.close,
            graphs[0].replay,
            graphs[0].close,
            lambda: runner.run({"x": row}),
            runner.capture,
            runner.close,
            lambda: kit.capture(step, x, pool=pool),
            lambda: kit.backend.make_graph(pool),
        ]
        for use in uses:
            assert _in_child(use).startswith("StateError: "), use
        assert _in_child(graphs.clear) == "nothing was raised"
    finally:
        forked.set()
        thread.join(60)
    held[0] = False
    kit.check(captured, step, x)


def test_closed_capture_refuses_and_closes_twice(kit: Kit) -> None:
    """FAULTS 28."""
    x = kit.tensor(4)
    with kit.capture(lambda x: x + 1, x) as captured:
        assert captured.info().state == "ready"
    assert captured.info().state == "closed"
    captured.close()
    for use in (captured.replay, captured.prove):
        with pytest.raises(dg.StateError, match="closed"):
            use()


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
        keep = captured.replay()  # in flight when its graph goes
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

for plugin in sys.argv[2:]:  # one of them may have registered the backend
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
"""A program that ends with everything alive and replays in flight."""


def test_interpreter_exits_silently_with_graphs_in_flight(
    kit: Kit, pytestconfig: pytest.Config
) -> None:
    """FAULTS 28."""
    plugins = [name for name in pytestconfig.option.plugins if not name.startswith("no:")]
    done = subprocess.run(
        [sys.executable, "-c", LEFT_BEHIND, kit.backend.name, *plugins],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if done.returncode == 77:
        pytest.skip("this backend is registered in this process only")
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


@pytest.mark.parametrize("policy", POLICIES)
def test_closed_capture_lets_go_of_the_bound_tensors(kit: Kit, policy: str) -> None:
    x = kit.tensor(4)
    bound = weakref.ref(x)
    captured = kit.capture(lambda x: x + 1, x, policy=policy)
    captured.replay()
    kit.backend.synchronize()
    captured.close()
    del x
    gc.collect()
    assert bound() is None


@dg.region(host_args=("n",), mutates=("out",))
def scaled(x: torch.Tensor, out: torch.Tensor, *, n: int) -> None:
    out.copy_(x * n)


def assert_gone_when_dropped(make: Callable[[], dg.DeviceGraph]) -> None:
    """Fail if a collection is needed: an engine freezes its heap when it has started, and what only
    a collection frees stays."""
    make()  # torch may import modules meanwhile, and exceptions in there keep frames
    gc.disable()
    try:
        graph = make()
        graph.backend.synchronize()
        kept = weakref.ref(graph)
        del graph
        assert kept() is None
    finally:
        gc.enable()


@declares("region_update")
@pytest.mark.parametrize("replayed", [False, True])
def test_dropped_graph_with_an_update_is_gone_without_a_collection(
    kit: Kit, replayed: bool
) -> None:
    x, out = kit.tensor(4), kit.tensor(4)

    def make() -> dg.DeviceGraph:
        graph, _ = kit.record(lambda: scaled(x, out, n=2), host_args={"n": 2})
        if replayed:
            graph.replay()
        graph.update(n=3)
        return graph

    assert_gone_when_dropped(make)


def test_replay_that_is_kept_without_its_graph_is_refused(kit: Kit) -> None:
    x = kit.tensor(4)
    graph, _ = kit.record(lambda: x + 1)
    replay = graph.replay
    replay()
    kit.backend.synchronize()
    del graph
    gc.collect()
    with pytest.raises(dg.StateError, match="is gone"):
        replay()


@pytest.mark.parametrize("how", ["never", "replay", "bound"])
def test_dropped_graph_is_gone_without_a_collection(kit: Kit, how: str) -> None:
    x = kit.tensor(4)

    def make() -> dg.DeviceGraph:
        graph, _ = kit.record(lambda: x + 1)
        if how != "never":
            (graph.replay if how == "replay" else graph.bound())()
        return graph

    assert_gone_when_dropped(make)


def test_graph_that_was_cleared_is_launched_by_no_step_that_bound_it(kit: Kit) -> None:
    """FAULTS 28."""
    body = dg.no_graph(lambda x: x * 2)
    captured = kit.capture(lambda x: body(x + 1) + 1, kit.tensor(4), policy="breakable")
    for _ in range(3):
        captured.replay()
    captured.segments[0].reset()
    with pytest.raises(dg.StateError, match="empty"):
        captured.replay()


def test_pool_outlives_its_last_graph(kit: Kit, pool: dg.Pool) -> None:
    x = kit.tensor(64)
    for offset in range(3):
        graph, y = kit.record(functools.partial(torch.add, x, offset), pool=pool)
        graph.replay()
        kit.same(y, x + offset)
        del graph, y
        gc.collect()
