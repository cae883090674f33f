"""Collectives of torch_npu over the simulated HCCL: eager, captured, and their faults."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.sim import ascend
from tests.sim.ascend.hccl_ranks import CASES, HEALTHY

pytest_plugins = ["tests.sim.ascend.plugin"]

ROOT = Path(__file__).parents[3]
OFTEN = {"fault_gone", "fault_gone_in_replay", "fault_counts"}
FAULTS = [
    pytest.param(name, marks=[] if name in OFTEN else pytest.mark.slow)
    for name in CASES
    if name not in HEALTHY
]


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def run_ranks(names: list[str], ranks: int, limit: float = 300) -> list[str]:
    """Run cases in turn in one set of processes and return the output of each rank."""
    case = CASES[names[0]]
    common = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "TORCH_CPP_LOG_LEVEL": "FATAL",
        "FAKEACL_DEVICES": str(ranks),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        **case.environment,
    }
    command = [sys.executable, "-W", "ignore", "-u", "-m", "tests.sim.ascend.hccl_ranks"]
    processes = [
        subprocess.Popen(
            [*command, ",".join(names)],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    end = time.monotonic() + limit
    try:
        outputs = [
            process.communicate(timeout=max(1, end - time.monotonic()))[0] for process in processes
        ]
    finally:
        for process in processes:
            process.kill()
    codes = [process.returncode for process in processes]
    assert codes == (case.exits or [0] * ranks), "\n".join(output[-3000:] for output in outputs)
    return outputs


@pytest.fixture(autouse=True)
def _needs_driver(ascend_session: ascend.Driver) -> None:
    """Build the driver once, before the ranks start."""


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_collectives_equal_gloo_eagerly_and_in_graphs(ranks: int):
    for output in run_ranks(HEALTHY, ranks):
        assert output.rstrip().endswith("- ended")


@pytest.mark.parametrize("name", FAULTS)
def test_fault_of_a_rank_reaches_all_others_and_none_hangs(name: str):
    before = {path.name for path in Path("/dev/shm").glob("fakehccl-*")}
    run_ranks([name], 2, limit=60)
    if name != "fault_connect":  # a rank that never connects leaves its file
        assert {path.name for path in Path("/dev/shm").glob("fakehccl-*")} <= before


def test_tensor_parallel_example_generates_the_tokens_of_one_device_in_graphs():
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    example = [str(ROOT / "examples" / "tensor_parallel.py"), "--backend", "npu", "--check"]
    done = subprocess.run(
        [sys.executable, *launcher, *example, "--layers", "2", "--new-tokens", "8"],
        capture_output=True,
        text=True,
        timeout=300,
        env={
            **os.environ,
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
            "FAKEACL_DEVICES": "2",
            "GLOO_SOCKET_IFNAME": "lo",
        },
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "2 ranks generate the tokens of one device: True" in done.stdout
    assert done.stdout.count("in graphs (100 %)") == 2
