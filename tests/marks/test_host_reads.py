"""The error for host reads: the line, the remedy under each policy, the vendor's text."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import devgraph as dg
from devgraph.api.marks.host_reads import host_read_cure, host_read_error
from devgraph.api.marks.source import SourceLine


def test_error_names_what_was_read_and_the_line_of_the_caller():
    error = host_read_error("copy_ reads device data on the host")
    assert isinstance(error, dg.HostReadError)
    assert str(error).startswith("copy_ reads device data on the host, at ")
    assert __file__ in str(error) and "test_error_names" in str(error)


def test_error_names_a_given_line_and_ends_with_the_text_of_the_vendor():
    line = SourceLine("model.py", 3, "step", "x.item()")
    text, *_ = str(host_read_error("it reads", line, "(code 900)")).splitlines()
    assert "at model.py:3 in step: x.item()." in text and text.endswith("(code 900)")


def test_remedy_outside_of_a_graph_offers_breaks():
    assert "@dg.region or @dg.no_graph" in host_read_cure()


@dg.region()
def reading(x: torch.Tensor, told: list[str]) -> torch.Tensor:
    told.append(host_read_cure())
    return x * 2


def test_remedy_in_a_region_of_a_full_graph_names_the_region_and_the_policy():
    told: list[str] = []

    def step(x: torch.Tensor) -> Any:
        return reading(x, told)

    with dg.capture(step, torch.ones(2), policy="full", backend="cpu", warmup=0):
        pass
    assert any("reading is part of the graph under policy 'full'" in text for text in told)


@pytest.mark.parametrize("policy", ["full", "breakable"])
def test_host_read_of_a_step_is_refused_with_the_line(policy: str):
    with pytest.raises(dg.HostReadError, match=r"\.item\(\)"):
        dg.capture(lambda x: x * x.sum().item(), torch.ones(2), policy=policy, backend="cpu")
