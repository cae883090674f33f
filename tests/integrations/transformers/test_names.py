from __future__ import annotations

import pytest

pytest.importorskip("transformers", reason="the transformers integration")

from devgraph.integrations.transformers import names
from tests.support.transformers_models import make_model, torch


def test_cache_of_a_call_is_found_under_its_deprecated_name_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(names, "CACHES", ("cache", "past_key_values"))
    assert names.cache_in({"past_key_values": 1}) == 1
    assert names.cache_in({"past_key_values": None, "cache": 2}) == 2
    assert names.cache_in({"use_cache": True}) is None


def test_installed_version_has_these_names() -> None:
    out = make_model("llama")(input_ids=torch.zeros(1, 2, dtype=torch.int64))
    assert out[names.CACHES[0]].get_seq_length() == 2
