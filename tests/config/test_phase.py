"""The keys of a phase: each is declared once, and everything that shows it follows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest

from devgraph.api.config.model import DeviceGraphConfig
from devgraph.api.config.phase import (
    DEFAULT_POLICY,
    KEYS,
    PHASES,
    Key,
    PhaseConfig,
    Verify,
    verify_from_environment,
)
from devgraph.api.errors import ConfigError, ConfigTypeError
from tests.support.config_cases import make_parser


def test_phase_config_checks_and_normalises_values_given_in_python() -> None:
    phase = PhaseConfig(policy="full", buckets=[8, 1, 8], max_padding=3)  # type: ignore[arg-type]
    assert phase.buckets == (1, 8)
    assert isinstance(phase.max_padding, float)
    assert phase.explicit == {"policy", "buckets", "max_padding"}
    with pytest.raises(ConfigError, match=r"buckets\[0\]"):
        PhaseConfig(policy="full", buckets=(-1,))
    with pytest.raises(ConfigError, match="bucket 9 exceeds max_bs=8"):
        PhaseConfig(policy="full", buckets=(9,), max_bs=8)
    with pytest.raises(ConfigError, match=r"backends\.x\.decode: the bucket 9"):
        DeviceGraphConfig(
            decode=PhaseConfig(policy="full", buckets=(9,)),
            overlays={"x": {"decode": {"max_bs": 8}}},
        )


def test_documentation_has_the_table_of_keys() -> None:
    text = (Path(__file__).parents[2] / "docs" / "modes.md").read_text()
    rows = [
        f"| `{key.name}` | {_default(key)} | {key.accepts}{', or `null`' * key.optional} | "
        f"{key.meaning} |"
        for key in KEYS.values()
    ]
    assert "\n".join(rows) in text


def _default(key: Key) -> str:
    if key.default is attrs.NOTHING:
        return " / ".join(f"`{name}`" for name in DEFAULT_POLICY.values())
    return f"`{json.dumps(key.default)}`"


def test_every_field_is_a_key_with_its_flag_and_reader() -> None:
    fields = [field.name for field in attrs.fields(PhaseConfig)]
    assert fields == [*KEYS, "explicit", "kept", "overlays"]
    options = make_parser()._option_string_actions
    for key in KEYS.values():
        for phase in PHASES:
            flag = f"--{phase}-device-graph-{key.flag}"
            assert (flag in options) == (key.flag is not None)
            assert key.flag is None or key.meaning in (options[flag].help or "")
        if key.default is not attrs.NOTHING:
            assert key.read(key.default, key.name) == key.default


@pytest.mark.parametrize(
    ("value", "read", "written"),
    [
        (None, None, None),
        ("start", Verify(), "start"),
        ({}, Verify(), "start"),
        ({"start": False}, None, None),
        ({"start": True, "every": 1000}, Verify(every=1000), {"start": True, "every": 1000}),
        ({"every": 5}, Verify(every=5), {"start": True, "every": 5}),
        (
            {"start": False, "every": 5},
            Verify(start=False, every=5),
            {"start": False, "every": 5},
        ),
    ],
)
def test_verify_is_read_and_written(value: Any, read: Verify | None, written: Any) -> None:
    config = DeviceGraphConfig.from_dict({"decode": {"verify": value}})
    assert config.decode.verify == read
    assert config.decode.to_dict()["verify"] == written
    assert DeviceGraphConfig.from_json(config.to_json()) == config
    assert hash(config) == hash(DeviceGraphConfig.from_json(config.to_json()))


@pytest.mark.parametrize(
    ("value", "kind", "part"),
    [
        ("stat", ConfigTypeError, r"decode.verify: expected null, \"start\" or an object"),
        (True, ConfigTypeError, "decode.verify: expected null"),
        ({"steps": 5}, ConfigError, "decode.verify: there is no entry 'steps'.*every"),
        ({"every": 0}, ConfigError, "decode.verify.every: expected at least 1, got 0"),
        ({"start": 1}, ConfigTypeError, "decode.verify.start: expected true or false"),
    ],
)
def test_verify_that_cannot_be_read_is_refused(
    value: Any, kind: type[Exception], part: str
) -> None:
    with pytest.raises(kind, match=part):
        DeviceGraphConfig.from_dict({"decode": {"verify": value}})


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("", None),
        ("0", None),
        ("Off", None),
        ("1", Verify()),
        ("start", Verify()),
        ('{"start": false, "every": 7}', Verify(start=False, every=7)),
    ],
)
def test_environment_may_hold_the_value_of_verify(
    text: str, read: Verify | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEVGRAPH_VERIFY", text)
    assert verify_from_environment() == read


@pytest.mark.parametrize("text", ["stat", "7", '{"steps": 7}', "["])
def test_environment_that_cannot_be_read_is_refused_by_name(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEVGRAPH_VERIFY", text)
    with pytest.raises(ConfigError, match="DEVGRAPH_VERIFY: "):
        verify_from_environment()


def test_numbers_too_large_for_a_float_are_refused_with_the_path() -> None:
    with pytest.raises(ConfigError, match=r"max_padding: expected a finite number of at least 1"):
        PhaseConfig(policy="full", max_padding=10**400)
