"""benchmarks/device.py: every step runs to its end or its limit, and its output is kept."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

PATH = Path(__file__).parents[1] / "benchmarks" / "device.py"


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Any:
    spec = importlib.util.spec_from_file_location("device_benchmarks", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def test_steps_name_what_exists(device: Any) -> None:
    for step in device.STEPS:
        script = PATH.parent / f"{step.name}.py"
        assert "benchmarks/{name}.py" not in step.command or script.exists()
    assert [step.name for step in device.steps_for("cpu", [])] == [
        "conformance", "tests", "generate", "run",
    ]  # fmt: skip


def test_only_steps_of_another_backend_are_an_error_and_no_success(
    device: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    argv = ["device.py", str(tmp_path), "--backend", "cpu", "--only", "soak"]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit) as end:
        device.main()
    assert end.value.code == 2


@pytest.mark.parametrize("devices", [[], ["--devices", "0", "1"]])
def test_failures_and_late_steps_leave_the_others_and_their_output(
    device: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    devices: list[str],
) -> None:
    steps = (
        device.Step("bad", "{python} -c 1/0", 60),
        device.Step("late", "{python} -uc print('begun');__import__('time').sleep(60)", 2),
        device.Step("elsewhere", "{python} -c 1", 60, ("cuda",)),
        device.Step("good", "{python} -c print('{backend}')", 60),
    )
    monkeypatch.setattr(device, "STEPS", steps)
    monkeypatch.setattr(sys, "argv", ["device.py", str(tmp_path), "--backend", "cpu", *devices])
    assert device.main() == 1
    out = capsys.readouterr().out
    assert "bad: 1 in" in out
    assert "late: 124 in" in out
    assert "good: 0 in" in out
    kept = {path.stem: path.read_text() for path in tmp_path.iterdir()}
    assert kept.keys() == {"bad", "late", "good"}
    assert "ZeroDivisionError" in kept["bad"]
    assert kept["late"] == "begun\n"
    assert kept["good"] == "cpu\n"
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--only", "good"])
    assert device.main() == 0
