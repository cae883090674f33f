"""Costs of graphs: device memory, its estimate by ``plan``, start-up time, and sleep.

    python benchmarks/economy.py [--only NAME ...] [--models SHAPE ...] [--backend cuda] [--small]
                                 [--json FILE]

memory      device memory of 36 decode and 30 prefill graphs of 540 nodes, of which a trace runs a
            quarter: with a budget for that quarter, and with graphs captured by torch alone;
            time of replays with and without the budget
plan        ``plan(sample=True)`` of both runners of the transformers engine with default buckets,
            compared with the device memory that is used after each graph was launched once
start       seconds of a capture of these buckets, by phase
first       time to the first token of a cold engine, eager and with capture="background", and the
            time until all buckets are captured while the engine serves
sleep       share of the graphs' device memory that suspend(release="memory") releases, and
            milliseconds from resume() to the end of the first replay, over 50 cycles. The memory of
            graphs is the memory of captures and launches that is freed when graphs are closed.

Each measurement runs in its own process, so that no process reuses memory, kernels or compiled code
of another one. ``plan`` has a process for each model; ``memory``, ``first`` and ``start`` have one
for each variant.
"""

from __future__ import annotations

import argparse
import bisect
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import devgraph as dg

MEASURES = ("memory", "plan", "start", "first", "sleep")
WAYS = {
    "memory": ("by hand", "budget", "no budget"),
    "first": ("eager", "background"),
    "start": ("warmup 0", "warmup 1", "warmup 2"),
}
"""Variants of measurements, each in its own process."""
CYCLES = 50
MODELS = ("smollm2-135m", "qwen3-0.6b", "llama-1b")
MIB = 2**20


class Device:
    """A backend, and the free memory of its device."""

    def __init__(self, name: str, small: bool) -> None:
        self.backend = dg.get_backend(name)
        self.small = small
        self.dtype = torch.float32 if self.backend.device.type == "cpu" else torch.bfloat16

    def free(self) -> int:
        """Return the free bytes of the device after garbage and caches were freed."""
        gc.collect()
        self.backend.synchronize()
        if self.backend.device.type == "cpu":
            return 0
        self.backend.namespace.empty_cache()
        return int(self.backend.memory_info()[0])

    def sizes(self) -> tuple[list[int], list[int]]:
        """Return the default buckets for 256 requests and for 512 tokens, or only a few."""
        from devgraph.runners.buckets import default_buckets

        most = (4, 8) if self.small else (256, 512)
        return list(default_buckets("decode", most[0])), list(default_buckets("prefill", most[1]))


# Memory.


def layers(device: Device) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a step of 36 layers with 15 kernels each."""
    depth, width = (2, 16) if device.small else (36, 1024)
    where = {"device": device.backend.device, "dtype": device.dtype}
    weights = [torch.randn(width, width, **where) / width**0.5 for _ in range(depth)]

    def step(x: torch.Tensor) -> torch.Tensor:
        for weight in weights:
            h = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)
            h = h @ weight
            h = h * torch.sigmoid(h)
            h = torch.relu((h + torch.tanh(h)) * 0.5 - h) * 0.3
            x = x + h
        return x

    step.width = width  # type: ignore[attr-defined]
    return step


def by_hand(device: Device, step: Any, inputs: dict[Any, torch.Tensor]) -> dict[Any, Any]:
    """Capture with torch alone, as engines do: in one pool, on one stream, the largest first."""
    namespace = device.backend.namespace
    pool, stream, graphs = namespace.graph_pool_handle(), namespace.Stream(), {}
    for size, x in inputs.items():
        stream.wait_stream(namespace.current_stream())
        with namespace.stream(stream):
            step(x)
        namespace.synchronize()
        graph = getattr(namespace, device.backend.graph_class_name)()
        with namespace.graph(graph, pool=pool, stream=stream):
            step(x)
        graphs[size] = graph
    return graphs


def measure_memory(device: Device, model: str | None, how: str) -> dict[str, Any]:
    """Measure device memory after a trace of a quarter of the buckets, and times of replays."""
    backend, layered = device.backend, layers(device)
    sizes = [(phase, n) for phase, each in enumerate(device.sizes()) for n in reversed(each)]
    sizes.sort(key=lambda key: -key[1])
    used = sizes[::4]
    where = {"device": backend.device, "dtype": device.dtype}
    inputs = {key: torch.randn(key[1], layered.width, **where) for key in sizes}
    out = torch.empty(sizes[0][1], layered.width, **where)

    def step(x: torch.Tensor) -> None:
        out[: x.shape[0]].copy_(layered(x))

    first = inputs[sizes[0]]
    found: dict[str, Any] = {"graphs": len(sizes), "used": len(used)}
    if how == "by hand":
        by_hand(device, step, {0: first}).popitem()[1].replay()  # Load kernels and workspaces.
        start = device.free()
        graphs = by_hand(device, step, inputs)
        found["captured_mib"] = (start - device.free()) / MIB
        for key in used:
            graphs[key].replay()
        found["mib"] = (start - device.free()) / MIB
        graphs.clear()
        found["left_mib"] = (start - device.free()) / MIB
        return found
    with dg.capture(step, first, backend=backend) as captured:
        captured.replay()
    start = device.free()
    pool = backend.make_pool()
    graphs = {key: dg.capture(step, inputs[key], backend=backend, pool=pool) for key in sizes}
    found["captured_mib"] = (start - device.free()) / MIB
    found["nodes"] = graphs[used[0]].info().nodes
    budget = sum(graphs[key].info().bytes for key in used)
    if how == "budget":
        pool.recordings.limit(budget)
    for _ in range(3):
        for key in used:
            graphs[key].replay()
    found["mib"] = (start - device.free()) / MIB
    found |= {"budget_mib": budget / MIB, "pool_mib": pool.bytes / MIB}
    for key in (used[0], used[-1]):
        inputs[key].normal_()
        graphs[key].replay()
        assert torch.equal(out[: key[1]], layered(inputs[key])), key
    found["residency"] = str(pool.recordings.residency())
    if how == "budget":
        alone = dg.capture(step, inputs[used[-1]], backend=backend)
        kept = graphs[used[-1]].segments[0]
        runs = {"budgeted": kept.replay, "unbudgeted": alone.segments[0].replay}
        found["steady"] = steady(backend, runs)
        alone.close()
    for key in sizes[1::4]:
        graphs[key].replay()
    found["after_another_quarter_mib"] = (start - device.free()) / MIB
    for each in graphs.values():
        each.close()
    graphs.clear()
    del pool, each
    found["left_mib"] = (start - device.free()) / MIB
    return found


def steady(backend: Any, runs: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return host and wall microseconds of alternating calls, and the ratio of the first two."""
    host: dict[str, list[float]] = {name: [] for name in runs}
    wall: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(15):
        for name in list(runs)[:: -1 if turn % 2 else 1]:
            call, taken = runs[name], []
            for _ in range(60):
                backend.synchronize()
                started = time.perf_counter()
                call()
                taken.append(time.perf_counter() - started)
            host[name].append(statistics.median(taken) * 1e6)
            backend.synchronize()
            started = time.perf_counter()
            for _ in range(40):
                call()
            backend.synchronize()
            wall[name].append((time.perf_counter() - started) / 40 * 1e6)
    first, second = runs
    result = {f"{name}_host_us": statistics.median(host[name]) for name in runs}
    result |= {f"{name}_wall_us": statistics.median(wall[name]) for name in runs}
    for what, taken_by in (("host", host), ("wall", wall)):
        pairs = zip(taken_by[first], taken_by[second], strict=True)
        result[f"{what}_ratio"] = statistics.median(a / b for a, b in pairs)
    return result


# The transformers engine.


def make_engine(
    device: Device, model: str, capture: str, policy: str | None = None, **more: Any
) -> Any:
    """Return an engine for a model with random weights, and the time before its creation."""
    from generate import make_model

    from devgraph.integrations.transformers import Engine

    loaded = make_model(model, device.backend.device, device.dtype)
    mode = {
        phase: {"policy": policy or chosen, "capture": capture, **more}
        for phase, chosen in (("decode", "full"), ("prefill", "breakable"))
    }
    requests, tokens = (4, 8) if device.small else (256, 512)
    device.backend.synchronize()
    started = time.perf_counter()
    engine = Engine(
        loaded,
        config=dg.DeviceGraphConfig.from_dict(mode),
        backend=device.backend,
        max_requests=requests,
        max_len=64 if device.small else 640,
        max_step_tokens=tokens,
        eos_token_ids=(),
    )
    return engine, started


def launch_all(engine: Any, *phases: str) -> int:
    """Launch every graph of ``phases``; return the number of launched graphs."""
    if "prefill" in phases:
        for size in sorted(engine.prefill.buckets):
            engine.add_request([7] * size, max_new_tokens=1)
            engine.step()
    if "decode" in phases:
        sizes = sorted(engine.decode.buckets)
        for number in range(1, sizes[-1] + 1):
            # Requests end in such an order that every bucket gets a step.
            steps = len(sizes) - bisect.bisect_left(sizes, number)
            engine.add_request([7, 8], max_new_tokens=1 + steps)
        while engine.has_work:
            engine.step()
    runners = [runner for runner in engine.runners if runner.phase in phases]
    return sum(bucket.hits > 0 for runner in runners for bucket in runner.stats().buckets)


def measure_plan(device: Device, model: str | None) -> dict[str, Any]:
    """Compare the planned memory of each runner with the memory that its graphs use."""
    assert model is not None
    found: dict[str, Any] = {}
    engine, _ = make_engine(device, model, "eager")
    launch_eagerly(engine)
    for runner in engine.runners:  # Prefill is first, as in ``engine.capture``.
        before = device.free()
        started = time.perf_counter()
        plan = runner.plan(sample=True)
        seconds = time.perf_counter() - started
        start = device.free()
        held = engine.pool.bytes
        runner.capture(everything=True)
        captured = start - device.free()
        launched = launch_all(engine, runner.phase)
        taken = start - device.free()
        assert launched == len(runner.buckets), launched
        found[runner.phase] = {
            "graphs": len(runner.buckets),
            "planned_mib": plan.graph_bytes / MIB,
            "taken_mib": taken / MIB,
            "ratio": plan.graph_bytes / max(taken, 1),
            "captured_mib": captured / MIB,
            "pool_mib": (engine.pool.bytes - held) / MIB,
            "executables_mib": runner.stats().executables.bytes / MIB,
            "nodes": sum(graph.captured.info().nodes or 0 for graph in runner.graphs),
            "segments": sum(graph.captured.info().segments for graph in runner.graphs),
            "sample_left_mib": (before - start) / MIB,
            "sample_s": seconds,
            "planned_of_largest_mib": [(bucket.bytes or 0) / MIB for bucket in plan.buckets[:3]],
        }
    engine.close()
    return found


def launch_eagerly(engine: Any) -> None:
    """Run steps of all sizes eagerly, so that kernels and workspaces are loaded."""
    for runner in engine.runners:
        runner.suspend()
    launch_all(engine, "prefill", "decode")
    for runner in engine.runners:
        runner.resume()


def measure_start(device: Device, model: str | None, how: str) -> dict[str, Any]:
    """Measure the seconds of a first and of a second capture of all buckets, by phase."""
    assert model is not None
    engine, _ = make_engine(device, model, "eager", warmup=int(how.removeprefix("warmup ")))
    found: dict[str, Any] = {}
    for name in ("first", "again"):
        started = time.perf_counter()
        engine.capture()
        device.backend.synchronize()
        found[name] = {"seconds": time.perf_counter() - started}
        for runner in engine.runners:
            stats = runner.stats()
            found[name][runner.phase] = {
                "graphs": len(runner.graphs.captured),
                "segments": sum(graph.captured.info().segments for graph in runner.graphs),
                "seconds": stats.capture_seconds,
                **stats.phase_seconds,
            }
        if name == "first":
            started = time.perf_counter()
            launch_all(engine, "prefill", "decode")
            found["launch_all_s"] = time.perf_counter() - started
            found["executables_s"] = engine.decode.stats().executables.seconds
            found["executables"] = engine.decode.stats().executables.made
            engine.invalidate("once more")
    engine.close()
    return found


def measure_first(device: Device, model: str | None, how: str = "") -> dict[str, Any]:
    """Measure the time of a new engine to its first token, and until its buckets are captured."""
    assert model is not None
    graphs = how == "background"
    engine, started = make_engine(
        device, model, "background" if graphs else "eager", None if graphs else "disabled"
    )
    length = 4 if device.small else 128
    engine.add_request([7] * length, max_new_tokens=8)
    while not engine.step():
        pass
    found: dict[str, Any] = {"first_token_s": time.perf_counter() - started}
    while engine.has_work:
        engine.step()
    if not graphs:
        return found
    rounds, steps, begun, longest = 0, 0, time.perf_counter(), 0.0
    left, running = True, 0
    while left:
        while running < 16:
            engine.add_request([7] * length, max_new_tokens=24)
            running += 1
        running -= sum(event.finish_reason is not None for event in engine.step())
        steps += 1
        idle = time.perf_counter()
        left = engine.idle()
        longest = max(longest, time.perf_counter() - idle)
        rounds += left
    seconds = time.perf_counter() - begun
    spent = sum(runner.stats().capture_seconds for runner in engine.runners)
    return found | {
        "captured": rounds,
        "under_load_s": seconds,
        "steps_meanwhile": steps,
        "captures_s": spent,
        "longest_pause_s": longest,
    }


def measure_sleep(device: Device, model: str | None) -> dict[str, Any]:
    """Measure the released memory of a suspended engine, and the time to resume with a request."""
    assert model is not None
    engine, _ = make_engine(device, model, "eager", releasable=True)
    launch_eagerly(engine)
    cold = device.free()
    engine.capture()
    launch_all(engine, "prefill", "decode")
    engine.invalidate("once more")
    engine.suspend(release="memory")
    # Static buffers, loaded kernels and workspaces of libraries stay after graphs are closed.
    start = device.free()
    engine.resume()
    engine.capture()
    found: dict[str, Any] = {"captured_mib": (start - device.free()) / MIB}
    found["beside_graphs_mib"] = (cold - start) / MIB
    sums: list[int] = []
    for runner in engine.runners:
        watch(runner, sums)
    launch_all(engine, "prefill", "decode")
    want = list(sums)
    held = start - device.free()
    found |= {"held_mib": held / MIB, "pool_mib": engine.pool.bytes / MIB}
    found["executables_mib"] = engine.decode.stats().executables.bytes / MIB
    suspends, resumes, firsts = [], [], []
    for cycle in range(CYCLES):
        engine.add_request([7] * 4, max_new_tokens=2)
        engine.step()
        begun = time.perf_counter()
        engine.suspend(release="memory")
        suspends.append((time.perf_counter() - begun) * 1e3)
        if cycle in (0, CYCLES - 1):
            left = start - device.free()
            found[f"left_mib_{cycle}"] = left / MIB
            found[f"share_{cycle}"] = 1 - left / max(held, 1)
        begun = time.perf_counter()
        engine.resume()
        resumes.append((time.perf_counter() - begun) * 1e3)
        engine.step()  # This is a decode step of the request.
        device.backend.synchronize()
        firsts.append((time.perf_counter() - begun) * 1e3)
        if cycle in (0, CYCLES - 1):
            sums.clear()
            begun = time.perf_counter()
            launch_all(engine, "prefill", "decode")
            found[f"launch_all_s_{cycle}"] = time.perf_counter() - begun
            found[f"bit_identical_{cycle}"] = sums == want
            found[f"held_mib_{cycle}"] = (start - device.free()) / MIB
    for name, taken in (("suspend", suspends), ("resume", resumes), ("first_replay", firsts)):
        found[f"{name}_ms"] = statistics.median(taken)
        found[f"{name}_worst_ms"] = max(taken)
    found["captures"] = sum(runner.stats().captures for runner in engine.runners)
    engine.close()
    del engine, runner
    found["closed_mib"] = (start - device.free()) / MIB
    return found


def watch(runner: Any, sums: list[int]) -> None:
    """Append a checksum of the logits of every step of ``runner`` to ``sums``."""
    run = runner.run

    def watched(*args: Any, **kwargs: Any) -> Any:
        out = run(*args, **kwargs)
        bits = out["logits"].contiguous().view(torch.uint8)
        sums.append(int(bits.to(torch.int64).sum()))
        return out

    runner.run = watched


def alone(args: argparse.Namespace) -> dict[str, Any]:
    """Run one measurement in this process."""
    device = Device(args.backend, args.small)
    torch.manual_seed(0)
    (name,), (model,) = args.only, args.models
    with torch.inference_mode():
        if name == "first":
            return measure_first(device, model, args.how)
        if name == "memory":
            return measure_memory(device, model, args.how)
        if name == "start":
            return measure_start(device, model, args.how)
        measures = {
            "plan": measure_plan,
            "sleep": measure_sleep,
        }
        return measures[name](device, model)


def in_process(args: argparse.Namespace, name: str, model: str, how: str = "") -> Any:
    """Run one measurement in a new process; return its results, or the error as text."""
    command = [sys.executable, __file__, "--alone", "--only", name, "--models", model]
    command += ["--backend", args.backend, "--how", how, *(["--small"] if args.small else [])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        return f"ended with {done.returncode}"
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Run the measurements and print them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=MEASURES, default=MEASURES)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--small", action="store_true", help="few layers and sizes, for a test")
    parser.add_argument("--json")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--how", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.alone:
        print(json.dumps(alone(args)))
        return
    report: dict[str, Any] = {"torch": torch.__version__}
    main_model = args.models[min(1, len(args.models) - 1)]
    for name in args.only:
        if name == "plan":
            report[name] = {model: in_process(args, name, model) for model in args.models}
        elif name in WAYS:
            report[name] = {how: in_process(args, name, main_model, how) for how in WAYS[name]}
        else:
            report[name] = in_process(args, name, main_model)
        print(json.dumps({name: report[name]}, indent=2), flush=True)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(report, file, indent=2)


if __name__ == "__main__":
    main()
