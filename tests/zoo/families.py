"""Tiny models with random weights of every causal language model class of transformers."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY = 97
LAYERS = 4
LARGEST = 30_000_000
"""Parameters; a class that cannot be made smaller by its configuration is not built."""

_HIDDEN = ("hidden_size", "d_model", "n_embd", "dim", "lru_width", "word_embed_proj_dim")
_INNER = ("intermediate_size", "ffn_dim", "n_inner", "d_ff", "decoder_ffn_dim", "encoder_ffn_dim")
_DEPTH = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "decoder_layers",
    "encoder_layers",
    "num_decoder_layers",
    "num_encoder_layers",
)
_HEADS = (
    "num_attention_heads",
    "n_head",
    "n_heads",
    "num_heads",
    "decoder_attention_heads",
    "encoder_attention_heads",
)
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")

# What a configuration of any family has of this is set; the rest is its default.
_TINY: dict[str, Any] = {
    **dict.fromkeys(_HIDDEN, 32),
    **dict.fromkeys(_INNER, 48),
    **dict.fromkeys(_DEPTH, LAYERS),
    **dict.fromkeys(_HEADS, 4),
    **dict.fromkeys(_EXPERTS, 4),
    "vocab_size": VOCABULARY,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "n_positions": 128,
    "max_seq_len": 128,
    # Shorter than most of the prompts.
    "sliding_window": 16,
    # Wide enough that the best token is never within rounding of the second best.
    "initializer_range": 0.3,
    "init_std": 0.3,
    # Tied, wide embeddings would make a model repeat its input for ever.
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "is_decoder": True,
    # A rule of generate, not of the model.
    "forced_eos_token_id": None,
    "rotary_dim": 4,
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
    "mamba_d_state": 8,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_expand": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}

# What the rules of a family need to fit together.
_SPECIAL: dict[str, dict[str, Any]] = {
    "BambaForCausalLM": {"attn_layer_indices": [1, 3]},
    "Dots1ForCausalLM": {"n_shared_experts": 1},
    "FalconH1ForCausalLM": {"mamba_d_ssm": 64},
    "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 2]]},
    "GraniteMoeHybridForCausalLM": {"layer_types": ["mamba", "attention"] * 2},
    "JambaForCausalLM": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "KimiLinearForCausalLM": {"num_experts_per_token": 2},
    "Lfm2ForCausalLM": {"layer_types": ["conv", "full_attention"] * 2},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"] * 2},
    "LongcatFlashForCausalLM": {"ffn_hidden_size": 48, "expert_ffn_hidden_size": 16},
    "Mamba2ForCausalLM": {"head_dim": 16, "n_groups": 1},
    "Mistral4ForCausalLM": {"num_key_value_heads": 4},
    # Its cache forgets what its mask shows past this window, so a request must fit in it; the
    # real model's is as long as its positions.
    "MoshiForCausalLM": {"sliding_window": 128},
    "MusicgenForCausalLM": {"num_codebooks": 1},
    "MusicgenMelodyForCausalLM": {"num_codebooks": 1},
    "ReformerModelWithLMHead": {"axial_pos_embds": False},
    "XLMWithLMHeadModel": {"emb_dim": 32, "n_words": VOCABULARY},
    "XmodForCausalLM": {"default_language": "en_XX"},
    "ZambaForCausalLM": {"use_mamba_kernels": False},
    "ZayaForCausalLM": {"num_experts_per_tok": 1},
}


def families() -> list[str]:
    """Return the names of the classes, sorted."""
    exported = {name for name in dir(transformers) if name.endswith("ForCausalLM")}
    mapped = {
        name
        for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        if not name.endswith("ForConditionalGeneration")
    }
    return sorted((exported | mapped) - {"AutoModelForCausalLM"})


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep what families say about tiny configurations out of the output."""
    disabled = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def build(name: str) -> Any:
    """Return a model of class ``name`` in evaluation mode.

    Raises:
        Exception: whatever transformers raises for a configuration that is tiny, or a ValueError
            when the model would be large all the same.
    """
    made = getattr(transformers, name)
    config = _config(name, made.config_class)
    with torch.device("meta"):
        size = sum(p.numel() for p in made(config).parameters())
    if size > LARGEST:
        raise ValueError(f"{size / 1e6:.0f} million parameters with this configuration")
    torch.manual_seed(0)
    return made(_config(name, made.config_class)).float().eval()


def _config(name: str, kind: type[Any]) -> Any:
    own = kind().to_dict()
    values = {key: value for key, value in _TINY.items() if key in own}
    heads = [own[key] for key in _HEADS if key in own]
    if own.get("num_key_value_heads") in heads:
        values["num_key_value_heads"] = 4
    if types := own.get("layer_types"):
        different = list(dict.fromkeys(types))
        values["layer_types"] = (different * LAYERS)[:LAYERS]
    return kind(**values | _SPECIAL.get(name, {}))
