"""What a host lacks, and what it is told."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import devgraph as dg
from devgraph.api import environment, registry
from devgraph.npu.backend import Diagnosis


def diagnosis(**changes: Any) -> Diagnosis:
    facts = {
        "torch": "2.13.0+cpu", "torch_npu": "2.13.0", "missing_libraries": (),
        "toolkit": "/usr/local/Ascend", "autoload": True,
    }  # fmt: skip
    return Diagnosis(**{**facts, **changes})


def test_complete_host_has_no_problem():
    assert diagnosis().problems == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"torch_npu": None}, ["pip install torch-npu==2.13.*", "install CANN"]),
        (
            {"torch_npu": None, "torch": "2.15.0+cpu"},
            ["torch==2.14.* torch-npu==2.14.*", "none is known for torch 2.15", "install CANN"],
        ),
        ({"torch": "2.15.0"}, ["does not match torch 2.15.0: install torch==2.13.*"]),
        ({"torch_npu": "2.12.1"}, ["does not match", "torch-npu==2.13.*", "torch==2.12.*"]),
        (
            {"missing_libraries": ("libascendcl.so",)},
            ["libascendcl.so", "source set_env.sh", "TORCH_DEVICE_BACKEND_AUTOLOAD=0"],
        ),
    ],
    ids=["no-package", "newer-torch", "newer-torch-beside-it", "other-version", "no-CANN"],
)
def test_problem_of_a_host_comes_with_the_way_to_fix_it(changes: dict[str, Any], said: list[str]):
    text = str(diagnosis(**changes))
    for part in said:
        assert part in text


def test_host_without_autoload_is_not_told_to_turn_it_off():
    [problem] = diagnosis(missing_libraries=("libhccl.so",), autoload=False).problems
    assert "AUTOLOAD" not in problem


def test_autoload_that_the_command_line_turned_off_is_still_reported(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv(registry.AUTOLOAD, "0")
    monkeypatch.delenv(environment.AUTOLOAD_WAS_ON, raising=False)
    assert not Diagnosis.of_host().autoload
    monkeypatch.setenv(environment.AUTOLOAD_WAS_ON, "1")
    assert Diagnosis.of_host().autoload


@pytest.mark.skipif(
    importlib.util.find_spec("torch_npu") is not None, reason="torch_npu is installed here"
)
def test_get_backend_without_torch_npu_says_how_to_get_it():
    with pytest.raises(dg.BackendUnavailableError, match=r"pip install torch-npu==.*install CANN"):
        dg.get_backend("npu")


def test_doctor_explains_a_torch_npu_that_breaks_import_torch(tmp_path: Path):
    """With autoload on, ``import torch`` fails on such a host; doctor must work all the same."""
    package = tmp_path / "torch_npu"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('libhccl.so: cannot open')\n")
    info = tmp_path / "torch_npu-2.13.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_npu\nVersion: 2.13.0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
    root = Path(__file__).parents[2]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (tmp_path, root)))}
    for name in (registry.AUTOLOAD, environment.AUTOLOAD_WAS_ON, "LD_LIBRARY_PATH"):
        variables.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-m", "devgraph", "doctor", "--no-probe", "--json", "--backend", "npu"],
        capture_output=True, text=True, env=variables, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    for part in ("libascendcl.so", "source set_env.sh", "TORCH_DEVICE_BACKEND_AUTOLOAD=0"):
        assert part in done.stdout
