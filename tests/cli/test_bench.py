"""``devgraph bench``: every way to run the step, its figures and its chart."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import devgraph as dg
from devgraph.cli import bench
from tests.support.cli_programs import run_cli, run_json

SMALL = (
    "bench", "--backend", "cpu", "--layers", "2", "--hidden", "32", "--heads", "2",
    "--vocabulary", "64", "--window", "16", "--batch", "2", "--steps", "4", "--repeats", "3",
    "--policy", "full", "--policy", "breakable",
)  # fmt: skip


def test_every_policy_is_timed_on_the_same_work(capsys: pytest.CaptureFixture[str]):
    data = run_json(capsys, *SMALL)
    rows = {one["name"]: one for one in data["rows"]}
    assert list(rows) == [
        "eager",
        "full",
        "full, 4 lengths in turn",
        "full, new length in each step",
        "breakable",
    ]
    assert all(one["equal"] for one in rows.values())
    assert all(len(one["repeats"]) == 3 for one in rows.values())
    assert all(0 < one["host"] <= one["wall"] for one in rows.values())
    assert rows["eager"]["wall_ratio"] == 1
    assert rows["eager"]["capture_seconds"] is None
    assert rows["full"]["segments"] == 1
    assert rows["breakable"]["segments"] == 5  # two regions between three graphs
    assert rows["full"]["pool_bytes"] > 0
    assert rows["full"]["capture_seconds"] > 0
    assert data["kv_len"] == 8
    assert data["device"] == dg.get_backend("cpu").device_name


def test_table_names_the_device_and_chart_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "bench.svg"
    result = run_cli(capsys, *SMALL, "--plot", path)
    assert result.code == 0
    assert result.err.splitlines() == [
        "devgraph: capturing full",
        "devgraph: capturing breakable",
        "devgraph: timing 3 repeats",
    ]
    assert "one decode step on cpu, " in result.out
    assert "medians of 3 repeats of 4 steps each" in result.out
    assert "these figures show the overhead of devgraph" in result.out
    texts = [one.text for one in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")]
    assert f"one decode step on {dg.get_backend('cpu').device_name}" in texts
    assert {"eager", "full", "breakable"} <= {*texts}


def test_chart_has_a_bar_and_a_figure_for_each_time():
    timing = {"host": 3.5e-5, "wall": 1.458e-3}
    rows = [{"name": "full & whole", **timing, "repeats": [timing, {"host": 4e-5, "wall": 2e-3}]}]
    picture = ElementTree.fromstring(bench.chart("a step on a device", rows))
    texts = [one.text for one in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert texts[0] == "a step on a device"
    assert texts[-3:] == ["full & whole", "35 us", "1.46 ms"]


def test_policy_that_is_absent_or_fails_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    real = bench.capture

    def some_fail(*args: Any, policy: str, **options: Any) -> Any:
        if policy == "full":
            raise dg.CapabilityError("no such thing here")
        if policy == "piecewise":
            raise dg.CaptureError("it broke at line 7")
        return real(*args, policy=policy, **options)

    monkeypatch.setattr(bench, "capture", some_fail)
    result = run_cli(capsys, *SMALL, "--policy", "piecewise", "--compiler", "eager")
    assert result.code == 1
    assert "full is not available on this backend: no such thing here" in result.out
    assert "piecewise, eager FAILED: it broke at line 7" in result.out
    absent = run_cli(capsys, *SMALL)
    assert absent.code == 0


def test_policy_with_other_results_than_eager_exits_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    real = bench.capture

    def wrong(*args: Any, policy: str, **options: Any) -> Any:
        captured = real(*args, policy=policy, **options)
        if policy == "breakable":
            replay = captured.replay
            captured.replay = lambda **host: replay(**host) + 1
        return captured

    monkeypatch.setattr(bench, "capture", wrong)
    data = run_json(capsys, *SMALL, code=1)
    assert {one["name"]: one["equal"] for one in data["rows"]} == {
        "eager": True,
        "full": True,
        "full, 4 lengths in turn": True,
        "full, new length in each step": True,
        "breakable": False,
    }


@pytest.mark.parametrize(("off", "right"), [(0.0, True), (1e-6, True), (1e-2, False)])
@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_compiled_kernels_may_differ_in_rounding_and_others_may_not(
    compiler: str,
    off: float,
    right: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    real = bench.capture

    def rounded(*args: Any, policy: str, compiler: str, **options: Any) -> Any:
        captured = real(*args, policy="breakable", **options)
        replay = captured.replay
        captured.replay = lambda **host: replay(**host) * (1 + off)
        return captured

    monkeypatch.setattr(bench, "capture", rounded)
    argv = [*SMALL[:-4], "--policy", "piecewise", "--compiler", compiler]
    right = right and (compiler == "inductor" or off == 0.0)
    data = run_json(capsys, *argv, code=0 if right else 1)
    row = data["rows"][1]
    assert row["name"] == f"piecewise, {compiler}"
    assert row["equal"] is right
    assert row["difference"] == pytest.approx(off, rel=0.2)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--hidden", "30", "--heads", "4"], "not a multiple of 4 heads"),
        (["--kv-len", "17"], "--kv-len must be from 1 to the window of 16"),
        (["--steps", "0"], "--steps: must be from 1 to"),
        (["--layers", "0"], "--layers: must be from 1 to"),
        (["--plot", "chart.png"], "cannot write the chart chart.png: charts are SVG"),
        (["--plot", "no/folder/chart.svg"], "cannot write no/folder/chart.svg"),
        (["--plot", ""], "charts are SVG"),
        (["--steps", "9" * 5000], "--steps: expected a whole number"),
        (["--compiler", "inductor"], "only with the policy piecewise"),
    ],
)
def test_unusable_request_is_one_clear_error(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
):
    result = run_cli(capsys, *SMALL, *argv)
    assert result.code == 2
    assert said in result.err
    assert len(result.err.splitlines()) == 1
