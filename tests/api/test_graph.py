"""A graph of its own: made, captured, replayed, updated and closed.

What each state refuses is here; what a vendor does on the way from one to the next, its updates and
its threads are the suite's: ``devgraph/testing/conformance/test_states.py``, ``test_update.py`` and
``test_concurrency.py``.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import devgraph as dg
from devgraph.testing.conformance.support import Kit
from devgraph.testing.conformance.test_update import WIDTH, both, head


def test_graph_is_made_captured_replayed_updated_and_closed():
    be = dg.get_backend("cpu")
    assert isinstance(be.capabilities, dg.Capabilities)
    for info in dg.backends():
        assert info.name and info.available == (not info.reason)
        assert isinstance(info.device, str) and isinstance(info.version, str)

    @dg.region(host_args=("kv_len",), mutates=("out",))
    def attention(x: Any, out: Any, *, kv_len: int) -> None:
        out.copy_(x[:, :kv_len].sum(1))

    x, out = torch.randn(4, 1024), torch.empty(4)
    pool = be.make_pool()
    graph = be.make_graph(pool=pool)
    with be.capture_context(graph, host_args={"kv_len": 512}):
        attention(x, out, kv_len=512)
    graph.replay()
    assert torch.equal(out, x[:, :512].sum(1))
    graph.update(kv_len=777)
    graph.replay()
    graph.replay()  # nothing but the last update is repeated
    assert torch.equal(out, x[:, :777].sum(1))
    info = graph.info()
    assert (graph.state, info.regions, info.segments) == ("ready", 1, 1)
    assert info.nodes and info.bytes and info.capture_seconds > 0
    graph.reset()
    assert graph.state == "empty"
    stream, mode = None, "thread_local"
    with be.capture_context(graph, stream, pool, mode):
        y = x + 1
    graph.replay()
    assert torch.equal(y, x + 1)
    graph.close()
    assert graph.state == "closed"


@pytest.mark.parametrize("call", ["replay", "update"])
def test_empty_graph_refuses_and_names_the_way_out(kit: Kit, call: str) -> None:
    graph = kit.backend.make_graph()
    with pytest.raises(dg.StateError, match=r"empty.*capture_context"):
        getattr(graph, call)()
    assert graph.state == "empty"


@pytest.mark.parametrize("call", ["replay", "update", "reset"])
def test_closed_graph_refuses_and_names_the_way_out(kit: Kit, call: str) -> None:
    """FAULTS 28."""
    x = kit.tensor(4)
    graph, _ = kit.record(lambda: x + 1)
    graph.close()
    with pytest.raises(dg.StateError, match=r"closed.*make_graph"):
        getattr(graph, call)()
    with (
        pytest.raises(dg.StateError, match=r"closed.*make_graph"),
        kit.backend.capture_context(graph),
    ):
        pytest.fail("the body ran")
    assert graph.state == "closed"


def test_ready_graph_is_not_captured_over(kit: Kit) -> None:
    x = kit.tensor(4)
    graph, y = kit.record(lambda: x + 1)
    with (
        pytest.raises(dg.StateError, match=r"ready.*reset"),
        kit.backend.capture_context(graph),
    ):
        pytest.fail("the body ran")
    kit.refill(x, 5)
    graph.replay()
    kit.same(y, x + 1)


def _captured(kit: Kit, x: torch.Tensor) -> Any:
    return kit.capture(lambda x: pytest.fail("the inner body ran"), x)


def _raw(kit: Kit) -> None:
    with kit.backend.capture_context(kit.backend.make_graph()):
        pytest.fail("the inner body ran")


INSIDE = """own.replay own.update own.reset own.close other.replay other.update captured.replay
    capture raw-capture""".split()


@pytest.mark.parametrize("use", INSIDE)
def test_use_inside_a_capture_is_refused_and_the_capture_goes_on(kit: Kit, use: str) -> None:
    """FAULTS 13."""
    x = kit.tensor(4)
    other, outside = kit.record(lambda: x + 1)
    captured = kit.capture(lambda x: x + 1, x)
    own = kit.backend.make_graph()
    named = {"own": own, "other": other, "captured": captured}
    uses: dict[str, Callable[[], object]] = {
        "capture": lambda: _captured(kit, x),
        "raw-capture": lambda: _raw(kit),
    }
    with kit.backend.capture_context(own):
        y = x + 1
        with pytest.raises((dg.StateError, dg.NestedCaptureError)) as caught:
            if use in uses:
                uses[use]()
            else:
                who, call = use.split(".")
                getattr(named[who], call)()
        assert use.startswith("own") or isinstance(caught.value, dg.NestedCaptureError)
        z = y * 2
    kit.refill(x, 5)
    other.replay()
    own.replay()
    kit.same((outside, z), (x + 1, (x + 1) * 2))
    kit.check(captured, lambda x: x + 1, x)


def test_capture_in_the_eager_body_of_a_break_is_refused(kit: Kit) -> None:
    """FAULTS 13."""
    refused: list[dg.NestedCaptureError] = []

    @dg.no_graph
    def body(x: torch.Tensor) -> torch.Tensor:
        if not refused:
            with pytest.raises(dg.NestedCaptureError, match="eager body") as caught:
                _captured(kit, x)
            refused.append(caught.value)
        return x * 2

    def step(x: torch.Tensor) -> torch.Tensor:
        return body(x + 1) + 1

    x = kit.tensor(4)
    captured = kit.capture(step, x, policy="breakable", warmup=0)
    assert len(refused) == 1
    kit.check(captured, step, x)


def test_expired_graph_is_stale_until_reset(kit: Kit) -> None:
    x = kit.tensor(4)
    graph, _ = kit.record(lambda: x + 1)
    graph.expire()
    assert graph.state == "stale"
    with pytest.raises(dg.StateError, match=r"stale.*reset"):
        graph.replay()
    graph.reset()
    with kit.backend.capture_context(graph):
        y = x - 1
    graph.replay()
    kit.same(y, x - 1)


def test_bound_replay_is_for_ready_graphs(kit: Kit) -> None:
    x = kit.tensor(4)
    graph = kit.backend.make_graph()
    with pytest.raises(dg.StateError, match="capture into it first"):
        graph.bound()
    graph, _ = kit.record(lambda: x + 1)
    graph.close()
    with pytest.raises(dg.StateError, match="closed"):
        graph.bound()


@pytest.mark.parametrize("wrong", [{"k": 3}, {"n": "3"}, {"n": 2.5}, {"n": 3, "k": 1}], ids=str)
def test_wrong_update_is_refused_and_changes_nothing(kit: Kit, wrong: dict[str, Any]) -> None:
    """FAULTS 19."""
    x = kit.tensor(4, WIDTH)
    graph, y = kit.record(lambda: head(x * 2, n=3), host_args={"n": 3})
    graph.update(n=5)
    with pytest.raises(dg.HostArgumentError, match="host argument"):
        graph.update(**wrong)
    assert graph.state == "ready"
    graph.replay()
    kit.same(y, head(x * 2, n=5))


def test_info_counts_what_was_captured(kit: Kit) -> None:
    x = kit.tensor(4)
    graph, _ = kit.record(lambda: (x + 1) * 2)
    info = graph.info()
    assert info.state == "ready"
    assert info.segments == 1
    assert info.regions == 0
    assert info.recordings == 0
    assert info.bytes >= 0
    assert info.capture_seconds > 0
    assert info.nodes is None or info.nodes >= 2
    graph.close()
    assert graph.info().state == "closed"
    assert "closed" in repr(graph)


def test_update_keeps_arguments_that_it_does_not_name(kit: Kit) -> None:
    x = kit.tensor(4, WIDTH)
    graph, y = kit.record(lambda: both(x, n=3, m=4), host_args={"n": 3, "m": 4})
    n, m = 3, 4
    for change in ({"n": 5}, {"m": 9}, {"n": 2, "m": 1}, {}):
        graph.update(**change)
        n, m = change.get("n", n), change.get("m", m)
        graph.replay()
        kit.same(y, both(x, n=n, m=m), f"the replay after update({change})")


def test_graph_that_dies_waits_for_no_thread_that_has_its_pool(
    cpu_kit: Kit, monkeypatch: pytest.MonkeyPatch
):
    """FAULTS 27. It may die in any thread, with any lock held: two such waited for each other."""
    backend = cpu_kit.backend
    pool = backend.make_pool()
    graph = backend.make_graph(pool)
    with backend.capture_context(graph):
        y = torch.ones(WIDTH) + 1
    graph.replay()
    held, end, gone = threading.Event(), threading.Event(), threading.Event()
    on_device: list[int] = []
    freed_in: list[int] = []

    @contextlib.contextmanager
    def entered() -> Iterator[None]:
        on_device.append(threading.get_ident())
        yield

    def freed() -> None:
        freed_in.append(threading.get_ident())
        gone.set()

    monkeypatch.setattr(backend, "on_device", entered)

    def hold() -> None:
        with pool.lock:
            held.set()
            end.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    weakref.finalize(graph._tape, freed)  # type: ignore[attr-defined]
    dying = threading.Thread(target=lambda graphs: graphs.clear(), args=([graph],))
    del graph
    dying.start()
    dying.join(30)
    waited = dying.is_alive()
    end.set()
    holder.join()
    assert not waited
    assert gone.wait(30)  # when the pool is free again
    assert freed_in == on_device  # a new thread begins on another one
    assert torch.equal(y, torch.full((WIDTH,), 2.0))
