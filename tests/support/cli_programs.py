"""Running the command line inside the test's process, and a file of functions to give to it."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
import pytest

from devgraph.cli.app import main
from devgraph.runners import capturing

__all__ = ["STEPS", "Result", "run_cli", "run_json", "write_steps"]


@attrs.frozen
class Result:
    """Exit code and what a user sees."""

    code: int
    out: str
    err: str


def run_cli(capsys: pytest.CaptureFixture[str], *argv: str | Path, columns: int = 400) -> Result:
    """Run ``devgraph *argv`` for so wide a terminal and return what came out, without the lines
    of progress that a slow host sees."""
    capsys.readouterr()
    quiet = mock.patch.object(capturing, "PROGRESS_SECONDS", math.inf)
    try:
        with quiet, mock.patch.dict(os.environ, {"COLUMNS": str(columns)}):
            code = main([str(one) for one in argv])
    except SystemExit as ended:  # of the parser
        code = int(ended.code or 0)
    captured = capsys.readouterr()
    return Result(code, captured.out, captured.err)


def run_json(capsys: pytest.CaptureFixture[str], *argv: str | Path, code: int = 0) -> Any:
    """Run ``devgraph *argv --json``; standard output must be one JSON document."""
    result = run_cli(capsys, *argv, "--json")
    assert result.code == code, result.err or result.out
    return json.loads(result.out)


STEPS = """\
import torch
import devgraph as dg

KEPT = []

def inputs():
    return (torch.arange(12.0).reshape(3, 4),)

def keywords():
    return {"x": torch.ones(3, 4)}

def both():
    return (torch.ones(3, 4),), {"twice": True}

def wrong_inputs():
    return [1]

def clean(x, twice=False):
    return torch.relu(x @ x.T) * (2 if twice else 1)

def reads(x):
    scale = x.sum().item()
    return x * scale

def masks(x):
    return x[x > 0]

def draws(x):
    return x + torch.rand_like(x)

def keeps(x):
    KEPT.append(x * 2)
    return x + 1

def several(x):
    if x.sum() > 0:
        x = x + 1
    return x * x.max().item()

def helper(x):
    return x.sum().item()

@dg.no_graph
def synced(x):
    return torch.full_like(x, helper(x))

def breaks(x):
    return synced(x * 2) + 1

@dg.region(host_args=("factor",), mutates=("out",))
def scaled(x, out, *, factor):
    torch.mul(x, factor, out=out)

def hosted(x, *, factor):
    out = torch.empty_like(x)
    scaled(x, out, factor=factor)
    return out + 1

def frozen(x, *, factor):
    return x + 1 if factor > 3 else x

def raises(x):
    return {}["nothing"]

class Holder:
    step = staticmethod(clean)

NUMBER = 3
"""


def write_steps(folder: Path, name: str = "steps.py") -> Path:
    """Write ``STEPS`` as a file and return its path."""
    path = folder / name
    path.write_text(STEPS, encoding="utf-8")
    return path
