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


@dg.no_graph
def logged(x: torch.Tensor) -> torch.Tensor:
    return x * 3


def doubled(x: torch.Tensor, n: int) -> torch.Tensor:
    return x * n


@torch.jit.script
def branching(x: torch.Tensor) -> torch.Tensor:
    if bool(x.sum() > 4):
        return x * 2
    return x * 3


HIDDEN: dict[str, tuple[Any, type[Exception], dict[str, int]]] = {
    "host read": (lambda x: x * x.sum().item(), dg.HostReadError, {}),
    "data-dependent shape": (lambda x: x[x > 0].sum() * x, dg.HostReadError, {}),
    "mark": (logged, dg.NotCapturableError, {}),
    "tracked value": (doubled, dg.FrozenValueError, {"n": 2}),
    "sparse tensor": (lambda x: x.to_sparse().to_dense(), dg.CaptureError, {}),
}


@pytest.mark.parametrize("kind", HIDDEN)
def test_refusal_that_the_step_catches_ends_the_capture(kind: str):
    """A replay would take the way around, and eager would not."""
    fn, error, host = HIDDEN[kind]

    def step(x: torch.Tensor, **host: int) -> torch.Tensor:
        try:
            return fn(x, **host)
        except Exception:
            return x * 2

    x = torch.ones(3)
    with pytest.raises(error):
        dg.capture(step, x, backend="cpu", host_args=host)
    assert dg.capture(lambda x: x + 1, x, backend="cpu").replay().tolist() == [2.0] * 3


def test_refusal_that_a_script_wraps_is_raised_itself():
    with pytest.raises(dg.HostReadError, match=r"test_host_reads\.py"):
        dg.capture(lambda x: branching(x) + 1, torch.ones(3), backend="cpu")


def test_refusal_that_an_eager_body_catches_is_its_own_business():
    @dg.no_graph
    def body(x: torch.Tensor) -> torch.Tensor:
        try:
            return x * x.sum().item() / (x.sum() > 100)
        except Exception:
            return x

    x = torch.ones(3)
    captured = dg.capture(lambda x: body(x) + 1, x, backend="cpu", policy="breakable")
    x.fill_(3)
    assert torch.equal(captured.replay(), body(x) + 1)
