"""Prompts in chunks behind a cached prefix on CUDA: in graphs, the tokens of eager steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.device_kit import on

pytest.importorskip("transformers", reason="the transformers integration")

from devgraph.api.config.model import DeviceGraphConfig
from devgraph.integrations.transformers import Engine
from tests.support.transformers_models import VOCABULARY, make_model

backend, _ = on("cuda")

pytestmark = pytest.mark.cuda

CHUNK = 16
"""Prompts are whole chunks, so that no step is padded and eager steps run the same kernels."""

LENGTHS = (4 * CHUNK, CHUNK, 5 * CHUNK, 3 * CHUNK)


def run(be: Any, model: Any, policy: str) -> tuple[list[list[int]], Any, Engine]:
    """Generate in steps of one chunk; return the tokens, the prefill's statistics, the engine."""
    prefill = {"policy": policy, "buckets": [CHUNK]} if policy != "disabled" else policy
    config = DeviceGraphConfig.from_dict({"decode": "disabled", "prefill": prefill})
    generator = torch.Generator().manual_seed(4)
    texts = [torch.randint(0, VOCABULARY, (n,), generator=generator).tolist() for n in LENGTHS]
    with Engine(
        model, config=config, backend=be, max_requests=1, max_len=100, max_step_tokens=CHUNK
    ) as engine:
        engine.capture()
        for layer in engine.model.cache.layers:
            layer.keys.fill_(float("nan"))
            layer.values.fill_(float("nan"))
        done = engine.generate(texts, max_new_tokens=6)
        assert engine.prefill.stats().steps == sum(LENGTHS) // CHUNK
        return [list(one.token_ids) for one in done], engine.prefill.stats(), engine


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("policy", ["full", "breakable"])
def test_chunks_behind_a_prefix_give_the_tokens_of_eager(
    be: Any, policy: str, dtype: torch.dtype
) -> None:
    model = make_model("llama", hidden_size=64, head_dim=16).to(be.device, dtype)
    want, _, _ = run(be, model, "disabled")
    got, stats, engine = run(be, model, policy)
    assert got == want
    steps = sum(LENGTHS) // CHUNK
    assert stats.graph_steps + sum(stats.eager.values()) == steps
    if engine.model.varlen or policy == "breakable":
        assert stats.graph_steps == steps
        assert sum(stats.updates.values()) == 0, "lengths come from the device or an eager body"
    else:
        broken = stats.updates["broken_over_miss_budget"] + stats.updates["broken_over_copy_budget"]
        gone = stats.updates["repeats"] + stats.updates["hits"] + stats.updates["misses"] + broken
        assert gone + sum(stats.eager.values()) >= steps, "every step is counted the way it went"


def test_attention_with_device_lengths_is_found(be: Any) -> None:
    model = make_model("llama", hidden_size=64, head_dim=16).to(be.device, torch.bfloat16)
    with Engine(model, backend=be, max_requests=1, max_len=64) as engine:
        assert engine.model.varlen
