"""Region update through libamdhip64 on a GPU: AMD's, or NVIDIA's with the shim under the backend.

    pytest tests/rocm/test_device.py -p tests.sim.hip.plugin

On an NVIDIA GPU the plugin puts the shim in libamdhip64's place, so that the captures, updates and
replays are real and the runtime is not AMD's.
"""

from __future__ import annotations

import ctypes
from typing import Any

import attrs
import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import devgraph as dg
from devgraph.api.torchlike.node_graph import NodeGraph
from devgraph.api.torchlike.nodes import RuntimeCallError
from devgraph.rocm import verification
from tests.support.device_kit import KEEP_ALL, check, graph_of, on, record, replayed

backend, randn = on("rocm")

pytestmark = pytest.mark.rocm

WIDTH = 64
WINDOW = 512


def layered(region: Any, layers: int = 3) -> Any:
    """A step with one region call per layer, between other work."""

    def step(x: torch.Tensor, cache: torch.Tensor, *, n: int) -> torch.Tensor:
        for layer in range(layers):
            x = torch.tanh(x * 0.5 + layer + region(x, cache, n=n))
        return x

    return step


def attention(be: Any) -> Any:
    if be.device.type == "cpu":
        pytest.skip("attention of the CPU takes part in the random state")

    @dg.region(host_args=("n",))
    def attend(x: torch.Tensor, cache: torch.Tensor, *, n: int) -> torch.Tensor:
        q = x.bfloat16().view(1, 1, -1, WIDTH)
        kv = cache[:n].bfloat16().view(1, 1, n, WIDTH)
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
            return F.scaled_dot_product_attention(q, kv, kv).view(x.shape).to(x.dtype)

    return attend


def products(be: Any) -> Any:
    @dg.region(host_args=("n",))
    def multiply(x: torch.Tensor, cache: torch.Tensor, *, n: int) -> torch.Tensor:
        scores = x.bfloat16() @ cache[:n].bfloat16().T
        return (scores @ cache[:n].bfloat16()).to(x.dtype) / n

    return multiply


def copies(be: Any) -> Any:
    @dg.region(host_args=("n",))
    def copied(x: torch.Tensor, cache: torch.Tensor, *, n: int) -> torch.Tensor:
        out = torch.empty_like(x)
        out.copy_(cache[n : n + x.shape[0]])
        return out

    return copied


def fills(be: Any) -> Any:
    fill = ctypes.CDLL(be.runtime.path).hipMemsetAsync
    fill.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p)

    @dg.region(host_args=("n",))
    def filled(x: torch.Tensor, cache: torch.Tensor, *, n: int) -> torch.Tensor:
        out = torch.ones_like(x)
        assert not fill(out.data_ptr(), n % 64, 4 * (n % 32 + 1), be.current_stream_id())
        return out + x

    return filled


def forks(be: Any) -> Any:
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


KINDS = {
    "attention": attention,
    "products": products,
    "copies": copies,
    "fills": fills,
    "forks": forks,
    "triton": triton_kernels,
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_node_follows_its_host_argument(be: Any, kind: str):
    step = layered(KINDS[kind](be))
    x, cache = randn(16, WIDTH), randn(WINDOW, WIDTH)
    # 1 and multiples of 16 are other specialisations of a Triton kernel.
    keys = (128, 160, 129, 1, 16, 17, 256, 300, 480, 128, 300, 1)
    for n in keys:
        step(x, cache, n=n)
    with dg.capture(step, x, cache, backend=be, host_args={"n": 128}, budget=KEEP_ALL) as cap:
        for n in keys * 2:
            check(cap, step, x, cache, n=n)
        if kind in ("copies", "fills", "triton"):
            assert cap.stats()["copies"] == 0, "these have the same nodes for every value"


@pytest.mark.parametrize("kind", ["products", "triton"])
@pytest.mark.parametrize("policy", ["breakable", "full"])
def test_step_equals_eager_under_every_policy(be: Any, policy: str, kind: str):
    step = layered(KINDS[kind](be), layers=2)
    x, cache = randn(16, WIDTH), randn(WINDOW, WIDTH)
    with dg.capture(step, x, cache, backend=be, host_args={"n": 64}, policy=policy) as cap:
        report = cap.prove(host_args=[{"n": n} for n in (64, 65, 200, 512)])
    assert report.ok, report.failures


def test_runtime_is_found_to_update_and_to_report_copies(be: Any):
    with dg.capture(
        layered(copies(be)), randn(16, WIDTH), randn(WINDOW, WIDTH), backend=be, host_args={"n": 8}
    ):
        findings = be.verification.find_out(be.device)
    assert findings.updates, "this runtime does not use parameters written into an executable"
    assert findings.reports_copies or be.runtime.version.major < 7


def test_updates_without_executables_renew_torchs_own_and_stay_right(
    be: Any, monkeypatch: pytest.MonkeyPatch
):
    step = layered(copies(be))
    x, cache = randn(16, WIDTH), randn(WINDOW, WIDTH)
    pool = be.make_pool()
    cap = dg.capture(step, x, cache, backend=be, host_args={"n": 1}, pool=pool, budget=KEEP_ALL)
    graph = graph_of(cap)
    for n in (1, 2, 3):
        check(cap, step, x, cache, n=n)
    pool.recordings.budget_bytes = pool.recordings.bytes  # no room for executables
    per_update = graph.applying.leaked_bytes // 2  # two recordings were written
    monkeypatch.setattr(verification, "LEAK_BUDGET_BYTES", 3 * per_update)
    made: list[int] = []
    renew = NodeGraph.renew_executable

    def counted(self: Any) -> None:
        made.append(1)
        renew(self)

    monkeypatch.setattr(NodeGraph, "renew_executable", counted)
    for n in (1, 2, 3, 2, 1, 3, 1, 2):
        check(cap, step, x, cache, n=n)
        assert graph.applying.leaked_bytes <= 3 * per_update
    assert len(made) >= 2
    cap.close()


def test_stale_recording_is_detected_by_the_first_replay(be: Any, monkeypatch: Any):
    """What a runtime with stale packets does: success, and the parameters of before."""
    region = copies(be)
    x, cache = randn(16, WIDTH), randn(WINDOW, WIDTH)
    graph, out = record(be, lambda: region(x, cache, n=3) + 1, n=3)
    assert torch.equal(replayed(graph, out), cache[3:19] + 1)
    findings = be.verification.find_out(be.device)
    monkeypatch.setattr(be.verification, "findings", findings)
    monkeypatch.setattr(be.runtime, "write", lambda updates, executable: None)
    graph.update(n=40)
    with pytest.raises(dg.UpdateError, match="parameters of an earlier one"):
        graph.replay()
    assert graph.state == "dirty"
    monkeypatch.undo()
    be.verification.findings = findings
    graph.reset()
    with be.capture_context(graph, host_args={"n": 3}):
        out = region(x, cache, n=3) + 1
    graph.update(n=40)
    assert torch.equal(replayed(graph, out), cache[40:56] + 1)


def test_runtime_that_does_not_update_gives_every_key_an_executable(be: Any, monkeypatch: Any):
    step = layered(copies(be))
    x, cache = randn(16, WIDTH), randn(WINDOW, WIDTH)
    monkeypatch.setattr(
        be.verification,
        "findings",
        attrs.evolve(be.verification.find_out(be.device), updates=False),
    )
    monkeypatch.setattr(be.runtime, "write", lambda *_: pytest.fail("an executable was updated"))
    with dg.capture(step, x, cache, backend=be, host_args={"n": 8}, budget=KEEP_ALL) as cap:
        for n in (8, 9, 16, 9, 8):
            check(cap, step, x, cache, n=n)
        assert cap.stats()["copies"] == 0


def test_update_that_the_driver_refuses_half_way_makes_the_graph_dirty(be: Any, monkeypatch: Any):
    region = copies(be)
    x, cache = randn(16, WIDTH), randn(WINDOW, WIDTH)
    graph, _ = record(be, lambda: region(x, cache, n=3) + region(x * 2, cache, n=3), n=3)
    whole = type(be.runtime).write

    def half(updates: Any, executable: int) -> None:
        whole(be.runtime, updates[: len(updates) // 2], executable)
        raise RuntimeCallError("refused (1: test)", 1)

    monkeypatch.setattr(be.runtime, "write", half)
    with pytest.raises(RuntimeCallError, match="refused"):
        graph.update(n=9)
    assert graph.state == "dirty"
    with pytest.raises(dg.StateError, match="reset"):
        graph.replay()


def test_random_numbers_outside_the_region_go_on_under_updates(be: Any):
    region = copies(be)

    def step(x: torch.Tensor, cache: torch.Tensor, *, n: int) -> torch.Tensor:
        return region(x, cache, n=n) + torch.rand(16, WIDTH, device=x.device)

    x, cache = randn(16, WIDTH), randn(WINDOW, WIDTH)
    keys = (4, 9, 4, 9, 9, 17, 9, 17, 4)
    with dg.capture(step, x, cache, backend=be, host_args={"n": 4}, budget=KEEP_ALL) as cap:
        torch.manual_seed(7)
        want = [step(x, cache, n=n).clone() for n in keys]
        torch.manual_seed(7)
        for n, expected in zip(keys, want, strict=True):
            assert torch.equal(cap.replay(n=n), expected), n


def test_executables_of_their_own_are_given_back(be: Any):
    step = layered(copies(be))
    x, cache = randn(16, WIDTH), randn(WINDOW, WIDTH)
    pool = be.make_pool()
    cap = dg.capture(step, x, cache, backend=be, host_args={"n": 0}, pool=pool, budget=KEEP_ALL)
    for n in (0, 1, 2, 3, 4, 5) * 3:
        check(cap, step, x, cache, n=n)
    assert sum(bool(k.recording.executable) for k in pool.recordings._items.values()) >= 5
    cap.close()
    assert len(pool.recordings) == 0
    assert pool.recordings.bytes == 0
