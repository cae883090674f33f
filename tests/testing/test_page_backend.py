"""The backend of docs/backends.md passes the conformance suite."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.suite import SUITE, run_suite

_OPTIONS = ("-p", "tests.support.page_backend", "--devgraph-backend", "other")


def _failed(cwd: Path, modules: tuple[str, ...], *options: str) -> list[str]:
    result = run_suite(*_OPTIONS, "--devgraph-skip-undeclared", *options, cwd=cwd, modules=modules)
    assert "passed" in result.outcomes.values(), result.text
    return [name for name, outcome in result.outcomes.items() if outcome == "failed"]


def test_backend_of_the_page_passes_the_tests_of_pools_and_updates(tmp_path: Path) -> None:
    modules = (f"{SUITE}.test_pool", f"{SUITE}.test_capture", f"{SUITE}.test_update")
    chosen = "test_pool or gradient_mode or own_argument or other_nodes or random_numbers"
    assert _failed(tmp_path, modules, "-k", chosen) == []


@pytest.mark.slow
def test_backend_of_the_page_passes_the_suite(tmp_path: Path) -> None:
    assert _failed(tmp_path, (SUITE,)) == []
