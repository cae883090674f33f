"""Actions that slow down all later graph replays of a process, and the recovery (CUDA only).

    python benchmarks/pace.py [--acts wait streams ...] [--times 8] [--json FILE]
    python benchmarks/pace.py --serve 5

Each action runs in its own process. Events time a graph of a small decoder (36 layers, 468 nodes)
before the action, after each repetition, and after eight empty programmatic launches on the streams
that the action used. docs/fast-replay.md has the results.

``--serve TIMES`` compares three kinds of processes instead, each started TIMES times. The first
only captures that graph with torch. The second captures and replays 36 decode buckets with a
runner. The third also captures 30 breakable steps and replays 200 keys of a region. All processes
time a replay of the same work.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import devgraph as dg
from devgraph.runners.buckets import default_buckets

WIDTH, HEADS, INNER, LAYERS = 1024, 16, 3072, 36


class Block(nn.Module):
    """One layer of a decoder, in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        options = {"bias": False, "device": "cuda", "dtype": torch.bfloat16}
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, **options)
        self.out = nn.Linear(WIDTH, WIDTH, **options)
        self.up = nn.Linear(WIDTH, 2 * INNER, **options)
        self.down = nn.Linear(INNER, WIDTH, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.out(self.attend(self.qkv(F.rms_norm(x, (WIDTH,)))))
        gate, value = self.up(F.rms_norm(x, (WIDTH,))).chunk(2, -1)
        return x + self.down(F.silu(gate) * value)

    def attend(self, qkv: torch.Tensor) -> torch.Tensor:
        """Return the attention of all rows."""
        return attention(qkv)


def attention(qkv: torch.Tensor, *, rows: int | None = None) -> torch.Tensor:
    """Return the attention of ``qkv`` over its first ``rows``, or causal attention."""
    q, k, v = (each.transpose(0, 1)[None] for each in qkv.view(len(qkv), 3, HEADS, -1).unbind(1))
    mixed = F.scaled_dot_product_attention(
        q, k[:, :, :rows], v[:, :, :rows], is_causal=rows is None
    )
    return mixed[0].transpose(0, 1).reshape(len(qkv), WIDTH)


class Process:
    """The objects that actions use: a captured model, a word of device memory and streams."""

    def __init__(self) -> None:
        self.net = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.x = torch.randn(8, WIDTH, device="cuda", dtype=torch.bfloat16)
        self.word = torch.ones(64, device="cuda")
        self.side = torch.cuda.Stream()
        self.used: dict[int, Any] = {}
        self.kept: list[Any] = []
        for _ in range(3):
            self.net(self.x)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.kept.append(self.net(self.x))

    def on(self, stream: Any) -> None:
        """Launch one kernel on ``stream``."""
        self.used[stream.cuda_stream] = stream
        with torch.cuda.stream(stream):
            self.word.add_(0)

    def capture(self) -> None:
        """Capture one kernel in torch's way, which launches two kernels on the capture stream."""
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        self.used[self.side.cuda_stream] = self.side
        with torch.cuda.stream(self.side):
            graph.capture_begin()
            self.word.add_(0)
            graph.capture_end()
        self.kept.append(graph)

    def eagerly(self, stream: Any) -> None:
        """Run the model without a graph."""
        self.used[stream.cuda_stream] = stream
        with torch.cuda.stream(stream):
            self.net(self.x)

    def timed(self, graph: Any = None) -> float:
        """Return the microseconds of a replay of ``graph`` or, by default, of the model's graph."""
        found, replay = [], (graph or self.graph).replay
        for _ in range(3):
            replay()
        for _ in range(5):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(20):
                replay()
            end.record()
            torch.cuda.synchronize()
            found.append(start.elapsed_time(end) / 20 * 1e3)
        return statistics.median(found)


ACTS: dict[str, Callable[[Process], Any]] = {
    "wait": lambda p: None,
    "kernel on the default stream": lambda p: p.on(torch.cuda.default_stream()),
    "kernel on one side stream": lambda p: p.on(p.side),
    "kernel on a new stream": lambda p: p.on(torch.cuda.Stream()),
    "capture": Process.capture,
    "model on the default stream": lambda p: p.eagerly(torch.cuda.default_stream()),
    "model on one side stream": lambda p: p.eagerly(p.side),
    "empty the cache": lambda p: (gc.collect(), torch.cuda.empty_cache()),
    "copy from pinned memory": lambda p: p.word.copy_(torch.ones(64).pin_memory()),
    "allocate": lambda p: p.kept.append(torch.empty(20 << 20, device="cuda")),
}


@torch.no_grad()
def measure(act: str, times: int) -> dict[str, Any]:
    """Repeat one action in this process, time replays, and recover the pace."""
    from devgraph.cuda.pace import PaceKeeper

    process = Process()
    found = [process.timed()]
    for _ in range(times):
        ACTS[act](process)
        torch.cuda.synchronize()
        found.append(process.timed())
    runtime = dg.get_backend("cuda").runtime
    keeper = PaceKeeper(runtime, torch.device("cuda", torch.cuda.current_device()))
    for handle in process.used:
        keeper.recover(handle)
    torch.cuda.synchronize()
    return {"act": act, "us": found, "recovered": process.timed()}


@torch.no_grad()
def serve(kind: str) -> float:
    """Return the microseconds of a replay after the earlier work of this kind of process."""
    process = Process()
    if kind == "torch":
        return process.timed()
    process.graph.reset()
    sizes = default_buckets("decode", 256)
    runner = dg.DecodeRunner(
        lambda batch: process.net(batch.x),
        inputs=[dg.InputSlot("x", ("tokens", WIDTH), torch.bfloat16, pad=dg.Pad.zero())],
        outputs=dg.OutputSlot(rows="tokens"),
        config=dg.PhaseConfig(policy="full", buckets=sizes),
        backend="cuda",
        max_requests=256,
    )
    runner.capture()
    kept: list[Any] = [runner]
    if kind != "decode":
        for one in process.net:
            one.attend = dg.no_graph(attention)
        for rows in range(1024, 0, -1024 // 30)[:30]:
            x = torch.randn(rows, WIDTH, device="cuda", dtype=torch.bfloat16)
            kept.append(dg.capture(process.net, x, policy="breakable", backend="cuda"))
            kept[-1].replay()
        rows = 512
        region = dg.region(attention, host_args=("rows",))
        x = torch.randn(rows, WIDTH, device="cuda", dtype=torch.bfloat16)

        def updated(x: torch.Tensor, *, rows: int) -> torch.Tensor:
            for one in process.net:
                one.attend = functools.partial(region, rows=rows)
            return process.net(x)

        kept.append(dg.capture(updated, x, backend="cuda", host_args={"rows": rows}))
        for fewer in range(rows, rows - 200, -1):
            kept[-1].replay(rows=fewer)
    for rows in sizes:
        x = torch.randn(rows, WIDTH, device="cuda", dtype=torch.bfloat16)
        runner.run({"x": x})
    (graph,) = (one.captured for one in runner.graphs if one.key.bucket == len(process.x))
    return process.timed(graph)


KINDS = ("torch", "decode", "decode, prefill and keys")


def compare(times: int) -> list[dict[str, Any]]:
    """Run a process of each kind ``times`` times, alternately."""
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(times):
        for kind, values in found.items():
            values.append(elsewhere("--kind", kind))
    least = statistics.median(found["torch"])
    results = []
    for kind, values in found.items():
        middle = statistics.median(values)
        results.append({"kind": kind, "us": values, "ratio": middle / least})
        row = " ".join(f"{value:.0f}" for value in values)
        print(f"{kind:30} {row} | {middle / least:.3f}", flush=True)
    return results


def elsewhere(*options: str) -> Any:
    """Run this program in a new process, and return its output."""
    command = [sys.executable, __file__, *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    """Measure each action in its own process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--acts", nargs="+", choices=ACTS, default=list(ACTS))
    parser.add_argument("--times", type=int, default=8)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", type=int, default=0, metavar="TIMES")
    parser.add_argument("--here", choices=ACTS, help="measure one action in this process")
    parser.add_argument("--kind", choices=KINDS, help="measure one kind in this process")
    args = parser.parse_args()
    if args.here or args.kind:
        print(json.dumps(serve(args.kind) if args.kind else measure(args.here, args.times)))
        return 0
    print(f"{torch.cuda.get_device_name()}: microseconds of a replay")
    results = compare(args.serve) if args.serve else []
    for act in args.acts if not args.serve else ():
        results.append(elsewhere("--here", act, "--times", str(args.times)))
        row = " ".join(f"{value:.0f}" for value in results[-1]["us"])
        print(f"{act:30} {row} | {results[-1]['recovered']:.0f}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
