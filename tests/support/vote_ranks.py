"""One rank of ``test_votes.py``, in a process that imports no torch and so starts at once.

``python vote_ranks.py PAGE RANK SIZE COUNT KIND`` votes COUNT times and prints JSON: the number of
right results, or the error.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MODULE = Path(__file__).parents[2] / "devgraph" / "runners" / "votes.py"


def load() -> Any:
    """Return ``devgraph.runners.votes`` without the package around it."""
    spec = importlib.util.spec_from_file_location("votes", MODULE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["votes"] = module
    spec.loader.exec_module(module)
    return module


def values_of(turn: int, rank: int) -> list[int]:
    draw = random.Random(turn * 1000 + rank)
    return [draw.randrange(-(2**33), 2**33) for _ in range(1 + turn % 6)]


def wait(is_complete: Callable[[], bool], tag: str) -> None:
    end = time.monotonic() + 60
    while not is_complete():
        if time.monotonic() > end:
            raise TimeoutError(f"waited 60 s at {tag}")
        os.sched_yield()


def loosely(votes: Any, draw: random.Random, kill: bool) -> Callable[..., None]:
    """Return a post that stores words in any order and with delays, and may die between them."""

    def post(row: int, epoch: int, values: list[int]) -> None:
        padded = [*values, *[0] * (8 - len(values))]
        start = votes._index(epoch, row)
        for word in draw.sample(range(8), 8):
            if draw.random() < 0.005:
                time.sleep(draw.random() * 1e-4)
            if kill and word == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            votes._words[start + word] = (epoch << 40 | 2**39) + padded[word]

    return post


def main(page: str, rank: int, size: int, count: int, kind: str) -> dict[str, Any]:
    module = load()
    if kind == "wrap":
        module.EPOCHS = 6
    votes = module.SharedVotes(page, rank, size, wait=wait)
    print("open", flush=True)
    sys.stdin.readline()
    draw, right = random.Random(rank), 0
    for turn in range(count):
        if kind == "late" and draw.random() < 0.02:
            time.sleep(draw.random() * 0.005)
        if kind == "loose":
            votes._post = loosely(votes, draw, kill=False)
        if kind == "killed" and rank == size - 1 and turn == count // 2:
            votes._post = loosely(votes, draw, kill=True)
        if kind == "interrupted" and draw.random() < 0.2 and _interrupted(votes, turn, rank):
            continue  # the other ranks count the vote, which was posted
        found = votes(f"turn {turn}", values_of(turn, rank))
        everyone = [values_of(turn, other) for other in range(size)]
        if found != [min(column) for column in zip(*everyone, strict=True)]:
            raise AssertionError(f"turn {turn}: {found}")
        right += 1
    return {"right": right}


def _interrupted(votes: Any, turn: int, rank: int) -> bool:
    """Interrupt the wait of a vote; return whether the vote was posted before."""
    before, polls = votes._posted(rank), votes._polls
    votes._wait, votes._polls = _interrupt, 0
    try:
        votes(f"turn {turn}", values_of(turn, rank))
    except KeyboardInterrupt:
        return bool(votes._posted(rank) != before)
    finally:
        votes._wait, votes._polls = wait, polls
    raise AssertionError("the wait was not interrupted")


def _interrupt(is_complete: Callable[[], bool], tag: str) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    path, *numbers, how = sys.argv[1:]
    try:
        report = main(path, *map(int, numbers), how)
    except Exception as error:
        report = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(report), flush=True)
