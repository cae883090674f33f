"""The shape of the house: tests mirror the rooms, no circle of imports, vendors that stay flat.

The tests of ``devgraph/ROOM/X.py`` are in ``tests/ROOM/test_X.py``. Every module has some. Rooms
inside ``devgraph/api`` are rooms of ``tests`` themselves.
"""

from __future__ import annotations

import ast
import graphlib
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from devgraph.api.graph import DeviceGraph

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "devgraph"

WHOLE = {
    "api/test_cases_state.py": "programs as people write them: state of the caller",
    "api/test_planted.py": "planted faults, which proofs find or captures refuse",
    "api/test_recaptures.py": "replays that capture again, because the state of the step changed",
    "api/test_interrupts.py": "an interrupt at any instruction of any module",
    "cpu/test_model.py": "a whole model through the recorder and the tape",
    "cpu/test_operator_database.py": "every operator of torch's own database against eager",
    "cuda/test_bench.py": "benchmarks/run.py beside the public package for breakable graphs",
    "cuda/test_breakable.py": "breaks on a device: side streams, failures, stale graphs",
    "cuda/test_faults.py": "what only the texts of its own runtime can show",
    "cuda/test_mutants.py": "broken backends, which the suite must catch",
    "cuda/test_prefix.py": "prompts in chunks behind a cached prefix",
    "cuda/test_update.py": "updates on a device: topologies, budgets, executables",
    "fuzz/test_fuzz.py": "random work against eager, with the seeds that stay",
    "integrations/sglang/test_platform.py": "a platform of SGLang: its hooks, and a whole engine",
    "integrations/transformers/test_demo.py": "the model of the demo: what it says",
    "integrations/transformers/test_parity.py": "the model of the demo on a device and the CPU",
    "integrations/vllm/test_dispatch.py": "vLLM's own dispatcher over the wrappers",
    "integrations/vllm/test_sleep.py": "graphs whose memory goes while an engine sleeps",
    "npu/test_accelerator.py": "the backend of torch's accelerator over the graph of torch_npu",
    "npu/test_budget.py": "hardware streams that run out under a runner",
    "npu/test_generate.py": "a language model over the simulated driver",
    "npu/test_handoff.py": "requests that move between the simulated device and the CPU",
    "npu/test_hardware.py": "what only a device can prove",
    "rocm/test_conformance.py": "the suite over the fake library",
    "rocm/test_device.py": "updates through libamdhip64, or the shim, on a GPU",
    "rocm/test_doctor.py": "the command line over the fake library",
    "rocm/test_releases.py": "what some versions of the runtime do wrong",
    "rocm/test_hardware.py": "what only a device can prove",
    "runners/test_device.py": "runners on the backend under test",
    "runners/test_tensor_parallel.py": "the example of a model split over ranks",
    "testing/test_mutants.py": "broken backends, which the suite must catch",
    "testing/test_page_backend.py": "the backend of the page for vendors, over the suite",
    "testing/test_xpu_example.py": "the example of a vendor, over the suite",
    "zoo/test_device.py": "twelve families and four small ones on a device, graphs against eager",
    "zoo/test_zoo.py": "every causal language model class of transformers on the engine",
}
"""Files that test no one module, with what they test instead."""

ELSEWHERE = {
    "api/torchlike/gates.py": "cuda/test_gates.py",
    "cuda/backend.py": "cuda/test_update.py",
    "integrations/engine/installation.py": "integrations/vllm/test_install.py",
    "integrations/sglang/segments.py": "integrations/sglang/test_platform.py",
    "integrations/vllm/layer.py": "integrations/vllm/test_wrappers.py",
    "integrations/vllm/manager.py": "integrations/vllm/test_install.py",
    "npu/graph.py": "npu/test_task_groups.py",
    "runners/dispatch.py": "runners/test_runner.py",
}
"""Modules without a test file of their name, with the file that tests them."""


def _module_of(test: Path) -> Path:
    room, *inner = test.parts[:-1]
    folder = PACKAGE / room if (PACKAGE / room).is_dir() else PACKAGE / "api" / room
    name = test.stem.removeprefix("test_")
    if name == room and not inner:
        return folder / "__init__.py"
    return folder.joinpath(*inner, f"{name}.py")


def test_every_test_file_of_a_room_is_named_after_the_module_that_it_tests():
    files = {path.relative_to(TESTS) for path in TESTS.glob("*/**/test_*.py")}
    files = {test for test in files if test.parts[0] != "sim"}  # it tests what lies beside it
    lost = {str(test) for test in files if not _module_of(test).exists()}
    assert lost - set(WHOLE) == set(), "name each after its module, or say in WHOLE what it tests"
    assert set(WHOLE) - lost == set(), "these have a module now, or are gone"


def _test_of(module: Path) -> Path:
    parts = module.parts[1:] if module.parts[0] == "api" and len(module.parts) > 2 else module.parts
    return TESTS.joinpath(*parts[:-1], f"test_{parts[-1]}")


def test_every_module_of_a_room_has_a_test_file():
    modules = {path.relative_to(PACKAGE) for path in PACKAGE.glob("*/**/*.py")}
    modules = {module for module in modules if module.name != "__init__.py"}
    modules = {module for module in modules if "conformance" not in module.parts}  # tests itself
    untested = {module.as_posix() for module in modules if not _test_of(module).exists()}
    assert untested - set(ELSEWHERE) == set(), "write its test file, or name another in ELSEWHERE"
    assert set(ELSEWHERE) - untested == set(), "these have a test file now, or are gone"
    assert [test for test in ELSEWHERE.values() if not (TESTS / test).exists()] == []


def _imported(path: Path, modules: set[str]) -> Iterator[str]:
    """Yield the modules that a file imports anywhere, under ``if TYPE_CHECKING`` as well."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from modules.intersection(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield from modules.intersection([name if name in modules else str(node.module)])


def _circle(root: Path) -> list[str]:
    """Return the modules of one circle of imports below ``root``, the first again as the last."""
    names = {}
    for path in root.rglob("*.py"):
        parts = path.relative_to(root.parent).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    known = set(names)
    try:
        graphlib.TopologicalSorter(
            {name: set(_imported(path, known)) for name, path in names.items()}
        ).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def test_modules_import_each_other_in_no_circle():
    assert _circle(PACKAGE) == []


def test_circle_that_only_a_type_checker_sees_is_found(tmp_path: Path):
    room = tmp_path / "room"
    room.mkdir()
    (room / "__init__.py").write_text("")
    (room / "one.py").write_text("from room.two import Two\n")
    (room / "two.py").write_text("if TYPE_CHECKING:\n    from room import one\n")
    assert sorted(set(_circle(room))) == ["room.one", "room.two"]


@pytest.mark.parametrize("vendor", ["cpu", "cuda", "npu", "rocm"])
def test_graph_class_of_a_vendor_is_at_most_three_deep(vendor: str):
    backend = importlib.import_module(f"devgraph.{vendor}.backend")
    kinds = {value.graph_type for value in vars(backend).values() if hasattr(value, "graph_type")}
    kinds |= {
        value
        for value in vars(backend).values()
        if isinstance(value, type) and issubclass(value, DeviceGraph)
    }
    assert kinds
    for kind in kinds:
        assert len([base for base in kind.__mro__ if issubclass(base, DeviceGraph)]) <= 3
