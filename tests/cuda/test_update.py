"""Region update on CUDA: every kind of node, executables, budgets and refusals."""

from __future__ import annotations

import ctypes
import os
import threading
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend

import devgraph as dg
from devgraph.api.policy.job import UpdateBudget
from devgraph.api.torchlike import node_graph as nodegraph
from tests.support.device_kit import KEEP_ALL, check, graph_of, on, record, replayed
from tests.support.node_updates import (
    WIDTH,
    WINDOW,
    attention,
    copies,
    draws_outside_the_region,
    fills,
    follows_its_host_argument,
    forks,
    is_dirty_after_half_an_update,
    layered,
    products,
    triton_kernels,
)

ALONE = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) == 1
"""Whether what the driver reports free is not also what other workers take and give back."""

backend, randn = on("cuda")

pytestmark = pytest.mark.cuda


@dg.region(host_args=("n",))
def scaled_rows(x: torch.Tensor, cache: torch.Tensor, *, n: int) -> torch.Tensor:
    """The same kernels for every ``n``."""
    return (cache[n : n + x.shape[0]] * n + x) * (1.0 / n)


def memset(be: Any) -> Any:
    fill = ctypes.CDLL("libcuda.so.1").cuMemsetD8Async
    fill.argtypes = (ctypes.c_void_p, ctypes.c_ubyte, ctypes.c_size_t, ctypes.c_void_p)
    return fills(be, fill)


KINDS = {
    "flash": lambda be: attention(be, [SDPBackend.FLASH_ATTENTION]),
    "efficient": lambda be: attention(be, [SDPBackend.EFFICIENT_ATTENTION], torch.float32),
    "math": lambda be: attention(be, [SDPBackend.MATH], torch.float32),
    "cublas": products,
    "triton": triton_kernels,
    "memcpy": copies,
    "memset": memset,
    "forked": forks,
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_node_follows_its_host_argument(be: Any, kind: str) -> None:
    same_nodes = kind in ("triton", "memcpy", "memset")
    follows_its_host_argument(be, randn, KINDS[kind](be), same_nodes=same_nodes)


def test_kernel_that_launches_with_other_cluster_sizes_is_right(be: Any) -> None:
    @dg.region(host_args=("m",))
    def product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *, m: int) -> None:
        torch.mm(a[:m], b, out=out[:m])

    def step(a: torch.Tensor, b: torch.Tensor, *, m: int) -> torch.Tensor:
        out = torch.zeros(a.shape[0], b.shape[1], device="cuda", dtype=b.dtype)
        product(a * 1, b, out, m=m)
        return out * 2

    a, b = randn(2048, 512).bfloat16(), randn(512, 1024).bfloat16()
    sizes = (64, 256, 2048, 1024, 128, 64, 2048)
    for m in sizes:
        step(a, b, m=m)
    cap = dg.capture(step, a, b, backend=be, host_args={"m": 64}, budget=KEEP_ALL)
    for m in sizes * 3:
        check(cap, step, a, b, m=m)
    assert cap.stats()["broken_over_copy_budget"] == 0


def test_region_called_on_a_forked_stream_is_recorded_on_it(be: Any) -> None:
    @dg.region(host_args=("n",))
    def scratchy(x: torch.Tensor, *, n: int) -> torch.Tensor:
        total = x * 0
        for _ in range(6):
            total = total + (x * n).cumsum(1) * 0.25
        return total

    side = torch.cuda.Stream()

    def step(x: torch.Tensor, *, n: int) -> torch.Tensor:
        here = torch.cuda.current_stream()
        h = x + 1
        side.wait_stream(here)
        with torch.cuda.stream(side):
            a = scratchy(h, n=n)
        b = scratchy(h * 2, n=n)
        here.wait_stream(side)
        return a * 3 + b

    x = randn(256, 2048)
    cap = dg.capture(step, x, backend=be, host_args={"n": 2}, budget=KEEP_ALL)
    for n in (3, 5, 2, 9, 3, 5, 9):
        for _ in range(3):
            check(cap, step, x, n=n)
    assert cap.stats()["copies"] == 0


def test_key_gets_its_own_executable_at_the_second_use_and_loses_it_last(be: Any) -> None:
    step = layered(scaled_rows, layers=1)  # the same kernels for every length
    x, cache = randn(16, WIDTH), randn(WINDOW, WIDTH)
    pool = be.make_pool()
    cap = dg.capture(step, x, cache, backend=be, host_args={"n": 64}, pool=pool, budget=KEEP_ALL)
    graph = graph_of(cap)

    def executables() -> int:
        return sum(bool(kept.executable) for kept in pool.recordings.kept())

    for n in (128, 192, 256):
        check(cap, step, x, cache, n=n)
    assert executables() == 0
    for n in (128, 192, 256, 128):
        check(cap, step, x, cache, n=n)
    assert executables() == 3
    assert graph.info().recordings == 4
    assert pool.recordings.bytes > 0
    pool.recordings.budget_bytes = pool.recordings.bytes
    for n in (320, 320, 128, 320, 128):
        check(cap, step, x, cache, n=n)
    assert pool.recordings.bytes <= pool.recordings.budget_bytes
    for n in (64, 128, 192, 256, 320, 128):
        check(cap, step, x, cache, n=n)
    cap.close()
    assert len(pool.recordings) == 0
    assert pool.recordings.bytes == 0


def test_full_budget_gives_an_executable_to_a_key_that_is_used_often(be: Any) -> None:
    step = layered(scaled_rows, layers=1)
    x, cache = randn(16, WIDTH), randn(WINDOW, WIDTH)
    pool = be.make_pool()
    cap = dg.capture(step, x, cache, backend=be, host_args={"n": 64}, pool=pool, budget=KEEP_ALL)
    check(cap, step, x, cache, n=64)
    cap.replay(n=128)
    pool.recordings.budget_bytes = pool.recordings.bytes  # no room
    often = pool.recordings.kept()[-1]
    for _ in range(nodegraph._USES_WHEN_FULL - 2):
        check(cap, step, x, cache, n=64)
        check(cap, step, x, cache, n=128)
        assert not often.executable
    for _ in range(3):
        check(cap, step, x, cache, n=64)
        check(cap, step, x, cache, n=128)
    assert often.executable


def test_temporaries_of_recordings_stay_out_of_the_graphs_memory(be: Any) -> None:
    """A block that looks free after the capture is in use inside every replay."""
    pool = be.make_pool()

    @dg.region(host_args=("n",))
    def scratchy(x: torch.Tensor, *, n: int) -> torch.Tensor:
        scratches.append(None)
        scratch = torch.empty(n * 1000, device=x.device)
        places.append(scratch.data_ptr())
        scratch.fill_(n)
        return x + scratch[:1]

    def step(x: torch.Tensor, *, n: int) -> torch.Tensor:
        held = [x * k for k in range(8)]
        y = scratchy(x, n=n)
        return y + sum(held)

    scratches: list[None] = []
    places: list[int] = []
    x = randn(64, 1000)
    cap = dg.capture(step, x, backend=be, host_args={"n": 64}, pool=pool, budget=KEEP_ALL)
    before = {s["address"] for s in pool._memory.snapshot()}
    for n in (32, 64, 16, 48, 8):
        places.clear()
        cap.replay(n=n)
        assert not any(pool.owns(place) for place in places), n
        check(cap, step, x, n=n)
    assert {s["address"] for s in pool._memory.snapshot()} == before
    assert scratches


def test_random_numbers_outside_the_region_go_on_under_updates(be: Any) -> None:
    kept = draws_outside_the_region(be, randn).pool.recordings.kept()
    assert not any(recording.executable for recording in kept), "only torch's draws numbers"


@pytest.mark.parametrize("what", ["random", "pinned", "unjoined"])
def test_region_that_cannot_be_updated_is_refused_at_capture(be: Any, what: str) -> None:
    pinned = torch.randn(8, WIDTH).pin_memory()
    side = torch.cuda.Stream()

    @dg.region(host_args=("n",))
    def odd(x: torch.Tensor, *, n: int) -> torch.Tensor:
        h = x[:, :n].sum(1, keepdim=True)
        if what == "random":
            return h + torch.rand(8, 1, device=x.device)
        if what == "pinned":
            out = torch.empty_like(x)
            out.copy_(pinned, non_blocking=True)
            return out + h
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            return h * 2

    def step(x: torch.Tensor, *, n: int) -> torch.Tensor:
        y = odd(x * 2, n=n)
        if what == "unjoined":
            torch.cuda.current_stream().wait_stream(side)
        return y + 1

    x = randn(8, WIDTH)
    pool = be.make_pool()
    state = be.get_rng_state()
    with pytest.raises(dg.CaptureError, match="odd"):
        dg.capture(step, x, backend=be, host_args={"n": 4}, pool=pool)
    assert torch.equal(be.get_rng_state(), state)
    assert len(pool.recordings) == 0
    plain = dg.capture(lambda x: x * 2, x, backend=be, pool=pool)
    check(plain, lambda x: x * 2, x)


def test_key_with_other_nodes_makes_one_copy_and_keeps_addresses(be: Any) -> None:
    @dg.region(host_args=("n",))
    def uneven(x: torch.Tensor, *, n: int) -> torch.Tensor:
        h = x[:, :n].sum(1, keepdim=True)
        for _ in range(1 if n < 16 else 3):
            h = h * 1.5
        return h

    def step(x: torch.Tensor, *, n: int) -> dict[str, torch.Tensor]:
        for _ in range(2):
            x = x * 0.5 + uneven(x + 1, n=n)
        return {"y": x, "sum": x.sum()}

    x = randn(8, WIDTH)
    cap = dg.capture(step, x, backend=be, host_args={"n": 4}, budget=KEEP_ALL)
    held = cap.outputs["y"].data_ptr()
    for n in (5, 20, 30, 4, 20, 5, 40, 30, 4):
        check(cap, step, x, n=n)
        assert cap.outputs["y"].data_ptr() == held
    assert cap.stats()["copies"] == 1
    graph, out = record(be, lambda: step(x, n=4)["y"], n=4)
    graph.update(n=5)
    with pytest.raises(dg.UpdateTopologyError, match="uneven"):
        graph.update(n=20)
    assert graph.state == "ready"
    assert torch.equal(replayed(graph, out), step(x, n=5)["y"])


def test_trace_of_new_keys_breaks_past_its_budget_and_is_right(be: Any) -> None:
    step = layered(products(be), layers=2)
    x, cache = randn(16, WIDTH), randn(WINDOW, WIDTH)
    cap = dg.capture(step, x, cache, backend=be, host_args={"n": 64}, budget=UpdateBudget(misses=2))
    held = cap.outputs.data_ptr()
    for n in range(65, 90):
        check(cap, step, x, cache, n=n)
        assert cap.outputs.data_ptr() == held
    counts = cap.stats()
    assert counts["broken_over_miss_budget"] >= 20
    for n in (88, 88, 64, 66, 88, 89):
        check(cap, step, x, cache, n=n)
    assert cap.stats()["misses"] > counts["misses"]


def test_broken_step_that_is_captured_in_a_replay_runs_once(be: Any) -> None:
    """State that the step advances must advance once per replay."""

    @dg.region(host_args=("n",), mutates=("state",))
    def advance(x: torch.Tensor, state: torch.Tensor, *, n: int) -> None:
        state.add_(x[:, :n].sum())

    def step(x: torch.Tensor, state: torch.Tensor, *, n: int) -> torch.Tensor:
        for _ in range(3):
            advance(x * 2, state, n=n)
            x = x + state
            state.mul_(0.5)
        return x

    x, state = randn(8, WIDTH), torch.zeros((), device="cuda")
    cap = dg.capture(step, x, state, backend=be, host_args={"n": 2}, budget=UpdateBudget(misses=0))
    mirror = torch.zeros((), device="cuda")
    for n in (3, 4, 2, 3, 5, 3):
        want = step(x.clone(), mirror, n=n)
        got = cap.replay(n=n)
        assert torch.equal(got, want), n
        assert torch.equal(state, mirror), n
    assert cap.stats()["broken_over_miss_budget"] >= 3


def test_update_that_the_driver_refuses_half_way_makes_the_graph_dirty(
    be: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = is_dirty_after_half_an_update(be, randn, monkeypatch)
    x, cache = randn(16, WIDTH), randn(WINDOW, WIDTH)
    graph.reset()
    with be.capture_context(graph, host_args={"n": 3}):
        out = scaled_rows(x, cache, n=3)
    graph.update(n=9)
    assert torch.equal(replayed(graph, out), scaled_rows(x, cache, n=9))


def test_regions_run_again_in_the_modes_of_capture(be: Any) -> None:
    seen: list[tuple[bool, bool]] = []

    @dg.region(host_args=("n",))
    def head(x: torch.Tensor, weight: torch.Tensor, *, n: int) -> torch.Tensor:
        seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
        return x[:, :n] @ weight[:n]

    weight = randn(WIDTH, 4).requires_grad_()

    def step(x: torch.Tensor, *, n: int) -> torch.Tensor:
        with torch.no_grad():
            return head(x * 2, weight, n=n) + 1

    x = randn(8, WIDTH)
    cap = dg.capture(step, x, backend=be, host_args={"n": 4}, budget=KEEP_ALL)
    seen.clear()
    with torch.inference_mode():
        cap.replay(n=16)
    cap.replay(n=32)
    assert seen == [(False, False), (False, False)]
    check(cap, step, x, n=48)


def test_context_alone_makes_a_region_updatable(be: Any) -> None:
    now = [3]

    @dg.region(context=lambda: now[0])
    def ambient(x: torch.Tensor, *, context: int) -> torch.Tensor:
        return x[:, :context].sum(1, keepdim=True)

    def step(x: torch.Tensor) -> torch.Tensor:
        return ambient(x * 2) + 1

    x = randn(8, WIDTH)
    cap = dg.capture(step, x, backend=be, budget=KEEP_ALL)
    for value in (3, 9, 3, 30, 9):
        now[0] = value
        check(cap, step, x)
    assert cap.info().segments == 1


def test_updates_from_other_threads_and_streams_are_right(be: Any) -> None:
    step = layered(products(be), layers=2)
    x, cache = randn(16, WIDTH), randn(WINDOW, WIDTH)
    keys = [64 * k for k in range(1, 7)]
    cap = dg.capture(step, x, cache, backend=be, host_args={"n": 64}, budget=KEEP_ALL)
    want = {n: step(x, cache, n=n).clone() for n in keys}
    torch.cuda.synchronize()
    wrong: list[Any] = []

    def serve(offset: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for i in range(40):
                    n = keys[(i + offset) % len(keys)]
                    with cap.pool.lock:  # nobody replays between the replay and its copy
                        got = cap.replay(n=n).clone()
                    torch.cuda.current_stream().synchronize()
                    if not torch.equal(got, want[n]):
                        wrong.append(n)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=serve, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []


@pytest.mark.slow
def test_ten_thousand_replays_over_two_hundred_keys_are_right_and_flat(be: Any) -> None:
    step = layered(scaled_rows, layers=2)
    x, cache = randn(16, WIDTH), randn(WINDOW, WIDTH)
    keys = list(range(256, 456))
    graph_pool = be.make_pool()
    cap = dg.capture(
        step, x, cache, backend=be, host_args={"n": 256}, pool=graph_pool, budget=KEEP_ALL
    )
    graph = graph_of(cap)
    want = torch.stack([step(x, cache, n=n) for n in keys])
    cap.replay(n=257)
    cap.replay(n=256)
    cap.replay(n=257)  # with an executable of its own
    recordings = graph_pool.recordings
    each = recordings.kept()[-1].bytes
    recordings.budget_bytes = 16 * each
    order = torch.randint(len(keys), (10_000,), generator=torch.Generator().manual_seed(3)).tolist()
    bad = torch.zeros((), device="cuda", dtype=torch.int64)
    free: list[int] = []
    for turn, index in enumerate(order):
        got = cap.replay(n=keys[index])
        bad += (got != want[index]).any()
        if turn % 1000 == 999:
            torch.cuda.synchronize()
            free.append(torch.cuda.mem_get_info()[0])
            assert recordings.bytes <= recordings.budget_bytes
    assert int(bad) == 0
    if ALONE:
        assert max(free[2:]) - min(free[2:]) <= 8 * 2**20, free
    counts = cap.stats()
    assert (counts["copies"], counts["broken_over_copy_budget"]) == (0, 0)
    assert 2 <= graph.info().recordings < len(keys)
