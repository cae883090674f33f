"""The third-party example: a vendor in one file fits the contract, statically and on a mock."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest
import torch

from devgraph.api.torchlike import base as torchlike
from tests.sim.hip import unavailable_reason
from tests.support.suite import run_suite

needs_fake = pytest.mark.skipif(
    unavailable_reason() is not None, reason=f"no fake library: {unavailable_reason()}"
)

# What the mock cannot show: its memory is the CPU's, and so are its tensors' streams.
BEYOND_THE_MOCK = (
    "memory_is_flat or memory_is_freed_with or many_buckets_cost or temporaries_of_a_step"
)


def namespace_names(source: str) -> set[str]:
    """Return the attributes of every ``namespace`` in ``source``."""
    return {
        node.attr
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute)
        and (
            (isinstance(node.value, ast.Attribute) and node.value.attr == "namespace")
            or (isinstance(node.value, ast.Name) and node.value.id == "namespace")
        )
    }


def test_torch_has_every_name_that_the_base_asks_of_its_namespace():
    asked = namespace_names(inspect.getsource(torchlike))
    assert {"MemPool", "Stream", "use_mem_pool"} <= asked, "the search is broken"
    missing = {name for name in asked if not hasattr(torch.xpu, name)}
    assert not missing, "the example has to supply these"


def test_native_graph_has_the_calls_that_the_example_makes():
    native = torch.xpu.XPUGraph
    assert list(inspect.signature(native.capture_begin).parameters) == ["self", "pool"]
    for name in ("capture_end", "replay", "reset"):
        assert callable(getattr(native, name))


@needs_fake
@pytest.mark.parametrize("backend", ["xpu", pytest.param("accelerator", marks=pytest.mark.slow)])
def test_example_passes_the_suite_on_a_mock(tmp_path: Path, backend: str):
    chosen = "test_backend or test_capture or test_marks or test_pool"
    result = run_suite(
        *("-p", "tests.sim.xpu", "--devgraph-backend", backend, "--devgraph-skip-undeclared"),
        *("-k", f"({chosen}) and not ({BEYOND_THE_MOCK})"),
        cwd=tmp_path,
    )
    failed = [name for name, outcome in result.outcomes.items() if outcome == "failed"]
    assert failed == [], result.text[-4000:]
    passed = [name for name, outcome in result.outcomes.items() if outcome == "passed"]
    assert len(passed) >= 80
    assert result.exit_code == 0, result.text[-2000:]
