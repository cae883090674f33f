"""Tests mirror the rooms: what tests ``devgraph/ROOM/X.py`` is ``tests/ROOM/test_X.py``.

Rooms inside ``devgraph/api`` are rooms of ``tests`` themselves.
"""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "devgraph"

WHOLE = {
    "api/test_interrupts.py": "an interrupt at any instruction of any module",
    "cpu/test_model.py": "a whole model through the recorder and the tape",
    "cuda/test_bench.py": "``devgraph bench`` beside the public package for breakable graphs",
    "cuda/test_breakable.py": "breaks on a device: side streams, failures, stale graphs",
    "cuda/test_faults.py": "what only the texts of its own runtime can show",
    "cuda/test_mutants.py": "broken backends, which the suite must catch",
    "cuda/test_prefix.py": "prompts in chunks behind a cached prefix",
    "cuda/test_update.py": "updates on a device: topologies, budgets, executables",
    "fuzz/test_fuzz.py": "random work against eager, with the seeds that stay",
    "integrations/transformers/test_demo.py": "the model of the demo: what it says",
    "integrations/transformers/test_parity.py": "the model of the demo on a device and the CPU",
    "integrations/vllm/test_dispatch.py": "vLLM's own dispatcher over the wrappers",
    "npu/test_budget.py": "hardware streams that run out under a runner",
    "npu/test_generate.py": "a language model over the simulated driver",
    "npu/test_hardware.py": "what only a device can prove",
    "policy/test_update_policy.py": "the budgets of policy full, in replays that cross them",
    "rocm/test_conformance.py": "the suite over the fake library",
    "rocm/test_device.py": "updates through libamdhip64, or the shim, on a GPU",
    "rocm/test_doctor.py": "the command line over the fake library",
    "rocm/test_releases.py": "what some versions of the runtime do wrong",
    "rocm/test_hardware.py": "what only a device can prove",
    "runners/test_device.py": "runners on the backend under test",
    "runners/test_tensor_parallel.py": "the example of a model split over ranks",
    "testing/test_mutants.py": "broken backends, which the suite must catch",
    "testing/test_xpu_example.py": "the example of a vendor, over the suite",
    "zoo/test_zoo.py": "every causal language model class of transformers on the engine",
}
"""Files that test no one module, with what they test instead."""


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
