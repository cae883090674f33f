"""What an engine says about itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from devgraph.api.capabilities import Capabilities
from devgraph.api.config.facts import EngineFacts
from devgraph.api.errors import ConfigError, ConfigTypeError


def backend_with(**capabilities: Any) -> SimpleNamespace:
    return SimpleNamespace(
        name="other",
        capabilities=Capabilities(**capabilities),
        recommended_mode={"prefill": "full"},
    )


def test_facts_include_the_declarations_of_a_backend() -> None:
    facts = EngineFacts(lora=True).on_backend(backend_with(region_update=True))
    assert facts == EngineFacts(
        backend="other",
        recommended={"prefill": "full"},
        lora=True,
        region_update=True,
        piecewise=False,
        compilers=("eager",),
        collectives_capturable=False,
    )
    stated = {"region_update": False, "piecewise": False, "compilers": ("inductor",)}
    able = backend_with(region_update=True, piecewise=True, compilers=("eager", "inductor"))
    narrowed = EngineFacts(**stated, collectives_capturable=False).on_backend(able)
    assert {name: getattr(narrowed, name) for name in stated} == stated


@pytest.mark.parametrize(
    ("values", "kind", "part"),
    [
        ({"loar": True}, ConfigError, "facts: there is no fact 'loar'.*Did you mean 'lora'"),
        ({"lora": 1}, ConfigTypeError, "facts.lora: expected true or false"),
        (
            {"pipeline_parallel": True},
            ConfigTypeError,
            "parallel: expected an integer",
        ),
        ({"pipeline_parallel": 0}, ConfigError, "at least 1"),
        ({"attention": "alway"}, ConfigError, "facts.attention.*Did you mean 'always'"),
        ({"role": None}, ConfigTypeError, "facts.role"),
        ({"backend": 5}, ConfigTypeError, "facts.backend: expected the name of a backend, got 5"),
        ({"recommended": {"decod": "full"}}, ConfigError, "Did you mean 'decode'"),
        ({"recommended": {"decode": "ful"}}, ConfigError, r"recommended.decode.*mean 'full'"),
        ([], ConfigTypeError, "facts: expected an object"),
        ({"compilers": 5}, ConfigTypeError, "facts.compilers: expected a list of compilers"),
        ({"compilers": "eager"}, ConfigTypeError, "facts.compilers: expected a list of compilers"),
        ({"compilers": ["eagre"]}, ConfigError, r"compilers\[0\].*Did you mean 'eager'"),
        ({"pipeline_parallel": -(10**2000)}, ConfigError, "got -10{1,40}\\.\\.\\.0{1,40}\n"),
    ],
)
def test_facts_from_a_file_are_checked(
    values: dict[str, Any], kind: type[Exception], part: str
) -> None:
    with pytest.raises(kind, match=part):
        EngineFacts.from_dict(values)
