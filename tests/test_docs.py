"""The documents are true: their code runs, their links lead somewhere, their tests exist."""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import io
import json
import re
import shlex
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import devgraph as dg
import devgraph.testing.conformance
from devgraph.api import errors
from devgraph.api.registry import _registry
from devgraph.cli import app
from devgraph.cli.bench import chart

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])

CONTEXT = {
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


def _blocks(path: Path, language: str, *, needs: str = "") -> list[str]:
    """Return the blocks of a language; those that need a device only for ``needs``, its name."""
    text = path.read_text(encoding="utf-8")
    found = re.findall(
        rf"(?:^<!-- needs: (\w+) -->\n)?^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE
    )
    return [block for device, block in found if device == needs]


def _outputs(path: Path) -> Iterator[tuple[str, str | None]]:
    """Yield each Python block with the block named ``output`` below it, if there is one.

    In an output, ``...`` stands for any text.
    """
    text = path.read_text(encoding="utf-8")
    for device, block, expected in re.findall(
        r"(?:^<!-- needs: (\w+) -->\n)?^```python\n(.*?)^```(?:\n+```output\n(.*?)^```)?",
        text,
        re.DOTALL | re.MULTILINE,
    ):
        if not device:
            yield block, _flat(expected) if expected else None


def _flat(text: str) -> str:
    """Remove spaces at the ends of lines and empty lines at both ends."""
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


def test_output_that_differs_is_found(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(1)\n```\n\n```output\n2\n```\n\n```python\nx = 1\n```\n")
    assert [*_outputs(page)] == [("print(1)\n", "2"), ("x = 1\n", None)]


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
    for number, (block, expected) in enumerate(_outputs(path)):
        code = compile(block, f"{path.name} block {number}", "exec", dont_inherit=True)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, space)
        if expected is not None:
            pattern = re.escape(expected.strip()).replace(r"\.\.\.", ".*")
            assert re.fullmatch(pattern, _flat(printed.getvalue()), re.DOTALL), printed.getvalue()


@pytest.mark.cuda
@pytest.mark.parametrize("path", [ROOT / "docs" / "tutorial.md"], ids=lambda path: path.name)
def test_code_that_needs_a_device_runs_on_it(path: Path):
    for block in _blocks(path, "python", needs="cuda"):
        exec(compile(block, path.name, "exec", dont_inherit=True), {})


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_code_that_no_test_can_run_uses_names_that_exist(path: Path):
    """Code for a serving engine, in blocks named ``py``, and code for a device."""
    for block in (*_blocks(path, "py"), *_blocks(path, "python", needs="cuda")):
        modules: dict[str, Any] = {}
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("devgraph"):
                for one in node.names:
                    parent = importlib.import_module(str(node.module))
                    if hasattr(parent, one.name):
                        modules[one.asname or one.name] = getattr(parent, one.name)
                    else:
                        path_of_module = f"{node.module}.{one.name}"
                        modules[one.asname or one.name] = importlib.import_module(path_of_module)
        for name, attribute in re.findall(r"\b(\w+)\.(\w+)", block):
            assert name not in modules or hasattr(modules[name], attribute), (name, attribute)


def _commands(path: Path) -> Iterator[str]:
    names = "|".join(one.stem for one in (ROOT / "devgraph" / "cli").glob("*.py"))
    text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    for line in re.findall(rf"^(?:    )?(devgraph (?:{names}) .*)$", text, re.MULTILINE):
        yield line.partition("  #")[0].partition(" [-")[0].partition(" > ")[0].partition(" | ")[0]


def test_commands_of_the_documents_parse():
    commands = [(path.name, one) for path in DOCUMENTS for one in _commands(path)]
    assert len(commands) > 12
    for name, command in commands:
        try:
            app._parser().parse_args(shlex.split(command)[1:])
        except SystemExit:
            pytest.fail(f"{name}: {command}")


def test_modes_of_the_documents_are_right():
    modes = [block for path in DOCUMENTS for block in _blocks(path, "json")]
    assert len(modes) >= 2
    for mode in modes:
        dg.DeviceGraphConfig.from_json(mode)


@pytest.mark.parametrize("results", sorted((ROOT / "docs" / "figures").glob("*.json")), ids=str)
def test_figures_show_what_the_benchmarks_say(results: Path):
    report = json.loads(results.read_text())
    assert results.with_suffix(".svg").read_text() == chart(report["title"], report["rows"])
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert f"figures/{results.stem}.svg" in page
    numbers = {float(one.replace(",", "")) for one in re.findall(r"\d[\d,]*(?:\.\d+)?", page)}
    for time in (row[kind] for row in report["rows"] for kind in ("host", "wall") if kind in row):
        # Microseconds, milliseconds, or tokens a second.
        told = (time * 1e6, time * 1e3, 1 / time)
        assert any(abs(one - number) < 5e-4 * one for one in told for number in numbers), time


def test_drawings_are_those_of_their_sources():
    spec = importlib.util.spec_from_file_location("draw", ROOT / "docs" / "figures" / "draw.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sources = sorted((ROOT / "docs" / "figures").glob("*.txt"))
    assert len(sources) >= 6
    pages = "".join(path.read_text(encoding="utf-8") for path in DOCUMENTS)
    for source in sources:
        assert source.with_suffix(".svg").read_text() == module.draw(source.read_text())
        assert f"figures/{source.stem}.svg)" in pages
    with pytest.raises(ValueError, match="a box begins with one of"):
        module.draw("title\nrow | unknown box")


def test_each_public_name_is_in_the_reference_and_each_error_has_a_section():
    pages = sorted((ROOT / "docs").glob("api*.md"))
    reference = "".join(path.read_text(encoding="utf-8") for path in pages)
    described = set(re.findall(r"^::: \S+\.(\w+)$", reference, re.MULTILINE))
    assert {*dg.__all__} - described - {*errors.__all__} == {"__version__"}
    sections = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    tree = ["DeviceGraphError", *re.findall(r"── (\w+)", errors.__doc__ or "")]
    assert re.findall(r"^## (\w+)$", sections, re.MULTILINE) == tree


def test_each_variable_of_the_environment_is_in_the_table():
    table = (ROOT / "docs" / "environment.md").read_text(encoding="utf-8")
    sources = (path.read_text(encoding="utf-8") for path in (ROOT / "devgraph").rglob("*.py"))
    named = {name for text in sources for name in re.findall(r'"(DEVGRAPH_[A-Z_]+)"', text)}
    assert len(named) >= 4
    assert {name for name in named if f"`{name}`" not in table} == {"DEVGRAPH_AUTOLOAD_WAS_ON"}


def _links(path: Path) -> Iterator[str]:
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
        if "://" not in target and not target.startswith("#"):
            yield target.partition("#")[0]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_of_a_document_lead_somewhere(path: Path):
    missing = [target for target in _links(path) if not (path.parent / target).exists()]
    assert missing == []


def _anchors(path: Path) -> set[str]:
    """Return the anchors of a document's headings, as mkdocs makes them."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.M)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    words = [re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings]
    return {re.sub(r"[-\s]+", "-", heading) for heading in words}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_anchors_of_a_document_exist(path: Path):
    missing = []
    for target in re.findall(r"\]\(([^)\s]*\.md#[^)\s]+|#[^)\s]+)\)", path.read_text("utf-8")):
        file, _, anchor = target.partition("#")
        if "://" not in target and anchor not in _anchors(path.parent / file if file else path):
            missing.append(target)
    assert missing == []


@pytest.mark.skipif(
    not (ROOT / ".venv-docs" / "bin" / "mkdocs").exists(), reason="make docs has not run"
)
@pytest.mark.parametrize(("anchor", "code"), [("here", 0), ("no-such-anchor", 1)])
def test_site_is_refused_for_a_broken_anchor(anchor: str, code: int, tmp_path: Path):
    command = re.search(r"bin/mkdocs (build .*)", (ROOT / "Makefile").read_text())
    assert command is not None
    strict = (ROOT / "mkdocs.yml").read_text().partition("\nvalidation:")[2]
    (tmp_path / "mkdocs.yml").write_text(f"site_name: x\nvalidation:{strict}")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(f"# Start\n\n[link](other.md#{anchor})\n")
    (tmp_path / "docs" / "other.md").write_text("# Other\n\n## Here\n")
    done = subprocess.run(
        [str(ROOT / ".venv-docs" / "bin" / "mkdocs"), *command[1].split()],
        cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert (anchor in done.stderr) is bool(code)


def test_each_page_is_in_the_menu_of_the_site():
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert {
        page for page in pages if not re.search(rf"[ :]{re.escape(page)}$", menu, re.M)
    } == set()


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
        row = re.match(r'\| <a id="row-(\d+)"></a>(\d+) \|', line)
        if row:
            assert row[1] == row[2]
            cells = line.split(" | ")
            tests = re.findall(r"`(?:([\w/]+\.py)::)?(test_\w+)`", cells[-1])
            rows[int(row[1])] = tests
    return rows


def test_every_fault_has_tests_that_name_it():
    table = _table()
    assert sorted(table) == list(range(1, 56))
    existing = _tests_by_file()
    wrong = [
        (row, file, name)
        for row, tests in table.items()
        for file, name in tests
        if row not in existing.get(file, {}).get(name, ())
    ]
    assert wrong == []
    assert [row for row, tests in table.items() if not tests] == []
