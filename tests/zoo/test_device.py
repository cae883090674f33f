"""Families of transformers on a GPU: graphs generate what the same engine does without them."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="the transformers integration")

from tests.support.device_kit import on
from tests.zoo.running import REFUSED, RUNS, UNCAPTURED, meet
from tests.zoo.test_zoo import SAMPLE

backend, randn = on("cuda")

pytestmark = pytest.mark.cuda

SMALL = {
    "BloomForCausalLM",  # ALiBi
    "FalconForCausalLM",  # attention beside the MLP
    "JambaForCausalLM",  # recurrent state
    "OlmoeForCausalLM",  # experts
}
OTHERWISE = {
    "FalconForCausalLM": {UNCAPTURED},  # indexes with a list, which is copied from the host
    "JambaForCausalLM": {RUNS, REFUSED},  # by its dtype
    "MoshiForCausalLM": {RUNS, REFUSED},  # before transformers 5.23
    "Qwen3NextForCausalLM": {RUNS, REFUSED},  # by its dtype
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", sorted(SAMPLE | SMALL))
def test_family_generates_in_graphs_what_it_does_without(name: str, dtype: torch.dtype) -> None:
    assert meet(name, "cuda", dtype).verdict in OTHERWISE.get(name, {RUNS})
