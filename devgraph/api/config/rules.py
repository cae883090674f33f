"""Which policies an engine's features allow: the compatibility rules, as one table.

An engine states facts about itself (``EngineFacts``); ``resolve`` applies the table. A *safety*
rule guards against wrong results, a crash or a hang; a *preference* rule against a loss; a *note*
changes nothing and tells what has to be arranged; a *scope* rule says that a phase does not occur
on this node at all. What a rule does to an explicit choice depends on that: safety refuses it,
preference warns and keeps it, scope sets it aside, because one configuration serves all nodes.

The table holds what SGLang and vLLM apply today for their breakable, piecewise and full modes,
except what concerns one model architecture only. Such rules belong to the engine, which passes
them as ``rules=(*RULES, Rule(...))``.
"""

from __future__ import annotations

import math

from devgraph.api.config.facts import EngineFacts
from devgraph.api.config.model import PhaseConfig
from devgraph.api.config.rule import ANY, SGLANG, VLLM, Rule, row
from devgraph.api.config.rules_model import MODEL_RULES, PIECEWISE_RULES

__all__ = ["RULES", "EngineFacts", "Rule"]


def _aligned(facts: EngineFacts, phase: PhaseConfig) -> tuple[int, ...]:
    step = facts.moe_all_to_all_align
    return tuple(sorted({-(-size // step) * step for size in phase.buckets or ()}))


_SCOPE_RULES = (
    row(
        "role-prefill",
        "scope",
        ANY,
        phases=("decode",),
        value="disabled",
        when=lambda facts, _: facts.role == "prefill",
        explanation="this node never decodes, so decode graphs would only take memory",
        source=f"{SGLANG}/pull/30409",
    ),
    row(
        "role-decode",
        "scope",
        ANY,
        phases=("prefill",),
        value="disabled",
        when=lambda facts, _: facts.role == "decode",
        explanation="this node never prefills, so prefill graphs would only take memory",
        source=f"{SGLANG}/pull/30409",
    ),
    row(
        "pooling-decode",
        "scope",
        ANY,
        phases=("decode",),
        value="disabled",
        when=lambda facts, _: facts.pooling,
        explanation="the model never decodes, so decode graphs would only take memory",
        source="SGLang 0.5.23, arg_groups/model_hook.py",
    ),
)

_ENGINE_RULES = (
    row(
        "weight-offload",
        "safety",
        ANY,
        value="disabled",
        when=lambda facts, _: facts.weight_offload,
        explanation="weights that move during a step are at other addresses than the graph reads",
        source=f"{SGLANG}/pull/23664",
    ),
    row(
        "debug-hooks",
        "safety",
        ANY,
        value="disabled",
        when=lambda facts, _: facts.debug_hooks,
        explanation="Python hooks do not run when a graph is replayed, so dumps would lack frames",
        source=f"{SGLANG}/pull/38439",
    ),
    row(
        "kv-sharding",
        "safety",
        ANY,
        phases=("prefill",),
        value="disabled",
        when=lambda facts, _: facts.kv_sharding,
        explanation="prefill follows a sharding plan of each request that a capture does not have",
        source="SGLang 0.5.23, arg_groups/kv_shard_hook.py",
    ),
    row(
        "kv-layerwise",
        "safety",
        "full",
        value="breakable",
        when=lambda facts, _: facts.kv_layerwise,
        explanation="the host's wait before each layer is skipped by a replay, so attention reads "
        "pages that have not arrived; marked no_graph, it runs between segments",
        source=f"{VLLM}/pull/31057",
    ),
    row(
        "kv-offload",
        "note",
        ANY,
        when=lambda facts, _: facts.kv_offload,
        explanation="pages that move between steps keep their addresses: graphs stay on; attach "
        "the transfers to the layers before capture",
        source=f"{SGLANG}/issues/25526, {SGLANG}/pull/38354",
    ),
    row(
        "memory-saver",
        "safety",
        ("breakable", "piecewise"),
        value="disabled",
        when=lambda facts, _: facts.memory_saver and not facts.suspend_on_release,
        explanation="segments hand tensors to eager code across a release that nobody announced; "
        "call suspend and resume of the runner around it",
        source="https://github.com/NVIDIA-NeMo/RL/pull/3612",
    ),
    row(
        "memory-saver-full",
        "note",
        "full",
        when=lambda facts, _: facts.memory_saver and not facts.suspend_on_release,
        explanation="memory comes back without its contents: buffers that are filled once, at "
        "start, must stay outside what is released",
        source=f"{SGLANG}/pull/30474",
    ),
)

_ATTENTION_RULES = (
    row(
        "attention-prefill",
        "safety",
        "full",
        phases=("prefill",),
        value="breakable",
        when=lambda facts, _: facts.attention != "always",
        explanation="a full prefill graph holds attention over requests of mixed lengths, which "
        "this attention cannot have captured",
        source=f"{VLLM}/pull/20059",
    ),
    row(
        "attention-decode",
        "safety",
        "full",
        phases=("decode",),
        value="breakable",
        when=lambda facts, _: facts.attention == "never",
        explanation="this attention cannot be captured at all; between segments it runs eagerly",
        source=f"{VLLM}/pull/20059",
    ),
    row(
        "attention-width",
        "safety",
        "full",
        phases=("decode",),
        value="breakable",
        when=lambda facts, _: (
            facts.attention == "single_token_decode" and facts.speculative_tokens > 0
        ),
        explanation="a verify step has several tokens per request, and this attention can be "
        "captured with one only",
        source=f"{VLLM}/pull/20059",
    ),
    row(
        "region-update",
        "safety",
        "full",
        value="breakable",
        when=lambda facts, _: facts.host_lengths and not facts.region_update,
        explanation="attention takes lengths from the host and this backend cannot update regions "
        "inside a graph, so the lengths of the capture would stay",
        source="devgraph: Capabilities.region_update",
    ),
    row(
        "slower-prefill",
        "preference",
        ANY,
        phases=("prefill",),
        value="disabled",
        when=lambda facts, _: facts.slower_prefill,
        explanation="a captured prefill falls back to a slower attention kernel than eager uses",
        source="SGLang 0.5.23, arg_groups/cuda_graph_hook.py",
    ),
    row(
        "full-prefill",
        "note",
        "full",
        phases=("prefill",),
        when=lambda *_: True,
        explanation="a full prefill graph has a fixed number of request slots; batches of more "
        "requests run eagerly",
        source=f"{SGLANG}/pull/27988",
    ),
    row(
        "speculation",
        "note",
        ANY,
        phases=("decode",),
        when=lambda facts, _: facts.speculative_tokens > 0,
        explanation="verify batches are variants of their own (width = 1 + draft tokens), which is "
        "no reason to switch graphs off",
        source=f"{VLLM}/pull/36165, {SGLANG}/pull/25795",
    ),
    row(
        "dynamic-speculation",
        "note",
        ANY,
        phases=("decode",),
        when=lambda facts, _: facts.dynamic_speculation,
        explanation="declare a variant per width that occurs; a step of another width runs as "
        "prefill",
        source=f"{VLLM}/pull/45953",
    ),
)

_PARALLEL_RULES = (
    row(
        "collectives",
        "safety",
        ANY,
        value="disabled",
        when=lambda facts, _: facts.collectives and not facts.collectives_capturable,
        explanation="the body holds collectives and this backend cannot capture them",
        source="devgraph: Capabilities.collectives",
    ),
    row(
        "pipeline-parallel",
        "preference",
        ANY,
        phases=("prefill",),
        value="disabled",
        when=lambda facts, _: facts.pipeline_parallel > 1,
        explanation="graphs of a pipeline stage pay off for small prefills only; large ones can be "
        "slower than eager",
        source=f"{SGLANG}/pull/36248",
    ),
    row(
        "context-parallel",
        "safety",
        ANY,
        phases=("prefill",),
        value="disabled",
        when=lambda facts, _: facts.context_parallel > 1 and not facts.context_parallel_static,
        explanation="ranks that share a prefill exchange sizes that differ from those of capture",
        source="SGLang 0.5.23, arg_groups/cuda_graph_hook.py",
    ),
    row(
        "decode-context-parallel",
        "safety",
        ANY,
        phases=("prefill",),
        value="disabled",
        when=lambda facts, _: facts.decode_context_parallel > 1,
        explanation="prefill gathers the KV shards by a plan of each batch that a capture lacks",
        source=f"{SGLANG}/pull/38943",
    ),
    row(
        "two-batch-overlap",
        "safety",
        ("breakable", "piecewise"),
        value="disabled",
        when=lambda facts, _: facts.two_batch_overlap,
        explanation="two interleaved halves would share the segments and break in each other's "
        "middle",
        source=f"{SGLANG}/issues/7511, {VLLM}/pull/23693",
    ),
    row(
        "dp-attention",
        "note",
        ANY,
        when=lambda facts, _: facts.data_parallel_attention,
        explanation="ranks without work must take part in every decision and step: agree on each "
        "decision and run idle ranks with it",
        source=f"{SGLANG}/issues/19252",
    ),
    row(
        "moe-host-counts",
        "safety",
        "full",
        value="breakable",
        when=lambda facts, _: facts.moe_all_to_all == "host",
        explanation="the exchange between experts reads its counts on the host; marked no_graph, "
        "it runs between segments",
        source=f"{SGLANG}/pull/5014",
    ),
    row(
        "moe-unproven",
        "preference",
        ANY,
        phases=("prefill",),
        value="disabled",
        when=lambda facts, _: facts.moe_all_to_all == "unproven",
        explanation="nobody has tried this exchange between experts under capture",
        source="SGLang 0.5.23, arg_groups/cuda_graph_hook.py",
    ),
    row(
        "moe-align",
        "safety",
        ANY,
        phases=("prefill",),
        key="align",
        value=lambda facts, phase: math.lcm(facts.moe_all_to_all_align, phase.align),
        when=lambda facts, phase: phase.align % facts.moe_all_to_all_align != 0,
        explanation="the exchange between experts can hang with other prefill sizes",
        source="SGLang 0.5.23, arg_groups/cuda_graph_hook.py",
    ),
    row(
        "moe-align-buckets",
        "safety",
        ANY,
        phases=("prefill",),
        key="buckets",
        value=_aligned,
        when=lambda facts, phase: (
            phase.buckets is not None and _aligned(facts, phase) != phase.buckets
        ),
        explanation="the exchange between experts can hang with other prefill sizes",
        source="SGLang 0.5.23, arg_groups/cuda_graph_hook.py",
    ),
)

RULES: tuple[Rule, ...] = (
    *_SCOPE_RULES,
    *_ENGINE_RULES,
    *_ATTENTION_RULES,
    *_PARALLEL_RULES,
    *MODEL_RULES,
    *PIECEWISE_RULES,
)
"""The whole table, in the order of application."""
