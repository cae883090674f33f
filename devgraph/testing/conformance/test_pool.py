"""Graphs that share a pool: replays in any order, and peak memory."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import devgraph as dg
from devgraph.testing.conformance.support import BREAKING, POLICIES, Kit, copied, declares, same

WIDTH = 32
DTYPES = (torch.float32, torch.bfloat16)


class Buckets:
    """A step that is captured for several row counts in one pool, largest first.

    Each bucket has its own input. Intermediate results of all buckets share the pool.
    """

    def __init__(
        self,
        kit: Kit,
        pool: dg.Pool,
        step: Callable[..., Any],
        sizes: tuple[int, ...],
        policy: str,
        *,
        dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> None:
        self.kit = kit
        self.step = step
        self.weight = kit.tensor(WIDTH, WIDTH, seed=1, dtype=dtype)
        self.inputs = {
            n: kit.tensor(n, WIDTH, seed=n, dtype=dtype) for n in sorted(sizes, reverse=True)
        }
        self.captured = {
            n: kit.capture(step, x, self.weight, policy=policy, pool=pool, **options)
            for n, x in self.inputs.items()
        }

    def check(self, size: int, seed: int) -> None:
        """Replay a bucket with fresh data and compare it with an eager run."""
        self.kit.check(self.captured[size], self.step, self.inputs[size], self.weight, seed=seed)

    def close(self) -> None:
        for captured in self.captured.values():
            captured.close()


def deep(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Allocate many temporary tensors of the size of ``x``."""
    for k in range(4):
        x = torch.tanh(x @ w) * 0.5 + x + k
    return x


@dg.region(mutates=("out",))
def mixed(x: torch.Tensor, residual: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x * 2 - residual)


@dg.no_graph
def on_host(x: torch.Tensor) -> torch.Tensor:
    return x + float(x.detach().abs().amax().cpu())


@dg.region()
def halved(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x * 0.5, residual + 1


def broken(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Run breaks that read results of earlier segments and earlier breaks."""
    residual = x * 3
    for k in range(3):
        h = torch.tanh(x @ w)
        out = torch.zeros_like(h)
        mixed(h, residual, out)
        if k == 1:
            out = on_host(out)
        x, residual = halved(out + h, residual)
        x = x + residual * 0.1
    return x


def partly(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Run a break that writes to part of a segment's tensor."""
    out = torch.zeros_like(x)
    write_first_row(x @ w, out)
    return out + x


@dg.region(mutates=("out",))
def write_first_row(x: torch.Tensor, out: torch.Tensor) -> None:
    out[:1].copy_(x[:1])


STEPS = [("full", deep), ("breakable", deep), ("breakable", broken), ("breakable", partly)]


@pytest.mark.parametrize(("policy", "step"), STEPS)
def test_buckets_are_right_in_every_order_after_all_are_captured(
    kit: Kit, pool: dg.Pool, policy: str, step: Callable[..., Any]
) -> None:
    """FAULTS 35."""
    sizes = (64, 17, 8, 1)
    buckets = Buckets(kit, pool, step, sizes, policy)
    kit.churn()
    seed = 1000
    for order in itertools.permutations(sizes):
        for size in order:
            seed += 10
            buckets.check(size, seed)


@pytest.mark.parametrize(("policy", "step"), STEPS)
def test_output_survives_replays_of_the_other_buckets(
    kit: Kit, pool: dg.Pool, policy: str, step: Callable[..., Any]
) -> None:
    """FAULTS 35. Outputs must not be in memory that the capture of another graph has freed."""
    sizes = (40, 20, 10)
    buckets = Buckets(kit, pool, step, sizes, policy)
    for size in sizes:
        kept = copied(buckets.captured[size].replay())
        for other in sizes:
            if other != size:
                buckets.captured[other].replay()
        kit.same(buckets.captured[size].outputs, kept, f"the output of bucket {size}")


@dg.region(host_args=("length",), mutates=("out",))
def prefix_mean(x: torch.Tensor, out: torch.Tensor, *, length: int) -> None:
    """Write the mean of the first ``length`` columns; the length determines the kernels."""
    out.copy_(x[:, :length].mean(1, keepdim=True).expand_as(out))


@dg.no_graph(fake=torch.empty_like)
def scaled_on_host(x: torch.Tensor) -> torch.Tensor:
    """Read device data on the host, which a capture forbids."""
    return x / max(1.0, float(x.detach().abs().max().cpu()))


def layered(x: torch.Tensor, w: torch.Tensor, *, length: int) -> torch.Tensor:
    """Run identical layers around regions."""
    for _ in range(3):
        h = torch.nn.functional.silu(x @ w)
        out = torch.empty_like(h)
        prefix_mean(h, out, length=length)
        x = scaled_on_host(x + out) * 2 + h
    return x


COMPILED = [pytest.param(True, dtype, marks=pytest.mark.slow) for dtype in DTYPES]


@declares("piecewise")
@pytest.mark.filterwarnings("ignore:TensorFloat32:UserWarning")  # advice of the compiler
@pytest.mark.parametrize(("compiled", "dtype"), [(False, torch.float32), *COMPILED], ids=str)
def test_compiled_buckets_in_any_order(kit: Kit, compiled: bool, dtype: torch.dtype) -> None:
    """FAULTS 35. Only declared compilers are tested."""
    sizes = (16, 8, 5)
    for compiler in set(kit.backend.capabilities.compilers) - {"eager"} if compiled else {"eager"}:
        options: dict[str, Any] = {"compiler": compiler, "host_args": {"length": 3}}
        pool = kit.backend.make_pool()
        buckets = Buckets(kit, pool, layered, sizes, "piecewise", dtype=dtype, **options)
        compilations = [c.stats()["compilations"] for c in buckets.captured.values()]
        assert compilations[1:] == [0, 0], "a bucket compiled the step again"
        for seed, order in enumerate(itertools.permutations(sizes)):
            for rows in order:
                x, length = buckets.inputs[rows], 1 + (seed + rows) % WIDTH
                kit.refill(x, seed)
                want = layered(x, buckets.weight, length=length)
                got = buckets.captured[rows].replay(length=length)
                kit.backend.synchronize()
                if compiled:
                    exact = layered(x.double(), buckets.weight.double(), length=length)
                    least = torch.finfo(dtype).eps * exact.abs().max()
                    error, eager_error = ((y - exact).abs().max() for y in (got, want))
                    assert error <= 4 * max(eager_error, least)
                else:
                    same(got, want)


@pytest.mark.parametrize("policy", POLICIES)
def test_closed_bucket_leaves_the_others_right(kit: Kit, pool: dg.Pool, policy: str) -> None:
    """FAULTS 27."""
    sizes = (64, 17, 8)
    buckets = Buckets(kit, pool, broken if policy == "breakable" else deep, sizes, policy)
    buckets.captured.pop(64).close()
    gc.collect()
    for size in (8, 17, 8):
        buckets.check(size, 3000 + size)
    x = kit.tensor(64, WIDTH)
    again = kit.capture(buckets.step, x, buckets.weight, policy=policy, pool=pool)
    for size in (17, 8):
        buckets.check(size, 4000 + size)
    kit.check(again, buckets.step, x, buckets.weight)
    buckets.check(17, 5000)


def test_breaks_keep_outside_tensors_alive(kit: Kit, pool: dg.Pool) -> None:
    """FAULTS 35."""
    sizes = (512, 4096)
    held = {n: kit.tensor(n, seed=n) for n in sizes}
    want = {n: tensor.clone() for n, tensor in held.items()}

    def step(x: torch.Tensor) -> torch.Tensor:
        n = x.shape[0]
        return weighed(x + 1, held[n]) * 2

    xs = {n: kit.tensor(n) for n in sizes}
    captured = {n: kit.capture(step, xs[n], policy="breakable", pool=pool) for n in sizes}
    held.clear()
    gc.collect()
    kit.churn()
    kept = [kit.tensor(n, seed=7) for n in sizes for _ in range(8)]
    for n in sizes:
        kit.refill(xs[n], 50 + n)
        kit.same(captured[n].replay(), (xs[n] + 1) * want[n] * 2, f"the bucket of {n}")
    del kept


@dg.no_graph
def weighed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * weight


@declares("shared_pool")
@pytest.mark.parametrize(("policy", "step"), STEPS[:3])
def test_many_buckets_cost_little_memory(kit: Kit, policy: str, step: Callable[..., Any]) -> None:
    """The limit is 1.2x the largest bucket, plus outputs and 2 MiB for allocator rounding."""
    largest = 1 << 14  # Tensors of 2 MiB dwarf allocator rounding.
    sizes = tuple(range(largest // 16, largest + 1, largest // 16))

    def to_one_row(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = step(x, w)
        return rows[:1].clone()

    alone = kit.backend.make_pool()
    weight = kit.tensor(WIDTH, WIDTH, seed=1)
    x = kit.tensor(largest, WIDTH)
    captured = kit.capture(to_one_row, x, weight, policy=policy, pool=alone)
    shared = kit.backend.make_pool()
    buckets = Buckets(kit, shared, to_one_row, sizes, policy)
    outputs = sum(c.outputs.nbytes for c in buckets.captured.values())
    assert alone.bytes > 0, "Pool.bytes must report the memory of captures"
    assert shared.bytes <= 1.2 * alone.bytes + outputs + 2 * 2**20, (
        f"{len(sizes)} buckets take {shared.bytes} bytes and the largest alone {alone.bytes}"
    )
    for size in sizes[::5]:
        buckets.check(size, 100 + size)
    captured.close()


@declares("shared_pool")
def test_temporaries_of_a_step_reuse_memory(kit: Kit) -> None:
    x = kit.tensor(1 << 16)

    def chain(steps: int) -> int:
        pool = kit.backend.make_pool()

        def step(x: torch.Tensor) -> torch.Tensor:
            for _ in range(steps):
                x = x * 0.5 + 1
            return x

        captured = kit.capture(step, x, pool=pool)
        kit.check(captured, step, x)
        return pool.bytes

    assert 0 < chain(64) <= 2 * chain(4)


def test_memory_of_hundreds_of_pools_is_known(kit: Kit) -> None:
    """Each snapshot of torch drops one reference too many to each number in the id of a pool."""
    pools = [kit.backend.make_pool() for _ in range(300)]
    for _ in range(2):
        assert [pool.bytes for pool in pools] == [0] * 300
    buckets = Buckets(kit, pools[-1], deep, (16,), "breakable")
    buckets.check(16, 7)


@pytest.mark.parametrize("policy", BREAKING)
def test_memory_freed_in_a_segment_is_intact_until_then(kit: Kit, policy: str) -> None:
    """FAULTS 35."""
    seen: list[torch.Tensor] = []

    @dg.no_graph(fake=lambda table, rows: torch.empty_like(rows, dtype=table.dtype))
    def looked_up(table: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        seen.append(rows.clone())
        return table[rows]

    def step(table: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        older = rows + 1
        first = looked_up(table, older.clone())
        newer = older * 2 - older  # The next result may reuse the memory of ``older``.
        del older
        zeros = torch.zeros_like(rows)
        return first + looked_up(table, newer) + zeros

    table, rows = kit.tensor(10), torch.arange(4, device=kit.device)
    captured = kit.capture(step, table, rows, policy=policy, warmup=0)
    assert seen and all(torch.equal(found, rows + 1) for found in seen)
    for shift in (0, 3):
        rows.copy_(torch.arange(4, device=kit.device) + shift)
        same(captured.replay(), step(table, rows))


@declares("remakes_executables")
@pytest.mark.parametrize(("policy", "step"), [("full", deep), ("breakable", broken)])
def test_evicted_executables_are_rebuilt(kit: Kit, policy: str, step: Callable[..., Any]) -> None:
    """FAULTS 43."""
    pool = kit.backend.make_pool()
    pool.limit(0)
    buckets = Buckets(kit, pool, step, (1, 3, 8), policy)
    for seed, size in enumerate((8, 1, 3, 3, 8, 1)):
        buckets.check(size, seed)
    found = pool.recordings.residency()
    cure = "the pool evicted no executable: _end must return an EvictableExecutable"
    assert found.evicted >= 6 and found.made >= 6, cure
    buckets.close()
    assert pool.recordings.bytes == 0


@declares("releasable_memory")
@pytest.mark.parametrize(("policy", "step"), STEPS)
def test_released_memory_is_restored(kit: Kit, policy: str, step: Callable[..., Any]) -> None:
    """FAULTS 10, 44."""
    pool = kit.backend.make_pool(releasable=True)
    buckets = Buckets(kit, pool, step, (64, 17, 1), policy)
    held = pool.bytes
    for cycle in range(3):
        for size in (17, 64, 1):
            buckets.check(size, seed=10 * cycle + size)
        for _ in range(2):
            pool.release()
        assert pool.recordings.bytes == 0 and pool.bytes <= held // 20
        with pytest.raises(dg.DeviceGraphError, match="restore"):
            buckets.captured[17].replay()
        with pytest.raises(dg.DeviceGraphError, match="restore"):
            kit.capture(step, buckets.inputs[17], buckets.weight, policy=policy, pool=pool)
        for _ in range(2):
            pool.restore()
    for size in (1, 64, 17):
        buckets.check(size, seed=100 + size)
    pool.release()
    buckets.close()


@declares("releasable_memory")
def test_contents_of_released_memory_are_kept(kit: Kit) -> None:
    """FAULTS 10. Every launch increments a workspace that was allocated by a capture."""
    pool, x = kit.backend.make_pool(releasable=True), kit.tensor(8, WIDTH)
    first, workspace = kit.record(lambda: x * 0, pool=pool)
    second, out = kit.record(lambda: workspace.add_(1) + x, pool=pool)
    first.replay()
    for launches in (1, 2, 3):
        second.replay()
        pool.release()
        pool.restore()
        kit.same(workspace, torch.full_like(workspace, launches))
        kit.same(out, x + launches)


@declares("releasable_memory")
def test_updates_work_after_memory_was_released(kit: Kit) -> None:
    @dg.region(host_args=("n",))
    def scaled(x: torch.Tensor, *, n: int) -> torch.Tensor:
        return (x + 1) * n

    pool, x = kit.backend.make_pool(releasable=True), kit.tensor(8, WIDTH)
    graph, out = kit.record(lambda: scaled(x * 2, n=2) + 1, pool=pool, host_args={"n": 2})
    for n in (2, 3, 5, 3, 5, 2, 7):
        if kit.backend.capabilities.region_update:
            graph.update(n=n)
        else:
            n = 2
        for _ in range(2):
            graph.replay()
            kit.same(out, (x * 2 + 1) * n + 1)
            pool.release()
            with pytest.raises(dg.DeviceGraphError, match="restore"):
                graph.replay()
            pool.restore()


def test_unreleasable_memory_is_refused(kit: Kit) -> None:
    plain = kit.backend.make_pool()
    with pytest.raises(dg.CapabilityError, match="cannot be released"):
        plain.release()
    if not kit.backend.capabilities.releasable_memory:
        with pytest.raises(dg.CapabilityError, match="capture them again"):
            kit.backend.make_pool(releasable=True)


@declares("releasable_memory")
def test_memory_is_not_released_during_a_step(kit: Kit) -> None:
    """FAULTS 38."""
    pool = kit.backend.make_pool(releasable=True)
    refused: list[dg.StateError] = []

    @dg.no_graph
    def body(x: torch.Tensor) -> torch.Tensor:
        with pytest.raises(dg.StateError, match="release the memory") as caught:
            pool.release()
        refused.append(caught.value)
        return x * 2

    x = kit.tensor(8)
    captured = kit.capture(lambda x: body(x + 1) - 1, x, policy="breakable", pool=pool)
    kit.check(captured, lambda x: (x + 1) * 2 - 1, x)
    assert len(refused) >= 2
    with pytest.raises(dg.StateError, match="release the memory"):
        kit.record(pool.release, pool=pool, warm=False)
    pool.release()
    with pytest.raises(dg.DeviceGraphError, match="restore") as caught:  # no body ran
        captured.replay()
    assert isinstance(caught.value, dg.ResourceError) and len(refused) >= 2
    pool.restore()
    kit.check(captured, lambda x: (x + 1) * 2 - 1, x)
