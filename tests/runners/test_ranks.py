"""Ranks as real processes over gloo: agreement, every way to fail, mixed groups.

Whatever happens, every rank ends within the timeout, with a common result or with an error that
names the rank at fault.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.sim import ascend

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not hasattr(os, "fork"), reason="needs torch.distributed and fork"
)

ROOT = Path(__file__).parents[2]
SCENARIOS = ROOT / "tests" / "support" / "rank_scenarios.py"
LIMIT_S = 100.0
"""A rank that runs longer hangs. Generous: the processors may be busy."""

TIMEOUT_S = 3.0
"""What ranks wait for each other where one of them does not come."""

PATIENT_S = 60.0
"""... and where all of them come, however busy the processors are."""

Ranks = Callable[..., dict[int, dict[str, Any]]]


class Prepared:
    """The prepared process that forks ranks; see ``rank_scenarios.py``."""

    def __init__(self) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        self.environment = environment
        self._process = subprocess.Popen(
            [sys.executable, str(SCENARIOS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert self._read() == "ready\n"

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def run(
        self,
        scenario: str,
        *,
        size: int = 4,
        timeout_s: float = PATIENT_S,
        ranks: list[int] | None = None,
        folder: Path | None = None,
        stuck: int | None = None,
    ) -> dict[int, dict[str, Any]]:
        """Run a scenario; return what each rank returned (value) or raised (error), and its end.

        Args:
            stuck: a rank that never ends by itself; it is killed when the others have ended.
        """
        assert self._process.stdin is not None
        wanted = {
            "scenario": scenario,
            "size": size,
            "timeout_s": timeout_s,
            "limit_s": LIMIT_S,
            "ranks": list(range(size)) if ranks is None else ranks,
            "stuck": stuck,
            "folder": None if folder is None else str(folder),
        }
        self._process.stdin.write(json.dumps(wanted) + "\n")
        self._process.stdin.flush()
        return {int(rank): found for rank, found in json.loads(self._read()).items()}

    def close(self) -> None:
        self._process.communicate(timeout=30)


@pytest.fixture(scope="module")
def prepared() -> Iterator[Prepared]:
    process = Prepared()
    yield process
    process.close()


def survivors(found: dict[int, dict[str, Any]], *gone: int) -> list[str]:
    """Return the errors of all ranks but ``gone``, which ended within twice the timeout."""
    for rank, result in found.items():
        assert result["end"] != "hang", f"rank {rank} hangs"
        if rank not in gone:
            assert "error" in result, f"rank {rank} ended without an error: {result}"
            # The timeout, a roll call, and time for busy processors.
            assert result["seconds"] < TIMEOUT_S + 2 + 20
    return [result["error"] for rank, result in found.items() if rank not in gone]


def test_ranks_that_are_alike_capture_and_run_the_same_graphs(prepared):
    found = prepared.run("agree")
    captured = dict.fromkeys(("8", "4", "2", "1"), "captured")
    for rank, result in found.items():
        assert "error" not in result, result
        value = result["value"]
        assert (value["bucket"], value["right"], value["states"]) == (4, True, captured)
        assert value["idle_steps"] == int(rank == 3)
        assert value["wrote"] == (rank != 3)


def test_another_bucket_list_is_named_on_every_rank(prepared):
    """FAULTS 30."""
    for error in survivors(prepared.run("other_buckets")):
        assert "rank 2 has buckets=[2, 8], others [1, 2, 4, 8]" in error


def test_a_rank_that_does_not_come_is_named_within_the_timeout(prepared):
    """FAULTS 30."""
    for error in survivors(prepared.run("missing", timeout_s=TIMEOUT_S), 2):
        assert error.startswith("AgreementError")
        assert "for rank 2, which did not come" in error


def test_a_rank_out_of_memory_at_its_third_bucket_leaves_common_buckets(prepared):
    """FAULTS 3."""
    found = prepared.run("fail_third")
    kept = {"8": "captured", "4": "captured"}
    for rank, result in found.items():
        assert "error" not in result, result
        value = result["value"]
        reason = "out_of_memory" if rank == 1 else "ranks_dropped"
        assert value["states"] == {**kept, "2": reason, "1": reason}
        assert value["right"]
        assert value["eager"] == {}  # a dropped bucket's batches use the next larger graph
        assert rank == 1 or "rank 1: out_of_memory" in value["explained"]


def test_a_rank_that_raises_at_its_third_bucket_stops_all_ranks(prepared):
    """FAULTS 30."""
    found = prepared.run("break_third")
    assert "KeyError: 'layer 7'" in survivors({1: found.pop(1)})[0]
    for error in survivors(found):
        assert "rank 1 could not capture 2: it raised KeyError: 'layer 7'" in error


@pytest.mark.parametrize(("scenario", "victim"), [("killed_last", 3), ("killed_first", 0)])
def test_a_rank_that_is_killed_in_capture_is_named(prepared, scenario, victim):
    """FAULTS 30."""
    found = prepared.run(scenario, timeout_s=TIMEOUT_S)
    assert found[victim]["end"] == "exit -9"
    for error in survivors(found, victim):
        assert error.startswith("AgreementError")
        assert f"rank {victim}" in error


@pytest.mark.parametrize(
    ("scenario", "stuck", "end"),
    [("exit_before_vote", None, "exit 0"), ("stuck_before_vote", 1, "stuck")],
)
def test_a_rank_that_does_not_vote_is_named(prepared, scenario, stuck, end):
    """FAULTS 30."""
    found = prepared.run(scenario, timeout_s=TIMEOUT_S, stuck=stuck)
    assert found.pop(1)["end"] == end
    for error in survivors(found):
        assert error.startswith("AgreementError")
        assert "decode/vote" in error
        assert "for rank 1, which did not come" in error


def test_a_device_that_waits_for_a_rank_that_left_is_noticed(prepared):
    """FAULTS 30."""
    (error,) = survivors(prepared.run("stuck_device", timeout_s=TIMEOUT_S, size=2), 1)
    assert error.startswith("AgreementError: rank 0 waited 3")
    assert "for rank 1, which did not come" in error


def test_ranks_meet_in_a_collective_between_segments(prepared):
    found = prepared.run("meet_in_a_collective", size=2)
    assert [found[rank].get("value", found[rank]) for rank in (0, 1)] == [1.0, None]


def test_two_groups_of_one_world_agree_apart(prepared):
    found = prepared.run("pairs")
    assert [found[rank].get("value", found[rank]) for rank in range(4)] == [
        [0, 2, 2, 2],
        [1, 2, 2, 2],
        [0, 2, 4, 3],
        [1, 2, 4, 3],
    ]


def test_a_collective_of_the_host_inside_a_graph_is_refused(prepared):
    for error in survivors(prepared.run("full_collective", size=2)):
        assert "all_reduce" in error or "allreduce" in error


def test_two_backends_in_one_group_are_refused(prepared):
    """FAULTS 31."""
    for error in survivors(prepared.run("two_vendors")):
        assert 'rank 3 has backend="second", others "cpu"' in error


def check_mixed(found: dict[int, dict[str, Any]], second: str) -> None:
    values = []
    for rank, result in found.items():
        assert "error" not in result, result["error"]
        value = result["value"]
        assert value["backend"] == (second if rank > 1 else "cpu")
        assert value["policies"] == ["full" if rank > 1 else "breakable", "full"]
        assert value["graphs"]["prefill"] == 1
        assert value["graphs"]["decode"] == 7
        values.append(value["tokens"])
    assert values == [values[0]] * 4
    assert len({token for tokens in values[0] for token in tokens}) > 8


def test_two_groups_on_two_backends_generate_the_same_tokens_from_one_mode_string(prepared):
    check_mixed(prepared.run("mixed_second"), "second")


@pytest.mark.skipif(
    bool(ascend.unavailable_reason()), reason=f"no simulation: {ascend.unavailable_reason()}"
)
def test_groups_on_the_reference_and_the_simulated_driver_generate_the_same_tokens(
    prepared, tmp_path
):
    ascend.build()  # once, not in two processes at the same time
    script, rest = str(SCENARIOS), ["4", str(PATIENT_S), str(tmp_path)]
    alone = [
        subprocess.Popen(
            [sys.executable, script, "mixed_npu", str(rank), *rest],
            env={**prepared.environment, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        )
        for rank in (2, 3)
    ]
    try:
        found = prepared.run("mixed_npu", ranks=[0, 1], folder=tmp_path)
        for process in alone:
            process.wait(LIMIT_S)
    finally:
        for process in alone:
            process.kill()
            process.wait()
    for rank in (2, 3):
        found[rank] = json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8"))
    check_mixed(found, "npu")
