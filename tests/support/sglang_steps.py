"""Steps for the tests of the SGLang integration, over its interface or the stand-in."""

from __future__ import annotations

import importlib
import inspect
import types
from typing import Any

import pytest
import torch

from tests.support import sglang_standin

WIDTH = 8


def module(name: str, room: str = sglang_standin.MODEL) -> Any:
    return importlib.import_module(f"{room}.{name}")


def runner() -> Any:
    return types.SimpleNamespace(
        device_module=sglang_standin.device_module(),
        model_runner=types.SimpleNamespace(tp_group=sglang_standin.Group()),
        cuda_graph_output_rows=lambda output: None,
        cuda_graph_output_capacity_rows=lambda output: None,
    )


def sharing() -> dict[str, bool]:
    """The option for one output buffer of all shapes."""
    full = module("runner_backend.full_cuda_graph_backend").FullCudaGraphBackend
    if "reuse_output_buffer" not in inspect.signature(full).parameters:
        pytest.skip("this SGLang's full backend keeps the outputs of its shapes apart")
    return {"reuse_output_buffer": True}


class Case:
    """A step over a static buffer of eight rows, with the eager part that the test gives it."""

    def __init__(self, eager: Any = None) -> None:
        self.x = torch.randn(8, WIDTH)
        self.weight = torch.randn(WIDTH, WIDTH)
        self.runs = 0
        self.eager = eager or (lambda hidden: hidden.tanh())

    def forward(self, size: int) -> Any:
        def run() -> torch.Tensor:
            self.runs += 1
            hidden = self.x[:size] @ self.weight
            return self.eager(hidden) * 2 + hidden

        return run

    def fill(self) -> None:
        self.x.copy_(torch.randn(8, WIDTH))

    def expected(self, size: int) -> torch.Tensor:
        hidden = self.x[:size] @ self.weight
        return self.eager(hidden) * 2 + hidden


def captured(engine: Any, backend: Any, case: Case, *sizes: int, hook: Any = None) -> None:
    with backend.capture_session(None):
        for size in sizes:
            backend.capture_one(engine.ShapeKey(size), case.forward(size), "owners", hook)
