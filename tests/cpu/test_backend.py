"""The CPU reference behind the DeviceGraph contract: pools, regions, updates, breaks, checks."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import devgraph as dg
from devgraph.api.capture import capture
from devgraph.api.errors import (
    CaptureError,
    HostReadError,
    StateError,
    UpdateTopologyError,
)
from devgraph.api.marks.marks import region
from devgraph.cpu.backend import ENTRY_BYTES, CpuBackend, CpuGraph, CpuPool
from tests.support.cpu_capture import same

torch.set_num_threads(1)


@pytest.fixture
def backend() -> CpuBackend:
    return CpuBackend()


@region(host_args=("kv_len",), mutates=("out",))
def attend(q: torch.Tensor, kv: torch.Tensor, out: torch.Tensor, *, kv_len: int) -> None:
    scores = q @ kv[:kv_len].t()
    out.copy_(scores.softmax(-1) @ kv[:kv_len])


@region(host_args=("kv_len",))
def attend_returning(q: torch.Tensor, kv: torch.Tensor, *, kv_len: int) -> torch.Tensor:
    return (q @ kv[:kv_len].t()).softmax(-1) @ kv[:kv_len]


def decode(x: torch.Tensor, kv: torch.Tensor, *, kv_len: int, layers: int = 3) -> torch.Tensor:
    for layer in range(layers):
        out = torch.empty_like(x)
        attend(x, kv, out, kv_len=kv_len)
        x = attend_returning(F.silu(out) + x, kv * (layer + 1), kv_len=kv_len) + x
    return x.sum(-1)


def test_registered_name_gives_the_backend() -> None:
    found = dg.get_backend("cpu")
    assert type(found).__name__ == "CpuBackend" and found.device.type == "cpu"
    free, total = found.memory_info() or (0, 1)
    assert 0 < free <= total


@pytest.mark.parametrize("policy", ["full", "breakable"])
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_replay_with_new_host_arguments_equals_eager(
    backend: CpuBackend, policy: str, mode: Any
) -> None:
    x, kv = torch.randn(2, 8), torch.randn(64, 8)
    with mode():
        cap = capture(decode, x, kv, policy=policy, backend=backend, host_args={"kv_len": 5})
        for kv_len in (5, 64, 1, 17, 5, 64):
            x.copy_(torch.randn(2, 8))
            kv.copy_(torch.randn(64, 8))
            assert same(cap.replay(kv_len=kv_len), decode(x, kv, kv_len=kv_len))
    cap.close()


def test_repeated_key_runs_no_host_code_of_a_region(backend: CpuBackend) -> None:
    calls = []

    @region(host_args=("n",))
    def counted(x: torch.Tensor, *, n: int) -> torch.Tensor:
        calls.append(n)
        return x[:n].sum(0)

    def step(x: torch.Tensor, *, n: int) -> torch.Tensor:
        return counted(x, n=n) + 1

    x = torch.randn(8, 4)
    cap = capture(step, x, backend=backend, host_args={"n": 2}, warmup=0)
    for n in (2, 3, 2, 3, 8, 2, 8):
        assert same(cap.replay(n=n), x[:n].sum(0) + 1)
    assert calls == [2, 3, 8]


def test_other_operations_for_a_value_are_a_topology_error_that_changes_nothing(
    backend: CpuBackend,
) -> None:
    @region(host_args=("n",))
    def halves(x: torch.Tensor, *, n: int) -> torch.Tensor:
        return x[:n].sum(0) if n < 5 else (x[:n] * 2).sum(0)

    x = torch.randn(8, 4)
    graph = backend.make_graph()
    with backend.capture_context(graph, host_args={"n": 2}) as host:
        out = halves(x, n=host["n"])
    graph.update(n=3)
    with pytest.raises(UpdateTopologyError):
        graph.update(n=6)
    assert graph.state == "ready"
    graph.replay()
    assert same(out, x[:3].sum(0))


def test_failing_region_leaves_the_graph_as_it_was(backend: CpuBackend) -> None:
    @region(host_args=("n",))
    def picky(x: torch.Tensor, *, n: int) -> torch.Tensor:
        if n == 7:
            return x.sum().item() * x[:n].sum(0)
        return x[:n].sum(0)

    x = torch.randn(8, 4)
    graph = backend.make_graph()
    with backend.capture_context(graph, host_args={"n": 2}) as host:
        out = picky(x, n=host["n"])
    with pytest.raises(HostReadError, match="item"):
        graph.update(n=7)
    graph.replay()
    assert same(out, x[:2].sum(0))
    graph.update(n=8)
    graph.replay()
    assert same(out, x[:8].sum(0))


def test_random_numbers_in_an_updatable_region_are_refused(backend: CpuBackend) -> None:
    @region(host_args=("n",))
    def noisy(x: torch.Tensor, *, n: int) -> torch.Tensor:
        return x[:n] + torch.rand(n, 4)

    graph = backend.make_graph()
    with (
        pytest.raises(CaptureError, match=r"noisy"),
        backend.capture_context(graph, host_args={"n": 2}) as host,
    ):
        noisy(torch.randn(8, 4), n=host["n"])
    assert graph.state == "empty"


def test_temporaries_of_updates_do_not_touch_graph_memory(backend: CpuBackend) -> None:
    pool = backend.make_pool()
    x, kv = torch.randn(2, 8), torch.randn(64, 8)
    caps = [
        capture(decode, x, kv, backend=backend, pool=pool, host_args={"kv_len": 4})
        for _ in range(3)
    ]
    graph_bytes = pool.blocks.reserved_bytes
    results = []
    for kv_len in (40, 9, 64, 3):
        results.append([cap.replay(kv_len=kv_len).clone() for cap in caps])
        assert all(same(r, decode(x, kv, kv_len=kv_len)) for r in results[-1])
    assert pool.blocks.reserved_bytes == graph_bytes
    for kv_len, known in zip((40, 9, 64, 3), results, strict=True):
        for cap, result in zip(reversed(caps), reversed(known), strict=True):
            assert same(cap.replay(kv_len=kv_len), result)


@pytest.mark.parametrize("policy", ["full", "breakable"])
def test_buckets_of_one_pool_stay_right_in_every_order(backend: CpuBackend, policy: str) -> None:
    pool = backend.make_pool()
    kv = torch.randn(64, 8)
    inputs = [torch.randn(rows, 8) for rows in (32, 16, 8, 4, 2, 1)]
    with torch.inference_mode():
        caps = [
            capture(
                decode, x, kv, policy=policy, backend=backend, pool=pool, host_args={"kv_len": 4}
            )
            for x in inputs
        ]
        for order in ((0, 1, 2, 3, 4, 5), (5, 4, 3, 2, 1, 0), (2, 5, 0, 3, 1, 4)):
            for index in order:
                kv_len = 3 + 7 * index
                inputs[index].copy_(torch.randn_like(inputs[index]))
                expected = decode(inputs[index], kv, kv_len=kv_len)
                assert same(caps[index].replay(kv_len=kv_len), expected)


def test_graph_reports_nodes_and_bytes(backend: CpuBackend) -> None:
    x = torch.randn(4, 4)
    graph = backend.make_graph()
    with backend.capture_context(graph):
        F.relu(x @ x)
    info = graph.info()
    assert (info.nodes, info.bytes) == (2, 2 * ENTRY_BYTES)


def test_pool_counts_its_bytes_and_gives_them_back(backend: CpuBackend) -> None:
    pool = backend.make_pool()
    assert pool.bytes == 0
    graph = backend.make_graph(pool)
    x = torch.randn(4, 4)
    with backend.capture_context(graph):
        out = x @ x
    assert pool.bytes > 0
    del out
    graph.close()
    assert pool.bytes == 0


def test_dropping_pool_and_graph_in_any_order_is_safe(backend: CpuBackend) -> None:
    x = torch.randn(4, 4)
    for first in ("pool", "graph"):
        pool: CpuPool | None = backend.make_pool()
        graph: CpuGraph | None = backend.make_graph(pool)
        assert graph is not None
        with backend.capture_context(graph):
            out = x @ x
        graph.replay()
        if first == "pool":
            pool = None
        else:
            graph = None
        gc.collect()
        if graph is not None:
            graph.replay()
        assert same(out, x @ x)
        pool = graph = None
        gc.collect()
        assert same(out, x @ x)


def test_pool_of_another_backend_is_refused(backend: CpuBackend) -> None:
    with pytest.raises(StateError):
        CpuBackend().make_graph(backend.make_pool())


def test_capture_does_not_search_the_heap(
    backend: CpuBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which takes longer than the rest of it: only a step's own change of a layout needs that."""
    x, kv = torch.randn(2, 8), torch.randn(64, 8)
    monkeypatch.setattr(gc, "get_referrers", lambda *objects: pytest.fail("searched the heap"))
    cap = capture(decode, x, kv, backend=backend, host_args={"kv_len": 4})
    assert torch.equal(cap.replay(kv_len=9), decode(x, kv, kv_len=9))


def test_hundred_captures_leave_no_memory_behind(backend: CpuBackend) -> None:
    pool = backend.make_pool()
    x, kv = torch.randn(2, 8), torch.randn(64, 8)
    sizes = set()
    for index in range(100):
        cap = capture(decode, x, kv, backend=backend, pool=pool, host_args={"kv_len": 4}, warmup=0)
        cap.replay(kv_len=4 + index % 3)
        cap.close()
        del cap
        sizes.add((pool.bytes, len(pool.recordings), len(pool.blocks.live())))
    assert sizes == {(0, 0, 0)}
