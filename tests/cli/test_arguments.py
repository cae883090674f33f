"""Options of the commands: counts, pairs of names and values, and defaults."""

from __future__ import annotations

import argparse

import pytest

from devgraph.cli.arguments import Options, by_name, check_compilers, check_model
from devgraph.cli.tables import CommandError


@pytest.mark.parametrize("text", ["0", "-1", "x", "1.5", "9" * 5000, str(1 << 31)])
def test_number_that_is_not_a_count_is_refused(text: str, capsys: pytest.CaptureFixture[str]):
    parser = argparse.ArgumentParser()
    Options(parser).number("--size", "a size", 3)
    assert parser.parse_args([]).size == 3
    with pytest.raises(SystemExit):
        parser.parse_args(["--size", text])
    assert len(capsys.readouterr().err) < 500


def test_names_have_values_once():
    assert by_name("--fact", ["a=1", "b=x=y"], "a=1") == {"a": "1", "b": "x=y"}
    for given, text in ((["a"], "write NAME=VALUE"), (["a=1", "a=2"], "given twice")):
        with pytest.raises(CommandError, match=text):
            by_name("--fact", given, "a=1")


def test_compiler_without_a_policy_that_compiles_is_refused():
    args = argparse.Namespace(compiler="eager")
    check_compilers(args, ["full", "piecewise"])
    with pytest.raises(CommandError, match="only with the policy piecewise"):
        check_compilers(args, ["full"])


def test_model_that_is_a_path_must_exist(tmp_path):
    check_model("organization/model")
    check_model(str(tmp_path))
    for name in (str(tmp_path / "gone"), "gone.gguf"):
        with pytest.raises(CommandError, match="no such folder or file"):
            check_model(name)
