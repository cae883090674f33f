"""The documents are true: their code runs, their links lead somewhere, their tests exist."""

from __future__ import annotations

import ast
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import devgraph as dg
import devgraph.testing.conformance
from devgraph.api.registry import _registry

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])

CONTEXT = {
    "README.md": {
        "SCRATCH_ROW": 0,
        "config": dg.DeviceGraphConfig(),
        "forward": lambda batch: batch.input_ids * 2 + batch.slot_mapping,
        "ids": torch.arange(3),
        "slots": torch.arange(3),
    },
    "modes.md": {"backend": dg.get_backend("cpu")},
    "distributed.md": {
        "backend": dg.get_backend("cpu"),
        "device": torch.device("cpu"),
        "forward": lambda batch: batch.x * 2,
        "slots": [dg.InputSlot("x", ("tokens",), torch.float32, pad=dg.Pad.zero())],
        "data": {"x": torch.ones(3)},
    },
}
"""What the text around a document's code stands for."""

ALONE = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
"""What a launcher tells the only rank of a group."""


def _blocks(path: Path, language: str) -> list[str]:
    text = path.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


WITH_CODE = [path for path in DOCUMENTS if _blocks(path, "python")]


def test_documents_with_code_are_found():
    names = {path.name for path in WITH_CODE}
    assert {"README.md", "backends.md", "modes.md", "regions.md", "runners.md"} <= names


@pytest.mark.parametrize("path", WITH_CODE, ids=lambda path: path.name)
def test_code_of_a_document_runs_from_top_to_bottom(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["engine"])
    for name, value in ALONE.items():
        monkeypatch.setenv(name, value)
    for kept in ("_factories", "_instances"):  # forget what a document registers
        monkeypatch.setattr(_registry, kept, dict(getattr(_registry, kept)))
    for number, text in enumerate(_blocks(path, "yaml")):
        Path("cluster.yaml" if number == 0 else f"{number}.yaml").write_text(text)
    # Older tracers import the module of a function that they trace.
    document = types.ModuleType("document")
    monkeypatch.setitem(sys.modules, "document", document)
    space: dict[str, Any] = vars(document)
    space.update(CONTEXT.get(path.name, {}))
    for number, block in enumerate(_blocks(path, "python")):
        code = compile(block, f"{path.name} block {number}", "exec", dont_inherit=True)
        exec(code, space)


def _links(path: Path) -> Iterator[str]:
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
        if "://" not in target and not target.startswith("#"):
            yield target.partition("#")[0]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_of_a_document_lead_somewhere(path: Path):
    missing = [target for target in _links(path) if not (path.parent / target).exists()]
    assert missing == []


def _tests_by_file() -> dict[str, dict[str, set[int]]]:
    """Return, for each test file, its tests and the rows of faults that each one names."""
    found: dict[str, dict[str, set[int]]] = {}
    folders = (Path(devgraph.testing.conformance.__file__).parent, ROOT / "tests")
    for path in (path for folder in folders for path in sorted(folder.rglob("test_*.py"))):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                named = re.match(r"FAULTS ([\d, ]+)", ast.get_docstring(node) or "")
                rows = {int(n) for n in re.findall(r"\d+", named.group(1))} if named else set()
                key = (
                    "" if path.parent == folders[0] else path.relative_to(ROOT / "tests").as_posix()
                )
                found.setdefault(key, {})[node.name] = rows
    return found


def _table() -> dict[int, list[tuple[str, str]]]:
    rows: dict[int, list[tuple[str, str]]] = {}
    for line in (ROOT / "docs" / "faults.md").read_text(encoding="utf-8").splitlines():
        if re.match(r"\| \d+ \|", line):
            cells = line.split(" | ")
            tests = re.findall(r"`(?:([\w/]+\.py)::)?(test_\w+)`", cells[-1])
            rows[int(cells[0].strip("| "))] = tests
    return rows


def test_every_fault_has_tests_that_name_it():
    table = _table()
    assert sorted(table) == [*range(1, 44)]
    existing = _tests_by_file()
    wrong = [
        (row, file, name)
        for row, tests in table.items()
        for file, name in tests
        if row not in existing.get(file, {}).get(name, ())
    ]
    assert wrong == []
    assert [row for row, tests in table.items() if not tests] == []
