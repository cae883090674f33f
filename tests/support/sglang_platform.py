"""An out-of-tree platform of SGLang on the CPU reference, and an engine on it.

As a script: ``python sglang_platform.py FOLDER JSON`` makes a tiny model and a plugin's metadata in
FOLDER, runs ``sglang.Engine`` with the keyword arguments in JSON and prints what it wrote as JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

PROMPTS = ["w1 w2 w3", "w5 w6 w7 w8 w9 w10", "w1 w2 w3 w4", " ".join(f"w{n}" for n in range(90))]

PLUGINS = """
[sglang.srt.platforms]
reference = tests.support.sglang_platform:activate
[sglang.srt.plugins]
devgraph = devgraph.integrations.sglang:plugin
"""

SAVER = """
import contextlib


class Saver:
    enabled = True

    def region(self, **options):
        return contextlib.nullcontext()

    def pause(self, tag):
        pass

    resume = pause


configure_subprocess, torch_memory_saver = contextlib.nullcontext, Saver()
"""
"""What stands for torch_memory_saver, which needs a GPU: it pauses nothing."""


def activate() -> str:
    """Name the platform's class, as SGLang asks a plugin for it."""
    return f"{__name__}.Reference"


def __getattr__(name: str) -> Any:
    if name != "Reference":
        raise AttributeError(name)
    globals()[name] = _reference()
    return globals()[name]


def _reference() -> Any:
    from devgraph import is_capturing
    from devgraph.integrations.sglang import DeviceGraphPlatform

    class Stream(torch.cpu.Stream):
        """torch has no streams on the CPU; SGLang's runners ask for these names."""

        stream_id = 0

        def wait_stream(self, other: Any) -> None:
            pass

    one = Stream()
    for attribute, value in {
        "Stream": Stream,
        "current_stream": lambda device=None: one,
        "is_current_stream_capturing": is_capturing,
    }.items():
        setattr(torch.cpu, attribute, value)
    mixin = importlib.import_module("sglang.srt.platforms.cpu").CpuDeviceMixin

    class Reference(mixin, DeviceGraphPlatform):  # type: ignore[misc]
        """The CPU as SGLang would see a device that it does not know."""

        _enum = DeviceGraphPlatform._enum

        def get_default_attention_backend(self) -> str:
            return "masked"

        def init_backend(self) -> None:
            super().init_backend()
            registry = importlib.import_module("sglang.srt.layers.attention.attention_registry")
            registry.ATTENTION_BACKENDS["masked"] = lambda runner: _masked()(runner)

    return Reference


def _masked() -> Any:
    native = importlib.import_module("sglang.srt.layers.attention.torch_native_backend")

    class Masked(native.TorchNativeAttnBackend):  # type: ignore[misc]
        """SGLang's torch-native attention, whose decode reads no length on the host."""

        def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
            pass

        def init_forward_metadata_out_graph(self, forward_batch: Any, **options: Any) -> None:
            pass

        def get_cuda_graph_seq_len_fill_value(self) -> int:
            return 1

        def _run_sdpa_forward_decode(
            self,
            query: torch.Tensor,
            output: torch.Tensor,
            k_cache: torch.Tensor,
            v_cache: torch.Tensor,
            req_to_token: torch.Tensor,
            req_pool_indices: torch.Tensor,
            seq_lens: torch.Tensor,
            encoder_lens: Any = None,
            scaling: float | None = None,
            enable_gqa: bool = False,
            **options: Any,
        ) -> torch.Tensor:
            slots = req_to_token[req_pool_indices]
            seen = torch.arange(slots.shape[1])[None] < seq_lens[:, None]
            found = torch.nn.functional.scaled_dot_product_attention(
                query[:, :, None],
                k_cache[slots].movedim(1, 2),
                v_cache[slots].movedim(1, 2),
                attn_mask=seen[:, None, None],
                enable_gqa=enable_gqa,
                scale=scaling,
            )
            return output.copy_(found[:, :, 0])

    return Masked


def rounds() -> list[list[str]]:
    """Return the prompts; once more with three words behind them, which have a prefix then; and one
    after the other more lengths than a graph that is updated records at once."""
    lengths = [[" ".join(f"w{200 + n + word}" for word in range(n))] for n in range(17, 31)]
    return [PROMPTS, [f"{prompt} w11 w12 w13" for prompt in PROMPTS], *lengths]


def make_model(folder: Path) -> None:
    """Write a random model of two layers with a tokenizer of whole words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=511,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    words = {f"w{n}": n for n in range(510)} | {"<unk>": 510, "</s>": 511}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")
    made.save_pretrained(folder)


def make_plugins(folder: Path) -> None:
    """Write what an installed package would declare, the platform and devgraph's plugin, and what
    SGLang's memory saver stands on."""
    (folder / "torch_memory_saver.py").write_text(SAVER)
    metadata = folder / "reference_platform-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: reference-platform\nVersion: 1.0\n"
    )
    (metadata / "entry_points.txt").write_text(PLUGINS)


def main(folder: Path, options: dict[str, Any]) -> None:
    """Generate for all prompts, and once more, behind a cached prefix.

    SGLang kills its scheduler, so ``wait_s`` among the options is how long its counters have to
    reach their file.
    """
    wait_s = options.pop("wait_s", 0)
    engine = importlib.import_module("sglang").Engine(
        model_path=str(folder / "model"),
        device="cpu",
        dtype="float32",
        attention_backend="masked",
        sampling_backend="pytorch",
        grammar_backend="none",
        max_total_tokens=2048,
        max_running_requests=8,
        chunked_prefill_size=64,
        **options,
    )
    texts = []
    for prompts in rounds():
        found = engine.generate(prompts, {"temperature": 0, "max_new_tokens": 12})
        texts.append([one["text"] for one in found])
        if options.get("enable_memory_saver"):
            engine.release_memory_occupation(tags=["cuda_graph"])
            engine.resume_memory_occupation(tags=["cuda_graph"])
    sys.stdout.write(json.dumps(texts) + "\n")
    time.sleep(wait_s)
    engine.shutdown()


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
