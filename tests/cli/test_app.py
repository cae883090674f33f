"""The program itself: help, errors, warnings, exit codes."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import devgraph as dg
from devgraph.cli import tables
from devgraph.cli.app import main
from tests.support.cli_programs import run_cli, run_json, write_steps
from tests.support.suite import printed_by

FULL_DEVICE = pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")

COMMANDS = (
    "doctor",
    "plan",
    "generate",
    "demo",
    "bench",
    "check",
    "explain",
    "completion",
    "troubleshoot",
)


def test_help_lists_every_command_and_imports_no_torch():
    code = (
        "import sys\n"
        "from devgraph.__main__ import main\n"
        "try:\n"
        "    main(['--help'])\n"
        "except SystemExit as end:\n"
        "    print('code', end.code, 'torch' in sys.modules)\n"
    )
    out = printed_by(code)
    assert out.splitlines()[-1] == "code 0 False"
    for name in COMMANDS:
        assert f"\n    {name} " in out


def test_help_of_a_command_and_a_typo_import_no_torch():
    code = (
        "import sys\n"
        "from devgraph.__main__ import main\n"
        f"for argv in [*([name, '--help'] for name in {COMMANDS}), ['plan', '--nonsense']]:\n"
        "    try:\n"
        "        main(argv)\n"
        "    except SystemExit:\n"
        "        pass\n"
        "print('torch' in sys.modules)\n"
    )
    assert printed_by(code).splitlines()[-1] == "False"


@pytest.mark.parametrize("name", COMMANDS)
def test_command_help_shows_its_options(name: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as end:
        main([name, "--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert "--json" in text
    assert "--debug" in text


def test_common_options_may_precede_the_command(capsys: pytest.CaptureFixture[str]):
    assert main(["--json", "troubleshoot", "InputError"]) == 0
    assert list(json.loads(capsys.readouterr().out)) == ["InputError"]


@pytest.mark.parametrize("option", ["--version", "-V"])
def test_version_is_that_of_the_package(option: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main([option])
    assert capsys.readouterr().out == f"devgraph {dg.__version__}\n"


@pytest.mark.parametrize("argv", [["nonsense"], ["plan", "--nonsense"]])
def test_unusable_arguments_exit_with_2(argv: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as end:
        main(argv)
    assert end.value.code == 2
    line = capsys.readouterr().err
    assert line.startswith("devgraph: error: ")
    command = "devgraph plan" if argv[:1] == ["plan"] else "devgraph"
    assert line.endswith(f"({command} --help lists the options)\n")
    assert line.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "hint"),
    [
        (["dcotor"], "argument command: 'dcotor' does not exist. Known: "),
        (["dcotor"], "Did you mean 'doctor'?"),
        (["explain", "a:b", "--policy", "ful"], "Did you mean 'full'?"),
        (["plan", "--backen", "cpu"], "Did you mean '--backend'?"),
        (["demo", "--model", "x"], "arguments: --model x (devgraph demo --help"),  # not --help?
        (["plan", "--beckend", "cpu"], "Did you mean '--backend'? (devgraph plan --help"),
        (["plan", "--model", "/nope"], "--model /nope: there is no such folder or file"),
    ],
)
def test_typo_is_answered_with_the_nearest_name(
    argv: list[str], hint: str, capsys: pytest.CaptureFixture[str]
):
    result = run_cli(capsys, *argv)
    assert result.code == 2
    assert hint in result.err


@pytest.mark.parametrize(
    ("color", "variables", "colored"),
    [
        ("always", {"NO_COLOR": "1"}, True),
        ("never", {"FORCE_COLOR": "1"}, False),
        ("auto", {}, False),
        ("auto", {"FORCE_COLOR": "1"}, True),
    ],
)
def test_colour_is_the_choice_of_the_user(
    color: str,
    variables: dict[str, str],
    colored: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    for given in (["--color", color], [f"--color={color}"]):
        for wrong in (["--backend", "cuba"], ["--emit", "nothing"]):  # the parser's error, too
            result = run_cli(capsys, "plan", *given, *wrong)
            assert result.code == 2
            assert ("\x1b[31m" in result.err) is colored
    assert dict(os.environ) == before


def test_environment_is_left_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("TORCH_DEVICE_BACKEND_AUTOLOAD", raising=False)
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    before = set(os.environ)
    run_cli(capsys, "check", f"{write_steps(tmp_path)}:clean")
    run_cli(capsys, "check", f"{write_steps(tmp_path)}:missing")
    added = set(os.environ) - before
    assert not {name for name in added if not name.startswith("TORCHINDUCTOR_")}, "torch's own"


def test_error_is_one_line_on_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    result = run_cli(capsys, "explain", f"{write_steps(tmp_path)}:clean", "--backend", "cuba")
    assert result.code == 2
    assert result.out == ""
    assert len(result.err.splitlines()) == 1
    assert result.err.startswith("devgraph: error: no backend 'cuba'")
    assert "Did you mean 'cuda'?" in result.err


@pytest.mark.parametrize(
    "argv",
    [
        ["--fact", "weight_offload=true", "--device-graph-mode", '{"decode": "full"}'],
        ["one\nargument"],
    ],
)
def test_error_of_several_lines_is_one(argv: list[str], capsys: pytest.CaptureFixture[str]):
    result = run_cli(capsys, "plan", "--backend", "cpu", *argv)
    assert result.code == 2
    assert result.err.startswith("devgraph: error: ")
    assert len(result.err.splitlines()) == 1


def test_help_tells_the_defaults_of_the_demo(capsys: pytest.CaptureFixture[str]):
    text = run_cli(capsys, "demo", "--help").out
    assert re.search(r"--max-new-tokens N +tokens to generate per prompt \(default: 32\)", text)
    assert re.search(r"--backend NAME +name of the backend \(default: cpu\)", text)


@pytest.mark.parametrize("place", ["before", "after"])
def test_debug_prints_the_traceback_and_keeps_the_exit_code(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    argv = ["explain", f"{write_steps(tmp_path)}:clean", "--backend", "cuba"]
    argv = ["--debug", *argv] if place == "before" else [*argv, "--debug"]
    result = run_cli(capsys, *argv)
    assert result.code == 2
    assert result.err.startswith("Traceback (most recent call last):")
    assert "devgraph.api.errors.UnknownBackendError: no backend 'cuba'" in result.err
    assert result.err.splitlines()[-1].startswith("devgraph: error: no backend 'cuba'")


@pytest.mark.parametrize(
    ("argv", "kind"),
    [
        (["plan", "--backend", "cuba"], "UnknownBackendError"),
        (["plan", "--nonsense"], "CommandError"),
        (["nonsense"], "CommandError"),
    ],
)
def test_with_json_an_error_is_json_too(
    argv: list[str], kind: str, capsys: pytest.CaptureFixture[str]
):
    plain = run_cli(capsys, *argv)
    assert plain.out == ""
    error = run_json(capsys, *argv, code=2)["error"]
    assert error["type"] == kind
    assert plain.err == f"devgraph: error: {error['message']}\n"


def test_help_is_a_command_too(capsys: pytest.CaptureFixture[str]):
    for command in ([], ["plan"]):
        said = run_cli(capsys, "help", *command)
        assert said == run_cli(capsys, *command, "--help") and said.code == 0
    missing = run_cli(capsys)
    assert missing.code == 2 and missing.err == run_cli(capsys, "--help").out


def test_older_flag_is_warned_about_in_one_line(capsys: pytest.CaptureFixture[str]):
    result = run_cli(capsys, "plan", "--backend", "cpu", "--disable-cuda-graph")
    assert result.code == 0
    lines = [line for line in result.err.splitlines() if "--disable-cuda-graph" in line]
    assert len(lines) == 1
    assert lines[0].startswith("devgraph: warning: --disable-cuda-graph is an older spelling")


def test_interrupt_exits_with_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    import devgraph.cli.plan

    def interrupted(args: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(devgraph.cli.plan, "run", interrupted)
    result = run_cli(capsys, "plan")
    assert result.code == 130
    assert result.err == "devgraph: interrupted\n"


def test_interrupt_while_torch_is_imported_exits_with_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    import devgraph.cli.app

    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(devgraph.cli.app.importlib, "import_module", interrupted)
    result = run_cli(capsys, "plan")
    assert result.code == 130
    assert result.err == "devgraph: interrupted\n"


SLOW = pytest.mark.slow  # imports torch, as a case beside it does too


@pytest.mark.parametrize(
    "given",
    [
        "plan",
        pytest.param("plan --json", marks=SLOW),
        pytest.param("explain {steps}:clean --inputs {steps}:inputs", marks=SLOW),
    ],
)
def test_closed_pipe_is_an_ordinary_end(given: str, tmp_path: Path):
    given = given.format(steps=write_steps(tmp_path))
    command = f"{sys.executable} -m devgraph {given} --backend cpu; echo $? >&2"
    done = subprocess.run(
        f"{{ {command}; }} | true", shell=True, capture_output=True, text=True, timeout=300
    )
    assert done.stderr == "0\n"


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ("plan >&-", 0),
        pytest.param("plan --json >&-", 0, marks=SLOW),
        ("doctor --backend x 2>&-", 2),
        pytest.param("doctor --backend x 2>/dev/full", 2, marks=[FULL_DEVICE, SLOW]),
        pytest.param("plan --nonsense 2>/dev/full", 2, marks=FULL_DEVICE),
    ],
)
def test_closed_output_changes_no_exit_code(given: str, code: int):
    done = subprocess.run(f"{sys.executable} -m devgraph {given}", shell=True, timeout=300)
    assert done.returncode == code


def test_error_of_another_kind_is_one_line_with_the_way_to_its_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    import devgraph.cli.plan

    def full(args: object) -> int:
        raise RuntimeError("no memory is left\nstack of the driver")

    monkeypatch.setattr(devgraph.cli.plan, "run", full)
    result = run_cli(capsys, "plan")
    assert result.code == 2
    said = "devgraph: error: RuntimeError: no memory is left (--debug prints the traceback)\n"
    assert result.err == said
    result = run_cli(capsys, "plan", "--debug")
    assert result.code == 2 and "in full" in result.err
    assert "RuntimeError: no memory is left\nstack of the driver\n" in result.err


@pytest.mark.parametrize("columns", ["0", "wide"])
def test_width_that_is_none_is_that_of_a_pipe(
    columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("COLUMNS", columns)
    assert main(["plan", "--backend", "cpu"]) == 0
    widths = [len(line.rstrip()) for line in capsys.readouterr().out.splitlines()]
    assert 60 < max(widths) <= 80


def test_file_that_the_system_refuses_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("DEVGRAPH_DEMO_MODEL", raising=False)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    result = run_cli(capsys, "demo")
    assert result.code == 2
    assert len(result.err.splitlines()) == 1
    assert "Not a directory" in result.err


def test_output_that_lacks_a_character_shows_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "stép.py"
    path.write_text("def clean():\n    return None\n", encoding="utf-8")
    monkeypatch.setenv("COLUMNS", "400")
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    assert main(["check", f"{path}:clean"]) == 0
    out.seek(0)
    assert "st\\xe9p.py:clean: a device capture" in out.read()


def test_what_users_name_is_printed_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "steps.py"
    monkeypatch.setenv("COLUMNS", "400")
    path.write_text("def ok():\n    return None\n", encoding="utf-8")
    assert main(["check", f"{path}:ok"]) == 0
    tables.say("a:ok:b [/bold]")
    out = capsys.readouterr().out
    assert f"{path.name}:ok: a device capture" in out
    assert "a:ok:b [/bold]" in out
    monkeypatch.setenv("FORCE_COLOR", "1")
    with tables.working("reading [/bold] :ok:"):  # was a MarkupError
        pass
    assert "reading [/bold] :ok:" in capsys.readouterr().err


@pytest.mark.parametrize(("flag", "seen"), [(None, False), ("-v", True)])
def test_verbose_shows_log_records(
    flag: str | None, seen: bool, capsys: pytest.CaptureFixture[str]
):
    argv = ["plan", "--prefill-device-graph-mode", "full", "--backend", "cpu"]
    result = run_cli(capsys, *argv, *([flag] if flag else []))
    assert result.code == 0
    assert ("devgraph: prefill [full-prefill]" in result.err) is seen
