"""Time of a vote between the ranks of one host through shared memory and over gloo.

    python benchmarks/votes.py [--ranks 2 4 8] [--json FILE]

The groups run one after another; each rank is a process. No device is used.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch.distributed as dist

import devgraph as dg


def microseconds_of(group: dg.RankGroup, votes: int) -> float:
    """Return the time of a vote in microseconds, as the median of seven rounds."""
    rounds = []
    for _ in range(7):
        dist.barrier()
        start = time.perf_counter()
        for _ in range(votes):
            group.minimum("bench", (2, -8, 0, 0))
        rounds.append((time.perf_counter() - start) / votes * 1e6)
    return statistics.median(rounds)


def measure(file: Path) -> None:
    """Measure the votes of this rank's group; rank 0 writes the results to ``file``."""
    dist.init_process_group("gloo")
    shared = microseconds_of(dg.RankGroup.from_process_group(shared=True), 2000)
    gloo = microseconds_of(dg.RankGroup.from_process_group(shared=False), 200)
    if dist.get_rank() == 0:
        found = {"ranks": dist.get_world_size(), "shared_us": shared, "gloo_us": gloo}
        file.write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if "RANK" in os.environ:
        measure(args.json)
        return
    rows = []
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "votes.json"
        for ranks in args.ranks:
            subprocess.run([*launcher, str(ranks), __file__, "--json", str(file)], check=True)
            rows.append(json.loads(file.read_text(encoding="utf-8")))
            shared, gloo = rows[-1]["shared_us"], rows[-1]["gloo_us"]
            print(f"{ranks} ranks: {shared:.1f} us through shared memory, {gloo:.1f} us over gloo")
    if args.json:
        args.json.write_text(json.dumps(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
