"""What a device does for every graph: whose turn it is, garbage in captures, its loss."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import attrs
import pytest
import torch

import devgraph as dg
from devgraph.api.device import require_alive
from devgraph.api.process import collector
from devgraph.cpu.backend import CpuBackend
from devgraph.testing.conformance.support import Kit
from devgraph.testing.conformance.test_concurrency import PATIENCE


class Alone(CpuBackend):
    """The CPU reference as a device on which nothing may run beside a capture."""

    capabilities = attrs.evolve(CpuBackend.capabilities, concurrent_threads=False)


def test_replays_of_every_pool_wait_for_a_capture_where_threads_may_not_mix():
    """FAULTS 16."""
    backend = Alone()
    x = torch.ones(4)
    captured = dg.capture(lambda x: x * 3, x, backend=backend)
    graph = backend.make_graph()
    with backend.capture_context(graph):
        x + 1
    order: list[str] = []
    threads = [
        threading.Thread(target=lambda: (captured.replay(), order.append("captured"))),
        threading.Thread(target=lambda: (graph.replay(), order.append("graph"))),
    ]
    with backend.capture_context(backend.make_graph()):
        x + 2
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(0.1)
        order.append("the capture ended")
    for thread in threads:
        thread.join(60)
    assert order[0] == "the capture ended"
    assert sorted(order[1:]) == ["captured", "graph"]


def test_steps_with_breaks_are_captured_where_threads_may_not_mix():
    backend = Alone()

    @dg.no_graph
    def body(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    x = torch.ones(4)
    with dg.capture(lambda x: body(x + 1) + 1, x, policy="breakable", backend=backend) as captured:
        assert captured.prove().ok


class Strict(CpuBackend):
    """Calls a RuntimeError with the text "capturing" a read of device data, as a driver would."""

    def is_host_read(self, error: BaseException) -> bool:
        return "capturing" in str(error)


def _reads(x: torch.Tensor) -> float:
    if dg.is_capturing():
        raise RuntimeError("operation not permitted when stream is capturing\nand more lines")
    return 1.0


@pytest.mark.parametrize("policy", ["full", "breakable"])
def test_host_read_that_a_driver_refuses_names_the_line_and_suggests_a_mark(policy: str):
    """FAULTS 23."""
    with pytest.raises(dg.HostReadError) as caught:
        dg.capture(lambda x: x * _reads(x), torch.ones(4), policy=policy, backend=Strict())
    text = str(caught.value)
    assert f"{__file__}:" in text
    assert "in _reads: raise RuntimeError" in text
    assert "@dg.no_graph" in text
    assert text.endswith("(operation not permitted when stream is capturing)")
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_other_errors_of_a_driver_stay_what_they_are():
    """FAULTS 1."""
    failure = RuntimeError("out of something")

    def step(x: torch.Tensor) -> Any:
        raise failure

    with pytest.raises(RuntimeError) as caught:
        dg.capture(step, torch.ones(4), backend=Strict(), warmup=0)
    assert caught.value is failure


@pytest.fixture
def backend():
    return dg.get_backend("cpu")


def test_capture_may_begin_while_this_thread_holds_the_device(backend):
    x = torch.ones(4)
    with backend.exclusive(), collector.paused():
        cap = dg.capture(lambda x: x * 2, x, backend=backend)
    assert torch.equal(cap.replay(), x * 2)


def test_hold_of_another_thread_is_waited_for_and_named(backend, monkeypatch):
    monkeypatch.setattr(backend, "capture_lock_timeout", 0.05)
    refused = []

    def second():
        try:
            with backend.exclusive():
                pass
        except dg.CaptureBusyError as error:
            refused.append(str(error))

    with backend.exclusive():
        thread = threading.Thread(target=second)
        thread.start()
        thread.join(60)
    assert len(refused) == 1
    assert threading.current_thread().name in refused[0]


class Fragile(CpuBackend):
    """The CPU reference, on which an error with the text "sticky" loses the device."""

    def lost_reason(self, error: BaseException) -> str | None:
        return "illegal address" if "sticky" in str(error) else None


def _breaks(failing: list[str]) -> Any:
    @dg.no_graph
    def body(x: torch.Tensor) -> torch.Tensor:
        if failing:
            raise RuntimeError(failing[0])
        return x * 2

    return lambda x: body(x + 1) + 1


def test_every_later_call_fails_fast():
    """FAULTS 34."""
    backend = Fragile()
    failing: list[str] = []
    x = torch.ones(4)
    pool = backend.make_pool()
    captured = dg.capture(_breaks(failing), x, policy="breakable", backend=backend, pool=pool)
    whole = dg.capture(lambda x: x * 3, x, backend=backend, pool=pool)
    other = dg.capture(lambda x: x * 3, x, policy="breakable", backend=backend)
    other.replay()
    graph = backend.make_graph()
    with backend.capture_context(graph):
        y = x + 1
    runner = dg.DecodeRunner(
        lambda batch: batch.x * 2,
        [dg.InputSlot("x", ("tokens",), torch.float32, pad=dg.Pad.zero())],
        backend=backend,
        max_requests=2,
        progress=False,
    )
    runner.capture()
    runner.run({"x": x[:2]})
    graph.replay()

    failing.append("a sticky error")
    with pytest.raises(dg.DeviceLost, match="illegal address") as first:
        captured.replay()
    assert isinstance(first.value.__cause__, RuntimeError)
    failing.clear()
    y.zero_()
    with pytest.raises(dg.DeviceLost, match="start a new process"):
        graph.replay()
    assert torch.equal(y, torch.zeros(4))
    for call in (
        captured.replay,
        whole.replay,
        other.replay,
        graph.update,
        lambda: runner.run({"x": x[:2]}),
        lambda: runner.run({"x": x}),
        lambda: runner.can_run(requests=1),
        runner.capture,
        lambda: dg.capture(lambda x: x + 1, x, backend=backend),
        lambda: backend.capture_context(backend.make_graph()).__enter__(),
    ):
        with pytest.raises(dg.DeviceLost):
            call()
    for thing in (captured, whole, other, graph, runner):
        thing.close()
    graph.close()


def test_loss_during_a_capture_or_an_eager_step_is_found():
    """FAULTS 34."""
    backend = Fragile()
    with pytest.raises(dg.DeviceLost) as caught:
        dg.capture(_breaks(["sticky"]), torch.ones(4), policy="breakable", backend=backend)
    assert isinstance(caught.value.__cause__, RuntimeError)

    other = Fragile()

    def forward(batch: Any) -> torch.Tensor:
        raise RuntimeError("sticky")

    runner = dg.DecodeRunner(
        forward,
        [dg.InputSlot("x", ("tokens",), torch.float32, pad=dg.Pad.zero())],
        config="disabled",
        backend=other,
        max_requests=2,
    )
    for _ in range(2):
        with pytest.raises(dg.DeviceLost):
            runner.run({"x": torch.ones(2)})


def test_other_errors_lose_nothing():
    backend = Fragile()
    failing = ["harmless"]
    x = torch.ones(4)
    step = _breaks([])
    with pytest.raises(RuntimeError, match="harmless"):
        dg.capture(_breaks(failing), x, policy="breakable", backend=backend)
    with dg.capture(step, x, policy="breakable", backend=backend) as captured:
        assert captured.prove().ok
    require_alive(backend)


def test_capture_that_waits_too_long_names_the_capturing_thread(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FAULTS 17."""
    monkeypatch.setattr(kit.backend, "capture_lock_timeout", 0.05)
    x = kit.tensor(8)
    refused: list[BaseException] = []

    def second() -> None:
        try:
            with kit.backend.capture_context(kit.backend.make_graph()):
                x * 2
        except dg.CaptureBusyError as error:
            refused.append(error)

    graph = kit.backend.make_graph()
    owner = threading.current_thread().name
    with kit.backend.capture_context(graph):
        y = x + 1
        thread = threading.Thread(target=second)
        thread.start()
        thread.join(PATIENCE)
    assert len(refused) == 1
    assert owner in str(refused[0])
    graph.replay()
    kit.same(y, x + 1)
    monkeypatch.undo()
    second()
    assert len(refused) == 1


def test_two_threads_capture_one_after_the_other(kit: Kit) -> None:
    """FAULTS 17."""
    inside = threading.Lock()
    alone: list[bool] = []

    def work(index: int) -> None:
        x = kit.tensor(64, seed=index)

        def step(x: torch.Tensor) -> torch.Tensor:
            if not dg.is_capturing():
                return x * 2 + index
            alone.append(inside.acquire(blocking=False))
            y = x * 2 + index
            inside.release()
            return y

        for _ in range(5):
            captured = kit.capture(step, x)
            kit.check(captured, step, x, seed=index)

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(work, range(3)))
    assert alone == [True] * 15


def test_replay_of_another_thread_waits_unless_it_may_run_beside_a_capture(kit: Kit) -> None:
    """FAULTS 16."""
    waits = not kit.backend.capabilities.concurrent_threads
    x, other = kit.tensor(64), kit.tensor(64, seed=1)
    captured = kit.capture(lambda x: x * 3, other)
    over, replayed = threading.Event(), []

    def work() -> None:
        captured.replay()
        replayed.append(over.is_set())

    graph = kit.backend.make_graph()
    thread = threading.Thread(target=work)
    with kit.backend.capture_context(graph):
        y = x + 1
        thread.start()
        thread.join(0.2 if waits else PATIENCE)
        assert thread.is_alive() == waits
        over.set()
    thread.join(PATIENCE)
    assert replayed == [waits]
    graph.replay()
    kit.same((y, captured.outputs), (x + 1, other * 3))
