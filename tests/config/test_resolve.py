"""What a configuration comes to: rules against defaults and choices."""

from __future__ import annotations

import json
import re
import warnings
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from devgraph.api.config.facts import ATTENTION, EngineFacts
from devgraph.api.config.model import DeviceGraphConfig
from devgraph.api.config.phase import PHASES, DeviceGraphWarning, choices
from devgraph.api.config.resolve import resolve
from devgraph.api.config.rules import RULES
from devgraph.api.errors import ConfigError, ConfigTypeError
from tests.support.config_cases import (
    config_with,
    resolve_quietly,
)


@pytest.mark.parametrize(
    ("attention", "tokens", "decode", "prefill"),
    [
        ("always", 3, "full", "full"),
        ("uniform_batch", 3, "full", "breakable"),
        ("single_token_decode", 0, "full", "breakable"),
        ("single_token_decode", 3, "breakable", "breakable"),
        ("never", 0, "breakable", "breakable"),
    ],
)
def test_attention_capability_decides_what_full_may_hold(
    attention: str, tokens: int, decode: str, prefill: str
) -> None:
    facts = EngineFacts(attention=attention, speculative_tokens=tokens)
    for phase, holds in (("decode", decode), ("prefill", prefill)):
        config = config_with(phase, explicit=False, policy="full")
        assert resolve_quietly(config, facts).effective.phase(phase).policy == holds


def test_weight_offload_switches_graphs_off_and_a_note_changes_nothing() -> None:
    default = DeviceGraphConfig()
    off = resolve_quietly(default, EngineFacts(weight_offload=True))
    assert (off.effective.decode.policy, off.effective.prefill.policy) == ("disabled",) * 2
    kept = resolve_quietly(default, EngineFacts(lora=True))
    assert kept.effective == default
    assert {fired.outcome for fired in kept.fired} == {"noted"}


def test_captures_while_serving_are_noted_where_there_are_several_ranks() -> None:
    config = DeviceGraphConfig.from_json('{"decode": {"capture": "background"}}')
    for facts, phases in (({}, []), ({"collectives": True}, ["decode"])):
        found = resolve_quietly(config, EngineFacts(**facts))
        assert [one.phase for one in found.fired if one.rule == "voted-captures"] == phases
        assert found.effective == config


def test_compiler_that_the_backend_lacks_becomes_eager_or_is_refused() -> None:
    facts = EngineFacts(compilers=("eager",))
    default = config_with("prefill", explicit=False, policy="piecewise", compiler="inductor")
    assert resolve_quietly(default, facts).effective.prefill.compiler == "eager"
    text = '{"prefill": {"policy": "piecewise", "compiler": "inductor"}}'
    with pytest.raises(ConfigError, match=r'prefill\.compiler="inductor"'):
        resolve(DeviceGraphConfig.from_json(text), facts)


def test_compiler_of_a_backend_without_eager_is_one_that_it_has() -> None:
    default = config_with("prefill", explicit=False, policy="piecewise")
    held = resolve_quietly(default, EngineFacts(compilers=("inductor",))).effective.prefill
    assert (held.policy, held.compiler) == ("piecewise", "inductor")
    held = resolve_quietly(default, EngineFacts(compilers=())).effective.prefill
    assert (held.policy, held.compiler) == ("breakable", "eager")


def test_all_refused_choices_are_listed() -> None:
    config = DeviceGraphConfig.from_json(
        '{"decode": "full", "backends": {"npu": {"prefill": "full"}}}'
    )
    facts = EngineFacts(backend="npu", attention="never", kv_layerwise=True)
    with pytest.raises(ConfigError) as error:
        resolve(config, facts)
    text = str(error.value)
    for rule in ("attention-decode", "attention-prefill", "kv-layerwise"):
        assert f"[{rule}]" in text
    assert 'decode.policy="full" does not work' in text


def test_backend_part_is_applied_before_the_rules() -> None:
    config = DeviceGraphConfig.from_json('{"backends": {"npu": {"prefill": "disabled"}}}')
    facts = EngineFacts(backend="npu", two_batch_overlap=True)
    found = resolve_quietly(config, facts)
    assert found.requested == config.for_backend("npu")
    assert found.effective.prefill.policy == "disabled"
    assert found.backend == "npu"
    assert [one for one in found.fired if one.rule == "two-batch-overlap"] == []
    general = resolve_quietly(config, EngineFacts())
    assert general.effective.prefill.policy == "breakable"
    assert general.effective.backends == ()


def test_phase_nobody_chose_takes_the_policy_that_the_backend_recommends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    facts = EngineFacts(backend="npu", recommended={"prefill": "full"})
    resolution = resolve(DeviceGraphConfig(), facts)
    assert resolution.effective.prefill.policy == "full"
    assert resolution.requested.prefill.policy == "breakable"
    changed = [one for one in resolution.fired if one.outcome == "changed"]
    assert [(one.phase, one.rule) for one in changed] == [("prefill", "recommended")]
    assert "'breakable' becomes 'full' [recommended]" in caplog.text
    assert changed[0].reason.startswith("policy: 'breakable' becomes 'full': the backend")
    assert "policy" in resolution.effective.prefill.explicit
    weak = resolve_quietly(DeviceGraphConfig(), attrs.evolve(facts, attention="uniform_batch"))
    assert weak.effective.prefill.policy == "breakable"
    assert "policy" in weak.effective.prefill.explicit, "the node must not decide again"


def test_choice_that_the_backend_advises_against_is_kept_with_a_warning() -> None:
    facts = EngineFacts(backend="npu", recommended={"prefill": "full"})
    chosen = DeviceGraphConfig.from_json('{"prefill": "breakable"}')
    with pytest.warns(DeviceGraphWarning, match=r"'breakable' kept, 'full' is preferable \[reco"):
        told = resolve(chosen, facts)
    assert told.effective.prefill.policy == "breakable"
    assert str(told).startswith('decode.policy: "full" -> "full"\nprefill.policy: "breakable" -> ')
    assert str(told).endswith(str(told.fired[-1]))
    off = DeviceGraphConfig.from_json('{"prefill": "disabled"}')
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert resolve(off, facts).effective.prefill.policy == "disabled"
        for given in (told.effective, chosen):  # The first call has warned.
            again = resolve(given, facts)
            assert again.fired == told.fired and again.effective == told.effective


def test_only_the_named_phases_are_resolved() -> None:
    facts = EngineFacts(weight_offload=True)
    chosen = DeviceGraphConfig.from_json('{"prefill": "full"}')
    resolution = resolve(chosen, facts, phases=["decode"])
    assert resolution.effective.decode.policy == "disabled"
    assert resolution.effective.prefill.policy == "full"
    assert {one.phase for one in resolution.fired} == {"decode"}
    with pytest.raises(ConfigError, match="no phase 'decod'.*Did you mean 'decode'"):
        resolve(chosen, facts, phases=["decod"])


def test_a_phase_that_does_not_occur_is_set_aside_even_when_it_was_chosen() -> None:
    config = DeviceGraphConfig.from_json('{"decode": "full", "prefill": "full"}')
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = resolve(config, EngineFacts(role="decode", attention="uniform_batch"))
    assert (found.effective.decode.policy, found.effective.prefill.policy) == ("full", "disabled")
    assert [one.outcome for one in found.fired] == ["ignored"]


def test_a_later_rule_removes_notes_about_a_policy_that_no_longer_holds() -> None:
    found = resolve_quietly(
        DeviceGraphConfig(), EngineFacts(data_parallel_attention=True, encoder_decoder=True)
    )
    names = [rule.name for rule in RULES]
    assert names.index("dp-attention") < names.index("encoder-decoder")
    assert [(one.phase, one.rule) for one in found.fired] == [
        ("decode", "dp-attention"),
        ("prefill", "encoder-decoder"),
    ]


@pytest.mark.parametrize("given", [5, {"lora": True}])
def test_what_are_no_facts_are_refused(given: Any) -> None:
    with pytest.raises(ConfigTypeError, match="expected EngineFacts"):
        resolve(DeviceGraphConfig(), given)


@pytest.mark.parametrize("given", [None, "full", {"decode": "full"}])
def test_what_is_no_configuration_is_refused(given: Any) -> None:
    with pytest.raises(ConfigTypeError, match="expected a DeviceGraphConfig"):
        resolve(given)


def test_resolution_as_data_has_requested_effective_and_every_rule() -> None:
    found = resolve_quietly(DeviceGraphConfig(), EngineFacts(pipeline_parallel=2, lora=True))
    data = json.loads(json.dumps(found.to_dict()))
    assert data["requested"]["prefill"]["policy"] == "breakable"
    assert data["effective"]["prefill"]["policy"] == "disabled"
    assert [(one["phase"], one["rule"], one["outcome"]) for one in data["rules"]] == [
        ("decode", "lora", "noted"),
        ("prefill", "pipeline-parallel", "changed"),
    ]
    assert all(one["source"].startswith("https://") for one in data["rules"])
    assert found.rows() == [
        ("decode", "policy", '"full"', '"full"'),
        ("prefill", "policy", '"breakable"', '"disabled"'),
    ]


FACTS = st.builds(
    EngineFacts,
    **{field.name: st.booleans() for field in attrs.fields(EngineFacts) if field.type == "bool"},
    **{
        field.name: st.integers(field.default, field.default + 3)
        for field in attrs.fields(EngineFacts)
        if field.type == "int"
    },
    attention=st.sampled_from(ATTENTION),
    role=st.sampled_from(["both", "prefill", "decode"]),
    multimodal=st.sampled_from(["none", "slot", "outside"]),
    recommended=st.dictionaries(st.sampled_from(PHASES), st.sampled_from(choices())),
    compilers=st.sampled_from([("eager",), ("eager", "inductor"), ("inductor",), ()]),
)
MODES = st.fixed_dictionaries(
    {},
    optional={
        phase: st.fixed_dictionaries(
            {},
            optional={
                "policy": st.sampled_from(choices()),
                "compiler": st.sampled_from(["eager", "inductor"]),
                "buckets": st.lists(st.integers(1, 99), min_size=1, max_size=3),
            },
        )
        for phase in PHASES
    },
)


def test_the_random_facts_vary_every_field() -> None:
    kinds = {field.type for field in attrs.fields(EngineFacts)}
    assert kinds == {"bool", "int", "str", "str | None", "tuple[str, ...]", "Mapping[str, str]"}


@settings(max_examples=300, deadline=None)
@given(facts=FACTS, mode=MODES)
def test_choices_are_never_changed_and_what_holds_is_allowed(
    facts: EngineFacts, mode: dict[str, Any]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = DeviceGraphConfig.from_dict(mode)
    try:
        found = resolve_quietly(config, facts)
    except ConfigError as error:
        refused = str(error)
    else:
        refused = ""
    if refused:
        kinds = {rule.name: rule.kind for rule in RULES}
        assert {kinds[name] for name in re.findall(r"\[([a-z-]+)\]", refused)} == {"safety"}
        assert mode
        return
    strength = {"full": 2, "piecewise": 2, "breakable": 1, "disabled": 0}
    for phase in PHASES:
        asked, holds = config.phase(phase), found.effective.phase(phase)
        aside = any(one.phase == phase and one.outcome == "ignored" for one in found.fired)
        for key in asked.explicit - ({"policy"} if aside else set()):
            assert getattr(holds, key) == getattr(asked, key)
        first = asked.policy
        if "policy" not in asked.explicit:
            first = facts.recommended.get(phase, first)
        assert holds.policy == first or strength[holds.policy] < strength[first]
        changed = {one.key for one in found.fired if one.phase == phase and one.after is not None}
        for key, value in holds.to_dict(everything=True).items():
            assert value == asked.to_dict(everything=True)[key] or key in changed
    # What holds can be sent on and chosen: no rule objects to it any more.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sent = DeviceGraphConfig.from_json(found.effective.to_json())
    again = resolve_quietly(sent, facts)
    assert again.effective == found.effective
