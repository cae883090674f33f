from __future__ import annotations

import pytest

pytest.importorskip("transformers", reason="the transformers integration")

from devgraph.integrations.transformers.names import NAMES, names_of
from tests.support.transformers_models import make_model, torch


@pytest.mark.parametrize(
    ("version", "cache", "length"),
    [
        ("5.10.0", "past_key_values", "past_key_values_length"),
        ("5.23.1", "past_key_values", "past_key_values_length"),
        ("5.24.0.dev0", "cache", "cache_length"),
        ("5.24.0", "cache", "cache_length"),
        ("6.0", "cache", "cache_length"),
    ],
)
def test_names_are_those_of_the_newest_entry_that_is_not_newer(
    version: str, cache: str, length: str
) -> None:
    names = names_of(version)
    assert (names.caches[0], names.length) == (cache, length)


def test_cache_of_a_call_is_found_under_its_deprecated_name_too() -> None:
    names = names_of("5.24.0")
    assert names.cache_in({"past_key_values": 1}) == 1
    assert names.cache_in({"past_key_values": None, "cache": 2}) == 2
    assert names.cache_in({"use_cache": True}) is None


def test_installed_version_has_the_names_of_the_table() -> None:
    out = make_model("llama")(input_ids=torch.zeros(1, 2, dtype=torch.int64))
    assert out[NAMES.caches[0]].get_seq_length() == 2
