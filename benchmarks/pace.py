"""Which acts of a process make every graph replay slower, and what brings the pace back (CUDA).

    python benchmarks/pace.py [--acts wait streams ...] [--times 8] [--json FILE]

Each act has a process of its own. A graph of a small decoder (36 layers, 468 nodes) is timed by
events before the act, after each repetition, and after eight empty programmatic launches on the
streams that the act used. docs/fast-replay.md says what was found.
"""

from __future__ import annotations

import argparse
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
        rows = x.shape[0]
        q, k, v = self.qkv(F.rms_norm(x, (WIDTH,))).view(rows, 3, HEADS, -1).unbind(1)
        heads = (each.transpose(0, 1)[None] for each in (q, k, v))
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)[0].transpose(0, 1)
        x = x + self.out(mixed.reshape(rows, WIDTH))
        gate, value = self.up(F.rms_norm(x, (WIDTH,))).chunk(2, -1)
        return x + self.down(F.silu(gate) * value)


class Process:
    """What an act works on: a captured model, a word of device memory, streams."""

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
        """Capture one kernel, as torch does; it launches two on the stream that captures."""
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

    def timed(self) -> float:
        """Return the microseconds of a replay."""
        found = []
        for _ in range(3):
            self.graph.replay()
        for _ in range(5):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(20):
                self.graph.replay()
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
    """Repeat one act in this process, and then bring the pace back."""
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


def main() -> int:
    """Measure each act in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--acts", nargs="+", choices=ACTS, default=list(ACTS))
    parser.add_argument("--times", type=int, default=8)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--here", choices=ACTS, help="measure one act in this process")
    args = parser.parse_args()
    if args.here:
        print(json.dumps(measure(args.here, args.times)))
        return 0
    results = []
    print(f"{torch.cuda.get_device_name()}: microseconds of a replay")
    for act in args.acts:
        command = [sys.executable, __file__, "--here", act, "--times", str(args.times)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            print(done.stderr, file=sys.stderr)
            return 1
        results.append(json.loads(done.stdout.splitlines()[-1]))
        row = " ".join(f"{value:.0f}" for value in results[-1]["us"])
        print(f"{act:30} {row} | {results[-1]['recovered']:.0f}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
