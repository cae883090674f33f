"""The tensor-parallel example under torchrun: same tokens as one device, and a rank that leaves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.forked import run_forked, run_ranks

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")

ROOT = Path(__file__).parents[2]
EXAMPLE = str(ROOT / "examples" / "tensor_parallel.py")
SMALL = ["--backend", "cpu", "--layers", "2", "--new-tokens", "6"]


def run(*arguments: str, ranks: int) -> subprocess.CompletedProcess[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    return subprocess.run(
        [sys.executable, *(launcher if ranks > 1 else []), EXAMPLE, *SMALL, *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )


def test_two_ranks_generate_the_tokens_of_one(tmp_path):
    saved = tmp_path / "two.json"
    first, second = run_ranks(EXAMPLE, *SMALL, "--check", "--save", saved, ranks=2)
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert "2 ranks generate the same tokens as one device: True" in first.stdout
    for phase in ("decode", "prefill"):
        assert f"{phase} (breakable on cpu): " in first.stdout
    assert first.stdout.count("cases: graphs equal eager") == 2
    assert first.stdout.count("in graphs (100 %)") == 2
    tokens = json.loads(saved.read_text(encoding="utf-8"))
    assert [len(one) for one in tokens] == [6, 3, 6, 3, 6, 3, 6]


@pytest.mark.slow
def test_a_rank_that_leaves_ends_the_other_with_an_error():
    started = time.monotonic()
    done = run("--leave", "1:2", "--timeout", "10", ranks=2)
    assert time.monotonic() - started < 120
    assert done.returncode != 0
    assert "rank 1 leaves at step 2" in done.stdout
    assert "Connection" in done.stderr or "AgreementError" in done.stderr


@pytest.mark.slow
def test_a_collective_of_the_host_is_refused_inside_one_graph():
    done = run("--device-graph-mode", '{"decode": "full"}', ranks=2)
    assert done.returncode != 0
    assert "add_up_on_the_host is marked @dg.no_graph" in done.stderr
    assert "policy='breakable'" in done.stderr


def figures_of(path: Path, words: str) -> dict[str, Any]:
    script = str(ROOT / "benchmarks" / "tensor_parallel.py")
    done = run_forked(script, *f"--backend cpu --layers 1 {words} --json".split(), path)
    assert done.returncode == 0, done.stderr
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.slow
def test_the_benchmark_of_a_start_captures_all_between_steps(tmp_path):
    figures = figures_of(tmp_path / "figures.json", "--first background")
    assert figures["captures"] == figures["steps_meanwhile"] - 1 > 4
    assert figures["other_tokens"] == 0
    assert figures["first_token_s"] > 0


def test_the_benchmark_measures_what_this_machine_has(tmp_path):
    figures = figures_of(tmp_path / "figures.json", "--repeats 1 --steps 1")
    assert figures["all_reduces"] == 2
    assert figures["prefill"]["segments"] == 3
    assert all(figures[phase]["runner"] > 0 for phase in ("decode", "prefill"))
