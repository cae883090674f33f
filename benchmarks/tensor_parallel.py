"""Graphs with all-reduces, compared with torch's own graphs.

    torchrun --standalone --nproc-per-node 2 benchmarks/tensor_parallel.py [--json FILE]
    torchrun --standalone --nproc-per-node 2 benchmarks/tensor_parallel.py --first HOW [--json FILE]

The step is that of ``examples/tensor_parallel.py``. Host time is the time of a call on an idle
device. Contenders alternate. Results are medians on the slowest rank, in microseconds.

decode    host time of a replay of one graph, captured with torch alone, with
          ``DeviceGraph.replay`` and with ``DecodeRunner.run``
prefill   host time of a replay of several segments, in a bare loop over native graphs and eager
          attention, and with devgraph
step      wall time of a decode step: eager, in a graph, and in a graph after a vote of the ranks
          through shared memory and over gloo (the example votes once per step)
vote      host time of ``agree`` through shared memory and over gloo

With ``--first``, each process is a rank of a cold engine with default buckets. HOW is ``disabled``
(no graphs), ``eager`` (all graphs are captured before the first token) or ``background`` (all ranks
vote on the capture of a bucket between two steps). Results are the seconds to the first token, and
until all buckets are captured under load.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import devgraph as dg

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from tensor_parallel import Engine, Model, Shape, World

SIZES = {"decode": 8, "prefill": 64}


def host_us(run: Callable[[], object], synchronize: Callable[[], None], steps: int) -> float:
    """Return the median host time of a call on an idle device in microseconds."""
    times = []
    for _ in range(steps):
        synchronize()
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e6


def wall_us(run: Callable[[], object], synchronize: Callable[[], None], steps: int) -> float:
    """Return the microseconds per call of ``steps`` consecutive calls, including device time."""
    synchronize()
    started = time.perf_counter()
    for _ in range(steps):
        run()
    synchronize()
    return (time.perf_counter() - started) * 1e6 / steps


def interleaved(
    runs: dict[str, Callable[[], object]],
    synchronize: Callable[[], None],
    args: argparse.Namespace,
    measure: Callable[..., float] = host_us,
) -> dict[str, float]:
    """Return the median of each run over alternating turns; all ranks use the same order."""
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(args.repeats):
        for name, run in runs.items():
            samples[name].append(measure(run, synchronize, args.steps))
    return {name: statistics.median(values) for name, values in samples.items()}


def slowest(figures: dict[str, float]) -> dict[str, float]:
    """Return the largest figure of all ranks, by name."""
    if not dist.is_initialized():
        return figures
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, figures)
    return {name: max(one[name] for one in gathered) for name in figures}


def rows_of(engine: Engine, phase: str) -> dict[str, torch.Tensor]:
    """Return the inputs of a step that fills its bucket."""
    shape, rows = engine.model.shape, SIZES[phase]
    each = rows // shape.requests
    data = {
        "input_ids": [i % shape.vocab for i in range(rows)],
        "slots": [i // each for i in range(rows)],
        "positions": [i % each for i in range(rows)],
    }
    if phase == "prefill":
        data["ends"] = [each * (i + 1) - 1 for i in range(shape.requests)]
    device = engine.backend.device
    return {name: torch.tensor(values, device=device) for name, values in data.items()}


def segments_of(runner: Any) -> tuple[Any, list[Any]]:
    """Return the largest capture of a runner and its segments."""
    captured = next(iter(runner.graphs)).captured
    return captured, captured.segments


def by_hand(engine: Engine, data: dict[str, torch.Tensor]) -> tuple[Any, Any]:
    """Capture the decode step with torch; return the graph and the tensors that it needs."""
    backend: Any = engine.backend
    namespace = backend.namespace
    batch = argparse.Namespace(**{name: tensor.clone() for name, tensor in data.items()})
    stream = namespace.Stream()
    stream.wait_stream(namespace.current_stream())
    with namespace.stream(stream):
        for _ in range(2):
            engine.model.decode(batch)
    namespace.synchronize()
    graph = getattr(namespace, backend.graph_class_name)()
    # The watchdog thread of the communicator queries events during the capture, which the mode
    # "global" forbids.
    with namespace.graph(graph, stream=stream, capture_error_mode="thread_local"):
        out = engine.model.decode(batch)
    return graph, (batch, out)


def measure_decode(engine: Engine, args: argparse.Namespace) -> dict[str, float]:
    """Measure the host time of the graph of a decode step."""
    data = rows_of(engine, "decode")
    _, segments = segments_of(engine.decode)
    runs: dict[str, Callable[[], object]] = {"runner": lambda: engine.decode.run(data)}
    error = None
    if len(segments) == 1:
        runs["devgraph"] = segments[0].replay
        if hasattr(engine.backend, "namespace"):
            hand, (_, out) = by_hand(engine, data)
            runs["by_hand"] = hand.replay
            expected = engine.decode.run(data, clone=True)
            hand.replay()
            error = float((out - expected).abs().max())
    found = slowest(interleaved(runs, engine.backend.synchronize, args))
    if error is not None:
        found["ratio"] = found["devgraph"] / found["by_hand"]
        found["largest_difference"] = error
    return found


def bare_loop(segments: list[Any]) -> Callable[[], None]:
    """Return a function that only launches the native graphs and runs the bodies between them."""
    steps = [
        segment.bound()
        if isinstance(segment, dg.DeviceGraph)
        else functools.partial(segment.mark.fn, *segment.call.args, **segment.call.kwargs)
        for segment in segments
    ]

    def run() -> None:
        for step in steps:
            step()

    return run


def measure_prefill(engine: Engine, args: argparse.Namespace) -> dict[str, float]:
    """Measure the host time of the segments of a prefill step, including eager attention."""
    data = rows_of(engine, "prefill")
    engine.prefill.run(data)
    captured, segments = segments_of(engine.prefill)
    runs: dict[str, Callable[[], object]] = {
        "devgraph": captured.replay,
        "runner": lambda: engine.prefill.run(data),
    }
    if hasattr(engine.backend, "namespace"):
        runs["native"] = bare_loop(segments)
    with torch.no_grad():
        found = slowest(interleaved(runs, engine.backend.synchronize, args))
    if "native" in found:
        found["ratio"] = found["devgraph"] / found["native"]
    return {**found, "segments": len(segments)}


def votes_of(engine: Engine) -> dict[str, Callable[[], dg.Decision]]:
    """Return functions that vote on a decode step, by transport of the vote."""
    if not dist.is_initialized():
        return {}
    gloo, size = dist.new_group(backend="gloo"), SIZES["decode"]
    groups = {
        name: dg.RankGroup.from_process_group(gloo, shared=shared)
        for name, shared in (("shared memory", True), ("gloo", False))
    }
    variants = [*engine.decode.graphs.variants]

    def vote(group: dg.RankGroup) -> dg.Decision:
        return group.agree(engine.decode.can_run(size), variants, "benchmark")

    return {name: functools.partial(vote, group) for name, group in groups.items()}


def measure_step(engine: Engine, args: argparse.Namespace) -> dict[str, float]:
    """Measure the wall time of a decode step."""
    data = rows_of(engine, "decode")
    batch = argparse.Namespace(**data)

    @torch.no_grad()
    def eager() -> None:
        engine.model.decode(batch)

    runs: dict[str, Callable[[], object]] = {
        "eager": eager,
        "graph": lambda: engine.decode.run(data),
    }
    for name, vote in votes_of(engine).items():
        runs[f"graph, vote by {name}"] = lambda vote=vote: engine.decode.run(data, decision=vote())
    # Wall times need fewer steps, and eager steps are slow.
    few = argparse.Namespace(repeats=args.repeats, steps=max(1, args.steps // 5))
    found = slowest(interleaved(runs, engine.backend.synchronize, few, wall_us))
    return {**found, "speedup": found["eager"] / found["graph"]}


def measure_vote(engine: Engine, args: argparse.Namespace) -> dict[str, float]:
    """Measure the host time of a vote."""
    return slowest(interleaved({**votes_of(engine)}, engine.backend.synchronize, args))


def measure_first(model: Model, world: World, how: str) -> dict[str, Any]:
    """Measure the time of a new engine to its first token, and until its buckets are captured."""
    capture = {} if how == "disabled" else {"capture": how}
    overlay = {"policy": "breakable"} if world.backend.name == "cpu" else {}
    policies = {
        phase: how if how == "disabled" else {"policy": policy, **capture, **overlay}
        for phase, policy in (("decode", "full"), ("prefill", "breakable"))
    }
    config = dg.DeviceGraphConfig.from_dict(policies)
    started = time.perf_counter()
    engine = Engine(model, config, world.backend, world.ranks)
    runners = [engine.prefill, engine.decode]
    found: dict[str, Any] = {}
    if how == "eager":
        engine.capture()
        found["captured_s"] = time.perf_counter() - started
    load = {
        phase: {name: rows.tolist() for name, rows in rows_of(engine, phase).items()}
        for phase in SIZES
    }
    tokens = engine.step(engine.prefill, load["prefill"], model.shape.requests)
    found["first_token_s"] = time.perf_counter() - started
    left = how == "background"
    begun, pauses, steps = time.perf_counter(), [0.0], 0
    while left:
        engine.step(engine.decode, load["decode"], model.shape.requests)
        idle = time.perf_counter()
        left = any(runner.idle() for runner in runners)  # All ranks capture the same bucket.
        pauses.append(time.perf_counter() - idle)
        steps += 1
    if how == "background":
        found |= {"under_load_s": time.perf_counter() - begun, "steps_meanwhile": steps}
        found["longest_pause_s"] = max(pauses)
    found["captures"] = sum(runner.stats().captures for runner in runners)
    found["captures_s"] = sum(runner.stats().capture_seconds for runner in runners)
    model.forget()
    again = engine.step(engine.prefill, load["prefill"], model.shape.requests)
    found["other_tokens"] = float(again != tokens)
    engine.close()
    return slowest(found)


def main() -> None:
    """Measure on all ranks, and print on the first rank."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--first", choices=("disabled", "eager", "background"))
    parser.add_argument("--json")
    args = parser.parse_args()
    shape = dataclasses.replace(Shape(), layers=args.layers)
    world = World.join(args.backend, 60.0)
    backend = world.backend
    model = Model(shape, backend.device, rank=world.rank, size=world.size, add_up=world.add_up)
    if args.first:
        found = measure_first(model, world, args.first)
        world.leave()
        if world.rank == 0:
            print(json.dumps({args.first: found}, indent=2))
            if args.json:
                Path(args.json).write_text(json.dumps(found, indent=2), encoding="utf-8")
        return
    overlay = {"cpu": {"decode": {"policy": "breakable"}}}
    mode = {phase: {"buckets": [size]} for phase, size in SIZES.items()}
    config = dg.DeviceGraphConfig.from_json(json.dumps({**mode, "backends": overlay}))
    engine = Engine(model, config, backend, world.ranks)
    engine.capture()
    report: dict[str, Any] = {
        "device": backend.device_name,
        "version": backend.version,
        "torch": torch.__version__,
        "ranks": world.size,
        "layers": args.layers,
        "all_reduces": 2 * args.layers,
    }
    for measure in (measure_decode, measure_prefill, measure_step, measure_vote):
        report[measure.__name__.removeprefix("measure_")] = measure(engine, args)
        if args.json and world.rank == 0:  # Write after each part, because a later one may fail.
            Path(args.json).write_text(json.dumps(report, indent=2), encoding="utf-8")
    engine.close()
    world.leave()
    if world.rank == 0:
        print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
