"""The compatibility rules, row by row."""

from __future__ import annotations

import json
import logging
import warnings
from pathlib import Path
from typing import Any

import attrs
import pytest

from devgraph.api.config.facts import EngineFacts
from devgraph.api.config.model import DeviceGraphConfig, DeviceGraphWarning
from devgraph.api.config.phase import KEYS, PHASES, PhaseConfig
from devgraph.api.config.resolve import resolve
from devgraph.api.config.rules import RULES, WEAKER, Rule
from devgraph.api.errors import ConfigError
from devgraph.api.policy import (
    BREAKS,
    UNTRACED,
    WHOLE,
    _registered,
    policies,
    register_policy,
    registration,
)
from devgraph.cpu.backend import CpuBackend
from tests.support.config_cases import config_with

# rule, facts that wake it, phase, policy, what holds then ("noted" for a note)
CASES: list[tuple[str, dict[str, Any], str, str, str]] = [
    ("role-prefill", {"role": "prefill"}, "decode", "full", "disabled"),
    ("role-decode", {"role": "decode"}, "prefill", "breakable", "disabled"),
    ("weight-offload", {"weight_offload": True}, "decode", "breakable", "disabled"),
    ("debug-hooks", {"debug_hooks": True}, "decode", "full", "disabled"),
    ("kv-layerwise", {"kv_layerwise": True}, "decode", "full", "breakable"),
    ("memory-saver", {"memory_saver": True}, "prefill", "breakable", "disabled"),
    ("attention-prefill", {"attention": "uniform_batch"}, "prefill", "full", "breakable"),
    ("attention-decode", {"attention": "never"}, "decode", "full", "breakable"),
    (
        "attention-width",
        {"attention": "single_token_decode", "speculative_tokens": 3},
        "decode",
        "full",
        "breakable",
    ),
    (
        "region-update",
        {"host_lengths": True, "region_update": False},
        "decode",
        "full",
        "breakable",
    ),
    ("full-prefill", {}, "prefill", "full", "noted"),
    (
        "collectives",
        {"collectives": True, "collectives_capturable": False},
        "decode",
        "full",
        "disabled",
    ),
    ("pipeline-parallel", {"pipeline_parallel": 2}, "prefill", "breakable", "disabled"),
    ("context-parallel", {"context_parallel": 2}, "prefill", "breakable", "disabled"),
    ("two-batch-overlap", {"two_batch_overlap": True}, "prefill", "breakable", "disabled"),
    ("dp-attention", {"data_parallel_attention": True}, "decode", "full", "noted"),
    ("moe-host-counts", {"moe_host_counts": True}, "decode", "full", "breakable"),
    ("multimodal", {"multimodal": "outside"}, "prefill", "breakable", "disabled"),
    ("encoder-decoder", {"encoder_decoder": True}, "prefill", "breakable", "disabled"),
    ("lora", {"lora": True}, "decode", "full", "noted"),
    ("piecewise-backend", {"piecewise": False}, "prefill", "piecewise", "breakable"),
    ("piecewise-traceable", {"traceable": False}, "prefill", "piecewise", "breakable"),
    ("piecewise-lora", {"lora": True}, "prefill", "piecewise", "breakable"),
]
OTHER_KEYS = {"piecewise-compiler", "voted-captures"}
"""Tested on their own."""
KINDS = {rule.name: rule.kind for rule in RULES}


def test_rules_have_different_names_and_only_weaken_policies() -> None:
    assert len({rule.name for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert rule.explanation
        assert rule.source
        assert rule.kind in ("safety", "preference", "note", "scope")
        assert set(rule.phases) <= set(PHASES)
        assert rule.key in KEYS
        assert (rule.spares or set()) <= {BREAKS, WHOLE, UNTRACED}
        if rule.key == "policy" and rule.kind != "note":
            assert rule.value in WEAKER
            assert rule.value not in policies_of(rule), rule.name


def policies_of(rule: Rule) -> list[str]:
    return [
        name
        for name in policies()
        if rule.spares is None or not rule.spares <= registration(name).promises
    ]


@pytest.fixture
def shadow(monkeypatch: pytest.MonkeyPatch) -> str:
    """A policy that promises nothing, registered for one test."""
    monkeypatch.setattr("devgraph.api.policy._registered", dict(_registered))
    register_policy("shadow", "a.module.that.nothing.here.imports")
    return "shadow"


WAKING = {
    "piecewise-compiler": ({"compilers": ("eager",)}, {"compiler": "inductor"}),
}
SAFETY = [
    *[(name, facts, phase, {}) for name, facts, phase, *_ in CASES if KINDS[name] == "safety"],
    *[(name, facts, "prefill", keys) for name, (facts, keys) in WAKING.items()],
]


def test_every_safety_rule_is_tried_on_a_policy_that_is_added() -> None:
    assert {name for name, *_ in SAFETY} == {one.name for one in RULES if one.kind == "safety"}


@pytest.mark.parametrize(("name", "facts", "phase", "keys"), SAFETY)
def test_safety_rule_refuses_a_policy_that_is_added(
    shadow: str, name: str, facts: dict[str, Any], phase: str, keys: dict[str, Any]
) -> None:
    config = DeviceGraphConfig.from_dict({phase: {"policy": shadow, **keys}})
    with pytest.raises(ConfigError, match=rf"\[{name}\]"):
        resolve(config, EngineFacts(**facts))


def test_cases_cover_the_whole_table() -> None:
    assert {name for name, *_ in CASES} | OTHER_KEYS == set(KINDS)


def test_documentation_has_every_rule_and_fact() -> None:
    text = (Path(__file__).parents[2] / "docs" / "modes.md").read_text()
    for rule in RULES:
        names = policies_of(rule)
        about = "any" if names == [*policies()] else ", ".join(names)
        sets = f", sets {rule.value if rule.key == 'policy' else f'`{rule.key}`'}"
        sets = "" if rule.kind == "note" else sets
        phase = "both" if rule.phases == PHASES else rule.phases[0]
        entry = f"- **`{rule.name}`** ({rule.kind}; {phase}; {about}{sets}): {rule.explanation} ("
        assert entry in text
    for field in attrs.fields(EngineFacts):
        default = json.dumps(getattr(EngineFacts(), field.name))
        assert f"| `{field.name}` | `{default}` |" in text


@pytest.mark.parametrize(("name", "facts", "phase", "policy", "holds"), CASES)
def test_rule_changes_a_default_and_is_reported(
    name: str,
    facts: dict[str, Any],
    phase: str,
    policy: str,
    holds: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = config_with(phase, explicit=False, policy=policy)
    with caplog.at_level(logging.INFO), warnings.catch_warnings():
        warnings.simplefilter("error")
        found = resolve(config, EngineFacts(**facts))
    assert found.requested.phase(phase).policy == policy
    assert found.effective.phase(phase).policy == (policy if holds == "noted" else holds)
    fired = next(one for one in found.fired if one.rule == name and one.phase == phase)
    outcomes = {"note": "noted", "scope": "ignored"}
    assert fired.outcome == outcomes.get(KINDS[name], "changed")
    assert any(f"[{name}]" in one.message for one in caplog.records)


@pytest.mark.parametrize(("name", "facts", "phase", "policy", "holds"), CASES)
def test_rule_stays_silent_without_its_facts(
    name: str, facts: dict[str, Any], phase: str, policy: str, holds: str
) -> None:
    found = resolve(config_with(phase, explicit=False, policy=policy), EngineFacts())
    assert found.effective.phase(phase).policy == policy
    assert [one.rule for one in found.fired if one.rule == name] == ([] if facts else [name])


@pytest.mark.parametrize(("name", "facts", "phase", "policy", "holds"), CASES)
def test_rule_against_an_explicit_choice_refuses_or_warns_or_notes(
    name: str, facts: dict[str, Any], phase: str, policy: str, holds: str
) -> None:
    config = config_with(phase, explicit=True, policy=policy)
    if KINDS[name] == "safety":
        with pytest.raises(ConfigError) as error:
            resolve(config, EngineFacts(**facts))
        assert f'{phase}.policy="{policy}"' in str(error.value)
        assert f"[{name}]" in str(error.value)
        assert f'Choose "{holds}" instead' in str(error.value)
        return
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = resolve(config, EngineFacts(**facts))
    about = [one for one in said if f"[{name}]" in str(one.message)]
    if KINDS[name] == "preference":
        assert found.effective.phase(phase).policy == policy
        assert len(about) == 1
        assert about[0].category is DeviceGraphWarning
        assert about[0].filename == __file__
        assert f"'{policy}' kept, '{holds}' is preferable" in str(about[0].message)
    else:
        assert about == []
        assert found.effective.phase(phase).policy == (policy if holds == "noted" else holds)


def test_every_fact_is_read_by_some_rule() -> None:
    read: set[str] = set()

    class Spy:
        def __init__(self, facts: EngineFacts) -> None:
            self.facts = facts

        def __getattr__(self, name: str) -> Any:
            read.add(name)
            return getattr(self.facts, name)

    waking = EngineFacts(
        attention="single_token_decode",
        host_lengths=True,
        collectives=True,
        context_parallel=2,
        kv_layerwise=True,
        memory_saver=True,
    )
    for rule in RULES:
        rule.when(Spy(waking), PhaseConfig(policy="full"))  # type: ignore[arg-type]
    assert read == {field.name for field in attrs.fields(EngineFacts)} - {"backend", "recommended"}


@pytest.mark.parametrize("capable", [True, False])
def test_gates_lift_the_rule_for_layers_where_the_backend_has_them(capable):
    class Backend(CpuBackend):
        capabilities = attrs.evolve(CpuBackend.capabilities, gates=capable)

    facts = EngineFacts(kv_layerwise=True, gates=True).on_backend(Backend)
    assert facts.gates is capable
    (rule,) = (rule for rule in RULES if rule.name == "kv-layerwise")
    assert rule.when(facts, PhaseConfig(policy="full")) is not capable
