"""Unsafe calls in captures that the fake runtime lets pass, and what becomes of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import devgraph as dg
from devgraph.rocm.guards import HostReadGuard
from tests.support.fake_hip import (
    assert_usable,
    captured,
    check,
    noise,
    on_fake,
    scaled,
    step,
)

HIP_72 = 70226015
HIP_714 = 71400000


READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "nonzero": torch.nonzero,
    "bool": lambda x: bool((x > 0).any()),
    "equal": lambda x: torch.equal(x, x),
    "allclose": lambda x: torch.allclose(x, x),
    "mask": lambda x: x[x > 0],
    "mask of rows": lambda x: x[x[:, 0] > 0].sum(),
    "mask of columns": lambda x: x[:, x[0] > 0],
    "mask of bytes": lambda x: x[(x > 0).byte()],
    "assignment under a mask": lambda x: x.index_put_((x > 0,), x[0, 0]),
    "assignment under a mask elsewhere": lambda x: x.index_put((x > 0,), x[0, 0]),
    "repeat_interleave": lambda x: torch.repeat_interleave(x, (x[:, 0] > 0).long() + 1, dim=0),
    "bincount": lambda x: torch.bincount((x[:, 0] > 0).long()),
    "histc": lambda x: torch.histc(x, 4),
    "unique": torch.unique,
    "old unique": torch._unique,
    "unique rows": lambda x: torch.unique(x, dim=0),
    "unique neighbors": torch.unique_consecutive,
    "masked_select": lambda x: torch.masked_select(x, x > 0),
    "where": lambda x: torch.where(x > 0),
    "one_hot": lambda x: torch.nn.functional.one_hot((x > 0).long()),
    "errors of linalg": lambda x: torch.linalg.inv(x[:, :4]),
    "sparse": lambda x: x.to_sparse(),
    "host": lambda x: x.to("cpu", torch.float64),
}
READING = pytest.mark.parametrize("read", READS.values(), ids=READS)


@READING
@pytest.mark.parametrize("inside", ["body", "region"])
def test_host_read_that_the_runtime_lets_pass_is_refused_with_its_line(
    inside: str, read: Callable[[torch.Tensor], Any]
):
    @dg.region(host_args=("n",))
    def reading(x: torch.Tensor, *, n: int) -> torch.Tensor:
        if inside == "region":
            read(x)
        return x * n

    def body(x: torch.Tensor, *, n: int) -> torch.Tensor:
        y = x + 1
        if inside == "body":
            read(y)
        return reading(y, n=n)

    with on_fake(version=HIP_72, quiet=1) as be:
        graph = be.make_graph()
        with (
            pytest.raises(dg.HostReadError, match=r"test_guards\.py:\d+"),
            be.capture_context(graph, host_args={"n": 2}),
        ):
            body(noise(), n=2)
        assert graph.state == "empty"
        assert_usable(be)


@READING
def test_host_read_under_inference_mode_is_refused(read: Callable[[torch.Tensor], Any]):
    """Operations that torch makes of others reach a dispatch mode whole there."""
    with torch.inference_mode(), on_fake(version=HIP_72, quiet=1) as be:
        x, graph = noise(), be.make_graph()
        with pytest.raises(dg.HostReadError), be.capture_context(graph):
            read(x)
        assert graph.state == "empty"


NO_READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "numbers as indices": lambda x: x[(x[:, 0] > 0).long()],
    "list as index": lambda x: x[[0, 2]],
    "assignment at numbers": lambda x: x.clone().index_put_(((x[:, 0] > 0).long(),), x[0]),
    "masked_fill": lambda x: x.masked_fill(x > 0, 0.0),
    "where of two": lambda x: torch.where(x > 0, x, -x),
    "repeat_interleave of a known size": lambda x: torch.repeat_interleave(
        x, torch.full((4,), 2) + (x[:, 0] > 99), dim=0, output_size=8
    ),
    "repeat_interleave by a number": lambda x: torch.repeat_interleave(x, 2, dim=0),
    "histc with bounds": lambda x: torch.histc(x, 4, -1.0, 1.0),
    "linear": lambda x: torch.nn.functional.linear(x, x),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("fn", NO_READS.values(), ids=NO_READS)
def test_operation_that_reads_nothing_on_the_host_is_captured(
    fn: Callable[[torch.Tensor], torch.Tensor], inference: bool
):
    with torch.inference_mode(inference), on_fake(version=HIP_72, quiet=1) as be:
        x = noise()
        with dg.capture(fn, x, backend=be) as cap:
            check(cap, fn, x)


def test_value_of_the_host_under_one_mask_is_a_fill_and_no_read():
    """As torch does it: ``x[x > 0] = 1.0``, whose value stays on the host."""
    x = noise()
    want = x.masked_fill(x > 0, 1.0)
    guard = HostReadGuard(lambda tensor: tensor.dim() > 0)
    guard.on = True
    with guard:
        x[x > 0] = 1.0
        with pytest.raises(dg.HostReadError):
            x.index_put_((x > 0,), torch.tensor(1.0), accumulate=True)
        with pytest.raises(dg.HostReadError):
            x.index_put_((x > 0,), torch.ones(1))
    assert torch.equal(x, want)


def test_eager_body_of_a_break_may_read_on_the_host():
    @dg.no_graph
    def shrink(x: torch.Tensor) -> torch.Tensor:
        return x * (0.5 if x.sum().item() > 0 else 0.25)

    def broken(x: torch.Tensor) -> torch.Tensor:
        return shrink(x + 1) * 3

    with on_fake(version=HIP_72, quiet=1) as be:
        x = noise()
        with dg.capture(broken, x, backend=be, policy="breakable") as cap:
            for sign in (1, -1, 1):
                x.copy_(torch.full((4, 8), 5.0 * sign))
                assert torch.equal(cap.replay(), broken(x))


def test_runtime_that_reports_unsafe_calls_needs_no_guard():
    with on_fake(version=HIP_714, quiet=0) as be:
        graph = be.make_graph()
        with (
            pytest.raises(RuntimeError, match="hipErrorStreamCaptureUnsupported"),
            be.capture_context(graph),
        ):
            (noise() + 1).sum().item()
        assert graph.state == "empty"
        assert be.capabilities.concurrent_threads
        assert_usable(be)


def test_synchronization_that_the_runtime_lets_pass_leaves_the_graph_right():
    with on_fake(version=HIP_72, quiet=1) as be:
        x = noise()

        def impatient(x: torch.Tensor, *, n: int) -> torch.Tensor:
            y = scaled(x, n=n)
            if be.namespace.is_current_stream_capturing():
                be.namespace.synchronize()
            return y + 1

        with captured(be, impatient, x) as cap:
            for n in (2, 3, 2):
                check(cap, impatient, x, n=n)
        assert not be.capabilities.concurrent_threads


def test_threads_beside_a_capture_work_where_the_runtime_reports_unsafe_calls():
    with on_fake(version=HIP_714, quiet=0) as be:
        x, other = noise(), noise()
        seen: list[torch.Tensor] = []
        with captured(be, step, other) as cap:
            check(cap, step, other, n=3)  # to record it would wait for the capture below

            def work() -> None:
                seen.extend([cap.replay(n=3).clone(), step(other, n=3)])

            graph = be.make_graph()
            with be.capture_context(graph, host_args={"n": 2}):
                out = step(x, n=2)
                thread = threading.Thread(target=work, daemon=True)
                thread.start()
                thread.join(60)
            assert len(seen) == 2
            assert torch.equal(*seen)
        x.copy_(noise())
        graph.replay()
        assert torch.equal(out, step(x, n=2))
