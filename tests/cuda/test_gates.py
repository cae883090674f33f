"""Gates on CUDA: the operations of graphs and openers, over a driver in Python and on a device."""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import c_uint32
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import devgraph as dg
from devgraph.api.torchlike.gates import CAPACITY
from devgraph.api.torchlike.node_calls import RuntimeCallError
from devgraph.cuda.gates import DeviceGates, MemOp, NodeParams

COMPUTE, OPENER = 11, 900
"""The launch stream, and the first stream that a channel makes."""


class Driver:
    """The driver's calls for gates, on host memory; waits that do not hold are put off."""

    def __init__(self) -> None:
        self.capturing = False
        self.nodes: list[list[Any]] = []
        self.put_off: list[list[Any]] = []
        self.refuses_parameters = False
        self.destroyed: list[int] = []
        self._handles = OPENER

    def context(self) -> tuple[int]:
        return (77,)

    def make(self, name: str, flags: int) -> int:
        assert (name, flags) == ("StreamCreate", 1)
        self._handles += 1
        return self._handles - 1

    def capture_of(self, stream: int) -> Any:
        return (5, 6, [len(self.nodes)] if self.nodes else []) if self.capturing else None

    def call(self, name: str, *args: Any) -> None:
        getattr(self, name)(*args)

    def StreamBatchMemOp(self, stream: int, count: int, address: int, flags: int) -> None:
        ops = _ops(address, count)
        if stream == COMPUTE and self.capturing:
            self.nodes.append(ops)
        else:
            self.put_off.append(ops)
            self.serve()

    def GraphBatchMemOpNodeSetParams(self, node: int, address: int) -> None:
        if self.refuses_parameters:
            raise RuntimeCallError("refused", 1)
        params = NodeParams.from_address(address)
        assert params.context == 77 and node == len(self.nodes)
        self.nodes[-1] = _ops(params.ops, params.count)

    def MemsetD32Async(self, address: int, value: int, count: int, stream: int) -> None:
        (c_uint32 * count).from_address(address)[:] = [value] * count

    def StreamDestroy(self, stream: int) -> None:
        self.destroyed.append(stream)

    def serve(self) -> None:
        """Run the batches that were put off as far as their waits hold."""
        for ops in self.put_off:
            while ops and _done(ops[0]):
                del ops[0]
        self.put_off = [ops for ops in self.put_off if ops]

    def replay(self) -> None:
        for ops in self.nodes:
            for op in ops:
                assert _done(op), "a closed gate"


def _ops(address: int, count: int) -> list[Any]:
    array = (MemOp * count).from_address(address)
    return [MemOp.from_buffer_copy(op) for op in array]


def _done(op: Any) -> bool:
    """Do an operation; return False for a wait that does not hold."""
    word = c_uint32.from_address(op.address)
    if op.operation == 2:
        word.value = op.value
        return True
    if op.flags == 1:
        return bool(word.value == op.value)
    return (word.value - op.value) & 0xFFFFFFFF < 2**31


class Stream:
    def __init__(self, handle: int = COMPUTE, device: Any = None) -> None:
        self.cuda_stream = handle
        self.waited: list[Any] = []

    def synchronize(self) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        self.waited.append(event)

    wait_stream = wait_event


class Event:
    over = False
    queries = 0

    def record(self, stream: Any) -> None:
        self.stream = stream

    def query(self) -> bool:
        Event.queries += 1
        return self.over


@pytest.fixture
def driver() -> Driver:
    return Driver()


@pytest.fixture
def channel(driver: Driver) -> DeviceGates:
    compute = Stream()
    namespace = SimpleNamespace(
        is_current_stream_capturing=lambda: driver.capturing,
        current_stream=lambda device: compute,
        ExternalStream=Stream,
        Event=Event,
    )
    backend: Any = SimpleNamespace(
        device=torch.device("cpu"),
        driver=driver,
        namespace=namespace,
        keeps_memory=False,
        pin=lambda tensor: tensor,
        hold=lambda tensor, stream: None,
        elsewhere=lambda: False,
        on_device=lambda: torch.autograd.graph.save_on_cpu(),
        current_stream_id=lambda: COMPUTE,
    )
    return DeviceGates(backend)


def record(driver: Driver, channel: DeviceGates) -> None:
    """Record layers that wait, with a signal before all waits but the first."""
    driver.capturing = True
    for layer in range(3):
        if layer:
            channel.signal(layer - 1, True)
        channel.wait(layer, 1.0, True)
        driver.nodes.append([])  # a kernel
    driver.capturing = False


def test_wait_shares_a_node_with_the_signal_before(driver, channel):
    record(driver, channel)
    kinds = [[(op.operation, op.value) for op in ops] for ops in driver.nodes]
    assert kinds == [[(1, 1)], [], *[[(2, 1), (1, 1)], []] * 2]


def test_driver_that_keeps_its_parameters_gets_nodes_of_their_own(driver, channel):
    driver.refuses_parameters = True
    record(driver, channel)
    assert [len(ops) for ops in driver.nodes] == [1, 0, 1, 1, 0, 1, 1, 0]


def test_gates_open_before_their_launch_pass_once(driver, channel):
    record(driver, channel)
    channel.begin(1, [0, 1, 2], True)
    assert not channel.signalled(0, 1)
    driver.replay()
    assert channel.signalled(0, 1) and not channel.signalled(2, 1) and channel.finished() == 0
    channel.end(1)
    assert channel.signalled(2, 1) and channel.finished() == 1
    channel.begin(2, [], True)
    with pytest.raises(AssertionError, match="closed gate"):
        driver.replay()


def test_open_of_a_later_launch_waits_for_its_begin(driver, channel):
    record(driver, channel)
    channel.begin(1, [0, 1, 2], True)
    channel.open(2, [0, 1, 2], None)
    assert driver.put_off
    driver.replay()
    channel.end(1)
    channel.begin(2, [], True)
    driver.serve()
    assert not driver.put_off
    driver.replay()


def test_numbers_of_launches_wrap(driver, channel):
    for launch in range(2**32 - 2, 2**32 + 2):
        channel.begin(launch, [], False)
        channel.open(launch, [0], None)
        assert not driver.put_off
        channel.end(launch)
        assert channel.finished() == launch


def test_stream_of_open_after_has_an_opener_of_its_own(driver, channel):
    stream = Stream(40)
    fence = channel.after(stream)
    channel.begin(1, [], False)
    channel.open(1, [0], fence)
    channel.open(1, [1], None)
    assert len({opener.cuda_stream for opener in channel._openers.values()}) == 2
    assert channel._openers[40].waited == [fence.event]
    assert fence.event.stream is stream


def test_stream_opens_a_gate_of_a_launch_that_has_begun(driver, channel):
    assert channel.behind(1, 0, 40) is None
    channel.begin(1, [], False)
    record(driver, channel)
    assert channel.behind(2, 0, 40) is None
    fence, queue = channel.behind(1, 0, channel.source(Stream(40)))
    assert not fence()
    channel.open(1, [0], fence)
    assert channel._openers == {None: channel._openers[None]}
    with pytest.raises(AssertionError, match="closed gate"):
        driver.replay()
    channel.clear()
    with pytest.raises(dg.GateError, match="has not finished"):  # it would open a later launch
        channel.begin(2, [], False)
    queue()
    assert fence()
    channel.open(1, [1, 2], None)
    driver.replay()
    channel.begin(2, [], False)
    assert channel.behind(2, 0, 40) is not None


def test_no_stream_is_made_while_a_launch_waits(driver, channel):
    """The driver may let a new stream wait for the launch whose gate it is to open."""
    made, make = [], driver.make
    driver.make = lambda *args: made.append(channel.finished() >= channel._launched) or make(*args)
    for launch in (1, 2):
        channel.begin(launch, [], False)
        for place, stream in enumerate((Stream(10 * launch), Stream(10 * launch + 1))):
            channel.open(launch, [place], channel.after(stream))
        channel.open(launch, [2], None)
        channel.end(launch)
    assert len(channel._openers) == 5
    channel.begin(3, [], False)
    fences = [channel.after(Stream(stream)) for stream in (30, 31, 32)]  # more than are ready
    for place, fence in enumerate(fences):
        channel.open(3, [place], fence)
    assert made == [True] * 5
    assert channel._openers[31].waited == [fences[1].event, fences[2].event]
    assert 32 not in channel._openers


def test_opens_behind_one_stream_ask_for_its_last_work_alone(driver, channel):
    fences = [channel.after(Stream(40)) for _ in range(36)]
    channel.begin(1, [], False)
    Event.queries = 0
    for place, fence in enumerate(reversed(fences)):  # issued in another order than recorded
        channel.open(1, [place], fence)
    assert Event.queries == 0
    channel.clear()
    for fence in fences[:-1]:
        fence.event.over = True
    with pytest.raises(dg.GateError, match="has not finished"):
        channel.begin(2, [], False)
    fences[-1].event.over = True
    channel.begin(2, [], False)


def test_unused_opens_are_taken_back_before_the_next_launch(driver, channel):
    fence = channel.after(Stream(40))
    channel.begin(1, [0], False)
    channel.open(1, [1], fence)
    channel.clear()
    with pytest.raises(dg.GateError, match="has not finished"):
        channel.begin(2, [2], False)
    fence.event.over = True
    channel.begin(2, [2], False)
    assert channel._flags[:3].tolist() == [0, 0, 1]


def test_streams_end_with_the_channel(driver, channel):
    channel.begin(1, [], False)
    channel.open(1, [0], None)
    channel.end(1)
    channel.__del__()
    assert sorted(driver.destroyed) == [OPENER, OPENER + 1, OPENER + 2]


def test_first_gate_in_a_capture_without_warm_up_is_refused(driver, channel):
    driver.capturing = True
    with pytest.raises(dg.CaptureError, match="warmup=1"):
        DeviceGates(channel._backend)
    with pytest.raises(dg.CaptureError, match="more than"):
        channel.wait(CAPACITY, 1.0, True)


@pytest.fixture
def device() -> Iterator[Any]:
    try:
        backend = dg.get_backend("cuda")
    except dg.BackendError as error:
        pytest.skip(f"needs a CUDA device ({error})")
    yield backend
    backend.synchronize()


@pytest.mark.cuda
def test_signal_and_wait_are_one_node_on_a_device(device):
    def step(x):
        for layer in range(8):
            dg.wait(str(layer))
            x = x + 1
            dg.signal(str(layer))
        return x

    x = torch.zeros(4, device=device.device)
    captured = dg.capture(step, x, backend=device)
    assert captured.info().nodes == 8 + 9


@pytest.mark.cuda
def test_hundred_replays_ahead_of_their_gates_on_a_device(device):
    def step(x):
        dg.wait("a")
        return x.add_(1)

    x = torch.zeros(4, device=device.device)
    captured = dg.capture(step, x, backend=device, gate_timeout=20.0)
    for _ in range(100):
        captured.replay()
    for epoch in range(1, 101):
        captured.gates["a"].open(epoch=epoch)
    device.synchronize()
    assert x.tolist() == [100.0] * 4
