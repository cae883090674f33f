"""Compatibility rules about the model, and about compiling it in pieces."""

from __future__ import annotations

from typing import Any

from devgraph.api.config.rule import ANY, SGLANG, VLLM, Rule, row

__all__ = ["MODEL_RULES", "PIECEWISE_RULES"]

MODEL_RULES = (
    row(
        "multimodal",
        "safety",
        ANY,
        phases=("prefill",),
        value="disabled",
        when=lambda facts, _: facts.multimodal == "outside",
        explanation="embeddings that join outside the captured body are dropped by a replay; give "
        "them an input slot",
        source=f"{SGLANG}/pull/30620",
    ),
    row(
        "encoder-decoder",
        "safety",
        ANY,
        phases=("prefill",),
        value="disabled",
        when=lambda facts, _: facts.encoder_decoder,
        explanation="the first decoder step takes another path than a replay would",
        source=f"{VLLM}/pull/30072",
    ),
    row(
        "pooling-prefill",
        "preference",
        "full",
        phases=("prefill",),
        value="breakable",
        when=lambda facts, _: facts.pooling,
        explanation="pooling reads the lengths of each batch after the body",
        source="vLLM 0.33, config/vllm.py",
    ),
    row(
        "lora",
        "note",
        ("full", "breakable"),
        when=lambda facts, _: facts.lora,
        explanation="steps with and without adapters are variants; without them one graph always "
        "pays for adapters",
        source=f"{VLLM}/pull/25914",
    ),
    row(
        "host-recorder",
        "safety",
        ("full", "piecewise"),
        value="breakable",
        when=lambda facts, _: facts.host_recorder,
        explanation="the recorder reads device data on the host; marked no_graph, it runs between "
        "segments",
        source="SGLang 0.5.18, server_args.py",
    ),
)


def _piecewise(name: str, kind: str, **rest: Any) -> Rule:
    return row(name, kind, "piecewise", value="breakable", **rest)


PIECEWISE_RULES = (
    _piecewise(
        "piecewise-backend",
        "safety",
        when=lambda facts, _: not facts.piecewise,
        explanation="this backend cannot capture compiled pieces",
        source=f"{SGLANG}/pull/27811, devgraph: Capabilities.piecewise",
    ),
    row(
        "piecewise-compiler",
        "safety",
        "piecewise",
        key="compiler",
        value="eager",
        when=lambda facts, phase: phase.compiler not in facts.compilers,
        explanation="this backend has no such compiler for the pieces",
        source="devgraph: Capabilities.compilers",
    ),
    _piecewise(
        "piecewise-torch-compile",
        "safety",
        when=lambda facts, _: facts.torch_compile,
        explanation="the engine compiles the whole model already; it cannot be split again",
        source="SGLang 0.5.18, server_args.py",
    ),
    _piecewise(
        "piecewise-traceable",
        "safety",
        when=lambda facts, _: not facts.traceable,
        explanation="torch.compile cannot trace this model",
        source="SGLang 0.5.18, server_args.py",
    ),
    _piecewise(
        "piecewise-lora",
        "safety",
        when=lambda facts, _: facts.lora,
        explanation="adapter data is rebound per batch, which breaks the guards of traced code",
        source=f"{SGLANG}/pull/19469, {SGLANG}/pull/25783",
    ),
    _piecewise(
        "piecewise-dp-attention",
        "preference",
        when=lambda facts, _: facts.data_parallel_attention,
        explanation="sizes gathered over ranks are host values that tracing specialises on",
        source=f"{SGLANG}/issues/11490",
    ),
    _piecewise(
        "piecewise-moe",
        "preference",
        when=lambda facts, _: facts.moe_all_to_all != "none",
        explanation="exchanges between experts are not proven to trace",
        source=f"{SGLANG}/pull/13638",
    ),
    _piecewise(
        "piecewise-role",
        "preference",
        when=lambda facts, _: facts.role != "both",
        explanation="KV transfers of disaggregated serving are not proven to trace",
        source="SGLang 0.5.18, server_args.py",
    ),
    _piecewise(
        "piecewise-deterministic",
        "preference",
        when=lambda facts, _: facts.deterministic,
        explanation="tracing chooses kernel configurations once, for another batch size than runs",
        source=f"{VLLM}/pull/57586",
    ),
    _piecewise(
        "piecewise-symmetric-memory",
        "preference",
        when=lambda facts, _: facts.symmetric_memory,
        explanation="collectives over symmetric memory are not proven to trace",
        source="SGLang 0.5.18, server_args.py",
    ),
)
