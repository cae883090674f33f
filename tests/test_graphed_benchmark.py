"""benchmarks/graphed.py: each contender takes the small shapes, and outputs equal eager."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from types import ModuleType

PATH = Path(__file__).parents[1] / "benchmarks" / "graphed.py"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("graphed_benchmark", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


graphed = load()


def figures(contender: str, shapes: list[str]) -> dict[str, dict[str, object]]:
    args = argparse.Namespace(
        only=shapes, contenders=[contender], backend="cpu", small=True, quick=True
    )
    return {name: row for found in graphed.alone(args) for name, row in found.items()}


def test_graphed_callables_have_the_bits_of_eager() -> None:
    shapes = ["DiT-B/2 256px, batch 2", "Z-Image 256px", "GPT 12x768 training, T=128"]
    eager, ours, theirs = (figures(name, shapes) for name in ("eager", "graphed", "dg"))
    assert [ours[name]["bits"] for name in shapes] == [eager[name]["bits"] for name in shapes]
    assert theirs[shapes[2]]["bits"] == eager[shapes[2]]["bits"]
    assert {*theirs} == {shapes[2]}
    assert ours["host"] is not None


def test_table_has_a_line_for_each_shape_and_names_errors() -> None:
    row = {
        "eager": {"us": 10.0, "bits": "a"},
        "graphed": {"us": 5.0, "bits": "a", "dropped": False},
    }
    shapes = {"mlp": row, "other": {"eager": {"us": 1.0}, "graphed": {"error": "OSError: no"}}}
    lines = [*graphed.table({"shapes": shapes, "host": 7.0}, ["eager", "graphed"])]
    assert lines[2] == "| mlp | 10.0 us | 5.0 us 2.00x = | no | +0.00 s |"
    assert lines[3].startswith("| other | 1.0 us | - |")
    assert lines[4].startswith("known key of four tensors: 7.0 us")
    assert lines[5] == "other, graphed: OSError: no"
