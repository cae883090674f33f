"""The count of functions that the everyday walks enter (benchmarks/walks.py)."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def walks() -> ModuleType:
    path = Path(__file__).parent.parent / "benchmarks" / "walks.py"
    spec = importlib.util.spec_from_file_location("walks", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_frames_are_those_of_the_walk_and_its_callees(walks: ModuleType) -> None:
    def inner() -> None:
        len("")

    def walk() -> None:
        inner()
        inner()

    assert walks.frames_of(walk) == {__file__: 2}
    assert sys.getprofile() is None


def test_benchmark_counts_the_same_frames_each_time(walks: ModuleType) -> None:
    assert walks.measure("decode") == walks.measure("decode")
