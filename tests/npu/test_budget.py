"""Hardware streams run out: what a runner keeps, what it says, and that it still serves."""

from __future__ import annotations

import gc
import logging
from typing import Any

import pytest
import torch

import devgraph as dg
from tests.sim.ascend import Driver

pytest_plugins = ["tests.sim.ascend.plugin"]

BUCKETS = list(range(1, 21))
STREAMS = 40


@dg.no_graph
def halve(x: torch.Tensor, out: torch.Tensor) -> None:
    torch.mul(x, 0.5, out=out)


def forward(batch: Any) -> torch.Tensor:
    """A step of three segments, each of which holds a hardware stream."""
    x = batch.x * 2
    out = torch.empty_like(x)
    halve(x, out)
    return (out + 1) * 3


def runner(backend: Any, policy: str, **options: Any) -> dg.DecodeRunner:
    config = dg.DeviceGraphConfig.from_json(
        f'{{"decode": {{"policy": "{policy}", "buckets": {BUCKETS}}}}}'
    ).decode
    return dg.DecodeRunner(
        forward if policy == "breakable" else lambda batch: batch.x * 3 + 3,
        [dg.InputSlot("x", ("tokens", 4), torch.float32, pad=dg.Pad.zero())],
        config=config,
        backend=backend,
        max_requests=BUCKETS[-1],
        progress=False,
        **options,
    )


@pytest.mark.parametrize("code", [207008, 207005], ids=["no-stream", "alloc-sq-cq-fail"])
def test_twenty_buckets_in_forty_streams_keep_a_subset_with_the_maximum_and_serve(
    driver: Driver, backend: Any, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    x = torch.ones(1, device="npu")
    with dg.capture(lambda v: v + 1, x, backend=backend):
        pass  # The streams that torch_npu itself takes once are taken.
    held = driver.counter("hardware_streams")
    driver.set(streams=held + STREAMS - 6, fail_stream_code=code)  # 34: 17 buckets of 2 segments
    with caplog.at_level(logging.WARNING), runner(backend, "breakable") as decode:
        decode.capture()
        stats = decode.stats()
        captured = [int(b.key) for b in stats.buckets if b.state == "captured"]
        assert BUCKETS[-1] in captured
        assert 10 <= len(captured) < len(BUCKETS)
        said = " ".join(record.getMessage() for record in caplog.records)
        assert "stream" in said
        dropped = sorted(set(BUCKETS) - set(captured))
        assert any(str(size) in said for size in dropped), said
        for requests in BUCKETS:
            data = torch.rand(requests, 4)
            got = decode.run({"x": data.npu()})
            backend.synchronize()
            assert torch.equal(got.cpu(), (data * 2 * 0.5 + 1) * 3)
        assert decode.stats().graph_steps >= len(captured)
        assert driver.counter("hardware_streams") <= held + STREAMS


def test_plan_is_shrunk_before_capture_where_the_limit_is_known(
    driver: Driver, backend: Any
) -> None:
    backend.stream_limit = STREAMS // 4
    with runner(backend, "full") as decode:
        decode.capture()
        captured = [int(b.key) for b in decode.stats().buckets if b.state == "captured"]
        assert BUCKETS[-1] in captured
        assert len(captured) <= STREAMS // 4
        got = decode.run({"x": torch.ones(20, 4, device="npu")})
        assert got.cpu().eq(6).all()


# Refusals and losses ----------------------------------------------------------------------------


def add_one(backend: Any, **options: Any) -> Any:
    return dg.capture(lambda v: v + 1, torch.ones(4, device="npu"), backend=backend, **options)


@pytest.mark.parametrize("of", [1, 2], ids=["keeper", "graph"])
@pytest.mark.parametrize("fault", ["fail_stream_in", "fail_capture_in", "fail_capture_end_in"])
def test_pool_is_usable_after_a_refusal_at_any_call_of_its_first_capture(
    driver: Driver, backend: Any, fault: str, of: int
) -> None:
    """FAULTS 3."""
    with add_one(backend):  # The streams that torch_npu itself takes once are taken.
        pass
    pool = backend.make_pool()
    driver.set(**{fault: of}, fail_capture_code=507000)
    with pytest.raises(dg.ResourceError if fault == "fail_stream_in" else RuntimeError) as caught:
        add_one(backend, pool=pool)
    assert str(207008 if fault == "fail_stream_in" else 507000) in str(caught.value)
    assert driver.settings()[fault] == 0
    with add_one(backend, pool=pool) as first, add_one(backend, pool=pool) as second:
        assert first.replay().tolist() == second.replay().tolist() == [2, 2, 2, 2]
        assert torch.rand(2, device="npu").lt(1).all()  # the generator is not left capturing


def test_graphs_of_a_pool_stay_right_when_a_later_capture_is_refused(
    driver: Driver, backend: Any
) -> None:
    pool = backend.make_pool()
    with add_one(backend, pool=pool) as kept:
        for _ in range(3):
            driver.set(fail_stream_in=1)
            with pytest.raises(dg.ResourceError, match="no stream"):
                add_one(backend, pool=pool)
            with add_one(backend, pool=pool) as later:
                assert later.replay().tolist() == kept.replay().tolist() == [2, 2, 2, 2]


def test_stream_that_the_body_is_refused_loses_the_device_and_not_the_process(
    driver: Driver, run_python: Any
) -> None:
    """The wait is queued, and torch_npu's launch thread ends with its first failure."""
    said = run_python(
        """
from tests.sim.ascend import activate
driver = activate()
import sys, torch
import devgraph as dg
backend, side = dg.get_backend("npu"), torch.npu.Stream()

def fork(x):
    driver.set(fail_stream_in=1)
    side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        y = x * 2
    torch.npu.current_stream().wait_stream(side)
    return y

try:
    dg.capture(fork, torch.ones(2, device="npu"), backend=backend, warmup=0)
except dg.DeviceLost as error:
    print("launch thread ended" in str(error))
sys.exit(0)
"""
    )
    assert said.split() == ["True"]


def test_first_stream_of_a_process_may_be_refused(driver: Driver, run_python: Any) -> None:
    said = run_python(
        """
from tests.sim.ascend import activate
driver = activate()
import torch, os
import devgraph as dg
from tests.npu.test_budget import add_one
backend, x = dg.get_backend("npu"), torch.ones(4, device="npu")  # torch_npu's own streams
for _ in range(3):
    driver.set(fail_stream_in=1)
    try:
        dg.capture(lambda v: v + 1, x, backend=backend)
    except dg.ResourceError as error:
        print("refused", "207008" in str(error))
print(dg.capture(lambda v: v + 1, x, backend=backend).replay().tolist())
os._exit(0)
"""
    )
    assert said.split("\n")[:4] == ["refused True"] * 3 + ["[2.0, 2.0, 2.0, 2.0]"]


def test_runner_that_ran_out_captures_everything_after_invalidate(
    driver: Driver, backend: Any
) -> None:
    """FAULTS 3."""
    with runner(backend, "full") as decode:
        driver.set(fail_stream_in=1)
        decode.capture()
        assert decode.stats().graph_steps == 0
        assert not [b for b in decode.stats().buckets if b.state == "captured"]
        decode.invalidate("streams were given back")
        decode.capture()
        assert all(b.state == "captured" for b in decode.stats().buckets)
        got = decode.run({"x": torch.ones(3, 4, device="npu")})
        assert got.cpu().eq(6).all()


def test_budget_counts_every_stream_that_graphs_hold(driver: Driver, backend: Any) -> None:
    def three_streams(x: torch.Tensor) -> torch.Tensor:
        current, sides = torch.npu.current_stream(), [torch.npu.Stream() for _ in range(2)]
        parts = []
        for side in sides:
            side.wait_stream(current)
            with torch.npu.stream(side):
                parts.append(x * 2)
        for side in sides:
            current.wait_stream(side)
        return parts[0] + parts[1]

    before = {graph["id"] for graph in driver.graphs()}

    def held() -> int:
        return sum(graph["streams"] for graph in driver.graphs() if graph["id"] not in before)

    x = torch.ones(2, device="npu")
    captured = dg.capture(three_streams, x, backend=backend)
    assert (
        sum(backend.streams.values()) == held() == 4
    )  # three, and one for what keeps the pool alive
    assert captured.replay().tolist() == [4, 4]
    captured.close()
    backend.synchronize()
    assert sum(backend.streams.values()) == held() == 1
    del captured
    gc.collect()
    backend.synchronize()
    assert sum(backend.streams.values()) == held() == 0


@pytest.mark.parametrize("ending", ["os._exit(0)", "sys.exit(0)"])
@pytest.mark.parametrize("told", [True, False], ids=["known", "unknown"])
def test_process_outlives_what_it_frees_on_a_lost_device(
    driver: Driver, run_python: Any, told: bool, ending: str
) -> None:
    """FAULTS 34. Launches are asynchronous: waiting is the first call that must know."""
    said = run_python(
        f"""
from tests.sim.ascend import activate
driver = activate()
import gc, os, sys, torch
import devgraph as dg
from tests.npu.test_budget import add_one
backend = dg.get_backend("npu")
pools = [backend.make_pool() for _ in range(3)]
kept, closed, dropped = [add_one(backend, pool=pool) for pool in pools]
for captured in (kept, closed, dropped):
    captured.replay()
driver.fail_device()
if {told}:
    try:
        backend.synchronize()
    except dg.DeviceLost as error:
        print("lost", "507015" in str(error))
closed.close()
del closed, dropped, pools, captured
gc.collect()
for call in (backend.synchronize, kept.replay, lambda: add_one(backend)):
    try:
        call()
    except dg.DeviceLost:
        print("refused")
sys.stdout.flush()
{ending}
"""
    )
    assert said.split("\n")[-4:-1] == ["refused"] * 3
