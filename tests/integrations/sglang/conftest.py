"""SGLang's interface for the tests of this folder: the installed one, and the stand-in."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from devgraph.integrations import sglang
from devgraph.integrations.sglang import backends
from devgraph.integrations.sglang.install import platform_class
from devgraph.integrations.sglang.segments import segment_classes
from tests.support import sglang_standin
from tests.support.sglang_steps import module

FOLDER = sglang_standin.root()


@pytest.fixture(params=["standin", "installed"])
def engine(request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param == "installed" and FOLDER is None:
        pytest.skip("SGLang is not installed; its stand-in is tested")
    sglang_standin.load(FOLDER if request.param == "installed" else None)
    _forget()
    with torch.inference_mode():
        yield types.SimpleNamespace(
            ShapeKey=module("runner.shape_key").ShapeKey,
            base=module("runner_backend.base_cuda_graph_backend").BaseCudaGraphBackend,
            eager=sys.modules[f"{sglang_standin.BREAKS}.breakable_cuda_graph"].eager_on_graph(True),
        )
    sglang.uninstall()
    _forget()
    sglang_standin.unload()


def _forget() -> None:
    made = (
        backends.shared,
        backends.full_backend,
        backends.breakable_backend,
        backends.updated_backend,
        segment_classes,
        platform_class,
    )
    for cached in made:
        cached.cache_clear()
