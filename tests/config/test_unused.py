"""Keys of a phase that have no effect."""

from __future__ import annotations

from typing import Any

import pytest

from devgraph.api.config.phase import KEYS, PHASES, PhaseConfig, phase_config
from devgraph.api.config.unused import UNUSED, unused

CASES: list[tuple[str, dict[str, Any], dict[str, str]]] = [
    ("decode", {"policy": "disabled", "max_bs": 8}, {"max_bs": "the policy is 'disabled'"}),
    ("decode", {"max_requests": 8}, {"max_requests": "decode takes its sizes from its buckets"}),
    ("prefill", {"max_requests": 8}, {"max_requests": "any number of requests"}),
    ("prefill", {"policy": "full", "max_requests": 8}, {}),
    ("decode", {"lazy_hits": 3}, {"lazy_hits": "only capture='lazy'"}),
    ("decode", {"lazy_hits": 3, "capture": "lazy"}, {}),
    ("prefill", {"miss_budget": 3}, {"miss_budget": "no key is recorded"}),
    ("decode", {"miss_budget": 3}, {}),
    ("decode", {"compiler": "inductor"}, {"compiler": "only piecewise compiles"}),
    ("prefill", {"policy": "piecewise", "compiler": "inductor"}, {}),
    ("decode", {"buckets": [4], "max_bs": 8}, {"max_bs": "a list of buckets is used"}),
    ("decode", {"buckets": [4, 8], "max_bs": 8}, {}),
]


@pytest.mark.parametrize(("phase", "keys", "reasons"), CASES)
def test_explicit_keys_that_nothing_reads_have_a_reason(
    phase: str, keys: dict[str, Any], reasons: dict[str, str]
) -> None:
    told = unused(phase, phase_config(keys, phase))
    assert told.keys() == reasons.keys()
    for key, part in reasons.items():
        assert part in told[key]


def test_a_default_that_is_written_out_needs_no_reason() -> None:
    keys = {"capture": "eager", "lazy_hits": 2, "max_bs": None, "buckets": [4], "compiler": "eager"}
    assert unused("decode", PhaseConfig(policy="full", explicit=frozenset(keys), **keys)) == {}


def test_defaults_need_no_reason() -> None:
    for phase in PHASES:
        assert unused(phase, PhaseConfig(policy="disabled")) == {}
    assert {row.key for row in UNUSED} == set(KEYS) - {"policy"}
