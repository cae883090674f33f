"""The simulated driver behaves as the real one is documented and reported to behave.

These tests are about the simulation: what it refuses, what it orders, what it injects and counts.
They use torch_npu's own interface, so that what they show is true of the unmodified binary.
"""

from __future__ import annotations

import gc
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.sim.ascend import Driver

pytest_plugins = ["tests.sim.ascend.plugin"]


def capture(body: Callable[[], Any], *, mode: str = "thread_local", stream: Any = None) -> Any:
    """Capture ``body`` on a stream of its own and return the graph."""
    graph = torch.npu.NPUGraph()
    torch.npu.synchronize()
    with torch.npu.stream(stream or torch.npu.Stream()):
        graph.capture_begin(capture_error_mode=mode)
        try:
            body()
        finally:
            graph.capture_end()
    return graph


class Region:
    """A graph of ``out = x + number; out *= 2`` whose number is a task group, and its update."""

    def __init__(self, driver: Driver, *, stream_type: str = "SyncLaunchStream") -> None:
        self.x = torch.ones(4, device="npu")
        self.out = torch.zeros(4, device="npu")
        self.stream = getattr(torch.npu, stream_type)()
        self.event = torch.npu.ExternalEvent()
        if not self.event.npu_event:
            # An event that is a flag exists only from its first record on; waiting for one that
            # does not exist is ignored.
            self.event.record(self.stream)
            self.event.reset(self.stream)
        self.graph = capture(self._body)

    def _body(self) -> None:
        stream = torch.npu.current_stream()
        self.event.wait(stream)
        self.event.reset(stream)
        torch.npu.graph_task_group_begin(stream)
        torch.add(self.x, 100.0, out=self.out)
        self.handle = torch.npu.graph_task_group_end(stream)
        self.out.mul_(2)

    def update(self, work: Callable[[], Any]) -> None:
        with torch.npu.stream(self.stream):
            torch.npu.graph_task_update_begin(self.stream, self.handle)
            try:
                work()
            finally:
                torch.npu.graph_task_update_end(self.stream)
            self.event.record(self.stream)

    def set(self, number: float) -> None:
        self.update(lambda: torch.add(self.x, number, out=self.out))

    def value(self) -> float:
        torch.npu.synchronize()
        return float(self.out[0].item())


# Capture and replay ---------------------------------------------------------------------------


def test_capture_does_not_execute_and_replays_do(driver: Driver) -> None:
    number = torch.zeros(2, device="npu")
    graph = capture(lambda: number.add_(1))
    torch.npu.synchronize()
    assert number.tolist() == [0, 0]
    with driver.counting() as moved:
        for _ in range(3):
            graph.replay()
        torch.npu.synchronize()
    assert number.tolist() == [3, 3]
    assert moved["replays"] == 3
    assert moved["kernels"] == 3


def test_fork_and_join_inside_a_capture_are_ordered(driver: Driver) -> None:
    first, second = torch.zeros(2, device="npu"), torch.zeros(2, device="npu")
    side = torch.npu.Stream()

    def body() -> None:
        fork, join = torch.npu.Event(), torch.npu.Event()
        first.add_(1)
        fork.record()
        with torch.npu.stream(side):
            fork.wait()
            second.copy_(first)
            second.mul_(10)
            join.record()
        join.wait()
        first.add_(second)

    graph = capture(body)
    held = driver.graphs()[-1]["streams"]
    graph.replay()
    assert first.tolist() == [11, 11]
    assert held == 2  # the side stream costs a hardware stream as well


@pytest.mark.parametrize("late", [False, True])
def test_unjoined_side_stream_is_refused_at_the_end(driver: Driver, late: bool) -> None:
    """``late``: the side stream works on after the event that the origin stream waits for."""
    number, side = torch.zeros(2, device="npu"), torch.npu.Stream()

    def body() -> None:
        fork, join = torch.npu.Event(), torch.npu.Event()
        number.add_(1)
        fork.record()
        with torch.npu.stream(side):
            fork.wait()
            number.add_(1)
            if late:
                join.record()
                number.add_(1)
        if late:
            join.wait()

    with pytest.raises(RuntimeError, match="107025"):
        capture(body)
    assert (number + 1).tolist() == [1, 1]  # nothing ran, and the device works


@pytest.mark.parametrize(
    ("what", "code"),
    [
        (lambda x: torch.npu.current_stream().synchronize(), "107027"),
        (lambda x: x[0].item(), "107027"),
        (lambda x: x.nonzero(), "107027"),
        (lambda x: torch.npu.synchronize(), "107030"),
        (lambda x: torch.ones(3).to("npu"), "107030"),
    ],
    ids=["stream-sync", "item", "nonzero", "device-sync", "host-copy"],
)
def test_host_reads_in_a_capture_are_refused(
    driver: Driver, what: Callable[[torch.Tensor], Any], code: str
) -> None:
    x = torch.ones(4, device="npu")
    seen: list[str] = []

    def body() -> None:
        try:
            what(x + 1)
        except RuntimeError as error:
            seen.append(str(error))
            raise

    with pytest.raises(RuntimeError, match="endCaptureErr"):
        capture(body)
    assert code in seen[0]
    graph = capture(lambda: x.add_(1))  # the next capture works
    graph.replay()
    assert x.tolist() == [2, 2, 2, 2]


@pytest.mark.parametrize(("mode", "allowed"), [("thread_local", True), ("global", False)])
def test_other_thread_may_copy_during_a_capture_by_mode(
    driver: Driver, mode: str, allowed: bool
) -> None:
    x = torch.ones(4, device="npu")
    problems: list[str] = []

    def other() -> None:
        try:
            torch.zeros(2).to("npu").tolist()
        except RuntimeError as error:
            problems.append(str(error))

    def body() -> None:
        x.add_(1)
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    if allowed:
        capture(body, mode=mode)
        assert not problems
    else:
        with pytest.raises(RuntimeError, match="endCaptureErr"):
            capture(body, mode=mode)
        assert "107030" in problems[0]


def test_default_stream_and_second_capture_are_refused(driver: Driver) -> None:
    with pytest.raises(RuntimeError, match="non-default stream"):
        torch.npu.NPUGraph().capture_begin()
    x = torch.ones(2, device="npu")
    graph = capture(lambda: x.add_(1))
    with pytest.raises(RuntimeError, match="already owns"), torch.npu.stream(torch.npu.Stream()):
        graph.capture_begin()


def test_random_numbers_advance_with_every_replay_and_repeat_from_a_seed(driver: Driver) -> None:
    out = torch.zeros(4, device="npu")
    graph = capture(lambda: out.normal_())

    def draw() -> list[list[float]]:
        torch.npu.manual_seed(11)
        drawn = []
        for _ in range(3):
            graph.replay()
            drawn.append(out.tolist())
        return drawn

    first = draw()
    assert first[0] != first[1] != first[2]
    assert draw() == first


def test_replay_after_its_memory_was_freed_is_a_device_error(
    driver: Driver, run_python: Any
) -> None:
    said = run_python(
        """
from tests.sim.ascend import activate
driver = activate()
import torch
x = torch.zeros(1 << 22, device="npu")
graph = torch.npu.NPUGraph()
torch.npu.synchronize()
with torch.npu.stream(torch.npu.Stream()):
    graph.capture_begin()
    x.add_(1)
    graph.capture_end()
del x
torch.npu.empty_cache()
graph.replay()
try:
    torch.npu.synchronize()
except RuntimeError as error:
    print("not device memory" in str(error), "507015" in str(error))
import os; os._exit(0)
"""
    )
    assert said.split()[-2:] == ["True", "True"]


# Task groups ----------------------------------------------------------------------------------


def require_blocked(driver: Driver) -> None:
    """Fail unless the device waits: a synchronize that waits for a short time only gives up."""
    with driver.setting(sync_timeout_ms=200), pytest.raises(RuntimeError, match="507046"):
        torch.npu.synchronize()


@pytest.mark.parametrize("stream_type", ["Stream", "SyncLaunchStream"])
@pytest.mark.parametrize("update_first", [False, True])
def test_task_update_reaches_the_replay_in_either_order(
    driver: Driver, stream_type: str, update_first: bool
) -> None:
    region = Region(driver, stream_type=stream_type)
    got = []
    for number in (1.0, 4.0, 2.0):
        if update_first:
            region.set(number)
        region.graph.replay()
        if not update_first:
            region.set(number)
        got.append(region.value())
    assert got == [4.0, 10.0, 6.0]


def test_replay_without_update_blocks_until_the_update_comes(driver: Driver) -> None:
    region = Region(driver)
    region.graph.replay()
    require_blocked(driver)
    region.set(2.0)
    assert region.value() == 6.0


def test_two_updates_are_one_credit(driver: Driver) -> None:
    region = Region(driver)
    region.set(1.0)
    region.set(2.0)
    torch.npu.synchronize()
    region.graph.replay()
    assert region.value() == 6.0
    region.graph.replay()
    require_blocked(driver)
    region.set(3.0)
    assert region.value() == 8.0


def test_held_updates_and_replays_are_done_when_they_are_let_go(driver: Driver) -> None:
    region = Region(driver)
    region.set(1.0)
    region.graph.replay()
    torch.npu.synchronize()
    for held, counter in (("hold_updates", "task_updates"), ("hold_replays", "replays")):
        before = driver.counter(counter)
        with driver.setting(**{held: 1}):
            region.graph.replay()
            region.set(5.0)
            require_blocked(driver)
            assert driver.counter(counter) == before
        assert region.value() == 12.0
        region.out.zero_()


def test_lost_event_record_blocks_the_replay(driver: Driver) -> None:
    region = Region(driver)
    driver.set(lose_record_in=1)
    region.graph.replay()
    region.set(1.0)
    require_blocked(driver)
    assert any("record was lost" in line for line in driver.report())
    region.set(3.0)
    assert region.value() == 8.0


@pytest.mark.parametrize(
    ("work", "why"),
    [
        (lambda region: torch.mul(region.x, 2.0, out=region.out), "Muls where Adds"),
        (lambda region: None, "0 tasks where 1"),
        (lambda region: (region.out.zero_(), region.out.zero_()), "InplaceZero where Adds"),
    ],
    ids=["other-kernel", "fewer", "more"],
)
def test_update_with_other_kernels_is_refused_and_the_graph_still_works(
    driver: Driver, work: Callable[[Region], Any], why: str
) -> None:
    region = Region(driver)
    with pytest.raises(RuntimeError, match="107040") as caught:
        region.update(lambda: work(region))
    chain = f"{caught.value} {caught.value.__context__}"
    assert why in chain
    region.set(2.0)
    region.graph.replay()
    assert region.value() == 6.0


def test_update_of_a_destroyed_graph_is_refused(driver: Driver) -> None:
    region = Region(driver)
    region.graph.reset()
    with pytest.raises(RuntimeError, match="107017"):
        torch.npu.graph_task_update_begin(region.stream, region.handle)


def test_flag_events_of_older_drivers_order_updates_as_well(
    run_python: Any, driver: Driver
) -> None:
    said = run_python(
        """
from tests.sim.ascend import activate
driver = activate(flag_events=True)
from tests.sim.ascend.test_driver import Region
import torch
region = Region(driver)
got = []
for number in (1.0, 4.0):
    region.graph.replay()
    region.set(number)
    got.append(region.value())
region.graph.replay()
try:
    with driver.setting(sync_timeout_ms=300):
        torch.npu.synchronize()
    got.append("not blocked")
except RuntimeError:
    got.append("blocked")
region.set(0.0)
got.append(region.value())
print(got, driver.counter("value_waits"))
import os; os._exit(0)
"""
    )
    assert "[4.0, 10.0, 'blocked', 2.0] 0" in said


# Faults ---------------------------------------------------------------------------------------


def test_kernel_exception_is_sticky_and_named(driver: Driver) -> None:
    x = torch.ones(4, device="npu")
    torch.npu.synchronize()
    driver.set(fail_kernel_in=2)
    x.add_(1)
    x.mul_(3)
    x.add_(1)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="507015") as caught:
            torch.npu.synchronize()
        assert "InplaceMuls: injected failure" in str(caught.value)
    driver.recover()
    assert x.tolist() == [2, 2, 2, 2]  # what came after the failure was not computed


def test_failed_device_releases_what_waits_on_it(driver: Driver) -> None:
    region = Region(driver)
    region.graph.replay()
    driver.fail_device(text="lost heartbeat", code=507010)
    with pytest.raises(RuntimeError, match="507010"):
        torch.npu.synchronize()
    driver.recover()
    assert (region.x + 1).tolist() == [2, 2, 2, 2]


@pytest.mark.parametrize(
    ("code", "text"), [(207008, "no stream resource"), (207005, "Alloc sq cq fail")]
)
def test_capture_beyond_the_hardware_streams_is_refused(
    driver: Driver, code: int, text: str
) -> None:
    x = torch.ones(4, device="npu")
    stream = torch.npu.Stream()
    torch.npu.synchronize()
    gc.collect()  # graphs of other tests hold streams until they are collected
    held = driver.counter("hardware_streams")
    driver.set(streams=held + 2, fail_stream_code=code)
    graphs = [capture(lambda: x.add_(1), stream=stream) for _ in range(2)]
    with pytest.raises(RuntimeError, match=str(code)) as caught:
        capture(lambda: x.add_(1), stream=stream)
    assert text in f"{caught.value} {caught.value.__context__}"
    assert driver.counter("hardware_streams") == held + 2
    graphs.pop().reset()  # a destroyed graph gives its stream back
    assert driver.counter("hardware_streams") == held + 1
    graphs.append(capture(lambda: x.add_(1), stream=stream))
    for graph in graphs:
        graph.replay()
    assert x.tolist() == [3, 3, 3, 3]


def test_nth_stream_and_nth_capture_fail_once(driver: Driver) -> None:
    x = torch.ones(4, device="npu")
    stream = torch.npu.Stream()
    driver.set(fail_stream_in=2)
    capture(lambda: x.add_(1), stream=stream)
    with pytest.raises(RuntimeError, match="207008"):
        capture(lambda: x.add_(1), stream=stream)
    driver.set(fail_capture_in=1, fail_capture_code=107032)
    with pytest.raises(RuntimeError, match="107032"):
        capture(lambda: x.add_(1), stream=stream)
    driver.set(fail_capture_end_in=1, fail_capture_code=507000)
    with pytest.raises(RuntimeError, match="507000"):
        capture(lambda: x.add_(1), stream=stream)
    capture(lambda: x.add_(1), stream=stream).replay()
    assert x.tolist() == [2, 2, 2, 2]


def test_exhausted_memory_is_torchs_out_of_memory_error(driver: Driver) -> None:
    torch.npu.empty_cache()
    with driver.setting(memory_mb=64), pytest.raises(torch.OutOfMemoryError):
        torch.empty(100 << 20, device="npu")
    assert torch.empty(100 << 20, device="npu").numel() == 100 << 20


def test_refused_allocation_is_tried_again_after_the_cache_was_given_back(driver: Driver) -> None:
    torch.npu.empty_cache()
    kept = torch.empty(30 << 20, device="npu", dtype=torch.int8)
    del kept  # now in torch's cache
    driver.set(fail_malloc_in=1)
    with driver.counting() as moved:
        assert torch.empty(50 << 20, device="npu", dtype=torch.int8).numel() == 50 << 20
    assert driver.settings()["fail_malloc_in"] == 0
    assert moved["mallocs"] == 1


# What a test can see --------------------------------------------------------------------------


def test_counters_follow_streams_events_and_graphs(driver: Driver) -> None:
    gc.collect()  # graphs of other tests would go away in between
    region = Region(driver)
    with driver.counting() as moved:
        region.set(1.0)
        region.graph.replay()
        region.value()
        event = torch.npu.Event()
        event.record()
        event.synchronize()
    assert moved["group_updates"] == moved["task_updates"] == 1
    assert moved["replays"] == moved["value_waits"] == 1
    assert moved["kernels"] >= 2
    assert moved["events_created"] == 1
    graphs = driver.graphs()
    assert graphs[-1]["task_groups"] == 1
    assert graphs[-1]["replays"] == 1
    region.graph.reset()
    assert len(driver.graphs()) == len(graphs) - 1


def test_setting_of_an_unknown_name_lists_what_exists(driver: Driver) -> None:
    with pytest.raises(ValueError, match="fail_stream_in"):
        driver.set(no_such_fault=1)


def test_missing_functions_are_listed_and_named_when_used(driver: Driver, run_python: Any) -> None:
    missing = driver.missing()
    assert "aclnnNLLLoss" in missing
    assert "aclnnAdd" not in missing
    said = run_python(
        """
from tests.sim.ascend import activate
driver = activate()
import torch, os
try:
    torch.nn.functional.cross_entropy(torch.ones(3, 4).npu(), torch.tensor([0, 1, 2]).npu())
except RuntimeError:
    pass
print([line for line in driver.report() if "NLLLoss" in line or "aclCreateTensorDesc" in line])
os._exit(0)
""",
        TASK_QUEUE_ENABLE="0",
    )
    assert "missing: graph operator NLLLoss" in said
    assert "stub: aclCreateTensorDesc" in said


def test_trace_and_log_tell_what_is_going_on(run_python: Any, driver: Driver) -> None:
    said = run_python(
        """
import os
os.dup2(1, 2)
from tests.sim.ascend import activate
activate()
import torch
torch.ones(4, device="npu") + 1
torch.npu.synchronize()
os._exit(0)
""",
        FAKEACL_TRACE="1",
        FAKEACL_LOG_LEVEL="1",
        ASCEND_GLOBAL_LOG_LEVEL="1",
    )
    assert "Adds" in said  # each task as it runs
    assert "[acl 1] NPUQueue.cpp" in said
    assert "[acl 0]" not in said


def test_graph_destroyed_while_it_runs_is_counted(driver: Driver) -> None:
    x = torch.zeros(2, device="npu")
    graphs = [capture(lambda: x.add_(1)) for _ in range(2)]
    with driver.counting() as moved:
        with driver.setting(hold_replays=1):
            graphs[0].replay()
            graphs[0].reset()
        torch.npu.synchronize()
        graphs[1].replay()
        torch.npu.synchronize()
        graphs[1].reset()
    assert x.tolist() == [2, 2]
    assert moved["graphs_destroyed"] == 2
    assert moved["graphs_destroyed_in_flight"] == 1


def test_environment_gives_devices_and_settings(run_python: Any, driver: Driver) -> None:
    said = run_python(
        """
from tests.sim.ascend import activate
driver = activate()
import torch, os, json
torch.npu.set_device(1)
x = torch.ones(2, device="npu:1")
graph = torch.npu.NPUGraph()
torch.npu.synchronize()
with torch.npu.stream(torch.npu.Stream()):
    graph.capture_begin()
    x.add_(1)
    graph.capture_end()
graph.replay()
y = torch.ones(2, device="npu:0") + 1
print(json.dumps([torch.npu.device_count(), x.tolist(), y.tolist(), driver.graphs()[0]["device"],
                  driver.settings()["streams"]]))
os._exit(0)
""",
        FAKEACL_DEVICES="2",
        FAKEACL_STREAMS="512",
    )
    assert json.loads(said.splitlines()[-1]) == [2, [2, 2], [2, 2], 1, 512]


def test_failed_queued_operator_silences_the_device_for_good(
    run_python: Any, driver: Driver
) -> None:
    """The reason why updates are issued on a stream without torch_npu's task queue.

    The queue's thread ends with its first failing operator; torch_npu reports that once, and from
    then on drops every launch without a word.
    """
    said = run_python(
        """
from tests.sim.ascend import activate
driver = activate()
from tests.sim.ascend.test_driver import Region
import torch, os
region = Region(driver, stream_type="Stream")
try:
    region.update(lambda: torch.mul(region.x, 2.0, out=region.out))
except RuntimeError as error:
    print("once", "aclnnMuls" in str(error))
y = torch.ones(2, device="npu") + 1
torch.npu.synchronize()
print("silent", y.tolist() != [2, 2])
os._exit(0)
"""
    )
    assert "once True" in said
    assert "silent True" in said
