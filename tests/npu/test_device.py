"""What ends while it is still in use: graphs, updates, threads, devices and whole processes."""

from __future__ import annotations

import gc
import json
import os
import threading
import weakref
from typing import Any

import pytest
import torch

import devgraph as dg
from devgraph.api.process import collector
from tests.sim.ascend import Driver
from tests.support.npu_steps import picky_step, step, wanted

pytest_plugins = ["tests.sim.ascend.plugin"]


@pytest.fixture
def backend(backend: Any) -> Any:
    """The backend with trusted values, so that no call waits for the update thread."""
    backend.try_new_values = False
    return backend


def capture(backend: Any, x: torch.Tensor, **options: Any) -> Any:
    return dg.capture(step, x, backend=backend, host_args={"factor": 2.0}, **options)


# Memory -----------------------------------------------------------------------------------------


def test_memory_goes_with_its_pool_after_dynamo_took_over_the_calls_of_frames(backend: Any) -> None:
    """From its first trace on, Dynamo's evaluation keeps arguments alive until a call returns."""
    x = torch.arange(8.0).to("npu")

    def untraceable(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.sum() > 0 else x - 1

    with pytest.raises(dg.CaptureError):
        dg.capture(untraceable, x, backend=backend, policy="piecewise")
    pool = backend.make_pool()
    with capture(backend, x, pool=pool) as captured:
        captured.replay(factor=3.0)
        backend.synchronize()
    del captured
    backend.synchronize()
    number = tuple(pool.handle)

    def segments() -> int:
        return sum(tuple(s["segment_pool_id"]) == number for s in torch.npu.memory_snapshot())

    assert segments() > 0
    del pool
    gc.collect()
    assert segments() == 0


def test_memory_is_kept_where_a_capture_that_nothing_could_end_counts_as_under_way(
    backend: Any,
) -> None:
    pools = [backend.make_pool() for _ in range(2)]
    alive = [weakref.ref(pool._memory) for pool in pools]
    with backend.exclusive(), collector.paused():
        pools.pop()  # waits until the capture is over
    assert alive.pop()() is None
    with backend.exclusive(), collector.paused():
        pools.pop()
        backend.keep_memory()
    backend.synchronize()
    assert alive.pop()() is not None


def test_memory_that_goes_in_a_capture_waits_for_the_update_of_a_replay(
    driver: Driver, backend: Any
) -> None:
    """Freeing it waits for the device with the interpreter's lock, which the update needs."""
    captured, pool = capture(backend, torch.arange(8.0).to("npu")), backend.make_pool()
    memory = weakref.ref(pool._memory)
    with driver.setting(hold_updates=1):
        captured.replay(factor=3.0)
        with backend.exclusive(), collector.paused():
            del pool
        assert memory() is not None
    backend.synchronize()
    assert memory() is None


# Graphs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["close", "reset", "drop"])
def test_graph_that_ends_with_an_update_outstanding_outlives_its_replay(
    driver: Driver, backend: Any, end: str
) -> None:
    x = torch.arange(8.0).to("npu")
    captured = capture(backend, x)
    captured.replay(factor=3.0)
    backend.synchronize()
    reported, alive = len(driver.report()), len(driver.graphs())
    with driver.counting() as moved:
        with driver.setting(hold_updates=1):  # what waited for the replay would wait for ever
            result = captured.replay(factor=5.0).clone()
            if end == "close":
                captured.close()
            elif end == "reset":
                captured.segments[0].reset()
            del captured
            assert len(driver.graphs()) == alive
        backend.synchronize()
    assert torch.equal(result.cpu(), wanted(x, 5.0))
    assert moved["graphs_destroyed"] >= 1
    assert moved.get("graphs_destroyed_in_flight", 0) == 0
    assert driver.report()[reported:] == []


@pytest.mark.parametrize("how", ["replay", "bound"])
def test_graph_without_regions_outlives_its_replay(driver: Driver, backend: Any, how: str) -> None:
    x, pool = torch.ones(4).to("npu"), backend.make_pool()
    graph, other = backend.make_graph(pool), backend.make_graph(pool)
    with backend.capture_context(graph):
        y = x * 3
    with backend.capture_context(other):
        x + 1
    alive = len(driver.graphs())
    with driver.counting() as moved:
        with driver.setting(hold_replays=1):
            launch = graph.replay if how == "replay" else graph.bound()
            launch()
            graph.close()
            other.close()  # Its pool is in use, though it never ran.
            backend.free_buried()
            assert len(driver.graphs()) == alive
        backend.synchronize()
    assert y.tolist() == [3.0] * 4
    assert moved["graphs_destroyed"] == 2
    assert moved.get("graphs_destroyed_in_flight", 0) == 0


def test_graph_that_ends_in_the_body_of_a_capture_waits_for_the_end_of_the_capture(
    driver: Driver, backend: Any
) -> None:
    x = torch.ones(4).to("npu")
    captured = capture(backend, x)
    captured.replay(factor=3.0)
    backend.synchronize()
    graph, destroyed = backend.make_graph(), driver.counter("graphs_destroyed")
    with backend.capture_context(graph):
        captured.close()
        backend.free_buried()
        assert driver.counter("graphs_destroyed") == destroyed
        y = x + 1
    graph.replay()
    backend.synchronize()
    assert driver.counter("graphs_destroyed") == destroyed + 1
    assert graph.info().nodes == 1  # and no event of the closed one
    assert y.tolist() == [2.0] * 4


def test_stream_of_a_closed_graph_is_there_for_the_next_capture(
    driver: Driver, backend: Any
) -> None:
    backend.stream_limit = 3
    x = torch.ones(4).to("npu")
    graph, following = backend.make_graph(), backend.make_graph()
    with backend.capture_context(graph):
        x + 1
    with driver.setting(hold_replays=1):
        graph.replay()
        graph.close()
        refused = pytest.raises(dg.ResourceError, match="3 of at most 3 streams")
        with refused, backend.capture_context(following):
            x + 2
    torch.npu.synchronize()
    with backend.capture_context(following):
        y = x + 2
    following.replay()
    assert y.tolist() == [3.0] * 4


def test_fifty_captures_and_closes_take_no_thread_stream_or_event(
    driver: Driver, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    events, kind = [], torch.npu.ExternalEvent
    monkeypatch.setattr(torch.npu, "ExternalEvent", lambda: events.append(1) or kind())

    def cycle(number: int) -> None:
        x = torch.arange(8.0).to("npu")
        captured = capture(backend, x, policy="full" if number % 2 else "breakable")
        captured.replay(factor=float(number))
        captured.close()  # with the replay and its update under way

    def held() -> dict[str, int]:
        gc.collect()
        backend.synchronize()
        counters = driver.counters()
        return {
            "hardware streams": counters["hardware_streams"],
            "streams": counters["streams_created"] - counters.get("streams_destroyed", 0),
            "graphs": len(driver.graphs()),
            "task groups": sum(graph["task_groups"] for graph in driver.graphs()),
            "external events": len(events),
            "Python threads": threading.active_count(),
            "threads": len(os.listdir("/proc/self/task")),
            "counted by the budget": sum(backend.streams.values()),
        }

    for thread in threading.enumerate():  # Threads that earlier tests started may still end.
        if type(thread) is threading.Thread and "devgraph update" not in thread.name:
            thread.join(60)
    for number in range(6):
        cycle(number)
    before = held()
    with driver.counting() as moved:
        for number in range(50):
            cycle(number)
        after = held()
    assert after == before
    assert moved["task_groups"] == 25 * 3
    assert moved.get("graphs_destroyed_in_flight", 0) == 0


def test_error_of_an_update_is_raised_by_its_own_graph_only(driver: Driver, backend: Any) -> None:
    x, y = torch.ones(4).to("npu"), torch.arange(8.0).to("npu")
    options: dict[str, Any] = {"backend": backend, "host_args": {"n": 2}}
    with dg.capture(picky_step, x, **options) as failing, capture(backend, y) as other:
        failing.replay(n=10)
        for factor in (3.0, 5.0):
            assert torch.equal(other.replay(factor=factor).cpu(), wanted(y, factor))
        backend.synchronize()
        assert other.segments[0].state == "ready"
        assert failing.segments[0].state == "dirty"
        with pytest.raises(ValueError, match="10 is too many"):
            failing.replay(n=3)
        with pytest.raises(dg.StateError, match="reset"):
            failing.replay(n=3)
        failing.segments[0].reset()
        assert torch.equal(other.replay(factor=7.0).cpu(), wanted(y, 7.0))


def test_threads_with_graphs_of_their_own_share_the_update_queue(
    driver: Driver, backend: Any
) -> None:
    """Other pools, other streams, one queue: neither waits for the other for ever."""
    driver.set(update_delay_ms=1, replay_delay_ms=1)
    wrong: list[Any] = []

    def work(seed: int) -> None:
        try:
            # torch hands out its streams in turn, and the capture stream is one of them.
            streams = [torch.npu.Stream() for _ in range(2)]
            stream = next(stream for stream in streams if stream != backend.capture_stream)
            with torch.npu.stream(stream):
                x = torch.arange(8.0).to("npu") + seed
                with capture(backend, x) as captured:
                    factors = [(7 * i + seed) % 13 / 4 for i in range(40)]
                    results = [captured.replay(factor=factor).clone() for factor in factors]
                    for factor, result in zip(factors, results, strict=True):
                        if not torch.equal(result.cpu(), wanted(x, factor)):
                            wrong.append((seed, factor))
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# Devices and processes --------------------------------------------------------------------------


def test_second_device_has_its_own_update_thread_and_its_own_tensors(
    driver: Driver, run_python: Any
) -> None:
    said = run_python(
        """
from tests.sim.ascend import activate
driver = activate()
import json, threading, torch
import devgraph as dg
from tests.support.npu_steps import step, wanted

torch.npu.set_device(1)
backend = dg.get_backend("npu")
backend.try_new_values = False
x = torch.arange(8.0, device="npu:1")
captured = dg.capture(step, x, backend=backend, host_args={"factor": 2.0})
devices = {graph["device"] for graph in driver.graphs()}
right = []

def replay(factor):
    right.append(torch.equal(captured.replay(factor=factor).cpu(), wanted(x, factor)))

replay(3.0)
torch.npu.set_device(0)
replay(4.0)
other = threading.Thread(target=replay, args=(5.0,))
other.start()
other.join()
[thread] = [t.name for t in threading.enumerate() if "update" in t.name]
backend.bind_worker(0)  # and now the first one, with a thread of its own
for policy in ("full", "breakable"):
    try:
        dg.capture(step, x, backend=backend, policy=policy, host_args={"factor": 2.0})
    except dg.InputError as error:
        right.append("x is on npu:1, but backend 'npu' captures work on npu:0" in str(error))
try:  # an output of the other device
    dg.capture(lambda y: (y * 2, x * 2), torch.arange(8.0, device="npu:0"), backend=backend)
except dg.InputError as error:
    right.append("an output is on npu:1" in str(error))
y = torch.arange(8.0, device="npu:0")
here = dg.capture(step, y, backend=backend, host_args={"factor": 2.0})
right.append(torch.equal(here.replay(factor=6.0).cpu(), wanted(y, 6.0)))
print(json.dumps([sorted(devices), right, thread, torch.npu.current_device()]))
""",
        FAKEACL_DEVICES="2",
    )
    assert json.loads(said.splitlines()[-1]) == [[1], [True] * 7, "devgraph update npu:1", 0]


ENDING = """
import os, time
os.dup2(1, 2)  # what is said at the end is seen by the test
from tests.sim.ascend import activate
driver = activate()
driver.set(sync_timeout_ms=600_000)  # longer than the test waits
import torch
import devgraph as dg

seconds, timeout = map(float, os.environ["ENDING"].split())
backend = dg.get_backend("npu")
backend.try_new_values = False
host_seconds = 0.0

@dg.region(host_args=("factor",), mutates=("out",))
def scale(x, out, *, factor):
    time.sleep(host_seconds)
    torch.mul(x, factor, out=out)

def step(x, *, factor):
    out = torch.empty_like(x)
    scale(x, out, factor=factor)
    return out + 1

captured = dg.capture(step, torch.ones(4).to("npu"), backend=backend, host_args={"factor": 2.0})
captured.replay(factor=3.0)
backend.synchronize()
host_seconds, backend.channel.timeout = seconds, timeout
captured.replay(factor=4.0)
print("ends", flush=True)
"""
"""A program that ends while the host code of a region runs."""


@pytest.mark.parametrize(
    ("ending", "said"),
    [("0.5 600", ""), ("1000 1", "a replay waits too long")],
    ids=["slow", "stuck"],
)
def test_process_that_ends_during_an_update_does_not_hang(
    driver: Driver, run_python: Any, ending: str, said: str
) -> None:
    """torch_npu waits for the device at the end, and the device for the update."""
    assert run_python(ENDING, ENDING=ending).startswith(f"ends\n{said}")


def test_process_ends_silently_even_if_freed_memory_is_written_to(
    driver: Driver, run_python: Any
) -> None:
    """Of torch_npu's queue thread, which logs once more when the loggers are gone."""
    said = run_python(ENDING, fresh=True, ENDING="0 600", MALLOC_PERTURB_="133")
    assert len(said.splitlines()) == 1, said


class Graph:
    """Something that can be counted."""


def test_shortage_says_who_holds_the_streams_that_the_driver_refused(
    driver: Driver, backend: Any
) -> None:
    graphs = [Graph() for _ in range(34)]
    backend.streams.update(dict.fromkeys(graphs, 2))
    said = backend.shortage(RuntimeError("error code is 207008"))
    assert "34 graphs with 68 of at most 1800 streams" in said
    assert "fewer buckets" in said
    assert "207008" in said
    assert backend.shortage(RuntimeError("error code is 107030")) is None


def test_alias_of_graph_memory_is_conjugated_and_negated_as_the_tensor(
    driver: Driver, backend: Any
) -> None:
    pool, x = backend.make_pool(), torch.zeros(3, dtype=torch.complex64).to("npu")
    for seen in (x, x.conj(), x.conj().imag):
        bare = pool.bare(seen)
        assert (bare.is_conj(), bare.is_neg()) == (seen.is_conj(), seen.is_neg())
