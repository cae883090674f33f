"""Region update through libamdhip64 on a GPU: AMD's, or NVIDIA's with the shim under the backend.

    pytest tests/rocm/test_device.py -p tests.sim.hip.plugin

On an NVIDIA GPU the plugin puts the shim in libamdhip64's place, so that the captures, updates and
replays are real and the runtime is not AMD's.
"""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend

import devgraph as dg
from devgraph.rocm import verification
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

backend, randn = on("rocm")

pytestmark = pytest.mark.rocm


def memset(be: Any) -> Any:
    fill = ctypes.CDLL(be.runtime.path).hipMemsetAsync
    fill.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p)
    return fills(be, fill)


KINDS = {
    "attention": lambda be: attention(be, [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]),
    "products": products,
    "copies": copies,
    "fills": memset,
    "forks": forks,
    "triton": triton_kernels,
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_node_follows_its_host_argument(be: Any, kind: str):
    same_nodes = kind in ("copies", "fills", "triton")
    follows_its_host_argument(be, randn, KINDS[kind](be), same_nodes=same_nodes)


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
        assert be.verification.updates, "this runtime ignores parameters that are written"
    assert be.runtime.reports_copies or be.runtime.version.major < 7


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
    per_update = graph.update_strategy.leaked_bytes // 2  # two recordings were written
    monkeypatch.setattr(verification, "LEAK_BUDGET_BYTES", 3 * per_update)
    made: list[int] = []
    instantiate = be.runtime.instantiate
    counted = lambda graph: made.append(1) or instantiate(graph)  # noqa: E731
    monkeypatch.setattr(be.runtime, "instantiate", counted)
    for n in (1, 2, 3, 2, 1, 3, 1, 2):
        check(cap, step, x, cache, n=n)
        assert graph.update_strategy.leaked_bytes <= 3 * per_update
    assert len(made) >= 2
    cap.close()


def test_stale_recording_is_detected_by_the_first_replay(be: Any, monkeypatch: Any):
    """What a runtime with stale packets does: success, and the parameters of before."""
    region = copies(be)
    x, cache = randn(16, WIDTH), randn(WINDOW, WIDTH)
    graph, out = record(be, lambda: region(x, cache, n=3) + 1, n=3)
    assert torch.equal(replayed(graph, out), cache[3:19] + 1)
    monkeypatch.setattr(be.verification, "updates", True)  # what it becomes is undone
    monkeypatch.setattr(be.runtime, "write", lambda updates, executable: None)
    graph.update(n=40)
    with pytest.raises(dg.UpdateError, match="with earlier parameters"):
        graph.replay()
    assert graph.state == "dirty"
    monkeypatch.undo()
    graph.reset()
    with be.capture_context(graph, host_args={"n": 3}):
        out = region(x, cache, n=3) + 1
    graph.update(n=40)
    assert torch.equal(replayed(graph, out), cache[40:56] + 1)


def test_runtime_that_does_not_update_gives_every_key_an_executable(be: Any, monkeypatch: Any):
    step = layered(copies(be))
    x, cache = randn(16, WIDTH), randn(WINDOW, WIDTH)
    be.verification.find_out(be.device)
    monkeypatch.setattr(be.verification, "updates", False)
    monkeypatch.setattr(be.runtime, "write", lambda *_: pytest.fail("an executable was updated"))
    with dg.capture(step, x, cache, backend=be, host_args={"n": 8}, budget=KEEP_ALL) as cap:
        for n in (8, 9, 16, 9, 8):
            check(cap, step, x, cache, n=n)
        assert cap.stats()["copies"] == 0


def test_update_that_the_driver_refuses_half_way_makes_the_graph_dirty(be: Any, monkeypatch: Any):
    is_dirty_after_half_an_update(be, randn, monkeypatch)


def test_random_numbers_outside_the_region_go_on_under_updates(be: Any):
    draws_outside_the_region(be, randn).close()


def test_executables_of_their_own_are_given_back(be: Any):
    step = layered(copies(be))
    x, cache = randn(16, WIDTH), randn(WINDOW, WIDTH)
    pool = be.make_pool()
    cap = dg.capture(step, x, cache, backend=be, host_args={"n": 0}, pool=pool, budget=KEEP_ALL)
    for n in (0, 1, 2, 3, 4, 5) * 3:
        check(cap, step, x, cache, n=n)
    assert sum(bool(kept.executable) for kept in pool.recordings.kept()) >= 5
    cap.close()
    assert len(pool.recordings) == 0
    assert pool.recordings.bytes == 0
