"""Updates of a vendor whose graph and stream objects have names of their own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import attrs
import pytest
import torch

import devgraph as dg
from devgraph.api.backend import Backend
from devgraph.api.capabilities import Capabilities
from devgraph.api.torchlike.node_graph import NodeBackend
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


class AcmeGraph:
    """A graph that is made launchable by ``compile`` and has its handles in a dictionary."""

    def __init__(self, device: AcmeDevice, *, editable: bool = False) -> None:
        self._inner = device.CUDAGraph(keep_graph=editable)
        self.capture_begin, self.capture_end = self._inner.capture_begin, self._inner.capture_end
        self.replay, self.reset = self._inner.replay, self._inner.reset

    def compile(self) -> None:
        self._inner.instantiate()

    @property
    def handles(self) -> dict[str, int]:
        inner = self._inner
        return {"plan": inner.raw_cuda_graph(), "program": inner.raw_cuda_graph_exec()}


class AcmeDevice(Device):
    """The namespace ``torch.acme``."""

    def AcmeGraph(self, **options: bool) -> AcmeGraph:
        return AcmeGraph(self, **options)

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


class AcmeBackend(NodeBackend):
    """A backend over that namespace, with the fake's driver."""

    name = "acme"
    device_type = "acme"
    graph_class_name = "AcmeGraph"
    stream_handle_name = "address"
    capabilities = Capabilities(region_update=True, rng=True, node_counts=True)

    def __init__(self, fake: Fake) -> None:
        Backend.__init__(self)
        self.namespace = AcmeDevice(fake)
        self._device = torch.device("cpu")
        self._capture_stream = None
        self.current_stream_id = self._make_current_stream_id()
        self.use_runtime(Runtime(fake.path))

    def make_kept_graph(self) -> Any:
        return self.namespace.AcmeGraph(editable=True)

    def instantiate(self, native: Any) -> None:
        native.compile()

    def raw_graph(self, native: Any) -> int:
        return int(native.handles["plan"])

    def raw_executable(self, native: Any) -> int:
        return int(native.handles["program"])

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


def test_executables_of_torch_stay_and_count_and_those_of_recordings_go(be: AcmeBackend) -> None:
    x, pool = noise(), be.make_pool()
    with dg.capture(step, x, backend=be, host_args={"n": 2}, budget=KEEP_ALL, pool=pool) as cap:
        for n in (2, 3, 5, 3, 5):
            check(cap, step, x, n=n)
        own = cap.segments[0].info().bytes
        before = pool.recordings.residency()
        assert before.made == 3 and before.bytes > 3 * own > 0
        pool.recordings.limit(own)
        found = pool.recordings.residency()
        assert own < found.bytes < 3 * own and found.evicted >= 1
        for n in (2, 3, 5, 3, 5):
            check(cap, step, x, n=n)
    assert pool.recordings.bytes == 0


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
