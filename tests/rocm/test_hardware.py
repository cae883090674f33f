"""What only AMD hardware can show. None of this has ever run: no such device was at hand.

    pytest tests/rocm/test_hardware.py tests/rocm/test_device.py -m rocm
    pytest --pyargs devgraph.testing.conformance --devgraph-backend rocm

Each test says what it would prove. Through the shim the backend is "rocm" as well, and these are
skipped: there the library is not AMD's.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

if not torch.version.hip or not torch.cuda.is_available():
    pytest.skip("needs an AMD GPU and the ROCm build of torch", allow_module_level=True)

from torch.nn import functional as F

import devgraph as dg
from devgraph.rocm import verification
from tests.support.device_kit import KEEP_ALL, check, graph_of, on, record, replayed

backend, randn = on("rocm")

pytestmark = pytest.mark.rocm

WIDTH = 64
WINDOW = 512


@dg.region(host_args=("n",), mutates=("out",))
def attend(q: torch.Tensor, cache: torch.Tensor, out: torch.Tensor, *, n: int) -> None:
    """Attention over ``n`` rows, by whichever kernel torch takes on this device."""
    kv = cache[:n].view(1, 1, n, WIDTH)
    out.copy_(F.scaled_dot_product_attention(q.view(1, 1, -1, WIDTH), kv, kv).view(out.shape))


@dg.region(host_args=("n",), mutates=("out",))
def scale(x: torch.Tensor, out: torch.Tensor, *, n: int) -> None:
    """One kernel."""
    torch.mul(x, n, out=out)


def test_library_that_torch_mapped_is_the_one_that_is_called(be: Any):
    """A stream and a capture of torch's are the same objects to the bound functions."""
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    x = randn(8)
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        assert be.runtime.capturing([stream.cuda_stream])
        x.add_(1)
        graph.capture_end()
    assert be.runtime.count(graph.raw_cuda_graph()) == 1
    assert be.runtime.kind(be.runtime.nodes(graph.raw_cuda_graph())[0]) == "kernel"


def test_attention_kernels_launch_with_their_new_parameters(be: Any):
    """CK or AOTriton attention keeps its lengths in kernel arguments, not elsewhere."""
    q, cache, out = randn(4, WIDTH).half(), randn(WINDOW, WIDTH).half(), randn(4, WIDTH).half()

    def step(q: torch.Tensor, *, n: int) -> torch.Tensor:
        attend(q * 1, cache, out, n=n)
        return out + 1

    with dg.capture(step, q, backend=be, host_args={"n": 128}, budget=KEEP_ALL) as cap:
        for n in (128, 160, 17, 512, 160, 17, 128):
            check(cap, step, q, n=n)


def test_unsafe_call_in_a_capture_is_reported_from_714_on_and_guarded_before(be: Any):
    """Which of the two this runtime is, and that neither leaves a wrong graph behind."""
    x = randn(8)
    graph = be.make_graph()
    with pytest.raises((dg.CaptureError, RuntimeError)), be.capture_context(graph):
        (x + 1).sum().item()
    assert graph.state == "empty"
    graph, out = record(be, lambda: x + 1)
    assert torch.equal(replayed(graph, out), x + 1)


def test_stream_with_an_unjoined_fork_is_retired_and_the_process_lives(be: Any):
    """The end that fails on 7.2 does not end the process, nor does the next capture."""
    x, side = randn(8), torch.cuda.Stream()
    graph = be.make_graph()
    with pytest.raises(dg.UnjoinedStreamError), be.capture_context(graph):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.mul(2)
    graph, out = record(be, lambda: x + 1)
    assert torch.equal(replayed(graph, out), x + 1)


def test_updates_stay_under_their_leak_budget(be: Any, monkeypatch: pytest.MonkeyPatch):
    """What the driver keeps per written node is not more than is counted."""
    x, out = randn(16, WIDTH), randn(16, WIDTH)

    def step(x: torch.Tensor, *, n: int) -> torch.Tensor:
        for _ in range(32):
            scale(x, out, n=n)
        return out + 1

    monkeypatch.setattr("devgraph.api.torchlike.node_graph._USES_WITH_ROOM", 10**9)
    with dg.capture(step, x, backend=be, host_args={"n": 2}, budget=KEEP_ALL) as cap:
        for n in range(2, 12):
            cap.replay(n=n)
        torch.cuda.synchronize()
        before, most = torch.cuda.mem_get_info()[0], 0
        for turn in range(2000):
            cap.replay(n=2 + turn % 10)
            most = max(most, before - torch.cuda.mem_get_info()[0])
        assert graph_of(cap).update_strategy.leaked_bytes <= verification.LEAK_BUDGET_BYTES
    assert most <= 2 * verification.LEAK_BUDGET_BYTES
