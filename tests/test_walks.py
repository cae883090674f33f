"""The count of functions that the everyday walks enter (benchmarks/walks.py)."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.sim.hip import unavailable_reason


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


MOST = {
    "mode": 300,
    "capture_region": 1000,
    "replay": 10,
    "known_key": 36,
    "repeated_key": 14,
    "new_node_key": 170,
    "decode": 20,
}


@pytest.mark.parametrize("name", MOST)
def test_walk_is_short_and_counted_the_same_each_time(walks: ModuleType, name: str) -> None:
    if name == "new_node_key" and unavailable_reason() is not None:
        pytest.skip(f"no fake library: {unavailable_reason()}")
    (state, frames), (again, others) = walks.measure(name), walks.measure(name)
    if name == "new_node_key":  # the rest is the library's
        frames, others = walks.own(frames), walks.own(others)
    assert (state, frames) == (again, others)
    assert frames.total() <= MOST[name]
