"""``devgraph explain``: segments and regions as text, JSON, DOT and a Chrome trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from devgraph.cli import explain
from tests.support.cli_programs import run_cli, run_json, write_steps


def test_break_is_an_eager_segment_between_graphs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    target = f"{write_steps(tmp_path)}:breaks"
    argv = [target, "--inputs", "inputs", "--policy", "breakable", "--backend", "cpu"]
    data = run_json(capsys, "explain", *argv)
    assert [one["kind"] for one in data["segments"]] == ["graph", "eager", "graph"]
    assert data["segments"][1]["name"] == "eager synced"
    assert [one["nodes"] for one in data["segments"]] == [1, None, 1]
    assert data["info"]["segments"] == 3
    text = run_cli(capsys, "explain", *argv).out
    assert "eager synced" in text
    assert "3 segments, 2 nodes" in text


def test_updatable_region_is_named_under_full(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    target = f"{write_steps(tmp_path)}:hosted"
    argv = [target, "--inputs", "inputs", "--host-arg", "factor=2", "--backend", "cpu"]
    data = run_json(capsys, "explain", *argv)
    (segment,) = data["segments"]
    assert segment["regions"] == ["scaled"]
    assert [one["name"] for one in segment["ranges"]] == ["scaled"]
    assert data["info"]["regions"] == 1
    assert data["pool_bytes"] > 0
    text = run_cli(capsys, "explain", *argv).out
    assert "scaled x1" in text and "0: scaled, node" in text


def test_dot_and_trace_have_every_segment_in_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    dot, trace = tmp_path / "capture.dot", tmp_path / "capture.json"
    result = run_cli(
        capsys, "explain", f"{write_steps(tmp_path)}:breaks", "--inputs", "inputs",
        "--policy", "breakable", "--backend", "cpu", "--dot", dot, "--chrome-trace", trace,
    )  # fmt: skip
    assert result.code == 0
    text = dot.read_text(encoding="utf-8")
    assert text.startswith("digraph capture {")
    assert "s0 -> s1;" in text
    assert "s1 -> s2;" in text
    assert "eager synced" in text
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    timed = [one for one in events if one["ph"] == "X"]
    assert [one["cat"] for one in timed] == ["graph", "eager", "graph"]
    ends = [one["ts"] + one["dur"] for one in timed]
    assert all(one["dur"] > 0 for one in timed)
    assert [one["ts"] for one in timed[1:]] == pytest.approx(ends[:-1])


def test_page_has_segments_times_nodes_and_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    page = tmp_path / "capture.html"
    target = f"{write_steps(tmp_path)}:hosted"
    result = run_cli(
        capsys, "explain", target, "--inputs", "inputs", "--host-arg", "factor=2",
        "--backend", "cpu", "--html", page,
    )  # fmt: skip
    assert result.code == 0
    text = page.read_text(encoding="utf-8")
    for part in ("scaled", "one replay", "nodes", "memory", "█"):
        assert part in text
    assert "http" not in text  # it needs no other file


def test_capture_that_is_refused_is_one_error_with_the_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = write_steps(tmp_path)
    result = run_cli(capsys, "explain", f"{path}:breaks", "--inputs", "inputs", "--backend", "cpu")
    assert result.code == 2
    assert "synced is marked @dg.no_graph" in result.err
    assert str(path) in result.err


def test_user_exception_is_one_error_with_the_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = write_steps(tmp_path)
    result = run_cli(capsys, "explain", f"{path}:raises", "--inputs", "inputs", "--backend", "cpu")
    assert result.code == 2
    assert f"raises raised KeyError: 'nothing' at {path}:" in result.err


def test_compiler_that_the_policy_does_not_read_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    target = f"{write_steps(tmp_path)}:clean"
    result = run_cli(capsys, "explain", target, "--inputs", "inputs", "--compiler", "inductor")
    assert result.code == 2
    assert "only with the policy piecewise" in result.err


@pytest.mark.parametrize("dot", ["", "no/folder.dot"])
def test_file_that_cannot_be_written_is_an_error(
    dot: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    result = run_cli(
        capsys, "explain", f"{write_steps(tmp_path)}:clean", "--inputs", "inputs",
        "--backend", "cpu", "--dot", dot,
    )  # fmt: skip
    assert result.code == 2
    assert "cannot write" in result.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--html", "no/page.html"], "cannot write no/page.html: there is no such folder"),
    ],
)
def test_options_that_cannot_work_are_refused_before_the_capture(
    words: list[str],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(explain, "capture", None)
    target = f"{write_steps(tmp_path)}:clean"
    result = run_cli(capsys, "explain", target, "--inputs", "inputs", *words)
    assert result.code == 2 and said in result.err


def test_error_on_a_terminal_keeps_its_lines_and_names_its_section(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    argv = ["explain", f"{write_steps(tmp_path)}:raises", "--backend", "npuu"]
    assert run_cli(capsys, *argv).err.count("\n") == 1
    monkeypatch.setenv("FORCE_COLOR", "1")  # which rich takes as a terminal
    monkeypatch.setenv("NO_COLOR", "1")
    last = run_cli(capsys, *argv).err.splitlines()[-1]
    assert last == "see: devgraph troubleshoot UnknownBackendError"
