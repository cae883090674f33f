"""Hardware streams run out: what a runner keeps, what it says, and that it still serves."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import devgraph as dg
from devgraph.npu.lifetimes import StreamBudget
from tests.sim.ascend import Driver

pytest_plugins = ["tests.sim.ascend.plugin"]
pytestmark = [
    pytest.mark.npu,
    pytest.mark.filterwarnings("ignore:Cannot create tensor with internal format"),
]

BUCKETS = list(range(1, 21))
STREAMS = 40


@pytest.fixture
def backend(driver: Driver) -> Iterator[Any]:
    backend: Any = dg.get_backend("npu")
    gc.collect()
    backend.synchronize()
    kept = backend.budget
    backend.budget = StreamBudget()
    yield backend
    backend.budget = kept


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
    backend.budget = StreamBudget(limit=STREAMS // 4)
    with runner(backend, "full") as decode:
        decode.capture()
        captured = [int(b.key) for b in decode.stats().buckets if b.state == "captured"]
        assert BUCKETS[-1] in captured
        assert len(captured) <= STREAMS // 4
        got = decode.run({"x": torch.ones(20, 4, device="npu")})
        assert got.cpu().eq(6).all()
