"""The conformance suite is tested itself: every broken backend must be caught."""

from __future__ import annotations

import ast
import inspect
import time
from pathlib import Path

import pytest
import torch

import devgraph as dg
import devgraph.testing.conformance
from devgraph.cpu.backend import CpuBackend
from devgraph.testing.conformance.support import Kit
from tests.support.mutants import MUTANTS, SOUND, Mutant, ReplayDoesNothing, UpdateIsIgnored
from tests.support.suite import SUITE, run_suite

NAMES = sorted({mutant.caught_by for mutant in MUTANTS})
MODULES = {
    node.name: f"{SUITE}.{path.stem}"
    for path in Path(inspect.getfile(devgraph.testing.conformance)).parent.glob("test_*.py")
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    if isinstance(node, ast.FunctionDef)
}
"""The module of each test of the suite."""


def _run(mutant: Mutant, names: list[str], cwd: Path, *options: str) -> dict[str, str]:
    return run_suite(
        *("-p", "tests.support.mutants", "-k", " or ".join(names)),
        *("--devgraph-backend", mutant.backend, *options),
        cwd=cwd,
        modules=sorted({MODULES[name] for name in names}),
    ).outcomes


def test_names_of_mutants_are_those_of_tests_in_the_suite():
    assert set(NAMES) <= set(MODULES)
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


def test_backend_without_a_fault_passes_every_test_that_catches_a_mutant(tmp_path):
    outcomes = _run(SOUND, NAMES, tmp_path)
    assert {name for name, outcome in outcomes.items() if outcome == "failed"} == set()
    passed = {name.split("[")[0] for name, outcome in outcomes.items() if outcome == "passed"}
    # Undeclared streams: the only tests that this backend may skip.
    assert set(NAMES) - passed <= {"test_side_stream_that_is_not_joined_is_refused"}


def test_a_difference_names_its_likely_cause(monkeypatch):
    kit = Kit(type("Stuck", (CpuBackend,), {"graph_type": ReplayDoesNothing})())
    x = kit.tensor(4)
    captured = kit.capture(torch.exp, x)
    with pytest.raises(pytest.fail.Exception, match="does not run the recorded work"):
        kit.check(captured, torch.exp, x)
    kit = Kit(type("Ignored", (CpuBackend,), {"graph_type": UpdateIsIgnored})())
    scaled = dg.region(host_args=("n",))(lambda x, *, n: x * n)
    captured = kit.capture(lambda x, *, n: scaled(x, n=n), x, host_args={"n": 2})
    with pytest.raises(pytest.fail.Exception, match="result for {'n': 2}.*_record or _apply"):
        kit.check(captured, lambda x, *, n: x * n, x, n=3)
    late = torch.zeros(2)
    monkeypatch.setattr(time, "sleep", lambda seconds: late.fill_(1))
    assert "It is correct 0.1 s later, so synchronize()" in kit.difference(late, torch.ones(2))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_caught(mutant, tmp_path):
    outcomes = _run(mutant, [mutant.caught_by], tmp_path, "-x")
    failed = {name.split("[")[0] for name, outcome in outcomes.items() if outcome == "failed"}
    assert failed == {mutant.caught_by}, f"{mutant.fault}, and the suite says {outcomes}"
