"""The update benchmark on the ROCm backend and the CUDA backend, both on an NVIDIA GPU.

    python benchmarks/update_shim.py [--steps 60] [--only d256 d1024] [--json FILE]

The shim of ``tests/sim/hip`` replaces libamdhip64 and forwards to the CUDA driver. Both backends
capture, update and launch the same kernels, so the comparison shows the work of the host. The model
is that of ``update.py``. Every length must equal eager bit for bit on both backends. The benchmark
needs an NVIDIA GPU and a C++ compiler (or a compiled shim in ``DEVGRAPH_TEST_HIP_SHIM``).
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import update
from update_model import Model, attend_region

from devgraph.api.policy.job import UpdateBudget
from devgraph.api.registry import register

BACKENDS = ("cuda", "rocm")
FIRST = ("new_to_eager", "update_us", "executable_ms")
GOAL = 1.25
"""Maximum host time of a replay with an update through the shim, relative to the CUDA backend."""


def contenders(model: Model) -> list[update.Contender]:
    """Capture the model under both policies on both backends."""
    made = []
    for policy, options in (("breakable", {}), ("full", {"budget": UpdateBudget(misses=10**6)})):
        for backend in BACKENDS:
            cap = update.captured(model, policy, attend_region, backend=backend, **options)
            call = lambda n, cap=cap: cap.replay(kv_len=n)  # noqa: E731
            made.append(update.Contender(f"{backend} {policy}", call, cap.close))
    return made


def measure(name: str, steps: int, keys: int) -> Iterator[dict[str, Any]]:
    """Measure one size; yield each part of the results."""
    work = update.WORKS[name]
    model = Model(work, torch.device("cuda"))
    real = update.compare(model, work, steps, contenders)
    ratios = {
        f"{what}, {policy}": real[f"rocm {policy}"][f"{what}_us"]
        / real[f"cuda {policy}"][f"{what}_us"]
        for what in ("host", "wall")
        for policy in ("full", "breakable")
    }
    yield {"real": real, "rocm / cuda": ratios}
    uses = {backend: update.FirstUses(model, backend) for backend in BACKENDS}
    for turn in range(4):
        for backend in BACKENDS[:: -1 if turn % 2 else 1]:
            uses[backend].take(-(-keys // 4))
    first = {backend: taken.result() for backend, taken in uses.items()}
    ratios = {what: first["rocm"][what] / first["cuda"][what] for what in FIRST}
    yield {"first": first, "rocm / cuda": ratios}


def report(result: dict[str, Any]) -> bool:
    """Print a part of the results; return whether it is correct and meets the goal."""
    say = sys.stdout.write
    right = True
    for contender, row in result.get("real", {}).items():
        wrong = row["wrong_lengths"]
        right = right and not wrong
        verdict = f"wrong at {wrong}" if wrong else f"{row['lengths']} lengths equal eager"
        say(
            f"  {contender:15} host {row['host_us']:8.1f} us  wall {row['wall_us']:8.1f} us"
            f"  {verdict}\n"
        )
    for backend, first in result.get("first", {}).items():
        say(
            f"  {backend:15} new length {first['new_ms']:.2f} ms, update {first['update_us']:.0f} "
            f"us, executable {first['executable_ms']:.2f} ms\n"
        )
    for what, value in result["rocm / cuda"].items():
        say(f"  rocm / cuda, {what}: {value:.3f}\n")
    if "real" in result:
        met = result["rocm / cuda"]["host, full"] <= GOAL
        right = right and met
        say(f"  goal, host of full at most {GOAL:g}: {'ok' if met else 'MISSED'}\n")
    sys.stdout.flush()
    return right


@torch.no_grad()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60, help="timed steps (default: 60)")
    parser.add_argument("--keys", type=int, default=40, help="new lengths (default: 40)")
    parser.add_argument("--only", nargs="+", choices=update.WORKS, default=["d256", "d1024"])
    parser.add_argument("--json", metavar="FILE", help="write all results to this file")
    args = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.sim.hip.backend import ShimBackend

    register("rocm", ShimBackend, replace=True)
    torch.backends.cuda.enable_cudnn_sdp(False)  # See update.py.
    sys.stdout.write(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, medians of {args.steps}\n"
    )
    results: dict[str, list[dict[str, Any]]] = {}
    right = True
    for name in args.only:
        sys.stdout.write(f"\n{update.WORKS[name]}, {update.WORKS[name].layers} layers\n")
        results[name] = []
        for part in measure(name, args.steps, args.keys):
            results[name].append(part)
            right = report(part) and right
            if args.json:
                with open(args.json, "w", encoding="utf-8") as file:
                    json.dump(results, file, indent=1, default=str)
        gc.collect()
        torch.cuda.empty_cache()
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
