"""Policy ``breakable`` on the reference.

Most of it is the suite's: ``devgraph/testing/conformance/test_breaks.py``.
"""

from __future__ import annotations

import pytest
import torch

from devgraph.api.capture import capture
from devgraph.api.errors import (
    NotCapturableError,
)
from devgraph.api.marks.marks import no_graph, region
from devgraph.cpu.backend import CpuBackend
from tests.support.cpu_capture import same


@pytest.fixture
def backend() -> CpuBackend:
    return CpuBackend()


def test_no_graph_function_breaks_or_is_refused(backend: CpuBackend) -> None:
    @no_graph
    def host_sum(x: torch.Tensor) -> torch.Tensor:
        return x * float(x.sum())

    def step(x: torch.Tensor) -> torch.Tensor:
        return host_sum(x + 1) * 2

    x = torch.randn(4)
    with pytest.raises(NotCapturableError):
        capture(step, x, backend=backend)
    cap = capture(step, x, backend=backend, policy="breakable")
    assert len(cap.segments) == 3
    x.copy_(torch.randn(4))
    assert same(cap.replay(), step(x))


def test_break_inside_the_users_own_mode(backend: CpuBackend) -> None:
    @region
    def middle(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    def step(x: torch.Tensor) -> torch.Tensor:
        with torch.device("cpu"), torch.autocast("cpu", dtype=torch.bfloat16):
            y = middle(x @ x) @ x
        return y + torch.ones(4, 4)

    x = torch.randn(4, 4)
    with torch.inference_mode():
        cap = capture(step, x, backend=backend, policy="breakable")
        x.copy_(torch.randn(4, 4))
        cap.replay()
    assert torch._C._len_torch_function_stack() == 0


@pytest.mark.parametrize("runs_before", [0, 1, 2])
def test_autocast_caches_as_before_when_a_body_between_graphs_raises(
    backend: CpuBackend, runs_before: int
) -> None:
    runs: list[int] = []

    @region
    def body(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        if len(runs) > runs_before:
            raise KeyError("of the body")
        return x * 2

    def step(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return body(x + 1) * 3

    with pytest.raises(KeyError):
        capture(step, torch.randn(4), policy="breakable", backend=backend, warmup=2)
    assert torch.is_autocast_cache_enabled()
