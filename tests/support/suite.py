"""Runs the installed conformance suite in a process of its own and reads the outcome."""

from __future__ import annotations

import gc
import importlib.metadata
import multiprocessing
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

import attrs
import pytest
import torch

__all__ = ["SUITE", "Result", "plugin_options", "printed_by", "run_suite"]

ROOT = Path(__file__).resolve().parents[2]
SUITE = "devgraph.testing.conformance"
TIMEOUT = 240


@attrs.frozen
class Result:
    """What one run of the suite said."""

    exit_code: int
    text: str
    """Standard output and error."""
    outcomes: dict[str, str]
    """Test name, with parameters, to passed, failed or skipped; an error counts as failed."""


def plugin_options() -> list[str]:
    """Return what loads the plugin where devgraph is not installed with its entry point, and leaves
    out hypothesis, whose import takes longer than torch's."""
    installed = importlib.metadata.entry_points(group="pytest11", name="devgraph")
    ours = [] if installed else ["-p", "devgraph.testing.plugin"]
    return [*ours, "-p", "no:hypothesispytest"]


def environment(**changes: str) -> dict[str, str]:
    """Return this process's environment for a child: one thread, our own modules on the path."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "COV_"))}
    return {**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **changes}


def printed_by(code: str) -> str:
    """Run ``code`` in an interpreter of its own and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300
    )
    return done.stdout


_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(
    ["pytest", "devgraph.api.policy.piecewise", "devgraph.runners", "devgraph.testing.plugin"]
)


def run_suite(
    *options: str, cwd: Path, modules: Sequence[str] = (SUITE,), **variables: str
) -> Result:
    """Run ``pytest --pyargs devgraph.testing.conformance`` as a user would, in ``cwd``.

    The process is a fork of one that has imported torch and made nothing: importing takes longer
    than most runs.

    Args:
        modules: which of the suite's modules to collect.
        variables: set in the environment meanwhile.
    """
    report, printed = cwd / "report.xml", cwd / "printed.txt"
    arguments = [
        *("--pyargs", *modules, *plugin_options()),
        *("-q", "--tb=short", "--color=no", "-p", "no:cacheprovider"),
        *("--rootdir", str(cwd), f"--junit-xml={report}", *options),
    ]
    # A process that has looked for a device cannot use it after a fork.
    fresh = multiprocessing.get_context("spawn") if torch.accelerator.is_available() else _forks
    process = fresh.Process(
        target=_run_pytest, args=(arguments, cwd, printed, environment(**variables))
    )
    process.start()
    process.join(TIMEOUT)
    if process.is_alive():
        process.kill()
    text = printed.read_text(encoding="utf-8", errors="replace")
    if process.exitcode is None or not report.exists():
        raise AssertionError(f"the suite did not run:\n{text}")
    return Result(process.exitcode, text, _outcomes(report))


def _run_pytest(arguments: list[str], cwd: Path, printed: Path, variables: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(cwd)
    with printed.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.path[:0] = [str(ROOT)]
    torch.set_num_threads(1)
    gc.freeze()  # full collections need not search the modules
    status = pytest.main(arguments)
    sys.stdout.flush()
    os._exit(status)


def _outcomes(report: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        if kinds & {"failure", "error"}:
            outcome = "failed"
        else:
            outcome = "skipped" if "skipped" in kinds else "passed"
        found[case.get("name", "")] = outcome
    return found
