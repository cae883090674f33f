"""The keys of a phase: each is declared once, and everything that shows it follows."""

from __future__ import annotations

import json
from pathlib import Path

import attrs
import pytest

from devgraph.api.config.model import DeviceGraphConfig
from devgraph.api.config.phase import DEFAULT_POLICY, KEYS, PHASES, Key, PhaseConfig
from devgraph.api.errors import ConfigError
from tests.support.config_cases import make_parser


def test_phase_config_checks_and_normalises_values_given_in_python() -> None:
    phase = PhaseConfig(policy="full", buckets=[8, 1, 8], max_padding=3)  # type: ignore[arg-type]
    assert phase.buckets == (1, 8)
    assert isinstance(phase.max_padding, float)
    assert phase.explicit == {"policy", "buckets", "max_padding"}
    with pytest.raises(ConfigError, match=r"buckets\[0\]"):
        PhaseConfig(policy="full", buckets=(-1,))
    with pytest.raises(ConfigError, match="bucket 9 is over max_bs=8"):
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
    assert fields == [*KEYS, "explicit"]
    options = make_parser()._option_string_actions
    for key in KEYS.values():
        for phase in PHASES:
            flag = f"--{phase}-device-graph-{key.flag}"
            assert (flag in options) == (key.flag is not None)
            assert key.flag is None or key.meaning in (options[flag].help or "")
        if key.default is not attrs.NOTHING:
            assert key.read(key.default, key.name) == key.default


def test_numbers_too_large_for_a_float_are_refused_with_the_path() -> None:
    with pytest.raises(ConfigError, match=r"max_padding: expected a finite number of at least 1"):
        PhaseConfig(policy="full", max_padding=10**400)
