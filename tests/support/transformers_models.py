"""Small models with random weights, one per family, and what transformers generates with them."""

# ruff: noqa: E402  (imports follow the skip where transformers is missing)

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", reason="the transformers integration")

from devgraph.integrations.transformers.names import CACHES

VOCABULARY = 211
CACHE = CACHES[0]
"""Argument of a forward, and key of its output, that holds the cache."""

# Tensors here are so small that threads cost more than they bring, most of all when tests run in
# several processes.
torch.set_num_threads(1)

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    # Wide enough that the best token is never within rounding of the second best.
    "initializer_range": 0.3,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "head_dim": 16,
            "num_hidden_layers": 4,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "query_pre_attn_scalar": 24,
            # Tied, the wide embeddings would make the model repeat its input for ever.
            "tie_word_embeddings": False,
        },
    ),
    "gemma2": (
        "Gemma2Config",
        {
            "head_dim": 16,
            "num_hidden_layers": 4,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "attn_logit_softcapping": 4.0,
            "final_logit_softcapping": 10.0,
            "query_pre_attn_scalar": 16,
            "tie_word_embeddings": False,
        },
    ),
    "mistral": ("MistralConfig", {"sliding_window": 8, "head_dim": 12}),
    "gpt2": (
        "GPT2Config",
        {"n_embd": 48, "n_head": 4, "n_layer": 2, "scale_attn_by_inverse_layer_idx": True},
    ),
    # Positions are learned, the head's forward calls the decoder inside the base model.
    "opt": ("OPTConfig", {"ffn_dim": 64, "word_embed_proj_dim": 48}),
    # Rotary embeddings of the first quarter of each head.
    "gpt_neox": ("GPTNeoXConfig", {}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "olmoe": (
        "OlmoeConfig",
        {"num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 4},
    ),
}


def make_model(family: str, *, seed: int = 0, **overrides: Any) -> Any:
    """Return a model of ``family`` with random weights, in evaluation mode."""
    name, special = FAMILIES[family]
    values = {**_COMMON, **special, **overrides}
    if family == "gpt2":
        for key in ("hidden_size", "num_hidden_layers", "num_attention_heads"):
            values.pop(key)
        for key in ("intermediate_size", "num_key_value_heads"):
            values.pop(key)
        values["n_positions"] = values.pop("max_position_embeddings")
    torch.manual_seed(seed)
    config = getattr(transformers, name)(**values)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    if family == "gemma2":
        # The reference must cap scores; transformers' fused attention did not before 5.18.
        model.set_attn_implementation("eager")
    return model


def prompts(count: int, *, seed: int = 1, shortest: int = 1, longest: int = 23) -> list[list[int]]:
    """Return ``count`` random prompts of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.linspace(shortest, longest, count).long().tolist()
    return [torch.randint(0, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def reference(model: Any, prompt: Sequence[int], new: int, **kwargs: Any) -> list[int]:
    """Return the tokens that ``model.generate`` adds to one prompt, greedily."""
    ids = torch.tensor([list(prompt)], device=next(model.parameters()).device)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new,
        do_sample=False,
        pad_token_id=0,
        **kwargs,
    )
    tokens: list[int] = out[0, ids.shape[1] :].tolist()
    return tokens
