"""A real model's decode and prefill steps on the CPU reference: tokens and caches bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from devgraph.cpu.memory import BlockPool
from tests.support.cpu_capture import record, same

transformers = pytest.importorskip("transformers")

torch.set_num_threads(1)

LENGTH = 32


def build(family: str, attention: str, dtype: torch.dtype) -> Any:
    """Return a small random model of ``family``."""
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 128,
        "max_position_embeddings": 64,
        "attn_implementation": attention,
    }
    name = {"llama": "Llama", "qwen3": "Qwen3", "gemma3": "Gemma3Text"}[family]
    config = getattr(transformers, f"{name}Config")(**sizes)
    cls = getattr(transformers, {"gemma3": "Gemma3ForCausalLM"}.get(family, f"{name}ForCausalLM"))
    return cls(config).to(dtype).eval()


class Engine:
    """The model with tensors at fixed addresses: ids, positions, mask, and a cache per layer."""

    def __init__(self, model: Any, tokens: int) -> None:
        self.model = model
        self.ids = torch.zeros(1, tokens, dtype=torch.int64)
        self.positions = torch.zeros(1, tokens, dtype=torch.int64)
        config = model.config
        head = getattr(config, "head_dim", None) or 64 // 4
        shape = (1, config.num_key_value_heads, LENGTH, head)
        self.caches = [
            (torch.zeros(shape, dtype=model.dtype), torch.zeros(shape, dtype=model.dtype))
            for _ in range(config.num_hidden_layers)
        ]

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new keys and values where the positions say; the cache's interface."""
        cache = self.caches[layer_idx]
        cache[0].index_copy_(2, self.positions[0], keys)
        cache[1].index_copy_(2, self.positions[0], values)
        return cache

    def get_seq_length(self, *_: Any) -> int:
        return 0

    def __call__(self) -> torch.Tensor:
        mask = torch.arange(LENGTH) <= self.positions[0, :, None]
        bias = torch.zeros(mask.shape, dtype=self.model.dtype)
        bias = bias.masked_fill(~mask, torch.finfo(self.model.dtype).min)[None, None]
        hidden = self.model.model.embed_tokens(self.ids)
        masks = {"full_attention": bias, "sliding_attention": bias}
        use_dict = type(self.model).__name__.startswith(("Gemma", "Qwen"))
        hidden = self.model.model(
            inputs_embeds=hidden,
            position_ids=self.positions,
            attention_mask=masks if use_dict else bias,
            past_key_values=self,
            use_cache=True,
        ).last_hidden_state
        logits: torch.Tensor = self.model.lm_head(hidden[:, -1:])
        return logits

    def run(self, ids: list[int], start: int) -> None:
        """Set the inputs of the next step."""
        self.ids.copy_(torch.tensor([ids]))
        self.positions.copy_(torch.arange(start, start + len(ids))[None])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_prefill_and_decode_replays_equal_eager(
    family: str, dtype: torch.dtype, attention: str
) -> None:
    model = build(family, attention, dtype)
    pool = BlockPool()
    prompt = [5, 17, 99, 3, 8]
    with torch.inference_mode():
        eager, graph = Engine(model, 5), Engine(model, 5)
        prefill, prefill_out = record(graph, pool=pool)
        step, caches = Engine(model, 1), graph.caches
        step.caches = caches
        decode, decode_out = record(step, pool=pool)
        assert not any(k.any() or v.any() for k, v in caches), "the capture wrote the cache"

        eager.run(prompt, 0)
        graph.run(prompt, 0)
        expected = eager()
        prefill.replay()
        assert same(prefill_out, expected)
        one = Engine(model, 1)
        one.caches = eager.caches
        token, start = int(expected.argmax()), len(prompt)
        for position in range(start, start + 8):
            one.run([token], position)
            step.run([token], position)
            expected = one()
            decode.replay()
            assert same(decode_out, expected)
            token = int(expected.argmax())
        for mine, theirs in zip(caches, eager.caches, strict=True):
            assert same(mine[0], theirs[0]) and same(mine[1], theirs[1])
