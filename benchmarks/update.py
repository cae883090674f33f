"""Steps with changing host arguments: updated and broken graphs, compared with Meta's package.

    python benchmarks/update.py [--steps 240] [--json FILE] [--only d256 d1024 d4096]

The benchmark runs three sizes of a 36-layer decoder, whose KV length changes in every step, with

meta         the public package breakable-cuda-graphs (``pip install breakable-cuda-graphs``)
breakable    dg.capture(policy="breakable")
full+update  dg.capture(policy="full") with a recording for every length

Host time is the time of a call on an idle device. Wall time is the time per call of consecutive
calls. Results are medians. Contenders alternate, and ratios to meta are medians over turns, because
a shared host may be slow for a few seconds. Every length of every contender must equal eager bit
for bit. The benchmark needs a CUDA device.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import torch
from update_model import Model, Work, attend, attend_region, nothing, nothing_region

import devgraph as dg
from devgraph.api.policy.job import UpdateBudget

WORKS = {"d256": Work(256, 16), "d1024": Work(1024, 64), "d4096": Work(4096, 64)}
GOALS = {
    "host, full+update / meta": dict.fromkeys(WORKS, 0.06),
    "wall, full+update / meta": {"d256": 0.80, "d1024": 0.95, "d4096": 1.00},
    "host above bare launches, breakable / meta, empty bodies": dict.fromkeys(WORKS, 0.5),
    "host, breakable / meta": dict.fromkeys(WORKS, 1.0),
    "wall, breakable / meta": dict.fromkeys(WORKS, 1.0),
    "host of 1,000 new lengths, full / breakable": dict.fromkeys(WORKS, 1.10),
    "first use of a length on an undisturbed host, ms": dict.fromkeys(WORKS, 4.0),
}
WALL_TURNS = 96
"""Number of turns in which each contender runs WALL_STEPS consecutive calls."""
WALL_STEPS = 12
EMPTY_TURNS = 40
"""Number of turns for breaks that do nothing. Each turn compares EMPTY_STEPS replays with as many
bare launches. Only the faster half of the turns counts."""
EMPTY_STEPS = 12
FIRST_USES = 100
"""Number of new lengths in each of the four parts of ``FirstUses``."""


@attrs.define
class Contender:
    """An implementation of a step with a given KV length."""

    name: str
    call: Callable[[int], torch.Tensor]
    close: Callable[[], None]
    host: list[float] = attrs.field(factory=list)
    wall: list[float] = attrs.field(factory=list)
    wrong: list[int] = attrs.field(factory=list)
    note: str = ""


def host_seconds(call: Callable[[int], Any], lengths: Iterator[int], steps: int) -> list[float]:
    """Time ``steps`` calls, each on an idle device."""
    taken = []
    for _ in range(steps):
        length = next(lengths)
        torch.cuda.synchronize()
        started = time.perf_counter()
        call(length)
        taken.append(time.perf_counter() - started)
    torch.cuda.synchronize()
    return taken


def wall_seconds(call: Callable[[int], Any], lengths: Iterator[int], steps: int) -> float:
    """Time ``steps`` consecutive calls after three calls that warm caches; return seconds each."""
    for _ in range(3):
        call(next(lengths))
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(steps):
        call(next(lengths))
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / steps


def median_ratio(times: Sequence[float], others: Sequence[float]) -> float:
    """Return the median over turns of the ratio of ``times`` to ``others``."""
    return statistics.median(a / b for a, b in zip(times, others, strict=True))


class MetaBreakable:
    """A capture of the model by the public package; its bodies read the KV length from here."""

    def __init__(self, model: Model, body: Callable[..., None]) -> None:
        import breakable_cuda_graphs as meta

        self._length = 512
        self.graph = meta.BreakableCUDAGraph()

        @meta.no_graph
        def attention(*tensors: torch.Tensor) -> None:
            body(*tensors, kv_len=self._length)

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                model.step(model.x, body, kv_len=512)
        torch.cuda.current_stream().wait_stream(side)
        with meta.breakable_graph(self.graph):
            self.outputs = model.step(model.x, attention)

    def __call__(self, length: int) -> torch.Tensor:
        self._length = length
        self.graph.replay()
        return self.outputs

    def executables(self) -> list[int]:
        """Return the handles of the executables that the segments launch."""
        graphs = [s for s in self.graph._segments if isinstance(s, torch.cuda.CUDAGraph)]
        return [graph.raw_cuda_graph_exec() for graph in graphs]


def captured(
    model: Model, policy: str, region: Callable[..., None], backend: str = "cuda", **options: Any
) -> dg.Captured:
    """Capture a step under a policy of devgraph."""

    def step(x: torch.Tensor, *, kv_len: int) -> torch.Tensor:
        return model.step(x, region, kv_len=kv_len)

    return dg.capture(
        step, model.x, policy=policy, backend=backend, host_args={"kv_len": 512}, **options
    )


def bare_launches(handles: Sequence[int]) -> Callable[[int], None]:
    """Return a function that launches the executables through the driver and does nothing else."""
    launch = ctypes.CDLL("libcuda.so.1").cuGraphLaunch
    launch.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    stream = torch.cuda.current_stream().cuda_stream

    def run(_: int) -> None:
        for handle in handles:
            launch(handle, stream)

    return run


def contenders(model: Model) -> list[Contender]:
    """Create the contenders with the real attention."""
    made = []
    if has_meta():
        meta = MetaBreakable(model, attend)
        made.append(Contender("meta", meta, meta.graph.reset))
    for name, policy in (("breakable", "breakable"), ("full+update", "full")):
        options = {"budget": UpdateBudget(misses=10**6)} if policy == "full" else {}
        cap = captured(model, policy, attend_region, **options)
        made.append(Contender(name, lambda n, cap=cap: cap.replay(kv_len=n), cap.close))
    return made


def has_meta() -> bool:
    """Whether the public package is installed."""
    try:
        import breakable_cuda_graphs  # noqa: F401
    except ImportError:
        return False
    return True


def compare(
    model: Model,
    work: Work,
    steps: int,
    make: Callable[[Model], list[Contender]] = contenders,
) -> dict[str, Any]:
    """Time the contenders on the real attention and check every length."""
    lengths = work.lengths()
    # After one pass in ascending order, every row of the caches has its final content.
    for length in sorted(lengths):
        model.step(model.x, attend, kv_len=length)
    expected = {length: model.step(model.x, attend, kv_len=length).clone() for length in lengths}
    all_made = make(model)
    for made in all_made:
        # Cycle through the lengths, because only a length that returns gets its own executable.
        for length in lengths * 3:
            got = made.call(length)
            if not torch.equal(got, expected[length]):
                made.wrong.append(length)
    turns = {made.name: itertools.cycle(lengths) for made in all_made}
    for made in all_made:
        host_seconds(made.call, turns[made.name], 10)
    # Contenders alternate after each step, so that disturbances of the host affect all of them.
    orders = itertools.cycle(itertools.permutations(all_made))
    for _ in range(steps):
        for made in next(orders):
            made.host += host_seconds(made.call, turns[made.name], 2)[1:]
    for _ in range(WALL_TURNS):
        for made in next(orders):
            made.wall.append(wall_seconds(made.call, turns[made.name], WALL_STEPS))
    result = {
        made.name: {
            "host_us": statistics.median(made.host) * 1e6,
            "wall_us": statistics.median(made.wall) * 1e6,
            "lengths": len(lengths),
            "wrong_lengths": sorted(set(made.wrong)),
        }
        for made in all_made
    }
    meta = next((made for made in all_made if made.name == "meta"), None)
    for made in all_made:
        if meta is not None:
            result[made.name]["host_to_meta"] = median_ratio(made.host, meta.host)
            result[made.name]["wall_to_meta"] = median_ratio(made.wall, meta.wall)
        made.close()
    return result


def empty_bodies(model: Model) -> dict[str, float]:
    """Measure breakable replays with empty eager bodies: host time minus that of bare launches."""
    pairs: dict[str, tuple[Callable[[int], Any], Callable[[int], None], Callable[[], None]]] = {}
    cap = captured(model, "breakable", nothing_region)
    cap.replay(kv_len=512)  # This creates the executables.
    handles = [s._own._executable for s in cap.segments if isinstance(s, dg.DeviceGraph)]
    pairs["breakable"] = (lambda n: cap.replay(kv_len=n), bare_launches(handles), cap.close)
    if has_meta():
        meta = MetaBreakable(model, nothing)
        pairs["meta"] = (meta, bare_launches(meta.executables()), meta.graph.reset)
    turn = itertools.cycle(range(512, 3000))
    turns: dict[str, list[tuple[float, float]]] = {name: [] for name in pairs}
    for number in range(EMPTY_TURNS):
        for name in list(pairs)[:: -1 if number % 2 else 1]:
            # The first calls of a turn only warm the caches.
            whole, bare = (
                statistics.median(host_seconds(call, turn, 3 + EMPTY_STEPS)[3:])
                for call in pairs[name][:2]
            )
            turns[name].append((whole, bare))
    result = {}
    # Use only the half of the turns with the fastest bare launches, because differences of slow
    # times are mostly noise.
    bare_times = [sum(bare for _, bare in pair) for pair in zip(*turns.values(), strict=True)]
    quick = sorted(range(EMPTY_TURNS), key=bare_times.__getitem__)[: EMPTY_TURNS // 2]
    for name, all_taken in turns.items():
        taken = [all_taken[turn] for turn in quick]
        result[f"{name}_us"] = statistics.median(whole for whole, _ in taken) * 1e6
        result[f"{name}_bare_us"] = statistics.median(bare for _, bare in taken) * 1e6
        result[f"{name}_above_us"] = statistics.median(a - b for a, b in taken) * 1e6
    for *_, close in pairs.values():
        close()
    return result


def new_lengths(model: Model, count: int) -> dict[str, Any]:
    """Measure the host time of a trace of new lengths, including recordings and captures.

    For each length, an eager step gives the expected output, and then both policies run. All write
    the same rows to the caches, so that they compute the same results.
    """
    order = torch.randperm(1200, generator=torch.Generator().manual_seed(2))
    trace = [512 + 2 * int(i) for i in order[:count]]
    policies = {policy: captured(model, policy, attend_region) for policy in ("breakable", "full")}
    seconds = dict.fromkeys(policies, 0.0)
    wrong: dict[str, list[int]] = {policy: [] for policy in policies}
    for number, length in enumerate(trace):
        want = model.step(model.x, attend, kv_len=length).clone()
        for policy in list(policies)[:: -1 if number % 2 else 1]:
            torch.cuda.synchronize()
            started = time.perf_counter()
            got = policies[policy].replay(kv_len=length)
            seconds[policy] += time.perf_counter() - started
            if not torch.equal(got, want):
                wrong[policy].append(length)
    result: dict[str, Any] = {"steps": len(trace)}
    for policy, cap in policies.items():
        result[f"{policy}_ms"], result[f"{policy}_wrong"] = seconds[policy] * 1e3, wrong[policy]
        result[f"{policy}_counts"] = cap.stats()
        cap.close()
    return result


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class FirstUses:
    """Host times of new lengths, of updates without an executable, and of creating an executable.

    Call ``take`` several times between other measurements, because a shared host may be slow for a
    few seconds. The eager step, which ``take`` also times, shows the speed of the host. ``result``
    needs 40 lengths.
    """

    def __init__(self, model: Model, backend: str = "cuda") -> None:
        self._model = model
        budget = UpdateBudget(misses=10**6)
        self._captured = captured(model, "full", attend_region, backend, budget=budget)
        host_seconds(self._call, iter((514, 516, 518)), 3)  # These replays load kernels.
        self._lengths: list[int] = []
        self._parts: list[tuple[list[float], list[float]]] = []
        self._grown = 0

    def _call(self, length: int) -> None:
        self._captured.replay(kv_len=length)

    def _eager(self, length: int) -> None:
        self._model.step(self._model.x, attend, kv_len=length)

    def take(self, count: int) -> None:
        """Time the next ``count`` new lengths, alternately with the same steps run eagerly."""
        start = 520 + 2 * len(self._lengths)
        new, eager = [], []
        for length in range(start, start + 2 * count, 2):
            resident = resident_bytes()
            new += host_seconds(self._call, iter((length,)), 1)
            self._grown += resident_bytes() - resident
            eager += host_seconds(self._eager, iter((length,)), 1)
            self._lengths.append(length)
        self._parts.append((new, eager))

    def result(self) -> dict[str, Any]:
        """Time updates and executables, close the graphs, and return all results.

        ``new_ms`` is the median of the part with the fastest eager steps.
        """
        recordings, lengths = self._captured.pool.recordings, self._lengths
        recording_bytes = sum(each.bytes for each in recordings.kept()) / len(recordings)
        budget = recordings.budget_bytes
        recordings.budget_bytes = recordings.bytes  # This leaves no room for executables.
        update = host_seconds(self._call, itertools.cycle(lengths[4:8]), 40)
        recordings.budget_bytes = budget
        free, charged = torch.cuda.mem_get_info()[0], recordings.bytes
        fresh = lengths[8:40]  # The budget has room for the executables of these lengths.
        build = host_seconds(self._call, iter(fresh), len(fresh))
        torch.cuda.synchronize()
        parts = [[statistics.median(times) * 1e3 for times in part] for part in self._parts]
        new, eager = min(parts, key=lambda part: part[1])
        pairs = [pair for part in self._parts for pair in zip(*part, strict=True)]
        found = {
            "new_ms": new,
            "eager_ms": eager,
            "parts_ms": parts,
            "new_to_eager": median_ratio(*zip(*pairs, strict=True)),
            "update_us": statistics.median(update) * 1e6,
            "executable_ms": statistics.median(build) * 1e3,
            "recording_bytes": recording_bytes,
            "recording_bytes_by_resident_memory": self._grown / len(lengths),
            "executable_bytes": (recordings.bytes - charged) / len(fresh),
            "executable_bytes_by_free_memory": (free - torch.cuda.mem_get_info()[0]) / len(fresh),
            "nodes": float(self._captured.info().nodes or 0),
        }
        self._captured.close()
        return found


def ratios(result: dict[str, Any]) -> dict[str, float]:
    """Return the measured value of each goal, as far as it can be measured here."""
    real, empty = result["real"], result["empty"]
    out = {}
    if "meta" in real:
        for what in ("host", "wall"):
            for name in ("full+update", "breakable"):
                out[f"{what}, {name} / meta"] = real[name][f"{what}_to_meta"]
        if empty["meta_above_us"] > 0:
            above = empty["breakable_above_us"] / empty["meta_above_us"]
            out["host above bare launches, breakable / meta, empty bodies"] = above
    trace = result["trace"]
    out["host of 1,000 new lengths, full / breakable"] = trace["full_ms"] / trace["breakable_ms"]
    out["first use of a length on an undisturbed host, ms"] = result["first"]["new_ms"]
    return out


def measure(name: str, steps: int, trace: int) -> dict[str, Any]:
    """Measure one size."""
    work = WORKS[name]
    model = Model(work, torch.device("cuda"))
    first = FirstUses(model)
    first.take(FIRST_USES)
    result: dict[str, Any] = {"real": compare(model, work, steps)}
    first.take(FIRST_USES)
    result["empty"] = empty_bodies(model)
    first.take(FIRST_USES)
    result["trace"] = new_lengths(model, trace)
    first.take(FIRST_USES)
    result["first"] = first.result()
    result["ratios"] = ratios(result)
    del model
    gc.collect()
    torch.cuda.empty_cache()
    return result


def report(name: str, result: dict[str, Any]) -> bool:
    """Print the results of one size; return whether every output was correct."""
    say = sys.stdout.write
    say(f"\n{WORKS[name]}, {WORKS[name].layers} layers\n")
    right = True
    for contender, row in result["real"].items():
        wrong = row["wrong_lengths"]
        right = right and not wrong
        verdict = f"wrong at {wrong}" if wrong else f"{row['lengths']} lengths equal eager"
        say(
            f"  {contender:12} host {row['host_us']:8.1f} us  wall {row['wall_us']:8.1f} us"
            f"  {verdict}\n"
        )
    for key in ("empty", "first", "trace"):
        say(f"  {key}: {json.dumps(result[key], default=str)}\n")
    right = right and not (result["trace"]["breakable_wrong"] or result["trace"]["full_wrong"])
    for goal, limits in GOALS.items():
        value = result["ratios"].get(goal)
        if value is None:
            say(f"  {goal}: not measured (no breakable-cuda-graphs, or too noisy a host)\n")
        else:
            met = "ok" if value <= limits[name] else "MISSED"
            say(f"  {goal}: {value:.3f} (at most {limits[name]:g}) {met}\n")
    return right


@torch.no_grad()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--steps",
        type=int,
        default=240,
        help="calls of each contender timed on an idle device (default: 240)",
    )
    parser.add_argument("--trace", type=int, default=1000, help="new lengths (default: 1000)")
    parser.add_argument("--only", nargs="+", choices=WORKS, default=list(WORKS))
    parser.add_argument("--json", metavar="FILE", help="write all results to this file")
    args = parser.parse_args()
    # cuDNN plans attention again for every length, which takes about a millisecond. Engines with
    # new lengths in each step use the flash kernels instead.
    torch.backends.cuda.enable_cudnn_sdp(False)
    sys.stdout.write(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, "
        f"host times are medians of {args.steps}\n"
    )
    results, right = {}, True
    for name in args.only:
        results[name] = measure(name, args.steps, args.trace)
        right = report(name, results[name]) and right
        sys.stdout.flush()
        if args.json:  # Write after each size, so that an interrupted run keeps its results.
            with open(args.json, "w", encoding="utf-8") as file:
                json.dump(results, file, indent=1, default=str)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
