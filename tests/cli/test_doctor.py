"""``devgraph doctor``: backends, reasons, and what small captures say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest

import devgraph as dg
from devgraph.api.backend import Backend
from devgraph.api.capabilities import Capabilities, hooks
from devgraph.api.graph import DeviceGraph
from devgraph.api.pool import Pool
from devgraph.api.registry import BackendInfo, declaration
from devgraph.api.torchlike.base import TorchBackend
from devgraph.cli import doctor
from devgraph.cli.doctor import probe_backend
from tests.support.cli_programs import run_cli, run_json
from tests.support.mutants import MUTANTS

BUILT_IN = ("cuda", "npu", "rocm", "cpu")

PROBES = {
    "full",
    "breakable",
    "region_update",
    "rng",
    "refuses_host_reads",
}


def test_json_names_every_backend_with_its_reason(capsys: pytest.CaptureFixture[str]):
    data = run_json(capsys, "doctor", "--no-probe")
    found = {one["name"]: one for one in data["backends"]}
    assert set(found) >= {"cuda", "npu", "rocm", "cpu"}
    for info in dg.backends():
        assert found[info.name]["available"] is info.available
        assert bool(found[info.name]["reason"]) is not info.available
    missing = {one["what"]: one["get"] for one in data["missing"]}
    for info in dg.backends():
        if not info.available:
            assert missing[f"backend {info.name}"] == info.reason
    assert data["packages"]["torch"] == __import__("torch").__version__


def test_cpu_is_probed_and_works(capsys: pytest.CaptureFixture[str]):
    data = run_json(capsys, "doctor", "--backend", "cpu")
    (cpu,) = data["backends"]
    probes = {one["name"]: one for one in cpu["probes"]}
    assert set(probes) >= PROBES
    assert all(one["ok"] and one["works"] for one in probes.values()), probes
    assert cpu["capabilities"]["region_update"] is True
    assert cpu["torch_device"] == "cpu"


def test_table_shows_capabilities_and_what_is_missing(capsys: pytest.CaptureFixture[str]):
    result = run_cli(capsys, "doctor", "--backend", "cpu")
    assert result.code == 0
    for name in PROBES:
        assert name in result.out
    assert "FAIL" not in result.out
    assert "all declared capabilities work on: cpu" in result.out


def test_unknown_backend_is_an_error_with_the_nearest_name(capsys: pytest.CaptureFixture[str]):
    result = run_cli(capsys, "doctor", "--backend", "cp")
    assert result.code == 2
    assert "Did you mean 'cpu'?" in result.err


@pytest.mark.parametrize(
    ("mutant", "probe"),
    [
        ("replay-does-nothing", "full"),
        ("update-ignored", "region_update"),
        ("rng-frozen", "rng"),
    ],
)
def test_broken_backend_is_reported_and_exits_with_1(
    mutant: str,
    probe: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    backend = next(one for one in MUTANTS if one.name == mutant).make()
    info = BackendInfo(
        name=backend.name, available=True, reason="", device="a broken one", version="1"
    )
    monkeypatch.setattr(doctor, "backends", lambda: [info])
    monkeypatch.setattr(doctor, "get_backend", lambda name: backend)
    result = run_cli(capsys, "doctor")
    assert result.code == 1
    [row] = [line.split() for line in result.out.splitlines() if line.split()[:1] == [probe]]
    assert row[1:3] == ["yes", "FAILS"]


def test_undeclared_capability_that_works_is_said_and_is_no_failure():
    backend = type(dg.get_backend("cpu"))()
    backend.capabilities = dg.Capabilities()
    probes = {one["name"]: one for one in probe_backend(backend)}
    assert all(probe["ok"] for probe in probes.values())
    assert probes["rng"]["verdict"] == "works, not declared"
    assert probes["region_update"]["verdict"] == "no"


def test_backend_that_fails_while_it_is_looked_at_does_not_end_the_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def lost(self: object) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(type(dg.get_backend("cpu")), "details", lost)
    data = run_json(capsys, "doctor", "--no-probe")
    (cpu,) = (one for one in data["backends"] if one["name"] == "cpu")
    assert (cpu["available"], cpu["reason"]) == (False, "RuntimeError: the device is gone")
    assert run_cli(capsys, "doctor", "--no-probe", "--backend", "cpu").code == 1


def test_asking_for_a_backend_that_is_not_here_exits_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    info = BackendInfo(
        name="absent", available=False, reason="no driver: install it", device="", version=""
    )
    monkeypatch.setattr(doctor, "backends", lambda: [info])
    result = run_cli(capsys, "doctor", "--backend", "absent")
    assert result.code == 1
    assert "no driver: install it" in result.out


def test_backend_that_is_asked_for_and_absent_is_said_to_be_unusable(
    capsys: pytest.CaptureFixture[str],
):
    absent = next(info.name for info in dg.backends() if not info.available)
    result = run_cli(capsys, "doctor", "--backend", absent)
    assert result.code == 1
    assert "none of the requested backends is usable here" in result.out
    assert "all declared capabilities work" not in result.out


def test_capabilities_are_listed_where_no_device_is(capsys: pytest.CaptureFixture[str]):
    names = [word for name in BUILT_IN for word in ("--backend", name)]
    lines = run_cli(capsys, "doctor", "--capabilities", *names, columns=80).out.splitlines()
    assert max(map(len, lines)) <= 80
    tables = "\n".join(line.rstrip() for line in lines).strip()
    page = Path(__file__).parents[2] / "docs" / "backends.md"
    assert tables in page.read_text(encoding="utf-8"), "paste the tables that the command prints"
    for field in attrs.fields(Capabilities):
        assert f"\n{field.name} " in tables


def test_capabilities_as_tables_and_as_data_do_not_go_together(
    capsys: pytest.CaptureFixture[str],
):
    result = run_cli(capsys, "doctor", "--capabilities", "--json")
    assert result.code == 2
    assert "use --no-probe --json, which prints the same data under" in result.err


def test_every_backend_says_what_it_declares_and_nothing_more_than_it_has(
    capsys: pytest.CaptureFixture[str],
):
    data = run_json(capsys, "doctor", "--no-probe", "--backend", "cpu")
    [found] = data["backends"]
    assert found["declared"] == found["capabilities"]
    assert found["lacks"] == {}


@pytest.mark.parametrize("name", BUILT_IN)
def test_what_a_node_may_lack_and_what_is_recommended_are_names_that_exist(name: str):
    kind = declaration(name)
    assert kind is not None
    assert kind.needs.keys() <= attrs.fields_dict(Capabilities).keys()
    dg.DeviceGraphConfig.from_dict({"backends": {name: dict(kind.recommended_mode)}})


def test_hooks_of_capabilities_are_methods_that_exist():
    rooms = {"Backend": Backend, "DeviceGraph": DeviceGraph, "TorchBackend": TorchBackend}
    for field in attrs.fields(Capabilities):
        for hook in hooks(field.name):
            room, _, method = hook.partition(".")
            assert callable(getattr({**rooms, "Pool": Pool}[room], method))


def test_capabilities_are_read_without_the_packages_of_vendors():
    code = """
import sys
for name in ("torch_npu", "cuda", "cuda.bindings", "triton"):
    sys.modules[name] = None
from devgraph.api.registry import declaration
print([declaration(name).capabilities.max_streams for name in ("cuda", "npu", "rocm", "cpu")])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.stdout, done.stderr) == ("[None, 1800, None, None]\n", "")


@pytest.fixture
def planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """The plan of a cluster whose group ``here`` is of the CPU reference."""
    cluster = tmp_path / "cluster.json"
    groups = [{"name": "here", "backend": "cpu"}, {"name": "there", "backend": "npu"}]
    cluster.write_text(json.dumps({"groups": groups}))
    path = tmp_path / "plan.json"
    path.write_text(run_cli(capsys, "plan", "--cluster", cluster, "--json").out)
    return path


def test_node_that_is_as_planned_is_confirmed(planned: Path, capsys: pytest.CaptureFixture[str]):
    result = run_cli(capsys, "doctor", "--expect", planned, "--group", "here")
    assert (result.code, result.out) == (0, "here: as planned\n")
    assert run_json(capsys, "doctor", "--expect", planned, "--group", "here") == {"here": []}
    argv = ["doctor", "--expect", planned, "--group", "here", "--backend"]
    assert run_cli(capsys, *argv, "cpu").code == 0
    result = run_cli(capsys, *argv, "cuda")
    assert result.code == 2
    assert "the plan is for cpu, but --backend names cuda" in result.err


def test_mode_of_the_environment_is_compared_with_the_plan(
    planned: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    argv = ["doctor", "--expect", planned, "--group", "here"]
    monkeypatch.setenv("DEVGRAPH_MODE", '{"decode": "breakable"}')
    result = run_cli(capsys, *argv)
    assert result.code == 1
    assert 'decode.policy: planned "full", here "breakable"' in result.out
    assert "devgraph plan --cluster FILE --emit env prints the mode" in result.out
    monkeypatch.setenv("DEVGRAPH_MODE", "{}")
    assert run_cli(capsys, *argv).code == 0


def test_mode_of_pyproject_is_compared_with_the_plan(
    planned: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    project = planned.parent / "pyproject.toml"
    monkeypatch.chdir(project.parent)
    project.write_text("[tool.devgraph.decode]\nbuckets = [3]\n")
    argv = ["doctor", "--expect", planned, "--group", "here"]
    result = run_cli(capsys, *argv)
    assert result.code == 1 and "decode.buckets: planned null, here [3]" in result.out
    assert "DEVGRAPH_MODE is not set: devgraph plan --cluster FILE --emit env" in result.out
    monkeypatch.setenv("DEVGRAPH_MODE", '{"decode": {"buckets": null}}')
    assert run_cli(capsys, *argv).code == 0


def test_variables_that_runners_apply_are_compared_with_the_plan(
    planned: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    argv = ["doctor", "--expect", planned, "--group", "here"]
    monkeypatch.setenv("DEVGRAPH_EMULATE", "1")
    monkeypatch.setenv("DEVGRAPH_VERIFY", "start")
    result = run_cli(capsys, *argv)
    assert result.code == 1 and "decode.emulate: planned false, here true" in result.out
    assert 'prefill.verify: planned null, here "start"' in result.out
    assert "unset DEVGRAPH_EMULATE and DEVGRAPH_VERIFY: runners" in result.out
    assert "--emit env" not in result.out, "one remedy for one fault"
    monkeypatch.setenv("DEVGRAPH_EMULATE", "maybe")
    assert "DEVGRAPH_EMULATE='maybe' is invalid" in " ".join(run_cli(capsys, *argv).out.split())


def test_differences_from_a_plan_are_listed(planned: Path, capsys: pytest.CaptureFixture[str]):
    document = json.loads(planned.read_text())
    document["devgraph"] = "0.0.1"
    document["groups"][0]["effective"]["decode"]["max_bs"] = 4
    planned.write_text(json.dumps(document))
    argv = ["doctor", "--expect", planned, "--group", "here"]
    result = run_cli(capsys, *argv)
    assert result.code == 1
    assert "here: NOT as planned\n  devgraph: " in result.out
    assert f"devgraph: version 0.0.1 in the plan, {dg.__version__} here" in result.out
    assert "decode.max_bs: planned 4, here null" in result.out
    assert len(run_json(capsys, *argv, code=1)["here"]) == 2


@pytest.mark.parametrize(
    ("text", "more", "said"),
    [
        ("{}", [], "is not the plan of a cluster; write one to another file with"),
        ("[]", [], "expected an object"),
        (None, ["--group", "hre"], "has no group 'hre'. Known: here, there. Did you mean 'here'"),
        (None, ["--group", "there"], "npu"),
    ],
)
def test_plan_that_cannot_be_checked_is_refused(
    text: str | None,
    more: list[str],
    said: str,
    planned: Path,
    capsys: pytest.CaptureFixture[str],
):
    if text is not None:
        planned.write_text(text)
    result = run_cli(capsys, "doctor", "--expect", planned, *more)
    assert result.code in (1, 2)
    assert said in result.err + result.out


def test_machine_of_several_groups_with_different_modes_must_name_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    cluster, path = tmp_path / "cluster.json", tmp_path / "plan.json"

    def plan(**second: Any) -> None:
        groups = [{"name": "first", "backend": "cpu"}, {"name": "second", "backend": "cpu"}]
        groups[1].update(second)
        cluster.write_text(json.dumps({"groups": groups}))
        path.write_text(run_cli(capsys, "plan", "--cluster", cluster, "--json").out)

    plan(role="decode")
    result = run_cli(capsys, "doctor", "--expect", path)
    assert result.code == 2 and "different modes (first, second); add --group" in result.err
    assert run_cli(capsys, "doctor", "--expect", path, "--group", "second").code == 0
    plan()
    result = run_cli(capsys, "doctor", "--expect", path)
    assert (result.code, result.out) == (0, "first: as planned\nsecond: as planned\n")


def test_settings_that_cannot_be_read_are_reported_and_exit_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    project = tmp_path / "pyproject.toml"
    project.write_text('[tool.devgraph]\ndecode = "ful"\n')
    monkeypatch.setenv("DEVGRAPH_EMULATE", "maybe")
    monkeypatch.setenv("DEVGRAPH_GATE_TIMEOUT", "soon")
    argv = ["doctor", "--no-probe", "--backend", "cpu"]
    report = run_json(capsys, *argv, code=1)
    assert report["mode"] == {} and len(report["errors"]) == 3
    result = run_cli(capsys, *argv)
    assert result.code == 1
    assert "error: [tool.devgraph]" in result.out and "Did you mean 'full'?" in result.out
    assert "error: DEVGRAPH_EMULATE='maybe'" in result.out.rpartition("\n\n")[2], "at the end"
    assert "changes the mode" not in result.out
    monkeypatch.delenv("DEVGRAPH_EMULATE")
    monkeypatch.delenv("DEVGRAPH_GATE_TIMEOUT")
    project.write_text('[tool.devgraph]\ndecode = "breakable"\n')
    result = run_cli(capsys, *argv)
    assert result.code == 0
    assert 'mode of DEVGRAPH_MODE and [tool.devgraph]: {"decode": "breakable"}' in result.out


def test_group_without_a_plan_is_refused(capsys: pytest.CaptureFixture[str]):
    result = run_cli(capsys, "doctor", "--group", "here")
    assert result.code == 2
    assert "add --expect PLAN.json" in result.err
