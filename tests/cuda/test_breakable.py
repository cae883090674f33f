"""Breakable captures on CUDA: side streams, failures in breaks, random numbers, stale graphs."""

from __future__ import annotations

import traceback
from typing import Any

import pytest
import torch

import devgraph as dg
from devgraph.integrations.engine.ledger import ModeCount
from devgraph.integrations.engine.steps import recorded
from tests.support.device_kit import check, graph_of, on

backend, randn = on("cuda")

pytestmark = pytest.mark.cuda


@dg.region(mutates=("out",))
def double(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x * 2)


@dg.no_graph
def pause() -> None:
    """A break without work."""


@pytest.mark.parametrize("fork", ["wait_stream", "event"])
@pytest.mark.parametrize("policy", ["full", "breakable"])
def test_unjoined_side_stream_is_refused_by_name(be: Any, fork: str, policy: str) -> None:
    pool = be.make_pool()
    side, joined = torch.cuda.Stream(), torch.cuda.Stream()
    assert side != joined

    def step(x: torch.Tensor) -> torch.Tensor:
        here = torch.cuda.current_stream()
        y = x + 1
        joined.wait_stream(here)
        with torch.cuda.stream(joined):
            z = y * 3
        here.wait_stream(joined)
        if fork == "event":
            event = torch.cuda.Event()
            event.record(here)
            side.wait_event(event)
        else:
            side.wait_stream(here)
        with torch.cuda.stream(side):
            w = y * 2
        if policy == "breakable":
            pause()  # the join comes too late
            here.wait_stream(side)
            return w + z
        return z

    x = randn(64)
    with pytest.raises(dg.UnjoinedStreamError) as caught:
        dg.capture(step, x, backend=be, policy=policy, pool=pool, warmup=0)
    assert f"{side.cuda_stream:#x}" in str(caught.value)
    assert f"{joined.cuda_stream:#x}" not in str(caught.value)
    again = dg.capture(lambda x: x * 5, x, backend=be, policy=policy, pool=pool)
    check(again, lambda x: x * 5, x)


def test_unjoined_side_stream_in_a_step_of_an_engine_is_refused_and_the_next_one_captured(
    be: Any,
) -> None:
    pool, side, x = be.make_pool(), torch.cuda.Stream(), randn(64)

    def step() -> torch.Tensor:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            return x * 2

    joined = pytest.raises(dg.UnjoinedStreamError, match="did not join")
    with joined, recorded(be, pool, ModeCount()):
        step()
    with recorded(be, pool, ModeCount()) as graph:
        output = x * 5
    x.fill_(3.0)
    graph.replay()
    assert torch.equal(output, x * 5)


def test_exception_in_a_break_of_a_capture_keeps_its_traceback(be: Any) -> None:
    pool = be.make_pool()

    @dg.no_graph
    def explode(x: torch.Tensor) -> None:
        deep(x)

    def deep(x: torch.Tensor) -> None:
        if dg.is_capturing():
            pytest.fail("an eager body runs outside the capture")
        raise KeyError("lost")

    def step(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        explode(y)
        return y + 1

    x = randn(32)
    with pytest.raises(KeyError, match="lost") as caught:
        dg.capture(step, x, backend=be, policy="breakable", pool=pool, warmup=0)
    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert names[-2:] == ["explode", "deep"]
    assert not torch.cuda.is_current_stream_capturing()
    torch.rand(4, device="cuda")  # the generator is not in capture mode either
    cap = dg.capture(lambda x: x * 2, x, backend=be, policy="breakable", pool=pool)
    check(cap, lambda x: x * 2, x)


def test_segments_that_draw_random_numbers_go_on_with_every_replay(be: Any) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        a = x + torch.rand(16, device=x.device)
        out = torch.empty_like(a)
        double(a, out)
        b = out * 2  # draws none
        out2 = torch.empty_like(a)
        double(b, out2)
        return out2 + torch.rand(16, device=x.device)  # the last segment draws as well

    x = randn(16)
    cap = dg.capture(step, x, backend=be, policy="breakable")
    torch.cuda.manual_seed(3)
    want = [step(x).clone() for _ in range(6)]
    torch.cuda.manual_seed(3)
    got = [cap.replay().clone() for _ in range(6)]
    for a, b in zip(want, got, strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(got[0], got[1])


def test_replay_refuses_a_stale_segment_and_closed_ones(be: Any) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        double(x + 1, out)
        return out * 3

    x = randn(16)
    cap = dg.capture(step, x, backend=be, policy="breakable")
    for _ in range(3):
        check(cap, step, x)
    other = dg.capture(step, x, backend=be, policy="breakable", pool=cap.pool)
    other.close()  # a graph of the same pool goes; this one stays good
    for _ in range(3):
        check(cap, step, x)
    graph_of(cap).expire()
    with pytest.raises(dg.StateError, match="stale"):
        cap.replay()


def test_replay_on_another_stream_waits_for_the_last_one(be: Any) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            out = torch.empty_like(x)
            double(x @ x * 1e-3, out)
            x = out
        return x

    x = randn(512, 512)
    cap = dg.capture(step, x, backend=be, policy="breakable")
    want = step(x).clone()
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(4)]
    kept = []
    for i in range(32):
        with torch.cuda.stream(streams[i % 4]):
            kept.append(cap.replay().clone())
    torch.cuda.synchronize()
    assert all(torch.equal(got, want) for got in kept)


def test_capture_stub_stands_in_while_capturing_only(be: Any) -> None:
    calls: list[str] = []

    def stub(x: torch.Tensor, out: torch.Tensor) -> None:
        calls.append("stub")
        out.zero_()

    @dg.no_graph(capture_stub=stub)
    def costly(x: torch.Tensor, out: torch.Tensor) -> None:
        calls.append("body")
        out.copy_(x * float(x.sum() > 0))

    def step(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        costly(x * 2, out)
        return out + 1

    x = randn(16)
    cap = dg.capture(step, x, backend=be, policy="breakable", warmup=0)
    assert calls == ["stub"]
    check(cap, step, x)
    assert calls == ["stub", "body", "body"]


def test_results_of_eager_bodies_share_memory_between_buckets(be: Any) -> None:
    """FAULTS 35."""

    @dg.no_graph
    def outside(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def step(x: torch.Tensor) -> torch.Tensor:
        first = outside(x)  # lives until the end
        for k in range(8):
            x = outside(x + k) - 1
        return (x + first)[:1].clone()

    pool, sizes = be.make_pool(), [(1 << 14) - 512 * n for n in range(6)]
    inputs = {size: randn(size, 64) for size in sizes}

    def capture(size: int) -> Any:
        return dg.capture(step, inputs[size], policy="breakable", backend=be, pool=pool)

    captured = {sizes[0]: capture(sizes[0])}
    held, allocated = pool.bytes, torch.cuda.memory_allocated()
    captured |= {size: capture(size) for size in sizes[1:]}
    assert pool.bytes <= 1.2 * held
    assert torch.cuda.memory_allocated() - allocated < inputs[sizes[0]].nbytes
    for size in (*sizes, *reversed(sizes), *sizes[::2], *sizes[1::2]):
        check(captured[size], step, inputs[size])


@pytest.mark.parametrize("policy", ["full", "breakable"])
def test_workspaces_of_matrix_products_belong_to_the_graph(be: Any, policy: str) -> None:
    """torch 2.14 frees the workspace of the warm-up when a capture ends."""
    weight = randn(2048, 2048).bfloat16()

    def product(x: torch.Tensor) -> torch.Tensor:
        return x @ weight

    outside = product if policy == "full" else dg.no_graph(product)

    def step(x: torch.Tensor) -> torch.Tensor:
        return (outside(x @ weight) @ weight)[:4].clone()

    pool, inputs = be.make_pool(), [randn(rows, 2048).bfloat16() for rows in (8192, 512)]
    captured = [dg.capture(step, x, policy=policy, backend=be, pool=pool) for x in inputs]
    torch.cuda.empty_cache()
    for one, x in zip(captured * 2, inputs * 2, strict=True):
        check(one, step, x)
