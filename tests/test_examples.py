"""The examples run as they are, and the third-party backend is found by its entry point."""

from __future__ import annotations

import configparser
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import devgraph as dg

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
THIRD_PARTY = EXAMPLES / "thirdparty_backend"


def _run(*argv: str, path: tuple[Path, ...] = ()) -> str:
    """Run Python with ``path`` in front of the import path; return what it printed."""
    inherited = os.environ.get("PYTHONPATH", "")
    places = [str(one) for one in (*path, ROOT)] + ([inherited] if inherited else [])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *argv], capture_output=True, text=True, env=environment, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_quickstart_replays_what_eager_computes():
    first, second, *rest = _run(str(EXAMPLES / "quickstart.py")).splitlines()
    assert first == "replay equals eager: True"
    assert second == "9 replays equal eager bit for bit"
    assert any("region 0: attention" in line for line in rest)


def test_quickstart_of_the_readme_runs(tmp_path: Path):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    quick = re.search(r"## Quick start\n+```python\n(.*?)```", readme, re.DOTALL)
    assert quick is not None
    assert "assert captured.prove(" in quick.group(1)
    path = tmp_path / "quick.py"
    path.write_text(quick.group(1) + "print(y.shape)\n")
    assert _run(str(path)) == "torch.Size([8, 64])\n"


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder with the metadata that installing the third-party package would leave."""
    project = (THIRD_PARTY / "pyproject.toml").read_text(encoding="utf-8")
    section = re.search(
        r'^\[project\.entry-points\."devgraph\.backends"\]\n(.*?)(?:\n\[|\Z)',
        project,
        re.DOTALL | re.MULTILINE,
    )
    assert section is not None
    points = configparser.ConfigParser()
    points.read_string(f"[devgraph.backends]\n{section.group(1)}".replace('"', ""))
    folder = tmp_path / "devgraph_xpu-0.1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: devgraph-xpu\nVersion: 0.1.0\n", encoding="utf-8"
    )
    with (folder / "entry_points.txt").open("w", encoding="utf-8") as out:
        points.write(out)
    return tmp_path


@pytest.mark.skipif(
    hasattr(torch, "xpu") and torch.xpu.is_available(), reason="this machine has such a device"
)
def test_third_party_backend_is_listed_with_its_reason(installed: Path):
    text = _run("-m", "devgraph", "doctor", "--no-probe", "--json", path=(installed, THIRD_PARTY))
    found = {one["name"]: one for one in json.loads(text)["backends"]}
    assert found["xpu"]["available"] is False
    assert "torch.xpu sees no device" in found["xpu"]["reason"]


def test_third_party_file_is_as_short_as_promised():
    lines = (THIRD_PARTY / "devgraph_xpu.py").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 60


@pytest.mark.cuda
def test_third_party_code_drives_a_device(monkeypatch: pytest.MonkeyPatch):
    """The example's class over the namespace of the device at hand instead of its own."""
    monkeypatch.syspath_prepend(str(THIRD_PARTY))
    module: Any = __import__("devgraph_xpu")
    kind = type(
        "Elsewhere",
        (module.XpuBackend,),
        {"name": "elsewhere", "device_type": "cuda", "graph_class_name": "CUDAGraph"},
    )
    backend = kind()
    weight = torch.randn(64, 64, device=backend.device)

    @dg.no_graph
    def halved(x: torch.Tensor) -> torch.Tensor:
        return x * 0.5

    def step(x: torch.Tensor) -> torch.Tensor:
        return halved(torch.relu(x @ weight)) + x

    x = torch.randn(8, 64, device=backend.device)
    with dg.capture(step, x, policy="breakable", backend=backend) as captured:
        assert len(captured.segments) == 3
        assert captured.prove().ok
    with dg.capture(lambda x: torch.relu(x @ weight), x, backend=backend) as captured:
        assert captured.prove().ok
