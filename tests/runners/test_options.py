"""Options: keywords, environment variables and facts of the engine."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
import torch

import devgraph as dg
from tests.support.runner_steps import (
    X,
    double,
    double_runner,
    encoder_of,
    rows_of_x,
)


def test_strictness_comes_from_the_configuration_unless_the_engine_says():
    assert_raises = double_runner(config={"strict": True}, captured=False)
    with pytest.raises(dg.StateError):
        assert_raises.run({"x": rows_of_x(1)})
    lenient = double_runner(config={"strict": True}, strict=False, captured=False)
    assert lenient.run({"x": rows_of_x(1)}).shape == (1, 3)


def test_the_environment_makes_every_runner_emulate(monkeypatch, caplog):
    monkeypatch.setenv("DEVGRAPH_EMULATE", "1")
    with caplog.at_level(logging.INFO, logger="devgraph.runners"):
        runner = double_runner(name="demo")
    assert "demo: emulates 4 of 4 buckets in" in caplog.text and "captured" not in caplog.text
    runner.run({"x": rows_of_x(3)})
    assert runner.effective_policy == "emulated" and runner.stats().emulated_steps == 1


def test_ranges_are_yes_or_no() -> None:
    with pytest.raises(dg.ConfigTypeError, match="ranges"):
        double_runner(ranges="yes")


@pytest.mark.parametrize("name", ["", 3])
def test_a_name_that_is_not_a_text_is_refused(name: Any) -> None:
    with pytest.raises(dg.ConfigTypeError, match="the name of a runner must be a non-empty string"):
        double_runner(name=name)


def test_an_unknown_option_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(dg.ConfigError, match="unknown runner option 'max_graph'.*max_graphs"):
        double_runner(max_graph=3)
    with pytest.raises(dg.ConfigError, match="Known: .*loop,.*outputs,.*Did you mean 'outputs'"):
        double_runner(output=dg.OutputSlot())


def test_keys_and_modes_in_the_place_of_options_are_answered_with_their_place() -> None:
    with pytest.raises(dg.ConfigError, match=r"key of config: pass config=\{'buckets': ...\}"):
        double_runner(buckets=[1])
    with pytest.raises(dg.ConfigTypeError, match=r"mapping of keys .*got \{'decode': 'full'\}"):
        double_runner(config={"decode": "full"})
    with pytest.raises(dg.ConfigTypeError, match=r"from_json\(text\).decode.*got '\{\"policy\""):
        double_runner(config='{"policy": "full"}')


def test_a_runner_applies_the_part_of_the_mode_for_its_backend() -> None:
    text = '{"decode": "full", "backends": {"cpu": {"decode": "disabled"}, "npu": {}}}'
    config = dg.DeviceGraphConfig.from_json(text)
    assert double_runner(config=config.decode).stats().requested == "disabled"
    assert config.decode.policy == "full"


@pytest.mark.parametrize(
    ("key", "replacement"),
    [
        ("memory", "use executable_budget"),
        ("memory_budget_bytes", "use graph_budget_bytes"),
        ("min_speedup", r"use dg.graphed\(step, min_speedup=...\)"),
        ("learned", "leave it out"),
        ("max_seq_len", "leave it out"),
    ],
)
def test_a_removed_key_is_refused_with_its_replacement(key: str, replacement: str) -> None:
    with pytest.raises(dg.ConfigError, match=f"'{key}' was removed: {replacement}"):
        double_runner(config={key: 1})
    text = json.dumps({"decode": {key: 1}})
    with pytest.raises(dg.ConfigError, match=f"'{key}' was removed: {replacement}"):
        dg.DeviceGraphConfig.from_json(text)


_UNSAFE = dg.EngineFacts(memory_saver=True)
"""Segments of a breakable graph would share tensors across a release of memory."""


def _prefill(config: Any, facts: Any) -> dg.PrefillRunner:
    return dg.PrefillRunner(
        double,
        [X],
        config=config,
        facts=facts,
        backend="cpu",
        max_tokens=8,
        max_requests=2,
    )


def test_a_safety_rule_refuses_an_explicit_choice_that_the_facts_contradict() -> None:
    with pytest.raises(dg.ConfigError, match=r"prefill.policy=\"breakable\".*memory-saver"):
        _prefill("breakable", _UNSAFE)
    assert _prefill("breakable", dg.EngineFacts()).effective_policy == "disabled"  # not captured


def test_a_safety_rule_changes_a_default_that_the_facts_contradict() -> None:
    runner = _prefill(None, _UNSAFE)
    runner.capture()
    assert (runner.stats().requested, runner.stats().captures) == ("disabled", 0)
    assert torch.equal(runner.run({"x": rows_of_x(3)}), rows_of_x(3) * 2)
    plain = _prefill(None, dg.EngineFacts())
    plain.capture()
    assert plain.effective_policy == "breakable"


def test_facts_of_the_backend_are_those_of_the_runner() -> None:
    """The rules see the capabilities of the backend, whatever backend the facts name."""
    facts = dg.EngineFacts(backend="npu", compilers=())
    with pytest.raises(dg.ConfigError, match="piecewise"):
        double_runner(config={"policy": "piecewise", "compiler": "inductor"}, facts=facts)


def _recommending() -> Any:
    backend = type(dg.get_backend("cpu"))()
    backend.recommended_mode = {"prefill": "full"}  # type: ignore[misc]
    return backend


@pytest.mark.parametrize("facts", [None, dg.EngineFacts()])
@pytest.mark.parametrize("config", [None, {"buckets": [8]}, dg.DeviceGraphConfig().prefill])
def test_a_policy_that_nobody_chose_is_that_of_the_plan(config: Any, facts: Any) -> None:
    backend = _recommending()
    mode = dg.DeviceGraphConfig() if config is None else dg.DeviceGraphConfig(prefill=config)
    planned = dg.resolve(mode, dg.EngineFacts().on_backend(backend)).effective.prefill.policy
    runner = dg.PrefillRunner(
        double, [X], config=config, facts=facts, backend=backend, max_tokens=8, max_requests=2
    )
    assert runner.stats().requested == planned == "full"


def test_a_chosen_policy_is_kept_against_the_recommendation_with_a_warning() -> None:
    with pytest.warns(dg.DeviceGraphWarning, match="'breakable' kept, 'full' is preferable"):
        runner = dg.PrefillRunner(
            double, [X], config="breakable", backend=_recommending(), max_tokens=8, max_requests=2
        )
    assert runner.stats().requested == "breakable"


def test_request_slots_have_an_effect_if_the_backend_recommends_full_prefill() -> None:
    mode = dg.DeviceGraphConfig.from_json('{"prefill": {"max_requests": 2}}')  # no warning
    for config in (mode.prefill, {"max_requests": 2}):
        dg.PrefillRunner(
            double, [X], config=config, backend=_recommending(), max_tokens=8, max_requests=4
        )


def test_widths_of_variants_are_speculative_tokens() -> None:
    facts = dg.EngineFacts(attention="single_token_decode")
    double_runner(config={"policy": "full"}, facts=facts)
    with pytest.raises(dg.ConfigError, match="attention-width"):
        double_runner(config={"policy": "full"}, facts=facts, variants=[{}, {"width": 3}])


def test_an_encoder_takes_facts_but_no_rule_covers_it() -> None:
    encoder = encoder_of(facts=_UNSAFE, config="breakable")
    assert encoder.effective_policy == "breakable"


def test_facts_of_another_kind_are_refused() -> None:
    with pytest.raises(dg.ConfigTypeError, match=r"facts must be dg.EngineFacts\(...\), got"):
        double_runner(facts={"lora": True})


def test_removed_option_names_its_replacement():
    with pytest.raises(dg.ConfigError, match=r"reset_state= was removed: .*bound=.*StateSlot"):
        double_runner(reset_state=print)
