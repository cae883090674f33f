"""The backend of torch's accelerator: when there is none, and what it says then."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import devgraph as dg
from devgraph.api import registry
from devgraph.api.capabilities import Capabilities
from devgraph.api.torchlike.accelerator import AcceleratorBackend


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make an Intel GPU torch's accelerator, as far as torch tells."""
    found = torch.device("xpu")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: found)
    return found


def test_it_comes_last_before_the_cpu_and_after_those_of_other_packages(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(registry._registry, "_factories", {"acme": AcceleratorBackend})
    names = registry._registry.names()
    assert names[-3:] == ["acme", "accelerator", "cpu"]


def test_nothing_is_claimed_of_an_unknown_device():
    assert AcceleratorBackend.capabilities == Capabilities(capture_error_modes=("global",))


def test_a_device_with_a_backend_of_its_own_is_left_to_it(
    device: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(registry, "names", lambda: ["xpu", "cpu"])
    with pytest.raises(dg.BackendUnavailableError, match="'xpu' has a backend of its own"):
        AcceleratorBackend()


def test_a_machine_without_one_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    with pytest.raises(dg.BackendUnavailableError, match="it sees the CPU only"):
        AcceleratorBackend()


def test_a_device_without_a_graph_in_torch_says_what_it_takes(
    device: Any, monkeypatch: pytest.MonkeyPatch
):
    class Refusing:
        def __init__(self) -> None:
            raise RuntimeError("no graph is registered")

    monkeypatch.setattr(torch.accelerator, "Graph", Refusing, raising=False)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    with pytest.raises(dg.BackendUnavailableError, match=r"no graph is registered.*torch 2\.12"):
        AcceleratorBackend()
