"""Output of the commands: widths of tables, and figures as text."""

from __future__ import annotations

from pathlib import Path

import pytest

from devgraph.cli import tables
from tests.support.cli_programs import run_cli, write_steps


def test_table_fits_the_terminal_without_broken_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("COLUMNS", "40")
    rows = [("first", "several words that need two lines"), ("second", None)]
    tables.print_table("title", ("name", "text"), rows)
    out = capsys.readouterr().out
    assert all(len(line) <= 40 for line in out.splitlines())
    assert {"several", "words", "that", "need", "two", "lines", "-"} <= {*out.split()}


def test_table_without_rows_is_not_printed(capsys: pytest.CaptureFixture[str]):
    tables.print_table("title", ("name", "text"), [])
    assert capsys.readouterr().out == ""


def test_table_that_is_too_wide_becomes_a_list(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("COLUMNS", "26")
    tables.print_table("title", ("name", "is_ready"), [("a" * 18, True)])
    assert capsys.readouterr().out.splitlines() == [
        "title", "", f"  name: {'a' * 18}", "  is_ready: yes", "",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("argv", "headings"),
    [
        (["doctor", "--backend", "cpu", "--no-probe"], "available device"),
        (["doctor", "--backend", "cpu"], "declared probed"),
        (
            ["plan", "--backend", "cuda", "--fact", "lora=true", "--encoder-budgets", "64"],
            "encoder",
        ),
        (
            "bench --backend cpu --layers 1 --hidden 8 --heads 1 --vocabulary 8 --window 8 "
            "--steps 1 --repeats 1 --policy full --policy breakable".split(),
            "wall vs",
        ),
        (["explain", "{steps}:breaks", "--inputs", "inputs", "--policy", "breakable"], "segment"),
        (["check", "{steps}:synced", "--inputs", "inputs"], ""),
        (["doctor", "--capabilities"], "capability cuda npu rocm"),
    ],
)
def test_output_of_a_command_fits_into_80_columns(
    argv: list[str], headings: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):  # fmt: skip
    monkeypatch.chdir(tmp_path)
    steps = write_steps(tmp_path).name
    out = run_cli(capsys, *(word.format(steps=steps) for word in argv), columns=80).out
    assert headings in " ".join(out.split())  # columns, not a list
    assert max(map(len, out.splitlines())) <= 80


def test_output_without_colours_has_no_bold_either_and_errors_wrap_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("FORCE_COLOR", "1")  # which rich takes as a terminal too
    monkeypatch.setenv("NO_COLOR", "1")
    result = run_cli(capsys, "plan", "--fact", "lorra=true", columns=60)
    assert "Did you mean 'lora'?" in " ".join(result.err.split())
    assert len(result.err.splitlines()) > 3
    assert max(map(len, result.err.splitlines())) <= 60
    assert "\x1b" not in result.err + run_cli(capsys, "plan").out


def test_sentences_wrap_at_words_and_keep_their_indent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("COLUMNS", "16")
    tables.say("  one two three four five")
    assert capsys.readouterr().out.splitlines() == ["  one two three", "  four five"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (tables.time_text(3.2e-3), "3.2 ms"),
        (tables.time_text(2.0), "2 s"),
        (tables.time_text(4e-7), "0.40 us"),
        (tables.time_text(None), None),
        (tables.number(1234.5), "1234"),
        (tables.number(0.12345), "0.123"),
        (tables.ratio(2.349), "2.35x"),
        (tables.percent(0.967), "97 %"),
        (tables.on_device("cpu", "cpu"), "cpu"),
        (tables.on_device("cuda", "NVIDIA H200"), "cuda (NVIDIA H200)"),
        (tables.ranges([1, 2, 4, 8, 12, 16, 32]), "1 2 4..16 by 4 32"),
        (tables.ranges([]), ""),
        (str(tables._text(3100)), "3,100"),
        (str(tables._text(True)), "yes"),
    ],
)
def test_figures_are_short(text: str | None, expected: str | None):
    assert text == expected
