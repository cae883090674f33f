"""The registry of policies (devgraph/api/policy/__init__.py)."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch

import devgraph as dg
from devgraph.api.policy import _registered, full, get_policy, policies, register_policy
from devgraph.testing.conformance.support import BREAKING, POLICIES, Kit, declares
from devgraph.testing.conformance.test_marks import chain, with_breaks
from tests.support.suite import printed_by


@pytest.fixture
def shadow(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A policy in a module of its own, registered for one test by one line."""
    module = types.ModuleType("shadow_policy")
    module.POLICY = full.POLICY  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr("devgraph.api.policy._registered", dict(_registered))
    register_policy("shadow", module.__name__)
    return module


def test_policy_that_is_added_captures_and_can_be_chosen_everywhere(
    shadow: types.ModuleType,
) -> None:
    assert policies() == ("full", "breakable", "piecewise", "shadow")
    x = torch.ones(3)
    with dg.capture(lambda x: x + 1, x, policy="shadow", backend="cpu") as captured:
        x.fill_(4)
        assert captured.replay().tolist() == [5, 5, 5]
    assert dg.DeviceGraphConfig.from_json('{"decode": "shadow"}').decode.policy == "shadow"
    with dg.DecodeRunner(
        lambda batch: batch.x + 1,
        inputs=[dg.InputSlot("x", ("tokens",), torch.float32, pad=dg.Pad.zero())],
        outputs=dg.OutputSlot(rows="requests"),
        config="shadow",
        backend="cpu",
        max_requests=2,
    ) as runner:
        runner.capture()
        assert runner.run({"x": torch.zeros(1)}).tolist() == [1]
        assert runner.effective_policy == "shadow"
    with dg.PrefillRunner(
        lambda batch: batch.x + 1,
        inputs=[
            dg.InputSlot("x", ("tokens",), torch.float32, pad=dg.Pad.zero()),
            dg.InputSlot("last", ("requests",), torch.int64, pad=dg.Pad.zero()),
        ],
        tail=lambda hidden, batch: hidden[batch.last] * 2,
        outputs=dg.OutputSlot(rows="requests"),
        config={"policy": "shadow", "buckets": [4]},
        backend="cpu",
        max_tokens=4,
        max_requests=1,
    ) as prefill:
        prefill.capture()
        assert prefill.run({"x": torch.arange(3.0), "last": torch.tensor([2])}).tolist() == [6]
        assert prefill.stats().graph_steps == 1


def test_unknown_policy_is_refused_with_what_there_is() -> None:
    """FAULTS 33."""
    with pytest.raises(dg.InputError, match="no policy 'ful'.*breakable.*Did you mean 'full'"):
        get_policy("ful")
    with pytest.raises(dg.InputError, match="no policy .'full'.*Known"):
        get_policy(["full"])  # type: ignore[arg-type]


def test_registration_refuses_a_name_that_is_taken_and_a_promise_that_is_none() -> None:
    for name in ("full", "disabled"):
        with pytest.raises(dg.InputError, match=f"there is a policy {name!r} already"):
            register_policy(name, "somewhere")
    with pytest.raises(dg.InputError, match="cannot promise 'break'.*Did you mean 'breaks'"):
        register_policy("other", "somewhere", "break")
    assert "other" not in policies()


def test_registry_is_read_without_torch() -> None:
    code = "import sys, devgraph.api.policy as p; print(len(p.policies()), 'torch' in sys.modules)"
    assert printed_by(code).split() == ["3", "False"]


def test_full_is_one_segment_whatever_is_marked(kit: Kit) -> None:
    x = kit.tensor(8)
    for step in (chain, with_breaks):
        captured = kit.capture(step, x, policy="full")
        assert len(captured.segments) == 1
        assert captured.info().segments == 1
        assert "policy full" in captured.explain()


@pytest.mark.parametrize("policy", BREAKING)
def test_breakable_alternates_graphs_and_eager_segments(kit: Kit, policy: str) -> None:
    captured = kit.capture(chain, kit.tensor(8), policy=policy)
    kinds = [isinstance(segment, dg.DeviceGraph) for segment in captured.segments]
    assert kinds == [True, False, True, False, True]
    assert captured.info().segments == 5
    assert captured.info().regions == 2
    assert captured.explain().count("doubled") == 2
    for segment in captured.segments:
        assert callable(segment.replay)
        assert callable(segment.reset)


@pytest.mark.parametrize("policy", BREAKING)
def test_hook_runs_before_each_break_of_a_breakable_capture(kit: Kit, policy: str) -> None:
    calls = []
    captured = kit.capture(
        chain, kit.tensor(4), policy=policy, before_break=lambda: calls.append(1)
    )
    assert len(calls) == 2
    captured.replay()
    assert len(calls) == 2


@declares("node_counts")
@pytest.mark.parametrize("policy", POLICIES)
def test_step_without_device_work_is_refused(kit: Kit, policy: str) -> None:
    """FAULTS 26."""
    with pytest.raises(dg.EmptyCaptureError):
        kit.capture(lambda: None, policy=policy)


GIVEN: dict[str, Any] = {
    "argument": lambda x, y: x,
    "views": lambda x, y: (x[1:], {"y": y.view(2, 2)}),
    "state": lambda x, y: TABLE[x.device.type],
}
TABLE: dict[str, torch.Tensor] = {}


@pytest.mark.parametrize("policy", ("full", "breakable"))
@pytest.mark.parametrize("what", GIVEN)
def test_step_that_returns_what_it_was_given_needs_no_work(
    kit: Kit, policy: str, what: str
) -> None:
    TABLE.setdefault(kit.backend.device.type, kit.tensor(3))
    captured = kit.capture(GIVEN[what], kit.tensor(4), kit.tensor(4, seed=1), policy=policy)
    for seed in (2, 3):
        x, y = kit.tensor(4, seed=seed), kit.tensor(4, seed=seed + 5)
        kit.same(captured.replay(x, y), GIVEN[what](x, y))
    assert captured.prove().ok
    assert captured.info().nodes == 0
