"""Collectives of torch_npu over the simulated HCCL: eager, captured, and their faults."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.sim import ascend
from tests.sim.ascend.hccl_ranks import CASES, HEALTHY
from tests.support.forked import run_ranks

pytest_plugins = ["tests.sim.ascend.plugin"]

ROOT = Path(__file__).parents[3]
OFTEN = {"fault_gone", "fault_gone_in_replay", "fault_counts"}
FAULTS = [
    pytest.param(name, marks=[] if name in OFTEN else pytest.mark.slow)
    for name in CASES
    if name not in HEALTHY
]


def run_cases(names: list[str], ranks: int, limit: float = 300) -> list[str]:
    """Run cases in turn in one set of processes and return the output of each rank."""
    case = CASES[names[0]]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "TORCH_CPP_LOG_LEVEL": "FATAL",
        "FAKEACL_DEVICES": str(ranks),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        **case.environment,
    }
    command = "-m", "tests.sim.ascend.hccl_ranks", ",".join(names)
    done = run_ranks(*command, ranks=ranks, env=environment, timeout=limit)
    outputs = [rank.stdout + rank.stderr for rank in done]
    codes = [rank.returncode for rank in done]
    assert codes == (case.exits or [0] * ranks), "\n".join(output[-3000:] for output in outputs)
    return [rank.stdout for rank in done]


@pytest.fixture(autouse=True)
def _needs_driver(ascend_session: ascend.Driver) -> None:
    """Build the driver once, before the ranks start."""


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_collectives_equal_gloo_eagerly_and_in_graphs(ranks: int):
    for output in run_cases(HEALTHY, ranks):
        assert output.rstrip().endswith("- ended")


@pytest.mark.parametrize("name", FAULTS)
def test_fault_of_a_rank_reaches_all_others_and_none_hangs(name: str):
    before = {path.name for path in Path("/dev/shm").glob("fakehccl-*")}
    run_cases([name], 2, limit=60)
    if name != "fault_connect":  # a rank that never connects leaves its file
        assert {path.name for path in Path("/dev/shm").glob("fakehccl-*")} <= before


def test_tensor_parallel_example_generates_the_tokens_of_one_device_in_graphs():
    done = run_ranks(
        *(ROOT / "examples" / "tensor_parallel.py", "--backend", "npu", "--check"),
        *("--layers", "2", "--new-tokens", "8"),
        ranks=2,
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "FAKEACL_DEVICES": "2"},
    )
    assert [rank.returncode for rank in done] == [0, 0], done
    out = "".join(rank.stdout for rank in done)
    assert "2 ranks generate the same tokens as one device: True" in out
    assert out.count("in graphs (100 %)") == 2
