"""The ranks of ``test_hccl.py``: torch_npu's own process group over the simulated HCCL.

A process runs one rank: ``python -m tests.sim.ascend.hccl_ranks graph,more`` with the variables of
torchrun. A case that ends normally prints ``ended``; cases that lose their device end the process.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import attrs


@attrs.frozen(kw_only=True)
class Case:
    """A function of one rank, its environment and the exit codes that the ranks must have."""

    function: Callable[[], None]
    environment: dict[str, str]
    exits: list[int] | None


CASES: dict[str, Case] = {}


def case(exits: list[int] | None = None, **environment: str) -> Callable[..., Any]:
    def register(function: Callable[[], None]) -> Callable[[], None]:
        CASES[function.__name__] = Case(function=function, environment=environment, exits=exits)
        return function

    return register


HEALTHY = (
    "collectives more groups stream_order graph graph_all graph_first graph_refused "
    "policies compiled handoffs"
).split()
"""Cases that leave the device usable, so that one set of processes runs all of them."""


def say(*words):
    print("-", *words, flush=True)


def begin():
    """Load the simulation, join the group; the names of torch become globals."""
    global torch, dist, rank, ranks, device, gloo, hccl
    from tests.sim import ascend

    driver = ascend.activate()
    import torch
    import torch.distributed as dist

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.npu.set_device(rank)
    device = torch.device("npu", rank)
    hccl = ctypes.CDLL(f"{driver.folder}/libhccl.so")
    hccl.fakehccl_count.restype = ctypes.c_int64
    hccl.fakehccl_set.argtypes = [ctypes.c_char_p, ctypes.c_int64]
    bound = {"device_id": device} if "PROOF_DEVICE_ID" in os.environ else {}
    dist.init_process_group("hccl", **bound)
    gloo = dist.new_group(backend="cpu:gloo,npu:hccl" if bound else "gloo")
    assert dist.get_backend() == "hccl"
    backend = dist.distributed_c10d._get_default_group()._get_backend(device)
    assert type(backend).__name__ == "ProcessGroupHCCL", backend


def count(what="collectives"):
    return hccl.fakehccl_count(what.encode())


def both(name, tensor, **options):
    """Run one collective by gloo on a CPU tensor and by HCCL on a copy; return both results."""
    out = []
    for group, x in ((gloo, tensor.clone()), (None, tensor.to(device))):
        if name == "all_reduce":
            dist.all_reduce(x, group=group, **options)
        elif name == "broadcast":
            dist.broadcast(x, group=group, **options)
        elif name == "all_gather":
            y = x.new_empty(ranks * x.numel())
            dist.all_gather_into_tensor(y, x, group=group)
            x = y
        elif name == "reduce_scatter":
            y = x.new_empty(x.numel() // ranks)
            dist.reduce_scatter_tensor(y, x, group=group, **options)
            x = y
        out.append(x)
    return out


def same(a, b):
    """Two ranks add the same two numbers: the same bits. More may add in another order."""
    a, b = a.cpu(), b.cpu()
    if ranks == 2 or not a.is_floating_point():
        return torch.equal(a, b)
    coarse = a.dtype in (torch.bfloat16, torch.float16)
    return torch.allclose(
        a.float(), b.float(), rtol=2e-2 if coarse else 1e-5, atol=0.1 if coarse else 1e-4
    )


def make(dtype, n, generator):
    if dtype is torch.int64:
        return torch.randint(-(2**40), 2**40, (n,), generator=generator)
    return torch.randn(n, generator=generator).to(dtype)


@case()
def collectives():
    """Every collective, dtype, reduction and some sizes against gloo."""
    generator = torch.Generator().manual_seed(rank)
    ops = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
    done = 0
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.float16, torch.int32):
        for n in (1, 7, 1000, 300_007):  # the last goes through in parts
            for op in ops.values():
                x = (
                    make(torch.int64, n, generator).to(dtype)
                    if not dtype.is_floating_point
                    else make(dtype, n, generator)
                )
                assert same(*both("all_reduce", x, op=op)), ("all_reduce", dtype, n, op)
                x = x.repeat(ranks)
                assert same(*both("reduce_scatter", x, op=op)), ("reduce_scatter", dtype, n, op)
                done += 2
            x = (
                make(dtype, n, generator)
                if dtype.is_floating_point
                else make(torch.int64, n, generator).to(dtype)
            )
            assert same(*both("all_gather", x)), ("all_gather", dtype, n)
            for source in range(ranks):
                assert same(*both("broadcast", x, src=source)), ("broadcast", dtype, n)
            done += 1 + ranks
        dist.barrier(device_ids=[rank])
    say(
        done,
        "collectives equal to gloo;",
        count(),
        "ran in",
        count("parts"),
        "parts,",
        count("bytes") >> 20,
        "MiB",
    )


@case()
def more():
    """What else the group has: reduce, scatter, gather, lists, all-to-all, send and receive."""
    x = torch.arange(6.0, device=device) + 10 * rank
    y = x.clone()
    dist.reduce(y, 0)
    if rank == 0:
        assert torch.equal(y.cpu(), sum(torch.arange(6.0) + 10 * r for r in range(ranks)))
    parts = [torch.empty_like(x) for _ in range(ranks)]
    dist.all_gather(parts, x)
    assert all(torch.equal(p.cpu(), torch.arange(6.0) + 10 * r) for r, p in enumerate(parts))
    y = torch.empty(3, device=device)
    dist.scatter(
        y,
        [torch.full((3,), float(r), device=device) for r in range(ranks)] if rank == 0 else None,
        src=0,
    )
    assert y.cpu().tolist() == [rank] * 3
    big = torch.randn(ranks * 50_000, generator=torch.Generator().manual_seed(7)).to(
        device
    )  # as on every rank
    out = torch.empty_like(big)
    dist.all_to_all_single(out, big * (rank + 1))
    piece = big.cpu().view(ranks, -1)[rank]
    assert torch.equal(out.cpu(), torch.cat([piece * (r + 1) for r in range(ranks)]))
    if rank == 0:
        dist.send(big, 1)
    elif rank == 1:
        got = torch.empty_like(big)
        dist.recv(got, 0)
        assert torch.equal(got.cpu(), big.cpu())
    to, by = (rank + 1) % ranks, (rank - 1) % ranks
    got = torch.empty_like(big)
    work = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, big * rank, to), dist.P2POp(dist.irecv, got, by)]
    )
    for w in work:
        w.wait()
    assert torch.equal(got.cpu(), (big * by).cpu())
    objects = [None] * ranks
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": r} for r in range(ranks)]
    backend = dist.distributed_c10d._get_default_group()._get_backend(device)
    assert backend.get_hccl_comm_name(rank) == "group_name_0"
    comm, nothing, number = ctypes.c_void_p(backend.get_hccl_comm(rank)), None, ctypes.c_uint64(4)
    assert hccl.HcclAllReduce(nothing, nothing, number, 7, 0, comm, nothing) == 5  # uint8
    assert hccl.HcclBroadcast(nothing, number, 4, ranks, comm, nothing) == 1  # no such root
    assert hccl.HcclBroadcast(nothing, number, 4, 0, nothing, nothing) == 2  # no communicator
    say("reduce, all_gather, scatter, all_to_all_single, point to point, all_gather_object")


@case()
def groups():
    """Groups beside the default one have communicators of their own."""
    pair = dist.new_group([0, 1])
    alone = [dist.new_group([r]) for r in range(ranks)]
    mixed = dist.new_group(backend="cpu:gloo,npu:hccl")
    for where in ("cpu", device):
        x = torch.ones(2, device=where)
        dist.all_reduce(x, group=mixed)
        assert x.cpu().tolist() == [ranks] * 2
    x = torch.full((3,), 1.0 + rank, device=device)
    dist.all_reduce(x, group=alone[rank])
    if rank < 2:
        dist.all_reduce(x, group=pair)
    dist.all_reduce(x)
    tail = sum(range(3, ranks + 1))
    assert x.cpu().tolist() == [6.0 + tail] * 3, x
    say("default group, a pair, groups of one, a group for CPU and NPU")


@case()
def stream_order():
    """200 random collectives between kernels, on two streams, without one synchronize."""
    same_on_all, own = random.Random(5), random.Random(100 + rank)
    names = ["all_reduce", "all_gather", "reduce_scatter", "broadcast"]  # a barrier synchronizes
    pairs, noise = [], []  # noise, other on each rank: else reductions make everything alike
    for i, dtype in enumerate((torch.float32, torch.bfloat16, torch.int64)):
        generator = torch.Generator().manual_seed(10 * rank + i)
        made = [make(dtype, 96 * ranks, generator) for _ in range(9)]
        pairs.append([made[0], made[0].to(device)])
        noise.append([made[1:], [x.to(device) for x in made[1:]]])
    other, kept, begun = torch.npu.Stream(), [], count()
    for i in range(200):
        if own.random() < 0.1:
            hccl.fakehccl_set(b"late_ms", own.choice((0, 0, 2, 5)))
        which, name = same_on_all.randrange(3), same_on_all.choice(names)
        op = same_on_all.choice((dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN))
        side, wait = same_on_all.random() < 0.3, same_on_all.random() < 0.5
        source = same_on_all.randrange(ranks)
        for k, group in ((0, gloo), (1, None)):
            x = pairs[which][k]
            current = torch.npu.current_stream()
            if k and side:  # the kernel before and the collective on another stream
                other.wait_stream(current)
                torch.npu.set_stream(other)
            x = (x if which == 2 else x * 0.25) + noise[which][k][i % 8]
            if name == "all_reduce":
                work = dist.all_reduce(x, op=op, group=group, async_op=True)
                y = x
            elif name == "broadcast":
                work = dist.broadcast(x, source, group=group, async_op=True)
                y = x
            elif name == "all_gather":
                y = x.new_empty(ranks * x.numel())
                work = dist.all_gather_into_tensor(y, x, group=group, async_op=True)
            else:
                y = x.new_empty(x.numel() // ranks)
                work = dist.reduce_scatter_tensor(y, x, op=op, group=group, async_op=True)
            if k == 0 or wait:
                work.wait()
            if k and side:
                torch.npu.set_stream(current)
                current.wait_stream(other)
            if k and not wait:
                work.wait()  # later, and on the stream that was current before
            if name == "all_gather":
                y = y[: x.numel()] + y[-x.numel() :]
            elif name == "reduce_scatter":
                y = torch.cat([y] * ranks)
            pairs[which][k] = y
            if k:
                kept.append((x, y))  # what is freed waits for streams in torch_npu's allocator
    if ranks == 2:
        assert all(torch.equal(a, b.cpu()) for a, b in pairs)
    else:
        assert all(same(a, b) for a, b in pairs)
    assert all(a.float().isfinite().all() and a.unique().numel() > 40 for a, _ in pairs)
    assert count() == begun + 200
    say("200 steps equal to gloo,", count() - begun, "collectives by HCCL")


@case()
def graph():
    """A tensor-parallel step captured in an NPUGraph and replayed with new inputs."""
    torch.manual_seed(rank)
    weight, bias = torch.randn(16, 8).to(device), torch.randn(8).to(device)
    x = torch.zeros(4, 16).to(device)

    def step(x):
        y = x @ weight
        dist.all_reduce(y)
        return y + bias

    step(x)  # makes the communicator
    torch.npu.synchronize()
    begun, g = count(), torch.npu.NPUGraph()
    with torch.npu.graph(g):
        out = step(x)
    torch.npu.synchronize()
    assert count() == begun  # captured, not run
    for i in range(50):
        x.copy_(torch.randn(4, 16))
        if i % 10 == rank:
            time.sleep(0.02)  # one rank replays later than the other
        g.replay()
        got = out.clone()
        assert torch.equal(got.cpu(), step(x).cpu()), i
    assert count() == begun + 100
    with tempfile.TemporaryDirectory() as folder:
        g.debug_dump(f"{folder}/graph.json")
        with open(f"{folder}/graph.json") as file:
            nodes = [node["name"] for node in json.load(file)]
    assert "HcclAllReduce" in nodes
    say("50 replays equal to eager; nodes", nodes)

    # Queued without a look at the results, replays and eager collectives mixed.
    results, inputs = [], [torch.randn(4, 16).to(device) for _ in range(50)]
    for i, value in enumerate(inputs):
        x.copy_(value)
        g.replay()
        results.append(out.clone())
        if i % 3 == 0:
            results[-1] += 0 * step(value)
    assert all(torch.equal(a.cpu(), step(b).cpu()) for a, b in zip(results, inputs, strict=True))
    say("50 replays in a queue, every third followed by an eager collective")


@case()
def graph_all():
    """Every collective in one graph, two graphs with one pool, a group of its own."""
    generator = torch.Generator().manual_seed(rank)
    group = dist.new_group(list(range(ranks)))
    x = torch.zeros(4 * ranks, device=device)
    n = torch.zeros(2, dtype=torch.int64, device=device)

    def step(x, n):
        a = x * 2
        dist.all_reduce(a, op=dist.ReduceOp.MAX)
        b = a.new_empty(4)
        dist.reduce_scatter_tensor(b, a, group=group)
        c = b.new_empty(4 * ranks)
        dist.all_gather_into_tensor(c, b + rank, group=group)
        d = c.bfloat16() + a.bfloat16()
        work = dist.broadcast(d, ranks - 1, async_op=True)
        m = n + 1
        work.wait()
        dist.all_reduce(m, group=group)
        return d.float() * 3 - x, m

    step(x, n)
    pool, graphs = torch.npu.graph_pool_handle(), []
    for _ in range(2):
        g = torch.npu.NPUGraph()
        with torch.npu.graph(g, pool=pool):
            out = step(x, n)
        graphs.append((g, out))
    for i in range(20):
        x.copy_(torch.randn(4 * ranks, generator=generator))
        n.fill_(i + rank)
        g, out = graphs[i % 2]
        g.replay()
        got = [t.clone() for t in out]
        assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(got, step(x, n), strict=True)), i
    for g, _ in graphs:
        g.reset()
    dist.all_reduce(x)
    torch.npu.synchronize()
    say("20 replays of two graphs with 5 collectives each")


@case()
def graph_first():
    """The first collective of a group inside a capture: the simulation lets it pass."""
    group = dist.new_group(list(range(ranks)))
    x, g = torch.ones(3, device=device), torch.npu.NPUGraph()
    with torch.npu.graph(g):
        y = x + 1
        dist.all_reduce(y, group=group)
    g.replay()
    assert y.cpu().tolist() == [2.0 * ranks] * 3
    say("the communicator was made inside the capture; a device may refuse that")


@case()
def graph_refused():
    """What a capture refuses, and that the group works after it."""
    x = torch.ones(3, device=device)
    dist.all_reduce(x)
    torch.npu.synchronize()
    try:
        with torch.npu.graph(torch.npu.NPUGraph()):
            x + 1
            dist.barrier(device_ids=[rank])
    except RuntimeError as problem:
        lines = str(problem).splitlines()
        say("barrier:", lines[0].split("NPU function error: ")[-1], "|", lines[-1])
    else:
        raise AssertionError("a barrier synchronizes the device")
    dist.all_reduce(x)
    assert x.cpu().tolist() == [ranks**2] * 3


@case()
def policies():
    """devgraph captures an all-reduce under every policy, equal to eager with other inputs."""
    import devgraph as dg

    torch.manual_seed(rank)
    weight, x = torch.randn(8, 8, device=device), torch.randn(4, 8, device=device)

    @dg.region(host_args=("scale",), mutates=("out",), fake=lambda x, out, *, scale: None)
    def scaled(x, out, *, scale):
        torch.mul(x, scale, out=out)

    def step(x, *, scale):
        y = x @ weight
        dist.all_reduce(y)
        out = torch.empty_like(y)
        scaled(y, out, scale=scale)
        dist.all_reduce(out, op=dist.ReduceOp.MAX)
        return out + 1

    for policy in ("full", "breakable", "piecewise"):
        graph = dg.capture(step, x, policy=policy, backend="npu", host_args={"scale": 2.0})
        for turn in range(5):
            x.copy_(torch.randn(4, 8))
            got = graph.replay(scale=1.0 + turn).cpu()
            assert torch.equal(got, step(x, scale=1.0 + turn).cpu()), (policy, turn)
        say(policy, len(graph.segments), "segments")
        graph.close()


@case()
def compiled():
    """Collectives of torch.compile's kind and DTensor go through the same group."""
    import torch.distributed._functional_collectives as functional

    x = torch.full((4,), 1.0 + rank, device=device)
    y = functional.all_reduce(x, "sum", dist.group.WORLD)
    z = functional.all_gather_tensor(x, 0, dist.group.WORLD)
    s = functional.reduce_scatter_tensor(
        torch.ones(2 * ranks, device=device), "sum", 0, dist.group.WORLD
    )
    total = sum(range(1, ranks + 1))
    assert y.cpu().tolist() == [total] * 4 and s.cpu().tolist() == [ranks] * 2
    assert z.cpu().view(ranks, 4)[:, 0].tolist() == list(range(1, ranks + 1))
    g = torch.npu.NPUGraph()
    with torch.npu.graph(g):
        y = functional.all_reduce(x * 2, "sum", dist.group.WORLD) + 1
    x.fill_(3.0)
    g.replay()
    assert y.cpu().tolist() == [6.0 * ranks + 1] * 4
    say("functional collectives, also in a graph")

    def step(x):
        y = x @ torch.ones(4, 4, device=device)
        dist.all_reduce(y)
        return y + 1

    x = torch.full((2, 4), 1.0 + rank, device=device)
    for how in ("eager", "aot_eager"):
        assert torch.equal(torch.compile(step, backend=how)(x).cpu(), step(x).cpu())
    say("torch.compile: eager, aot_eager")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    torch.manual_seed(0)
    wide = 8 * ranks
    model = torch.nn.Sequential(torch.nn.Linear(8, wide), torch.nn.ReLU(), torch.nn.Linear(wide, 8))
    x = torch.randn(4, 8)
    want = model(x).detach()
    model = model.to(device)
    mesh = init_device_mesh("npu", (ranks,))
    model = parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    with torch.no_grad():
        got = model(x.to(device))
    assert torch.allclose(got.cpu(), want, atol=1e-5)
    say("parallelize_module on a mesh of npu devices")


@case()
def handoffs():
    """Handoffs travel from device to device, or through the host where a rank has no device."""
    import attrs

    from devgraph.integrations.transformers import TorchTransport
    from tests.support.handoff_ranks import made_handoff, same

    for turn, place in enumerate((device, device, "cpu")):
        handoff = made_handoff(turn)
        done = count()
        with TorchTransport(device=place) as transport:
            names = [""]
            if rank == 0:
                names = [transport.offer(attrs.evolve(handoff, data=handoff.data.to(device)))]
            dist.broadcast_object_list(names, 0, group=gloo)
            if rank == 1:
                received = transport.fetch(names[0])
                assert received.data.device == torch.device(place)
                assert same(attrs.evolve(received, data=received.data.cpu()), handoff)
                transport.release(names[0])
            dist.barrier(group=gloo)
        assert (count() > done) == (place == device and rank < 2), (place, done, count())
    say("handoffs from device to device")


# --- faults: nothing hangs, everyone who is left learns it -------------------------------------


def expect_failure(code, text, within, action):
    start = time.monotonic()
    try:
        action()
        torch.npu.synchronize()
    except RuntimeError as problem:
        took = time.monotonic() - start
        lines = str(problem).splitlines()
        found = next((line for line in lines if text in line), "")
        say(
            f"after {took:.1f} s:",
            lines[0].split("NPU function error: ")[-1],
            "|",
            found.strip()[:200],
        )
        assert str(code) in str(problem) and found and took < within, str(problem)
    else:
        raise AssertionError("it did not fail")
    try:
        torch.npu.synchronize()
    except RuntimeError:
        os._exit(0)  # sticky; a process in this state has nothing to tidy
    raise AssertionError("the error went away")


def warm():
    x = torch.ones(8, device=device)
    dist.all_reduce(x)
    torch.npu.synchronize()
    return x


@case(exits=[0, -signal.SIGKILL])
def fault_gone():
    x = warm()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    expect_failure(507048, "rank 0 waits for rank 1, which is gone", 5, lambda: dist.all_reduce(x))


@case(exits=[0, -signal.SIGKILL])
def fault_gone_in_replay():
    x, g = warm(), torch.npu.NPUGraph()
    with torch.npu.graph(g):
        dist.all_reduce(x)
    g.replay()
    torch.npu.synchronize()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    expect_failure(507048, "which is gone", 5, g.replay)


@case(FAKEHCCL_TIMEOUT_MS="1500")
def fault_late():
    x = warm()
    if rank == 1:
        time.sleep(3)
    expect_failure(507048, "rank 0 waited 1500 ms for rank 1", 4, lambda: dist.all_reduce(x))


@case(FAKEHCCL_TIMEOUT_MS="3000")
def late_enough():
    x = warm()
    if rank == 1:
        time.sleep(1.5)
    dist.all_reduce(x)
    assert x.cpu().tolist() == [ranks * ranks] * 8
    say("half of the timeout late is no error")


@case()
def fault_counts():
    warm()
    x = torch.ones(8 + rank, device=device)
    expect_failure(507015, "parameter count", 5, lambda: dist.all_reduce(x))


@case()
def fault_types():
    warm()
    x = torch.ones(8, device=device, dtype=torch.float32 if rank else torch.int32)
    expect_failure(507015, "parameter data type", 5, lambda: dist.all_reduce(x))


@case()
def fault_unlike():
    x = warm()
    expect_failure(
        507015, "calls Hccl", 5, lambda: dist.broadcast(x, 0) if rank else dist.all_reduce(x)
    )


@case()
def fault_root():
    x = warm()
    expect_failure(507015, "parameter root", 5, lambda: dist.broadcast(x, rank))


@case()
def fault_reduction():
    x, op = warm(), dist.ReduceOp.MAX if rank else dist.ReduceOp.MIN
    expect_failure(507015, "parameter reduction", 5, lambda: dist.all_reduce(x, op=op))


@case()
def fault_left():
    """A rank that destroyed its group, and lives on."""
    x = warm()
    if rank == 1:
        dist.destroy_process_group()
        time.sleep(3)
        os._exit(0)
    time.sleep(1)
    expect_failure(507048, "which is gone", 2, lambda: dist.all_reduce(x))


@case(PROOF_DEVICE_ID="1")
def device_id():
    x = warm()
    assert x.cpu().tolist() == [ranks] * 8
    try:
        dist.new_group(backend="gloo")
    except RuntimeError as problem:
        say("new_group(backend='gloo') with a device_id:", problem)
    else:
        say("new_group(backend='gloo') with a device_id works in this version")


@case()
def fault_injected():
    x = warm()
    if rank == 1:
        hccl.fakehccl_set(b"fail_in", 3)

    def action():
        for _ in range(5):
            dist.all_reduce(x)

    expect_failure(507048, "injected on rank 1", 5, action)


@case(FAKEHCCL_CONNECT_MS="1500", exits=[0, 0])
def fault_connect():
    if rank == 1:
        time.sleep(4)
        os._exit(0)
    start = time.monotonic()
    try:
        dist.all_reduce(torch.ones(3, device=device))
    except RuntimeError as problem:
        lines = str(problem).splitlines()
        say(
            f"after {time.monotonic() - start:.1f} s:",
            lines[0].split("HCCL function error: ")[-1],
            "|",
            lines[-1],
        )
        assert "error code is 9" in str(problem) and "to connect" in str(problem)
        os._exit(0)
    raise AssertionError("it did not fail")


@case(exits=[-signal.SIGABRT, 0], FAKEHCCL_TIMEOUT_MS="4000")
def fault_watchdog():
    """An asynchronous error of the communicator: torch_npu's watchdog ends the process."""
    warm()
    if rank == 0:
        hccl.fakehccl_set(b"async_error", 21)  # HCCL_E_REMOTE
        time.sleep(10)
        os._exit(1)
    time.sleep(3)
    os._exit(0)


if __name__ == "__main__":
    begin()
    for name in sys.argv[1].split(","):
        CASES[name].function()
    torch.npu.synchronize()
    dist.destroy_process_group()
    say("ended")
