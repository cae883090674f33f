"""Time of a vote between the ranks of one host through shared memory and over gloo.

torchrun --standalone --nproc-per-node 4 benchmarks/votes.py [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    shared = microseconds_of(dg.RankGroup.from_process_group(shared=True), 2000)
    gloo = microseconds_of(dg.RankGroup.from_process_group(shared=False), 200)
    if dist.get_rank() == 0:
        print(
            f"{dist.get_world_size()} ranks: a vote takes {shared:.1f} us through shared memory, "
            f"{gloo:.1f} us over gloo"
        )
        if args.json:
            found = {"ranks": dist.get_world_size(), "shared_us": shared, "gloo_us": gloo}
            args.json.write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
