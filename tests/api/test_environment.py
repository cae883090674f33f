"""Environment variables: switches, and names that do not exist."""

from __future__ import annotations

import pytest

import devgraph as dg
from devgraph.api.environment import (
    DEBUG_VARIABLE,
    EMULATE_VARIABLE,
    VARIABLES,
    VERIFY_VARIABLE,
    VLLM_VARIABLE,
    switch,
    warn_unknown,
)
from tests.support.runner_steps import double_runner, rows_of_x

ON = ("1", "true", "on", "yes", "ON", " Yes ")
OFF = ("", "0", "false", "off", "no", "OFF", "False")


@pytest.mark.parametrize("text", [*ON, *OFF])
@pytest.mark.parametrize("variable", [EMULATE_VARIABLE, DEBUG_VARIABLE, VERIFY_VARIABLE])
def test_all_switches_have_the_same_words(
    variable: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, text)
    runner = double_runner(config={"buckets": [2]}, captured=False)
    runner.capture()
    state = {
        EMULATE_VARIABLE: runner.effective_policy == "emulated",
        DEBUG_VARIABLE: runner.run({"x": rows_of_x(2)}).__class__.__name__ == "LeasedTensor",
        VERIFY_VARIABLE: runner.stats().checks > 0,
    }
    assert state == {name: name == variable and text in ON for name in state}


@pytest.mark.parametrize("variable", [EMULATE_VARIABLE, DEBUG_VARIABLE, VERIFY_VARIABLE])
def test_another_value_of_a_switch_is_refused_with_its_name(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "maybe")
    with pytest.raises(dg.ConfigError, match=variable):
        double_runner(captured=False)


def test_a_switch_may_have_words_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (VLLM_VARIABLE, DEBUG_VARIABLE):
        monkeypatch.setenv(name, "Strict")
    assert switch(VLLM_VARIABLE) == "strict"
    with pytest.raises(dg.ConfigError, match="'Strict' is invalid. Valid values: 1, true"):
        switch(DEBUG_VARIABLE)


def test_a_variable_that_does_not_exist_is_a_warning_with_the_nearest_name(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setenv("DEVGRAPH_MODES", "{}")
    double_runner(captured=False)
    double_runner(captured=False)
    [one] = recwarn
    assert issubclass(one.category, dg.DeviceGraphWarning)
    assert "unknown environment variable DEVGRAPH_MODES" in str(one.message)
    assert "Did you mean 'DEVGRAPH_MODE'?" in str(one.message)


def test_known_variables_are_no_reason_to_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*VARIABLES, "DEVGRAPH_TEST_HIP_SIM", "DEVGRAPH_AUTOLOAD_WAS_ON"):
        monkeypatch.setenv(name, "0")
    warn_unknown()
