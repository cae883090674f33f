"""benchmarks/run.py on CUDA: the public package for breakable graphs beside our policies."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from tests.support.device_kit import on

backend, _ = on("cuda")

pytestmark = pytest.mark.cuda

SMALL = (
    "--backend", "cuda", "--layers", "3", "--hidden", "64", "--heads", "2",
    "--vocabulary", "64", "--window", "64", "--steps", "4", "--repeats", "2",
    "--policy", "full", "--policy", "breakable",
)  # fmt: skip


def test_public_package_runs_the_same_work_with_the_same_result(
    be: object, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("breakable_cuda_graphs", reason="the public package")
    path = Path(__file__).parents[2] / "benchmarks" / "run.py"
    capsys.readouterr()
    assert runpy.run_path(str(path))["main"]([*SMALL, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    rows = {one["name"]: one for one in data["rows"]}
    assert {"eager", "full", "breakable", "breakable-cuda-graphs"} <= set(rows)
    assert all(one["equal"] for one in rows.values())
    assert data["failed"] == {}
