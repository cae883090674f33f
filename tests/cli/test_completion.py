"""``devgraph completion``: the scripts complete commands, options and values."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from tests.support.cli_programs import run_cli


def _complete(script: str, *words: str) -> list[str]:
    typed = " ".join(f"'{word}'" for word in words)
    code = f"{script}\nCOMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}; _devgraph\n"
    code += 'printf "%s\\n" "${COMPREPLY[@]}"'
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("devgraph", "do"), ["doctor"]),
        (("devgraph", "plan", "--cl"), ["--cluster"]),
        (("devgraph", "explain", "a:b", "--policy", "p"), ["piecewise"]),
        (("devgraph", "bench", "--policy", "f"), ["full"]),
        (("devgraph", "completion", "z"), ["zsh"]),
        (("devgraph", "--js"), ["--json"]),
        (("devgraph", "check", "--col"), ["--color"]),
        (("devgraph", "plan", "--color", "n"), ["never"]),
        (("devgraph", "--json", "--color", "never", "pl"), ["plan"]),
        (("devgraph", "--json", "plan", "--em"), ["--emit"]),
        (("devgraph", "plan", "--decode-device-graph-mode", "d"), ["disabled"]),
        (("devgraph", "doctor", "--backend", "c"), ["cuda", "cpu"]),
        (("devgraph", "-V"), ["-V"]),
        (("devgraph", "generate", "--model", ""), []),  # a file
        (("devgraph", "plan", "--cuda-graph-b"), []),  # older flags are accepted, not offered
    ],
)
def test_bash_completes_commands_options_and_values(
    words: tuple[str, ...], expected: list[str], capsys: pytest.CaptureFixture[str]
):
    script = run_cli(capsys, "completion", "bash").out
    assert _complete(script, *words) == expected


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_script_of_a_shell_is_one_that_it_reads(shell: str, capsys: pytest.CaptureFixture[str]):
    script = run_cli(capsys, "completion", shell).out
    assert "explain" in script and "piecewise" in script
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True)


def test_shell_that_is_unknown_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]):
    assert "Did you mean 'fish'?" in run_cli(capsys, "completion", "fisch").err
