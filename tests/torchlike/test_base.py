"""Backends over torch namespaces: captures that the driver refuses to begin or to end."""

from __future__ import annotations

import contextlib
import gc
import logging
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import devgraph as dg
from devgraph.api.process import collector
from devgraph.api.session import session, supported_error_mode
from devgraph.api.torchlike.base import TorchBackend
from tests.support.torch_namespace import FakeBackend


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


def _capture(backend: FakeBackend, graph: Any, body: Callable[[], Any] = lambda: None) -> None:
    with backend.capture_context(graph):
        body()


def _works(backend: FakeBackend, pool: dg.Pool) -> None:
    graph = backend.make_graph(pool)
    _capture(backend, graph)
    graph.replay()
    assert graph.state == "ready"
    assert backend.namespace.current is backend.namespace.default


def test_capture_that_cannot_begin_leaves_the_graph_empty(backend: FakeBackend):
    """FAULTS 2."""
    pool = backend.make_pool()
    _works(backend, pool)
    graph = backend.make_graph(pool)
    backend.namespace.failing_begins = 1
    with pytest.raises(RuntimeError, match="refused to begin"):
        _capture(backend, graph, lambda: pytest.fail("the body ran"))
    assert graph.state == "empty"
    assert backend.namespace.made[-1].ended == 0
    _works(backend, pool)


def test_refused_end_is_undone_and_not_tried_for_the_same_capture_again(backend: FakeBackend):
    """FAULTS 2."""
    pool = backend.make_pool()
    _works(backend, pool)
    handle, uses = pool.handle, pool.uses
    graph = backend.make_graph(pool)
    backend.namespace.failing_ends = 1
    with pytest.raises(RuntimeError, match="refused to end"):
        _capture(backend, graph)
    native = backend.namespace.made[-1]
    assert native.ended == 2  # the second ended the bare capture that undoes the first
    assert native.was_reset
    assert graph.state == "empty"
    assert (pool.handle, pool.uses) == (handle, uses)
    _works(backend, pool)


def test_stream_and_memory_of_an_end_that_cannot_be_undone_are_retired(
    backend: FakeBackend, caplog: pytest.LogCaptureFixture
):
    """FAULTS 2."""
    pool = backend.make_pool()
    _works(backend, pool)
    handle = pool.handle
    graph = backend.make_graph(pool)
    backend.namespace.failing_ends, backend.namespace.reopens = 1, False
    failure = ValueError("from the body")

    def body() -> None:
        raise failure

    with caplog.at_level(logging.WARNING, logger="devgraph"), pytest.raises(ValueError) as caught:
        _capture(backend, graph, body)
    assert caught.value is failure
    assert graph.state == "empty"
    assert pool.handle != handle
    _works(backend, pool)
    assert "could not be undone" in caplog.text


@pytest.mark.parametrize("undone", [True, False])
def test_memory_goes_with_its_pool_unless_a_capture_is_under_way_for_ever(
    backend: FakeBackend, undone: bool
):
    """torch ends the process when it frees a pool while it counts a capture as under way."""
    _works(backend, other := backend.make_pool())
    backend.namespace.failing_ends, backend.namespace.reopens = 1, undone
    with contextlib.suppress(RuntimeError):
        _capture(backend, backend.make_graph(other))
    pool = backend.make_pool()
    _works(backend, pool)
    memory = weakref.ref(pool._memory)
    del pool
    backend.namespace.pools.clear()
    backend.namespace.made.clear()
    gc.collect()
    assert (memory() is None) == undone


def test_stream_that_stays_in_capture_mode_is_retired(
    backend: FakeBackend, caplog: pytest.LogCaptureFixture
):
    """FAULTS 2."""
    pool = backend.make_pool()
    _works(backend, pool)
    stream = pool.stream
    backend.namespace.failing_ends = 2  # that of the capture, and that of the bare one
    with caplog.at_level(logging.WARNING, logger="devgraph"), pytest.raises(RuntimeError):
        _capture(backend, backend.make_graph(pool))
    assert "retired a stream" in caplog.text
    assert pool.stream is not stream
    _works(backend, pool)


def test_side_stream_that_the_driver_calls_unjoined_is_a_typed_error(backend: FakeBackend):
    """FAULTS 15."""
    _works(backend, pool := backend.make_pool())
    backend.namespace.failing_ends = 1
    backend.namespace.refusal = "capture has UNJOINED work"
    with pytest.raises(dg.UnjoinedStreamError, match="wait_stream"):
        _capture(backend, backend.make_graph(pool))


@pytest.mark.parametrize("given", [None, "default", "own"])
def test_capture_on_the_default_stream_moves_to_one_that_is_joined(
    backend: FakeBackend, given: str | None
):
    """FAULTS 14."""
    space = backend.namespace
    own = space.Stream()
    stream = {"default": space.default, "own": own}.get(given or "")
    pool = backend.make_pool()
    seen = []
    with backend.capture_context(backend.make_graph(pool), stream=stream):
        seen.append(space.current)
    side = own if given == "own" else pool.stream
    assert seen == [side]
    assert side is not space.default
    assert side.waited_for[0] is space.default
    assert space.default.waited_for[-1] is side
    assert space.current is space.default


def test_stream_that_cannot_be_joined_to_the_callers_is_an_error_and_hides_none(
    backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
):
    """Unordered behind the capture, the caller's stream would read what is not written yet."""

    def refuse(current: Any, side: Any) -> None:
        raise RuntimeError("no event is left")

    _works(backend, pool := backend.make_pool())
    with monkeypatch.context() as patched:
        patched.setattr(backend, "join", refuse)
        with pytest.raises(RuntimeError, match="no event is left"):
            _capture(backend, backend.make_graph(pool))
        with pytest.raises(ZeroDivisionError):
            _capture(backend, backend.make_graph(pool), lambda: 1 // 0)
    _works(backend, pool)


def test_replay_on_another_stream_waits_for_the_last_one(backend: FakeBackend):
    """FAULTS 18."""
    space, pool = backend.namespace, backend.make_pool()
    graphs = [backend.make_graph(pool) for _ in range(2)]
    for graph in graphs:
        _capture(backend, graph)
    first, second = space.Stream(), space.Stream()
    with space.stream(first):
        graphs[0].replay()
    with space.stream(second):
        graphs[1].replay()
    assert second.waited_for == [first]


def test_replay_waits_for_no_stream_that_another_capture_is_on(backend: FakeBackend):
    """All pools capture on one stream; a stream that waits for it becomes part of a capture."""
    space, pool = backend.namespace, backend.make_pool()
    graph = backend.make_graph(pool)
    with session(pool) as held:  # as a step with breaks, which runs what it has captured
        held.begin(graph)
        held.end(allow_empty=True)
        with pool.lock:
            pool.order()
    side = pool.stream
    waited = len(space.default.waited_for)
    graph.replay()
    assert side not in space.default.waited_for[waited:]
    with space.stream(other := space.Stream()):
        graph.replay()
    assert other.waited_for == [space.default]


def test_error_mode_that_the_vendor_lacks_becomes_the_one_it_has_and_says_so(
    backend: FakeBackend, caplog: pytest.LogCaptureFixture
):
    """FAULTS 16."""
    with caplog.at_level(logging.INFO, logger="devgraph"):
        assert supported_error_mode(backend, "global") == "thread_local"
    assert "no capture error mode global; using thread_local" in caplog.text


@pytest.mark.parametrize(
    ("member", "told"),
    [("is_available", "sees no device"), ("Graph", "has no Graph: upgrade torch")],
)
def test_namespace_without_device_or_graphs_is_unavailable_with_the_way_to_fix_it(
    member: str, told: str
):
    """FAULTS 32."""

    class Lacking(FakeBackend):
        def check_available(self) -> None:
            try:
                super().check_available()
            finally:
                space = self.namespace
                if member == "Graph":
                    del space.Graph
                else:
                    space.is_available = lambda: False
            TorchBackend.check_available(self)

    with pytest.raises(dg.BackendUnavailableError, match=told):
        Lacking()


def test_build_of_torch_without_the_namespace_is_unavailable():
    """FAULTS 32."""
    members = {"name": "absent", "device_type": "absent_device"}
    with pytest.raises(
        dg.BackendError, match="Absent has no graph_class_name; set it in the class"
    ):
        type("Absent", (TorchBackend,), members)()
    kind = type("Absent", (TorchBackend,), {**members, "graph_class_name": "Graph"})
    with pytest.raises(dg.BackendUnavailableError, match=r"has no torch\.absent_device: install"):
        kind()


@pytest.mark.parametrize("policy", ["full", "breakable"])
def test_random_numbers_are_refused_where_the_backend_does_not_declare_them(
    backend: FakeBackend, policy: str
):
    """FAULTS 22."""
    x = torch.ones(8)
    pool = backend.make_pool()

    @dg.no_graph
    def eager(x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)

    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x * 2, 0.5, training=True)

    with pytest.raises(dg.CaptureError, match=r"bernoulli|dropout") as caught:
        dg.capture(step, x, policy=policy, backend=backend, pool=pool, warmup=1)
    assert __file__ in str(caught.value)
    assert "does not declare" in str(caught.value)
    if policy == "breakable":
        with dg.capture(lambda x: eager(x * 2) + 1, x, policy=policy, backend=backend) as captured:
            captured.replay()
    _works(backend, pool)


@pytest.mark.filterwarnings("error")
def test_empty_segments_do_not_warn(backend: FakeBackend, monkeypatch: pytest.MonkeyPatch):
    pool = backend.make_pool()
    _works(backend, pool)
    graph_class = backend.namespace.Graph
    end = graph_class.capture_end

    def capture_end(self: Any) -> None:
        warnings.warn("The CUDA Graph is empty. This usually means", UserWarning, stacklevel=1)
        end(self)

    monkeypatch.setattr(graph_class, "capture_end", capture_end)
    with session(pool) as recording:
        recording.begin(backend.make_graph(pool))
        graph = recording.end(allow_empty=True)
    assert graph.state == "ready"


@pytest.mark.parametrize("drops", [True, False])
def test_snapshots_take_no_references(backend: FakeBackend, drops: bool):
    pool = backend.make_pool()
    backend.namespace.drops_references = drops
    assert pool.bytes == 0  # finds out
    number = pool._memory.id[1]
    spare = [number] * 1000  # a test that fails must not end the process
    before = sys.getrefcount(number), sys.getrefcount(True)
    for _ in range(400):
        assert pool.bytes == 0
    backend.namespace.failing_snapshots = 100
    for _ in range(100):
        with pytest.raises(RuntimeError, match="no snapshot"):
            pool.snapshot(pool._memory)
    assert sys.getrefcount(number) == before[0]
    assert len(spare) == 1000
    # Everybody holds True (from Python 3.12 on it is not counted): its count moves, not by 500. A
    # torch that drops nothing leaves it alone.
    assert abs(sys.getrefcount(True) - before[1]) < 250


def test_memory_that_the_keeper_writes_is_no_other_tensors(
    backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
):
    """A backend may launch it, to see what torch does before a replay."""
    zeroed: list[weakref.ref[torch.Tensor]] = []
    zero = torch.Tensor.zero_

    def noted(tensor: torch.Tensor) -> torch.Tensor:
        zeroed.append(weakref.ref(tensor))
        return zero(tensor)

    monkeypatch.setattr(torch.Tensor, "zero_", noted)
    pool = backend.make_pool()
    _works(backend, pool)
    assert pool.keeper is not None
    [word] = zeroed
    assert word() is not None


def test_alias_of_graph_memory_is_conjugated_and_negated_as_the_tensor(backend: FakeBackend):
    """What a region is given again is what it was given."""
    pool, x = backend.make_pool(), torch.randn(3, dtype=torch.complex64)
    for seen in (x, x.conj(), x.conj().imag):
        assert torch.equal(pool.bare(seen), seen)


class Owner:
    """Something that gives back device memory when it goes."""


def test_garbage_waits_until_the_outermost_hold_ends(backend: FakeBackend):
    thing = Owner()
    gone = weakref.ref(thing)
    with backend.exclusive(), collector.paused():
        assert not gc.isenabled()
        with backend.exclusive(), collector.paused():
            backend.bury(thing)
            del thing
        assert not gc.isenabled()
        assert gone() is not None
    assert gc.isenabled()
    assert gone() is None


def test_garbage_of_another_thread_waits_as_well(backend: FakeBackend):
    thing = Owner()
    gone = weakref.ref(thing)

    def drop(owner: Owner):
        backend.bury(owner)

    with backend.exclusive(), collector.paused():
        thread = threading.Thread(target=drop, args=(thing,))
        thread.start()
        thread.join(60)
        del thread, thing
        assert gone() is not None
    assert gone() is None


class StickyError(RuntimeError):
    error_code = 700


@pytest.mark.parametrize("lost", [True, False])
def test_what_is_buried_on_a_lost_device_or_in_a_capture_without_end_is_never_freed(lost: bool):
    """FAULTS 34: its destructor would fail, which would abort the process."""

    backend = FakeBackend()
    backend.sticky_errors = frozenset({700})

    class Memory:
        pass

    kept = [Memory() for _ in range(2)]
    alive = [weakref.ref(memory) for memory in kept]
    expected = pytest.raises(dg.DeviceLost) if lost else contextlib.nullcontext()
    with expected, session(backend.make_pool()):
        backend.bury(kept.pop())
        if lost:
            raise StickyError
        backend.keep_memory()
    backend.bury(kept.pop())
    gc.collect()
    assert all(memory() is not None for memory in alive)
