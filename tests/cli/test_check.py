"""``devgraph check``: findings as a user sees them, with lines and an exit code."""

from __future__ import annotations

import colorsys
import contextlib
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import devgraph as dg
from devgraph.cli.arguments import KINDS
from devgraph.runners import capturing
from tests.support.cli_programs import STEPS, run_cli, run_json, write_steps


def _line(text: str) -> int:
    """Return the number of the only line of ``STEPS`` that holds ``text``."""
    (found,) = [i for i, line in enumerate(STEPS.splitlines(), 1) if text in line]
    return found


@pytest.mark.parametrize(
    ("function", "kind", "source"),
    [
        ("reads", "host_sync", "scale = x.sum().item()"),
        ("masks", "data_dependent_shape", "return x[x > 0]"),
        ("draws", "rng", "return x + torch.rand_like(x)"),
        ("keeps", "escaping_allocation", "KEPT.append(x * 2)"),
    ],
)
def test_finding_names_kind_and_line(
    function: str, kind: str, source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = write_steps(tmp_path)
    result = run_cli(capsys, "check", f"{path}:{function}", "--inputs", "inputs")
    assert result.code == 1
    first, line, *_, last = result.out.splitlines()
    assert first.startswith(f"{path}:{_line(source)}: {kind}: ")
    assert line.strip() == source
    assert last.endswith("1 operation that a device capture would refuse or freeze")


PROGRAMS = sorted((Path(__file__).parent / "programs").glob("*.py"))


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.stem)
def test_program_has_the_findings_that_its_comments_name(
    program: Path, capsys: pytest.CaptureFixture[str]
):
    """Each of ``PROGRAMS`` is one kind of mistake, or is right."""
    expected = {
        (number, kind)
        for number, line in enumerate(program.read_text().splitlines(), 1)
        for kind in line.partition("# finds: ")[2].split(", ")
        if kind
    }
    code = 1 if expected else 0
    argv = (f"{program}:step", "--inputs", "inputs")
    for _ in range(2):  # the first check leaves the state of the step as it was
        findings = run_json(capsys, "check", *argv, code=code)["findings"]
        assert {(finding["line"], finding["kind"]) for finding in findings} == expected
    assert all(finding["file"] == str(program) for finding in findings)


@pytest.mark.parametrize("kind", KINDS)
def test_kind_names_a_section_of_the_documents_and_is_in_a_program(kind: str):
    page, _, anchor = KINDS[kind].partition("#")
    if not anchor:
        page, anchor = "troubleshooting.md", page.lower()
    headings = (Path(__file__).parents[2] / "docs" / page).read_text().split("\n## ")[1:]
    anchors = [h.partition("\n")[0].strip().lower().replace(" ", "-") for h in headings]
    assert anchor in anchors
    assert any(kind in line for p in PROGRAMS for line in p.read_text().split("# finds: ")[1:])


@pytest.mark.parametrize("example", ["quickstart", "lora", "speculative", "custom_engine"])
def test_steps_of_examples_have_no_findings(example: str, monkeypatch: pytest.MonkeyPatch):
    reference: Any = dg.get_backend("cpu")
    capture, findings, steps = dg.capture, [], []

    def checked(fn: Any, *args: Any, **options: Any) -> Any:
        named = {name: options.get(name) for name in ("kwargs", "host_args")}
        if options["policy"] == "full":  # regions of the others read the batch outside of graphs
            findings.extend(reference.check(fn, args, **named))
            steps.append(fn)
        return capture(fn, *args, **options)

    for module in (dg, capturing):
        monkeypatch.setattr(module, "capture", checked)
    monkeypatch.setattr(sys, "argv", [example])
    path = Path(__file__).parents[2] / "examples" / f"{example}.py"
    with torch.random.fork_rng(), torch.no_grad(), contextlib.suppress(SystemExit):
        runpy.run_path(str(path), run_name="__main__")
    assert steps and findings == []


def test_everything_is_found_in_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = write_steps(tmp_path)
    data = run_json(capsys, "check", f"{path}:several", "--inputs", "inputs", code=1)
    assert [one["line"] for one in data["findings"]] == [
        _line("if x.sum() > 0:"),
        _line("return x * x.max().item()"),
    ]
    assert data["ok"] is False
    assert all(one["file"] == str(path) for one in data["findings"])


@pytest.mark.parametrize(
    ("function", "inputs"),
    [("clean", "inputs"), ("clean", "keywords"), ("clean", "both"), ("Holder.step", "inputs")],
)
def test_clean_function_exits_with_0(
    function: str, inputs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = write_steps(tmp_path)
    result = run_cli(capsys, "check", f"{path}:{function}", "--inputs", f"{path}:{inputs}")
    assert result.code == 0
    assert "a device capture would refuse or freeze nothing" in result.out


def test_no_graph_body_is_not_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    data = run_json(
        capsys, "check", f"{write_steps(tmp_path)}:breaks", "--inputs", "inputs", code=0
    )
    assert data["findings"] == []


def test_host_argument_in_its_region_is_fine_and_frozen_outside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = write_steps(tmp_path)
    argv = ["--inputs", "inputs", "--host-arg", "factor=4"]
    assert run_cli(capsys, "check", f"{path}:hosted", *argv).code == 0
    data = run_json(capsys, "check", f"{path}:frozen", *argv, code=1)
    (finding,) = data["findings"]
    assert finding["kind"] == "host_value"
    assert finding["line"] == _line("return x + 1 if factor > 3 else x")


def test_ignored_kind_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    target = f"{write_steps(tmp_path)}:draws"
    for kinds in ("rng", "host_sync,rng"):
        assert run_cli(capsys, "check", target, "--inputs", "inputs", "--ignore", kinds).code == 0
    wrong = run_cli(capsys, "check", target, "--inputs", "inputs", "--ignore", "rgn")
    assert wrong.code == 2
    assert "Did you mean 'rng'?" in wrong.err


def test_module_in_the_current_folder_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    write_steps(tmp_path, "steps_by_name.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(__import__("sys").path))
    result = run_cli(capsys, "check", "steps_by_name:clean", "--inputs", "inputs")
    assert result.code == 0


@pytest.mark.parametrize(
    ("target", "argv", "said"),
    [
        ("{path}:cleen", [], "has no 'cleen'"),
        ("{path}:cleen", [], "Did you mean 'clean'?"),
        ("{path}", [], "write MODULE:FUNCTION"),
        ("{path}:NUMBER", [], "is a int, not a function"),
        ("nowhere_to_be_found:x", [], "there is no module 'nowhere_to_be_found'"),
        ("{path}.py:x", [], "there is no file"),
        ("{path}:clean", ["--inputs", "wrong_inputs"], "returned a list"),
        ("{path}:clean", ["--inputs", "NUMBER"], "--inputs names a function that returns the arg"),
        ("{path}:hosted", ["--host-arg", "factor"], "write NAME=VALUE"),
        ("{path}:hosted", ["--host-arg", "factor=?"], "not a Python literal"),
        ("{path}:hosted", ["--host-arg", "factor={[]: 1}"], "not a Python literal"),
        ("{path}:hosted", ["--host-arg", "factor=" + "-" * 9999 + "1"], "not a Python literal"),
        ("{path}:Holder.stepp", [], "has no 'Holder.stepp'"),
        ("{path}:hosted", ["--host-arg", "a=1", "--host-arg", "a=2"], "'a' is given twice"),
        ("{path}:hosted", ["--inputs", "inputs"], "and --host-arg NAME=VALUE passes"),
        ("{path}:raises", ["--inputs", "inputs"], "raises raised KeyError: 'nothing' at {path}:"),
    ],
)
def test_unusable_target_is_one_clear_error(
    target: str,
    argv: list[str],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    path = write_steps(tmp_path)
    result = run_cli(capsys, "check", target.format(path=path), *argv)
    assert result.code == 2
    assert len(result.err.splitlines()) == 1
    assert said.format(path=path) in result.err


@pytest.mark.parametrize("command", ["check", "explain"])
def test_missing_inputs_are_asked_for(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    result = run_cli(capsys, command, f"{write_steps(tmp_path)}:clean")
    assert result.code == 2
    assert "missing 1 required positional argument: 'x' (--inputs MODULE:FUNCTION" in result.err


def test_error_of_the_step_names_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = write_steps(tmp_path)
    result = run_cli(capsys, "check", f"{path}:raises", "--inputs", "inputs")
    line = next(i for i, text in enumerate(path.read_text().splitlines(), 1) if "nothing" in text)
    assert f"raised KeyError: 'nothing' at {path}:{line} (--debug" in result.err


def test_file_has_its_neighbors_and_leaves_modules_of_its_name_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("sys.path", [*sys.path])
    (tmp_path / "beside_colorsys.py").write_text("def inputs():\n    return (colors(),)\n")
    (tmp_path / "colorsys.py").write_text(
        "from beside_colorsys import inputs\nimport beside_colorsys\nKEPT = object()\n"
        "def colors():\n    return KEPT\ndef step(kept):\n    assert kept is KEPT\n"
        "beside_colorsys.colors = colors\n"
    )
    path = f"{tmp_path / 'colorsys.py'}"
    result = run_cli(capsys, "check", f"{path}:step", "--inputs", f"{path}:inputs")
    assert result.code == 0, result.err
    assert sys.modules["colorsys"] is colorsys


def test_script_that_ends_the_program_is_no_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "script.py"
    path.write_text("import sys\ndef step():\n    return None\nsys.exit(0)\n")
    result = run_cli(capsys, "check", f"{path}:step")
    assert result.code == 2
    assert f"{path} raised SystemExit: 0 at {path}:4" in result.err


@pytest.mark.parametrize("command", ["check", "explain"])
def test_what_the_users_code_prints_is_no_part_of_the_result(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "chatty.py"
    path.write_text("print('loaded')\ndef inputs():\n    print('made')\n    return ()\n")
    with path.open("a") as file:
        file.write("import torch\ndef step():\n    print('ran')\n    return torch.ones(2)\n")
    result = run_cli(capsys, command, f"{path}:step", "--inputs", "inputs", "--json")
    assert isinstance(json.loads(result.out), dict)
    assert set(result.err.split()) == {"loaded", "made", "ran"}


def test_unknown_function_lists_functions_and_no_modules(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    result = run_cli(capsys, "check", f"{write_steps(tmp_path)}:claen")
    assert "Did you mean 'clean'?" in result.err
    assert "torch" not in result.err.partition("Known:")[2]


def test_advice_is_printed_once_for_each_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = write_steps(tmp_path)
    lines = run_cli(capsys, "check", f"{path}:several", "--inputs", "inputs").out.splitlines()
    assert len([line for line in lines if line.startswith(f"{path}:")]) == 2 + 1
    assert len([line for line in lines if line.startswith("- host_sync: ")]) == 1


def test_path_in_the_current_folder_is_relative(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    path = write_steps(tmp_path)
    monkeypatch.chdir(tmp_path)
    out = run_cli(capsys, "check", f"{path.name}:draws", "--inputs", "inputs").out
    assert out.startswith(f"{path.name}:{_line('return x + torch.rand_like(x)')}: rng: ")


def test_comment_ignores_kinds_on_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "ignores_kinds.py"
    path.write_text(
        "import torch\n\n\ndef inputs():\n    return (torch.ones(3),)\n\n\ndef step(x):\n"
        "    x = x + torch.rand(3)  # devgraph: ignore[rng, host_sync]\n"
        "    return x * x.sum().item()  # devgraph: ignore[rng]\n"
    )
    data = run_json(capsys, "check", f"{path}:step", "--inputs", "inputs", code=1)
    assert [one["kind"] for one in data["findings"]] == ["host_sync"]


def test_several_targets_are_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = write_steps(tmp_path)
    targets = [f"{path}:{name}" for name in ("clean", "draws", "reads")]
    data = run_json(capsys, "check", *targets, "--inputs", "inputs", code=1)
    assert data["targets"] == targets
    assert [one["target"] for one in data["findings"]] == targets[1:]
    assert run_cli(capsys, "check", *targets[:1] * 2, "--inputs", "inputs").code == 0


def test_findings_are_annotations_of_github(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    target = f"{write_steps(tmp_path)}:draws"
    argv = ("check", target, "--inputs", "inputs", "--output-format", "github")
    result = run_cli(capsys, *argv)
    assert result.code == 1
    (line,) = result.out.splitlines()
    assert line.startswith("::error file=")
    place = _line("return x + torch.rand_like(x)")
    assert f",line={place},title=devgraph rng::aten::rand_like" in line
    both = run_cli(capsys, *argv, "--json")
    assert both.code == 2
    assert "choose one" in both.err


def test_findings_are_written_as_sarif(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    path = write_steps(tmp_path)
    monkeypatch.chdir(tmp_path)
    argv = (f"{path}:reads", "--inputs", "inputs", "--output-format", "sarif")
    (run,) = json.loads(run_cli(capsys, "check", *argv).out)["runs"]
    (result,) = run["results"]
    assert result["ruleId"] == "host_sync"
    assert result["ruleId"] in [rule["id"] for rule in run["tool"]["driver"]["rules"]]
    assert result["locations"] == [
        {
            "physicalLocation": {
                "artifactLocation": {"uri": path.name},
                "region": {"startLine": _line("scale = x.sum().item()")},
            }
        }
    ]
