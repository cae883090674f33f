"""Votes through shared memory: real processes, loose stores, interrupts, ranks that die."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from devgraph.runners import votes

pytestmark = pytest.mark.skipif(
    not Path("/dev/shm").is_dir(), reason="this system has no shared memory at /dev/shm"
)

SCRIPT = Path(__file__).parents[1] / "support" / "vote_ranks.py"


def run_ranks(kind: str, *, size: int, count: int) -> dict[int, dict[str, Any]]:
    """Vote ``count`` times in ``size`` processes; return the report of each, or its exit status."""
    page = votes.create_page(size)
    try:
        ranks = [
            subprocess.Popen(
                [sys.executable, str(SCRIPT), page, str(rank), str(size), str(count), kind],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(size)
        ]
        for process in ranks:
            assert process.stdout is not None
            assert process.stdout.readline() == "open\n"
    finally:
        os.unlink(page)
    for process in ranks:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    reports = {}
    for rank, process in enumerate(ranks):
        output, _ = process.communicate(timeout=500)
        reports[rank] = json.loads(output) if output else {"status": process.returncode}
    return reports


@pytest.mark.parametrize("kind", ["plain", "late", "loose", "wrap"])
@pytest.mark.parametrize("size", [2, 3])
def test_every_vote_is_the_minimum_of_all_ranks(kind: str, size: int):
    count = 400
    assert run_ranks(kind, size=size, count=count) == {
        rank: {"right": count} for rank in range(size)
    }


@pytest.mark.slow
def test_a_million_votes_with_loose_stores_are_right():
    """FAULTS 55."""
    count = 1_000_000
    assert run_ranks("loose", size=2, count=count) == {rank: {"right": count} for rank in (0, 1)}


def test_vote_after_an_interrupted_one_is_right_on_every_rank():
    """FAULTS 55."""
    count = 400
    reports = run_ranks("interrupted", size=2, count=count)
    assert all("error" not in report for report in reports.values()), reports
    assert all(0 < report["right"] < count for report in reports.values())


def test_rank_that_is_killed_between_two_words_ends_the_others_with_an_error():
    """FAULTS 55."""
    reports = run_ranks("killed", size=3, count=40)
    assert reports[2] == {"status": -9}
    for rank in (0, 1):
        assert reports[rank] == {"error": "ProcessLookupError: the process of rank 2 has exited"}


@pytest.fixture
def page() -> Iterator[str]:
    path = votes.create_page(1)
    yield path
    os.unlink(path)


def test_long_vote_takes_several_rounds(page: str):
    alone = votes.SharedVotes(page, 0, 1, wait=lambda done, tag: None)
    assert alone("t", list(range(20))) == list(range(20))
    assert alone("t", [-(2**38), 2**38]) == [-(2**38), 2**38]


def test_page_needs_memory_that_exists(monkeypatch: pytest.MonkeyPatch):
    """FAULTS 55."""

    def full(file: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    before = set(Path("/dev/shm").glob("devgraph-*"))
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        votes.create_page(2)
    assert set(Path("/dev/shm").glob("devgraph-*")) <= before


def test_rank_opens_its_page_once(page: str):
    with pytest.raises(FileNotFoundError):
        votes.SharedVotes(f"{page}-gone", 0, 1, wait=lambda done, tag: None)


def test_hosts_vote_among_themselves_and_members_read_the_result(page: str):
    begun = []

    def begin(values: list[int]) -> votes.Finish:
        begun.append(values)
        return lambda tag: [min(value, 5) for value in values]

    leader = votes.SharedVotes(
        page, 0, 1, wait=lambda done, tag: None, several_hosts=True, begin_between_hosts=begin
    )
    assert leader("t", [9, 3]) == [5, 3]
    assert begun[0][:2] == [9, 3]


def test_interrupted_vote_among_hosts_is_begun_once(page: str):
    begun, interrupts = [], [True]

    def begin(values: list[int]) -> votes.Finish:
        begun.append(values)

        def finish(tag: str) -> list[int]:
            if interrupts and interrupts.pop():
                raise KeyboardInterrupt
            return values

        return finish

    leader = votes.SharedVotes(
        page, 0, 1, wait=lambda done, tag: None, several_hosts=True, begin_between_hosts=begin
    )
    with pytest.raises(KeyboardInterrupt):
        leader("t", [1])
    assert leader("t", [2]) == [2]
    assert [values[0] for values in begun] == [1, 2]
