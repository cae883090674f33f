"""Regions of every kind of node, and what their updates must do on each vendor that has nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import devgraph as dg
from devgraph.api.torchlike.node_calls import RuntimeCallError
from tests.support.device_kit import KEEP_ALL, check, record

__all__ = [
    "WIDTH", "WINDOW", "attention", "copies", "draws_outside_the_region", "fills",
    "follows_its_host_argument", "forks", "is_dirty_after_half_an_update", "layered", "products",
    "triton_kernels",
]  # fmt: skip

WIDTH = 64
WINDOW = 512

Randn = Callable[..., torch.Tensor]


def layered(region: Any, layers: int = 3) -> Any:
    """A step with one region call per layer, between other work."""

    def step(x: torch.Tensor, cache: torch.Tensor, *, n: int) -> torch.Tensor:
        for layer in range(layers):
            h = x * 0.5 + layer
            x = torch.tanh(h + region(h, cache, n=n))
        return x

    return step


def attention(be: Any, kinds: Sequence[SDPBackend], dtype: torch.dtype = torch.bfloat16) -> Any:
    """Attention over the first ``n`` rows of the cache, by one of these implementations."""
    if be.device.type == "cpu":
        pytest.skip("attention of the CPU takes part in the random state")

    @dg.region(host_args=("n",))
    def attend(x: torch.Tensor, cache: torch.Tensor, *, n: int) -> torch.Tensor:
        q = x.to(dtype).view(1, 1, -1, WIDTH)
        kv = cache[:n].to(dtype).view(1, 1, n, WIDTH)
        with sdpa_kernel(list(kinds)):
            return F.scaled_dot_product_attention(q, kv, kv).view(x.shape).to(x.dtype)

    return attend


def products(be: Any) -> Any:
    """Two matrix products of the vendor's library, one with ``n`` inside and one outside."""

    @dg.region(host_args=("n",))
    def multiply(x: torch.Tensor, cache: torch.Tensor, *, n: int) -> torch.Tensor:
        scores = x.bfloat16() @ cache[:n].bfloat16().T
        return (scores @ cache[:n].bfloat16()).to(x.dtype) / n

    return multiply


def copies(be: Any) -> Any:
    """Copies of contiguous memory, which are memcpy nodes."""

    @dg.region(host_args=("n",))
    def copied(x: torch.Tensor, cache: torch.Tensor, *, n: int) -> torch.Tensor:
        out = torch.empty_like(x)
        out.copy_(cache[n : n + x.shape[0]])
        return out

    return copied


def fills(be: Any, fill: Callable[[int, int, int, int], int]) -> Any:
    """A memset node whose value and size depend on ``n``.

    Args:
        be: the backend.
        fill: the driver's call, which takes address, byte, size and stream.
    """

    @dg.region(host_args=("n",))
    def filled(x: torch.Tensor, cache: torch.Tensor, *, n: int) -> torch.Tensor:
        out = torch.ones_like(x)
        assert not fill(out.data_ptr(), n % 64, 4 * (n % 32 + 1), be.current_stream_id())
        return out + x

    return filled


def forks(be: Any) -> Any:
    """Two streams that join inside the region."""
    side = be.namespace.Stream()

    @dg.region(host_args=("n",))
    def forked(x: torch.Tensor, cache: torch.Tensor, *, n: int) -> torch.Tensor:
        here = be.namespace.current_stream()
        side.wait_stream(here)
        with be.namespace.stream(side):
            a = cache[:n].sum(0) * 2
        b = cache[:n].amax(0) + x
        here.wait_stream(side)
        return a + b

    return forked


def triton_kernels(be: Any) -> Any:
    """A kernel of Triton that takes ``n`` by value."""
    if be.device.type == "cpu":
        pytest.skip("Triton needs a GPU")
    triton = pytest.importorskip("triton", reason="a Triton kernel")
    import triton.language as tl

    @triton.jit
    def rows_sum(x, cache, out, n, stride, width: tl.constexpr):  # type: ignore[no-untyped-def]
        columns = tl.arange(0, width)
        total = tl.zeros([width], tl.float32)
        for row in range(n):
            total += tl.load(cache + row * stride + columns)
        here = tl.program_id(0) * stride + columns
        tl.store(out + here, total + tl.load(x + here))

    @dg.region(host_args=("n",))
    def summed(x: torch.Tensor, cache: torch.Tensor, *, n: int) -> torch.Tensor:
        out = torch.empty_like(x)
        rows_sum[(x.shape[0],)](x, cache, out, n, x.stride(0), width=WIDTH)
        return out

    return summed


def follows_its_host_argument(be: Any, randn: Randn, region: Any, *, same_nodes: bool) -> None:
    """Fail unless every replay of ``layered(region)`` is right; ``same_nodes`` for every value."""
    step = layered(region)
    x, cache = randn(16, WIDTH), randn(WINDOW, WIDTH)
    # 1 and multiples of 16 are other specializations of a Triton kernel.
    keys = (128, 160, 129, 1, 16, 17, 256, 300, 480, 128, 300, 1)
    for n in keys:
        step(x, cache, n=n)
    with dg.capture(step, x, cache, backend=be, host_args={"n": 128}, budget=KEEP_ALL) as cap:
        for n in keys * 2:
            check(cap, step, x, cache, n=n)
        assert cap.stats()["copies"] == 0 or not same_nodes


def is_dirty_after_half_an_update(
    be: Any, randn: Randn, monkeypatch: pytest.MonkeyPatch
) -> dg.DeviceGraph:
    """Fail unless a graph whose update the driver refuses half way is dirty; return it."""
    region = copies(be)
    x, cache = randn(16, WIDTH), randn(WINDOW, WIDTH)
    graph, _ = record(be, lambda: region(x, cache, n=3) + region(x * 2, cache, n=3), n=3)
    graph.replay()  # before its first launch there is nothing to write
    whole = be.runtime.write

    def half(updates: Any, executable: int) -> None:
        whole(updates[: len(updates) // 2], executable)
        raise RuntimeCallError("refused (1: test)", 1)

    with monkeypatch.context() as patch:
        patch.setattr(be.runtime, "write", half)
        with pytest.raises(RuntimeCallError, match="refused"):
            graph.update(n=9)
    assert graph.state == "dirty"
    with pytest.raises(dg.StateError, match="reset"):
        graph.replay()
    return graph


def draws_outside_the_region(be: Any, randn: Randn) -> dg.Captured:
    """Fail unless random numbers beside a region are those of eager under updates."""
    region = copies(be)

    def step(x: torch.Tensor, cache: torch.Tensor, *, n: int) -> torch.Tensor:
        return region(x, cache, n=n) + torch.rand(16, WIDTH, device=x.device)

    x, cache = randn(16, WIDTH), randn(WINDOW, WIDTH)
    keys = (4, 9, 4, 9, 9, 17, 9, 17, 4)
    cap = dg.capture(step, x, cache, backend=be, host_args={"n": 4}, budget=KEEP_ALL)
    torch.manual_seed(7)
    want = [step(x, cache, n=n).clone() for n in keys]
    torch.manual_seed(7)
    for n, expected in zip(keys, want, strict=True):
        assert torch.equal(cap.replay(n=n), expected), n
    return cap
