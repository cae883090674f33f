"""Runs the installed conformance suite in a process of its own and reads the outcome."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import attrs

__all__ = ["Result", "plugin_options", "printed_by", "run_suite"]

ROOT = Path(__file__).resolve().parents[2]
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
    """Return what loads the plugin: nothing where devgraph is installed with its entry point."""
    installed = importlib.metadata.entry_points(group="pytest11", name="devgraph")
    return [] if installed else ["-p", "devgraph.testing.plugin"]


def environment(**changes: str) -> dict[str, str]:
    """Return this process's environment for a child: one thread, our own modules on the path."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "COV_"))}
    return {**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **changes}


def printed_by(code: str) -> str:
    """Run ``code`` in an interpreter of its own and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    return done.stdout


def run_suite(*options: str, cwd: Path, **variables: str) -> Result:
    """Run ``pytest --pyargs devgraph.testing.conformance`` as a user would, in ``cwd``."""
    report = cwd / "report.xml"
    command = [
        *(sys.executable, "-m", "pytest", "--pyargs", "devgraph.testing.conformance"),
        *plugin_options(),
        *("-q", "--tb=short", "--color=no", "-p", "no:cacheprovider"),
        *("--rootdir", str(cwd), f"--junit-xml={report}", *options),
    ]
    done = subprocess.run(
        command,
        cwd=cwd,
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    text = done.stdout + done.stderr
    if not report.exists():
        raise AssertionError(f"the suite did not run:\n{text}")
    return Result(done.returncode, text, _outcomes(report))


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
