"""Updates of a vendor whose graph and stream objects have names of their own."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import pytest
import torch

import devgraph as dg
from devgraph.api.backend import Backend
from devgraph.api.capabilities import Capabilities
from devgraph.api.errors import ExecutableError
from devgraph.api.marks.scopes import repeater
from devgraph.api.torchlike.base import TorchPool
from devgraph.api.torchlike.node_graph import NodeBackend
from devgraph.api.torchlike.recording import executable_bytes
from devgraph.rocm.runtime import Runtime
from tests.sim.hip import Fake
from tests.sim.hip.device import Device, Recorder
from tests.support.fake_hip import KEEP_ALL, check, scaled, step


@attrs.frozen
class AcmeStream:
    """A stream that calls its handle ``address``."""

    inner: Any

    @property
    def address(self) -> int:
        return int(self.inner.cuda_stream)

    def wait_stream(self, other: AcmeStream) -> None:
        self.inner.wait_stream(other.inner)


class AcmeDevice(Device):
    """The namespace ``torch.acme``."""

    def AcmeGraph(self) -> Any:
        return self.CUDAGraph()

    def Stream(self, device: object = None, priority: int = 0) -> Any:
        return AcmeStream(super().Stream(device, priority))

    def current_stream(self, device: object = None) -> Any:
        return AcmeStream(super().current_stream(device))

    def default_stream(self, device: object = None) -> Any:
        return AcmeStream(super().default_stream(device))

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        with super().stream(stream.inner):
            yield


class AcmeRuntime(Runtime):
    """The fake's driver with loops: a kernel that launches the body again and again."""

    device: AcmeDevice

    @contextlib.contextmanager
    def looping(
        self, stream: int, body: int, going: int, prepare: Callable[[], None]
    ) -> Iterator[Callable[[], int]]:
        prepare()
        device, flag, found = self.device, ctypes.c_bool.from_address(going), []
        self.begin_capture(body)
        try:
            yield lambda: found[0]
        except BaseException:
            self.destroy(self.end_capture(body))
            raise
        graph = self.end_capture(body)
        found.append(self.count(graph))
        once = self.bound(self.instantiate(graph), 0)

        def run() -> None:
            while flag.value:
                once()

        device.fake.launch(stream, device.kernel("loop"), ctypes.c_int64(device.remember(run)))


class AcmeBackend(NodeBackend):
    """A backend over that namespace, with the fake's driver."""

    name = "acme"
    device_type = "acme"
    graph_class_name = "AcmeGraph"
    stream_handle_name = "address"
    capabilities = Capabilities(
        region_update=True, rng=True, node_counts=True, remakes_executables=True, loops=True
    )

    def __init__(self, fake: Fake) -> None:
        Backend.__init__(self)
        self.fake = fake
        self.namespace = AcmeDevice(fake)
        self._device = torch.device("cpu")
        self._capture_stream = None
        self.current_stream_id = self._make_current_stream_id()
        runtime = AcmeRuntime(fake.path)
        runtime.device = self.namespace
        self.use_runtime(runtime)

    @contextlib.contextmanager
    def side_stream(self, pool: Any, stream: Any = None) -> Iterator[None]:
        with Recorder(self.namespace), super().side_stream(pool, stream):
            yield


@pytest.fixture
def be() -> Iterator[AcmeBackend]:
    backend = AcmeBackend(Fake())
    yield backend
    assert not dg.is_capturing()


def noise() -> torch.Tensor:
    return torch.randn(4, 8)


def test_every_key_is_right_written_or_with_an_executable_of_its_own(be: AcmeBackend) -> None:
    x = noise()
    with dg.capture(step, x, backend=be, host_args={"n": 2}, budget=KEEP_ALL) as cap:
        for n in (2, 3, 5, 3, 5, 2, 7):
            check(cap, step, x, n=n)
        assert cap.stats()["copies"] == 0
        graph = cap.segments[0]
        assert graph.info().nodes == 12 and graph.info().recordings == 4
        kept = cap.pool.recordings.kept()
        assert sum(bool(recording.executable) for recording in kept) == 2


def test_executables_of_graphs_and_of_recordings_go_for_the_budget(be: AcmeBackend) -> None:
    x, pool = noise(), be.make_pool()
    with dg.capture(step, x, backend=be, host_args={"n": 2}, budget=KEEP_ALL, pool=pool) as cap:
        assert pool.recordings.residency().made == 0
        for n in (2, 3, 5, 3, 5):
            check(cap, step, x, n=n)
        own = executable_bytes(12)
        before = pool.recordings.residency()
        assert before.made == 3 and before.bytes > 3 * own > 0
        for budget in (own, 0):
            pool.recordings.limit(budget)
            for n in (2, 3, 5, 3, 5):
                check(cap, step, x, n=n)
        found = pool.recordings.residency()
        assert found.bytes < own and found.evicted >= 5
    assert pool.recordings.bytes == 0


def test_executable_that_is_made_again_launches_what_was_last_updated(be: AcmeBackend) -> None:
    x, pool = noise(), be.make_pool()
    pool.limit(0)
    graph, other = be.make_graph(pool), be.make_graph(pool)
    with be.capture_context(graph, host_args={"n": 2}):
        out = step(x, n=2)
    with be.capture_context(other):
        plain = x + 1
    bound = other.bound(be.current_stream_id())
    for n in (2, 3, 5, 2, 3):
        graph.update(n=n)
        for _ in range(2):
            other.replay()
            graph.replay()
            bound()
            assert torch.equal(out, step(x, n=n))
            assert torch.equal(plain, x + 1)
    assert pool.recordings.residency().made >= 30


def test_want_of_memory_for_an_executable_is_typed_and_loses_nothing(
    be: AcmeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FAULTS 44."""
    x, pool = noise(), be.make_pool()
    graphs = [be.make_graph(pool) for _ in range(2)]
    outs = []
    for graph in graphs:
        with be.capture_context(graph):
            outs.append(x * 2)
    bound = graphs[0].bound(be.current_stream_id())
    refuse = functools.partial(be.runtime.refuse, 2, "GraphInstantiateWithFlags")
    with monkeypatch.context() as patched:
        patched.setattr(be.runtime, "instantiate", lambda graph: refuse())
        for launch in (graphs[0].replay, bound):
            with pytest.raises(ExecutableError, match="launch it again when there is memory"):
                launch()
            assert graphs[0].state == "ready"
    for launch, out in zip((bound, graphs[1].replay), outs, strict=True):
        launch()
        assert torch.equal(out, x * 2)
    graphs[0].close()
    with pytest.raises(dg.StateError, match="closed"):
        bound()


def test_results_of_eager_bodies_lie_in_the_memory_of_the_graphs(
    be: AcmeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[object] = []

    def use(memory: object, device: object) -> contextlib.AbstractContextManager[None]:
        taken.append(memory)
        return contextlib.nullcontext()

    @dg.no_graph
    def outside(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def broken(x: torch.Tensor) -> torch.Tensor:
        return outside(x + 1) - 1

    monkeypatch.setattr(be.namespace, "use_mem_pool", use)
    x, pool = noise(), be.make_pool()
    with dg.capture(broken, x, backend=be, policy="breakable", pool=pool) as cap:
        check(cap, broken, x)
    assert taken == [pool._memory]


class AcmePages:
    """Memory of the fake, which stays: who takes it is noted."""

    allocator = None

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.lacking = False

    def release(self, addresses: Sequence[int]) -> None:
        self.calls.append("release")

    def restore(self, addresses: Sequence[int]) -> None:
        self.calls.append("restore")
        if self.lacking:
            raise dg.ResourceError("no memory")


@pytest.fixture
def releasable(be: AcmeBackend, monkeypatch: pytest.MonkeyPatch) -> TorchPool:
    be.capabilities = attrs.evolve(be.capabilities, releasable_memory=True)
    monkeypatch.setattr(be, "make_pages", AcmePages)
    make_memory = be.namespace.MemPool
    monkeypatch.setattr(be.namespace, "MemPool", lambda allocator: make_memory())
    monkeypatch.setattr(be.namespace, "empty_cache", lambda: None, raising=False)
    return be.make_pool(releasable=True)


def test_graph_that_was_not_ready_is_not_so_after_its_memory_was_given_back(
    be: AcmeBackend, releasable: TorchPool
) -> None:
    graph, x = be.make_graph(releasable), noise()
    with be.capture_context(graph, host_args={"n": 2}):
        step(x, n=2)
    graph.replay()
    graph.expire()
    releasable.release()
    releasable.restore()
    with pytest.raises(dg.StateError, match="stale"):
        graph.replay()


def test_graphs_launch_what_they_last_did_after_their_memory_was_given_back(
    be: AcmeBackend, releasable: TorchPool
) -> None:
    """FAULTS 44."""
    x, pool = noise(), releasable
    pages: Any = pool._pages
    with dg.capture(step, x, backend=be, host_args={"n": 2}, budget=KEEP_ALL, pool=pool) as cap:
        for n in (2, 3, 5, 3, 5, 2):  # written into the own executable, and launched directly
            check(cap, step, x, n=n)
            pool.release()
            assert not any(recording.executable for recording in pool.recordings.kept())
            for launch in (cap.segments[0].replay, functools.partial(cap.replay, n=7)):
                with pytest.raises(ExecutableError, match="restore"):
                    launch()
            pages.lacking = True
            with pytest.raises(dg.ResourceError, match="no memory"):
                pool.restore()
            pages.lacking = False
            pool.restore()
            cap.segments[0].replay()
            assert torch.equal(cap.outputs, step(x, n=n))
            check(cap, step, x, n=n)
    # Where there is none, torch's own is asked for, and what was taken is given back.
    assert pages.calls[:4] == ["release", "restore", "restore", "release"]


def test_fork_that_is_not_joined_is_named_by_its_handle(be: AcmeBackend) -> None:
    side = be.namespace.Stream()
    graph = be.make_graph()
    with (
        pytest.raises(dg.UnjoinedStreamError, match=f"stream {side.address:#x} forked"),
        be.capture_context(graph),
    ):
        y = noise() + 1
        side.wait_stream(be.namespace.current_stream())
        with be.namespace.stream(side):
            y * 2


def test_region_that_comes_to_draw_random_numbers_is_refused_with_its_line(
    be: AcmeBackend,
) -> None:
    @dg.region(host_args=("n",))
    def shaken(x: torch.Tensor, *, n: int) -> torch.Tensor:
        return x * n if n < 5 else x + torch.rand(4, 8)

    graph, x = be.make_graph(), noise()
    with be.capture_context(graph, host_args={"n": 2}):
        out = shaken(x, n=2)
    with pytest.raises(dg.UpdateError, match=r"aten.rand.*test_node_graph\.py:\d+.*shaken"):
        graph.update(n=7)
    assert graph.state == "ready"
    graph.update(n=3)
    graph.replay()
    assert torch.equal(out, x * 3)


def test_error_of_a_region_that_draws_nothing_is_its_own(be: AcmeBackend) -> None:
    runs: list[int] = []

    @dg.region(host_args=("n",))
    def failing(x: torch.Tensor, *, n: int) -> torch.Tensor:
        runs.append(n)
        if n == 7:
            raise RuntimeError("no generator of electricity")
        return scaled(x, n=n)

    graph, x = be.make_graph(), noise()
    with be.capture_context(graph, host_args={"n": 2}):
        failing(x, n=2)
    with pytest.raises(RuntimeError, match="electricity"):
        graph.update(n=7)
    assert graph.state == "ready"


def summed(x: torch.Tensor, times: torch.Tensor, turn: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Add ``turn(x)`` to ``x`` so many times, four at most."""
    total, at = x.clone(), torch.zeros(1, dtype=torch.int64)
    going = (at < times)[0]

    def add() -> None:
        total.add_(turn(x).masked_fill(going.logical_not(), 0))
        at.add_(1)
        going.copy_((at < times)[0])

    repeat = repeater()
    if repeat is not None:
        repeat(add, going)
    else:
        for _ in range(4):
            add()
    return total * 2


def test_loop_is_repeated_by_the_device_and_counts_its_nodes(be: AcmeBackend) -> None:
    turns: list[int] = []
    backend = weakref.ref(be)  # the capture examines objects that a step refers to

    def turn(x: torch.Tensor) -> torch.Tensor:
        turns.append(backend().namespace.current_stream().address)  # type: ignore[union-attr]
        return x * 3

    x, times = noise(), torch.tensor([2])
    pool = be.make_pool()
    pool.limit(0)
    fn = lambda x, times: summed(x, times, turn)  # noqa: E731
    with dg.capture(fn, x, times, backend=be, pool=pool, warmup=1) as cap:
        assert turns[4:] == [be.loop_stream.address] != [be.capture_stream.address]
        assert cap.stats() == {"loops": 1, "loop_nodes": 7}
        assert cap.info().nodes == 7 + 5
        for _ in range(2):
            for most in (0, 4, 1, 3):
                times.fill_(most)
                x.copy_(noise())
                assert torch.equal(cap.replay(), summed(x, times, lambda x: x * 3))


@pytest.mark.parametrize("case", ["random", "region", "swallowed"])
def test_loop_that_the_device_cannot_repeat_is_unrolled(be: AcmeBackend, case: str) -> None:
    @dg.region(host_args=("n",))
    def times_n(x: torch.Tensor, *, n: int) -> torch.Tensor:
        return x * n

    def turn(x: torch.Tensor, **host: Any) -> torch.Tensor:
        if case == "random":
            return x + torch.rand(4, 8)
        try:
            return times_n(x, **host)
        except dg.CaptureError:
            if case == "region":
                raise
            return x

    def fn(x: torch.Tensor, times: torch.Tensor, *, n: int) -> torch.Tensor:
        return summed(x, times, lambda x: turn(x, n=n))

    x, times = noise(), torch.tensor([2])
    pool = be.make_pool()
    pool.used = True  # others were captured, so that the outputs are moved
    with dg.capture(fn, x, times, backend=be, host_args={"n": 2}, pool=pool, warmup=1) as cap:
        assert cap.stats()[f"loops_unrolled_{'failed' if case == 'random' else 'region'}"] == 1
        assert "loops" not in cap.stats()
        for n in (2, 3):
            be.set_rng_state(rng := be.get_rng_state())
            got = cap.replay(n=n).clone()
            be.set_rng_state(rng)
            assert torch.equal(got, fn(x, times, n=n))
