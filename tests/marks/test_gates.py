"""The marks of gates: where they may stand."""

from __future__ import annotations

import pytest
import torch

import devgraph as dg

X = torch.ones(4)


def test_name_that_occurs_twice_is_refused():
    def step(x):
        dg.wait("a")
        dg.wait("a")
        return x + 1

    for policy in ("full", "breakable"):
        with pytest.raises(dg.CaptureError, match=r"dg.wait\('a'\) occurs twice"):
            dg.capture(step, X, backend="cpu", policy=policy)


def test_wait_and_signal_may_have_one_name():
    def step(x):
        dg.wait("a")
        out = x + 1
        dg.signal("a")
        return out

    captured = dg.capture(step, X, backend="cpu")
    captured.gates["a"].open()
    assert torch.equal(captured.replay(), X + 1)
    assert captured.gates["a"].wait() == 1


def test_name_that_is_no_string_is_refused():
    def step(x):
        dg.wait(3)
        return x + 1

    with pytest.raises(dg.InputTypeError, match="must be a string, got 3"):
        dg.capture(step, X, backend="cpu")


def test_gate_inside_an_updatable_region_is_refused():
    @dg.region(host_args=("n",))
    def scaled(x, *, n):
        dg.wait("a")
        return x * n

    with pytest.raises(dg.CaptureError, match="inside region .*scaled"):
        dg.capture(scaled, X, host_args={"n": 2}, backend="cpu")


def test_gate_inside_a_region_without_host_values_is_part_of_the_graph():
    @dg.region()
    def doubled(x):
        dg.wait("a")
        return x * 2

    captured = dg.capture(doubled, X, backend="cpu")
    captured.gates["a"].open()
    assert torch.equal(captured.replay(), X * 2)


def test_gate_in_a_capture_context_is_refused():
    backend = dg.get_backend("cpu")
    with (
        pytest.raises(dg.CaptureError, match=r"capture that has no gates.*dg\.capture"),
        backend.capture_context(backend.make_graph()),
    ):
        dg.wait("a")


def test_check_of_a_step_passes_over_gates():
    def step(x):
        dg.wait("a")
        return x + 1

    assert dg.get_backend("cpu").check(step, (X,)) == []
