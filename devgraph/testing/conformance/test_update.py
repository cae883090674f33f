"""Region updates: new host values in a captured graph."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import devgraph as dg
from devgraph.api.errors import ExecutableError
from devgraph.testing.conformance.support import Kit, beside, declares, runner_of, same

pytestmark = declares("region_update")

WIDTH = 16


@dg.region(host_args=("n",))
def head(x: torch.Tensor, *, n: int) -> torch.Tensor:
    """Sum ``n`` columns. ``n`` changes kernel arguments, but not the kernels."""
    return x[:, :n].sum(1, keepdim=True) * 2


@dg.region(host_args=("m",))
def tail(x: torch.Tensor, *, m: int) -> torch.Tensor:
    return x[:, m:].sum(1, keepdim=True) + 1


def layers(x: torch.Tensor, *, n: int) -> torch.Tensor:
    for _ in range(3):
        x = x * 0.5 + head(x + 1, n=n)
    return x


def both(x: torch.Tensor, *, n: int, m: int) -> torch.Tensor:
    h = x * 2
    return head(h, n=n) * 10 + tail(h, m=m)


def test_update_is_seen_by_the_next_replay_and_by_later_ones(kit: Kit) -> None:
    x = kit.tensor(4, WIDTH)
    graph, y = kit.record(lambda: head(x * 2, n=3), host_args={"n": 3})
    for n in (3, 7, 1):
        graph.update(n=n + 4)  # No launch uses this update.
        graph.update(n=n)
        for seed in (1, 2):
            kit.refill(x, seed)
            graph.replay()
            kit.same(y, head(x * 2, n=n), f"the replay after update(n={n})")


def test_update_does_not_run_the_region(kit: Kit) -> None:
    @dg.region(host_args=("n",), mutates=("out",))
    def added(x: torch.Tensor, out: torch.Tensor, *, n: int) -> None:
        out.add_(x * n)

    x, out = kit.tensor(4), kit.tensor(4, seed=1)
    before = out.clone()
    graph, _ = kit.record(lambda: added(x, out, n=2), host_args={"n": 2}, warm=False)
    graph.update(n=3)
    kit.same(out, before, "the written argument after the update")
    graph.replay()
    kit.same(out, before + x * 3)


def test_recording_is_not_used_before_it_is_applied(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: object) -> None:
        raise ExecutableError("a planted shortage of memory")

    x = kit.tensor(4, WIDTH)
    graph, y = kit.record(lambda: head(x * 2, n=3), host_args={"n": 3})
    with monkeypatch.context() as patch, pytest.raises(ExecutableError):
        patch.setattr(graph, "_apply", fails)
        graph.update(n=7)
    for n in (3, 7):
        graph.update(n=n)
        graph.replay()
        kit.same(y, head(x * 2, n=n), f"the replay for n={n}, after _record for n=7,")


def test_every_order_of_keys_gives_eager_results(kit: Kit) -> None:
    x = kit.tensor(4, WIDTH)
    captured = kit.capture(layers, x, host_args={"n": 2})
    keys = (2, 5, 11)
    seed = 0
    for order in itertools.permutations(keys):
        for n in (*order, order[0], order[0]):
            seed += 1
            kit.check(captured, layers, x, seed=seed, n=n)


def test_each_region_gets_its_own_argument(kit: Kit) -> None:
    x = kit.tensor(4, WIDTH)
    captured = kit.capture(both, x, host_args={"n": 3, "m": 4})
    for n, m in ((3, 4), (4, 3), (9, 4), (9, 1), (3, 1), (3, 4)):
        kit.check(captured, both, x, n=n, m=m)


def test_unchanged_key_runs_no_host_code(kit: Kit) -> None:
    calls = []

    @dg.region(host_args=("n",))
    def counted(x: torch.Tensor, *, n: int) -> torch.Tensor:
        calls.append(n)
        return x[:, :n].sum(1)

    def step(x: torch.Tensor, *, n: int) -> torch.Tensor:
        return counted(x * 2, n=n)

    x = kit.tensor(4, WIDTH)
    captured = kit.capture(step, x, host_args={"n": 3})
    captured.replay(n=6)
    calls.clear()
    for _ in range(3):
        captured.replay(n=6)
    kit.backend.synchronize()
    assert calls == []
    kit.check(captured, step, x, n=6)


def test_reset_forgets_recordings(kit: Kit, pool: dg.Pool) -> None:
    """Replays of the second capture must not use recordings of the first capture."""
    x = kit.tensor(4, WIDTH)
    graph, _ = kit.record(lambda: head(x * 2, n=3), pool=pool, host_args={"n": 3})
    graph.update(n=5)
    graph.replay()
    graph.reset()
    assert graph.info().recordings == 0
    with kit.backend.capture_context(graph, host_args={"n": 3}):
        y = head(x * 7, n=3) + 100
    for n in (5, 3, 5):
        graph.update(n=n)
        graph.replay()
        kit.same(y, head(x * 7, n=n) + 100, f"the second capture after update(n={n})")


def test_new_graph_does_not_inherit_recordings(kit: Kit, pool: dg.Pool) -> None:
    x = kit.tensor(4, WIDTH)
    first = kit.capture(layers, x, host_args={"n": 2}, pool=pool)
    kit.check(first, layers, x, n=5)
    first.close()
    del first

    def other(x: torch.Tensor, *, n: int) -> torch.Tensor:
        return head(x * 3, n=n) - 1

    for _ in range(3):  # A new graph may reuse the address or id of a freed one.
        second = kit.capture(other, x, host_args={"n": 2}, pool=pool)
        for n in (5, 2):
            kit.check(second, other, x, n=n)
        second.close()


def test_invalidated_runner_forgets_recordings(kit: Kit, pool: dg.Pool) -> None:
    """FAULTS 10. New captures must not use the old weights."""
    weight = [kit.tensor(WIDTH, WIDTH)]

    @dg.region(host_args=("n",))
    def weighed(x: torch.Tensor, w: torch.Tensor, *, n: int) -> torch.Tensor:
        return (x[:, :n] * w[0, :n]).sum(1)

    def forward(batch: Any) -> torch.Tensor:
        out: torch.Tensor = weighed(batch.x * 2, weight[0], n=batch.host.n)
        return out + 1

    slot = dg.InputSlot("x", ("tokens", WIDTH), torch.float32, pad=dg.Pad.zero())
    runner = runner_of(kit, forward, [slot], host_args={"n": 2}, config="full", pool=pool)
    keys = (5, 2, 7, 5, 2)
    for turn in range(3):
        for seed, n in enumerate(keys):
            x = kit.tensor(4, WIDTH, seed=seed)
            out = runner.run({"x": x}, host_args={"n": n})
            want = ((x * 2)[:, :n] * weight[0][0, :n]).sum(1) + 1
            kit.same(out, want, f"the run with n={n} after {turn} invalidations")
        weight[0] = weight[0].clone() * 3 + 1
        runner.invalidate("weights")
        runner.capture()
    assert runner.stats().eager == {}


def test_small_budget_evicts_and_stays_right(kit: Kit) -> None:
    x = kit.tensor(4, WIDTH)
    pool = kit.backend.make_pool()
    pool.limit(1)
    captured = kit.capture(layers, x, host_args={"n": 2}, pool=pool)
    for n in (2, 3, 4, 2, 3, 4, 2):
        kit.check(captured, layers, x, n=n)
    assert captured.info().recordings <= 2


def test_two_graphs_of_a_pool_are_updated_separately(kit: Kit, pool: dg.Pool) -> None:
    x = kit.tensor(4, WIDTH)
    first = kit.capture(layers, x, host_args={"n": 2}, pool=pool)
    second = kit.capture(both, x, host_args={"n": 2, "m": 1}, pool=pool)
    for n, m in ((5, 6), (2, 1), (7, 6)):
        kit.check(first, layers, x, n=n)
        kit.check(second, both, x, n=m, m=n)
        kit.check(first, layers, x, n=n)


def test_region_temporaries_do_not_touch_the_memory_of_the_graph(kit: Kit, pool: dg.Pool) -> None:
    """Memory that is free after the capture may be in use during a replay."""

    @dg.region(host_args=("n",))
    def scratchy(x: torch.Tensor, *, n: int) -> torch.Tensor:
        total = x * 0
        for _ in range(4):
            total = total + (x * n).cumsum(1) * 0.25
        return total

    def step(x: torch.Tensor, *, n: int) -> torch.Tensor:
        held = [x + k for k in range(6)]
        h = scratchy(x, n=n)
        for k, item in enumerate(held):
            h = h + item * k
        return h

    x = kit.tensor(32, WIDTH)
    captured = kit.capture(step, x, host_args={"n": 1}, pool=pool)
    for n in (4, 2, 9, 1, 4):
        kit.check(captured, step, x, n=n)


def _uneven(n: int) -> int:
    return 1 if n < 8 else 3


@dg.region(host_args=("n",))
def uneven(x: torch.Tensor, *, n: int) -> torch.Tensor:
    """Run two more kernels if ``n`` is at least 8."""
    h = x[:, :n].sum(1, keepdim=True)
    for _ in range(_uneven(n)):
        h = h * 1.5
    return h


def uneven_behind_head(x: torch.Tensor, *, n: int) -> torch.Tensor:
    """Call a region that accepts any ``n``, then a region that needs other kernels for some."""
    h = x * 2
    return head(h, n=n) * 10 + uneven(h, n=n)


def test_update_that_needs_other_nodes_is_refused_as_a_whole(kit: Kit) -> None:
    """FAULTS 21."""
    x = kit.tensor(4, WIDTH)
    uneven(x, n=9)
    graph, y = kit.record(lambda: uneven_behind_head(x, n=3), host_args={"n": 3})
    for good, bad in ((3, 9), (5, 12), (5, 9)):
        graph.update(n=good)
        with pytest.raises(dg.UpdateTopologyError, match="uneven"):
            graph.update(n=bad)
        assert graph.state == "ready"
        graph.replay()
        kit.same(y, uneven_behind_head(x, n=good), f"the replay after the refused update(n={bad})")


def test_step_that_needs_other_nodes_is_right_or_refused(kit: Kit) -> None:
    """FAULTS 21."""
    x = kit.tensor(4, WIDTH)
    captured = kit.capture(uneven_behind_head, x, host_args={"n": 3})
    for n in (5, 9, 3, 12, 6):
        try:
            kit.check(captured, uneven_behind_head, x, n=n)
        except dg.UpdateTopologyError:
            assert _uneven(n) != _uneven(3)


class _Refused(Exception):
    pass


@dg.region(host_args=("n",))
def picky(x: torch.Tensor, *, n: int) -> torch.Tensor:
    if n == 13:
        raise _Refused("n is 13")
    return x[:, :n].sum(1, keepdim=True) - 1


def picky_first(x: torch.Tensor, *, n: int) -> torch.Tensor:
    h = x * 2
    return picky(h, n=n) * 10 + head(h, n=n)


def picky_second(x: torch.Tensor, *, n: int) -> torch.Tensor:
    h = x * 2
    return head(h, n=n) * 10 + picky(h, n=n)


@pytest.mark.parametrize("step", [picky_first, picky_second])
def test_failed_update_keeps_the_old_result_or_refuses_to_replay(kit: Kit, step: Any) -> None:
    """FAULTS 20."""
    x = kit.tensor(4, WIDTH)
    graph, y = kit.record(lambda: step(x, n=3), host_args={"n": 3})
    graph.update(n=5)
    with pytest.raises(_Refused, match="n is 13"):
        graph.update(n=13)
    if graph.state == "dirty":
        with pytest.raises(dg.StateError, match=r"dirty.*reset"):
            graph.replay()
        graph.reset()
        return
    assert graph.state == "ready"
    for _ in range(2):
        graph.replay()
        kit.same(y, step(x, n=5), "the replay after the failed update")
    graph.update(n=7)
    graph.replay()
    kit.same(y, step(x, n=7))


@pytest.mark.parametrize("step", [picky_first, picky_second])
def test_failed_step_raises_the_original_and_the_next_is_right(kit: Kit, step: Any) -> None:
    """FAULTS 20, 25."""
    x = kit.tensor(4, WIDTH)
    captured = kit.capture(step, x, host_args={"n": 3})
    kit.check(captured, step, x, n=5)
    with pytest.raises(_Refused, match="n is 13"):
        captured.replay(n=13)
    for n in (5, 3, 6):
        kit.check(captured, step, x, n=n)


def test_threads_that_update_one_capture_get_their_own_results(kit: Kit) -> None:
    """FAULTS 20. A replay uses its own value, even if another thread updates the graph."""
    x = kit.tensor(4, WIDTH)
    captured = kit.capture(layers, x, host_args={"n": 2})
    keys = (2, 5, 7, 11)
    want = {n: layers(x, n=n) for n in keys}
    kit.backend.synchronize()

    def work(start: int) -> None:
        for turn in range(40):
            n = keys[(start + turn) % len(keys)]
            with captured.pool.lock:  # The next replay overwrites the outputs.
                got = captured.replay(n=n).clone()
            kit.same(got, want[n], f"the replay of thread {start} with n={n}")

    with ThreadPoolExecutor(3) as threads:
        for done in [threads.submit(work, start) for start in range(3)]:
            done.result(60)


def test_thread_that_starts_with_a_known_key_gets_its_results(kit: Kit) -> None:
    """The replay may build an executable in a thread that has never used the device."""
    x = kit.tensor(4, WIDTH)
    captured = kit.capture(layers, x, host_args={"n": 2})
    captured.replay(n=5)
    captured.replay(n=2)
    kit.backend.synchronize()
    with ThreadPoolExecutor(1) as thread:
        got = thread.submit(captured.replay, n=5).result(60)
    kit.same(got, layers(x, n=5), "the replay of a new thread")


def test_replay_between_updates_of_another_thread_is_never_half_updated(kit: Kit) -> None:
    """FAULTS 20."""
    x = kit.tensor(4, WIDTH)
    graph, y = kit.record(lambda: both(x, n=3, m=4), host_args={"n": 3, "m": 4})
    pairs = ((3, 4), (9, 1), (5, 12))
    legal = [both(x, n=n, m=m) for n, m in pairs]
    kit.backend.synchronize()
    stop = threading.Event()

    def update() -> None:
        for turn in itertools.count():
            if stop.is_set():
                return
            n, m = pairs[turn % len(pairs)]
            graph.update(n=n, m=m)

    with beside(update):
        try:
            for _ in range(60):
                graph.replay()
                kit.backend.synchronize()
                assert any(torch.equal(y, one) for one in legal), "half an update was replayed"
        finally:
            stop.set()


def test_random_numbers_in_an_updatable_region_are_refused(kit: Kit, pool: dg.Pool) -> None:
    """FAULTS 22."""

    @dg.region(host_args=("n",))
    def noisy(x: torch.Tensor, *, n: int) -> torch.Tensor:
        return x[:, :n].sum(1) + torch.rand(4, device=x.device)

    x = kit.tensor(4, WIDTH)
    state = kit.backend.get_rng_state()
    with pytest.raises(dg.CaptureError, match="noisy"):
        kit.capture(lambda x, *, n: noisy(x * 2, n=n), x, host_args={"n": 3}, pool=pool)
    same(kit.backend.get_rng_state(), state, "the random state after the refusal")
    captured = kit.capture(layers, x, host_args={"n": 3}, pool=pool)
    kit.check(captured, layers, x, n=4)


def test_region_that_returns_another_layout_for_a_value_is_refused(kit: Kit) -> None:
    """FAULTS 24."""

    @dg.region(host_args=("n",))
    def growing(x: torch.Tensor, *, n: int) -> torch.Tensor:
        return x[:, :n] * 2

    def step(x: torch.Tensor, *, n: int) -> torch.Tensor:
        return growing(x + 1, n=n).sum()

    x = kit.tensor(4, WIDTH)
    captured = kit.capture(step, x, host_args={"n": 3})
    with pytest.raises(dg.RegionError, match="growing"):
        captured.replay(n=5)
    kit.check(captured, step, x, n=3)


def test_info_counts_regions_and_recordings(kit: Kit) -> None:
    x = kit.tensor(4, WIDTH)
    captured = kit.capture(layers, x, host_args={"n": 2})
    assert captured.info().regions == 3
    captured.replay(n=5)
    captured.replay(n=6)
    assert captured.info().recordings >= 2
    assert captured.explain().count("head") == 3
    captured.close()
    assert len(captured.pool.recordings) == 0


def test_an_error_of_a_region_that_runs_again_names_mark_and_bucket(kit: Kit) -> None:
    runner = runner_of(kit, lambda batch: picky(batch.x, n=batch.host.n), host_args={"n": 1})
    with pytest.raises(_Refused) as caught:
        runner.run({"x": torch.zeros_like(runner.buffers["x"][:2])}, host_args={"n": 13})
    notes = "\n".join(caught.value.__notes__)  # type: ignore[attr-defined]
    assert "picky, marked call 0" in notes and "decode, bucket 2" in notes
