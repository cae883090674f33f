"""``devgraph troubleshoot``: the sections of the page, in a checkout and in a wheel."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import devgraph as dg
from devgraph.api import errors
from devgraph.cli import troubleshoot
from devgraph.cli.troubleshoot import read_sections
from tests.support.cli_programs import run_cli, run_json

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = None

ROOT = Path(__file__).parents[2]


def test_note_of_an_error_names_a_command_that_prints_its_section(
    capsys: pytest.CaptureFixture[str],
):
    (note,) = dg.InputError("x").__notes__
    result = run_cli(capsys, *note.partition("devgraph ")[2].split())
    assert result.code == 0
    assert result.out.startswith("InputError\n\n")
    assert "## " not in result.out


def test_sections_are_as_wide_as_the_terminal(capsys: pytest.CaptureFixture[str]):
    for section in read_sections():
        out = run_cli(capsys, "troubleshoot", section, columns=80).out
        assert max(map(len, out.splitlines())) <= 80
    out = run_cli(capsys, "troubleshoot", "Symptoms without an error", columns=80).out
    assert (
        "\n- **Graphs are not faster.** Run `devgraph bench`. On a CPU, launches take\n  little"
        in out
    )
    out = run_cli(capsys, "troubleshoot", "HostReadError").out
    assert "There are three remedies:\n\n- Compute the value" in out
    assert "`.tolist()`, `.cpu()`, `if tensor:`" in out


def test_every_error_class_has_a_section(capsys: pytest.CaptureFixture[str]):
    sections = run_json(capsys, "troubleshoot")
    names = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, dg.DeviceGraphError)
    }
    assert names <= {*sections}
    assert all(sections.values())
    assert run_cli(capsys, "troubleshoot").out.splitlines() == list(sections)


def test_start_of_several_sections_is_answered_with_all_of_them(
    capsys: pytest.CaptureFixture[str],
):
    result = run_cli(capsys, "troubleshoot", "input")
    assert result.code == 2
    assert "'input' is a prefix of several sections: InputError, InputTypeError\n" in result.err
    assert run_cli(capsys, "troubleshoot", "inputt").out.startswith("InputTypeError\n")


def test_unknown_section_is_answered_with_the_nearest_name(capsys: pytest.CaptureFixture[str]):
    result = run_cli(capsys, "troubleshoot", "InputEror")
    assert result.code == 2
    assert "Did you mean 'InputError'?" in result.err


@pytest.mark.parametrize("start", ["inputerror", "sym", "regionErr"])
def test_start_of_one_section_is_enough(start: str, capsys: pytest.CaptureFixture[str]):
    out = run_cli(capsys, "troubleshoot", start).out
    assert out.lower().startswith(start.lower())
    assert "](" not in out  # Links show where their page is.
    assert start != "regionErr" or "See results [regions.md#results] for" in out


def test_installation_without_the_page_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(troubleshoot, "_PAGES", (tmp_path / "gone.md",))
    result = run_cli(capsys, "troubleshoot", "InputError")
    assert result.code == 2
    assert "install devgraph again" in result.err


@pytest.mark.skipif(tomllib is None, reason="Python 3.10 cannot read pyproject.toml")
def test_wheel_holds_the_page_where_the_command_reads_it():
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    for source, place in build["targets"]["wheel"]["force-include"].items():
        assert (ROOT / source).is_file()
        assert ROOT / place == troubleshoot._PAGES[0]
