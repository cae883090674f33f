"""Which policies an engine's features allow: the compatibility rules, as one table.

An engine states facts about itself (``EngineFacts``); ``resolve`` applies the table. A *safety*
rule guards against wrong results, a crash or a hang; a *preference* rule against a loss; a *note*
changes nothing and tells what has to be arranged; a *scope* rule says that a phase does not occur
on this node at all. What a rule does to an explicit choice depends on that: safety refuses it,
preference warns and keeps it, scope sets it aside, because one configuration serves all nodes.

A rule holds for every policy that is registered (devgraph/api/policy), except those that promise
what it spares.

The table holds what SGLang and vLLM apply today for their breakable, piecewise and full modes,
except what concerns one model architecture only.

A second table, ``UNUSED``, names the settings that nothing reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Set
from typing import Any

import attrs

from devgraph.api.config.facts import EngineFacts
from devgraph.api.config.phase import KEYS, PHASES, RUNNER_POLICY, PhaseConfig
from devgraph.api.policy import BREAKS, UNTRACED, WHOLE, breaks, compiles, policies

WEAKER = ("breakable", "disabled")
"""What a rule may make of a policy, from the stronger to the weaker: rules never strengthen one,
and so cannot undo each other."""


@attrs.frozen(kw_only=True)
class Rule:
    """One row: in which phases and for which policies, when, and what follows."""

    name: str
    kind: str
    """``safety``, ``preference``, ``note`` or ``scope``."""
    when: Callable[[EngineFacts, PhaseConfig], bool]
    explanation: str
    source: str
    phases: tuple[str, ...] = PHASES
    spares: Set[str] | None = None
    """A policy that promises all of these is spared; None spares no policy."""
    key: str = "policy"
    value: Any = "disabled"
    """What ``key`` is set to, or a function of facts and phase configuration; a note sets
    nothing."""

    def result(self, facts: EngineFacts, phase: PhaseConfig) -> Any:
        """Return the value that the rule sets."""
        value = self.value(facts, phase) if callable(self.value) else self.value
        return KEYS[self.key].read(value, self.name)


_SGLANG = "https://github.com/sgl-project/sglang"
_VLLM = "https://github.com/vllm-project/vllm"


def _aligned(facts: EngineFacts, phase: PhaseConfig) -> tuple[int, ...]:
    step = facts.moe_all_to_all_align
    return tuple(sorted({-(-size // step) * step for size in phase.buckets or ()}))


def _row(kind: str) -> Callable[..., Rule]:
    def row(name: str, *phases: str, **rest: Any) -> Rule:
        return Rule(name=name, kind=kind, phases=phases or PHASES, **rest)

    return row


_safety, _preference, _note, _scope = map(_row, ("safety", "preference", "note", "scope"))
_INSIDE = {"spares": {BREAKS}, "value": "breakable"}
"""Of rules about marked code that is captured with the rest."""
_TRACED = {"spares": {UNTRACED}, "value": "breakable"}
"""Of rules about policies that trace or compile the step's own code."""

RULES: tuple[Rule, ...] = (
    # Phases that do not occur.
    _scope(
        "role-prefill",
        "decode",
        when=lambda facts, _: facts.role == "prefill",
        explanation="this node never decodes, so decode graphs would only take memory",
        source=f"{_SGLANG}/pull/30409",
    ),
    _scope(
        "role-decode",
        "prefill",
        when=lambda facts, _: facts.role == "decode",
        explanation="this node never prefills, so prefill graphs would only take memory",
        source=f"{_SGLANG}/pull/30409",
    ),
    _scope(
        "pooling-decode",
        "decode",
        when=lambda facts, _: facts.pooling,
        explanation="the model never decodes, so decode graphs would only take memory",
        source="SGLang 0.5.23, arg_groups/model_hook.py",
    ),
    # What the engine does around a step.
    _safety(
        "weight-offload",
        when=lambda facts, _: facts.weight_offload,
        explanation="weights that move during a step are at other addresses than the graph reads",
        source=f"{_SGLANG}/pull/23664",
    ),
    _safety(
        "debug-hooks",
        when=lambda facts, _: facts.debug_hooks,
        explanation="Python hooks do not run when a graph is replayed, so dumps would lack frames",
        source=f"{_SGLANG}/pull/38439",
    ),
    _safety(
        "kv-sharding",
        "prefill",
        when=lambda facts, _: facts.kv_sharding,
        explanation="prefill follows a sharding plan of each request that a capture does not have",
        source="SGLang 0.5.23, arg_groups/kv_shard_hook.py",
    ),
    _safety(
        "kv-layerwise",
        **_INSIDE,
        when=lambda facts, _: facts.kv_layerwise,
        explanation="the host's wait before each layer is skipped by a replay, so attention reads "
        "pages that have not arrived; marked no_graph, it runs between segments",
        source=f"{_VLLM}/pull/31057",
    ),
    _note(
        "kv-offload",
        when=lambda facts, _: facts.kv_offload,
        explanation="pages that move between steps keep their addresses: graphs stay on; attach "
        "the transfers to the layers before capture",
        source=f"{_SGLANG}/issues/25526, {_SGLANG}/pull/38354",
    ),
    _safety(
        "memory-saver",
        spares={WHOLE},
        when=lambda facts, _: facts.memory_saver and not facts.suspend_on_release,
        explanation="segments hand tensors to eager code across a release that nobody announced; "
        "call suspend and resume of the runner around it",
        source="https://github.com/NVIDIA-NeMo/RL/pull/3612",
    ),
    _note(
        "memory-saver-full",
        when=lambda facts, _: facts.memory_saver and not facts.suspend_on_release,
        explanation="memory comes back without its contents: buffers that are filled once, at "
        "start, must stay outside what is released",
        source=f"{_SGLANG}/pull/30474",
    ),
    # Attention.
    _safety(
        "attention-prefill",
        "prefill",
        **_INSIDE,
        when=lambda facts, _: facts.attention != "always",
        explanation="a full prefill graph holds attention over requests of mixed lengths, which "
        "this attention cannot have captured",
        source=f"{_VLLM}/pull/20059",
    ),
    _safety(
        "attention-decode",
        "decode",
        **_INSIDE,
        when=lambda facts, _: facts.attention == "never",
        explanation="this attention cannot be captured at all; between segments it runs eagerly",
        source=f"{_VLLM}/pull/20059",
    ),
    _safety(
        "attention-width",
        "decode",
        **_INSIDE,
        when=lambda facts, _: (
            facts.attention == "single_token_decode" and facts.speculative_tokens > 0
        ),
        explanation="a verify step has several tokens per request, and this attention can be "
        "captured with one only",
        source=f"{_VLLM}/pull/20059",
    ),
    _safety(
        "region-update",
        **_INSIDE,
        when=lambda facts, _: facts.host_lengths and not facts.region_update,
        explanation="attention takes lengths from the host and this backend cannot update regions "
        "inside a graph, so the lengths of the capture would stay",
        source="devgraph: Capabilities.region_update",
    ),
    _preference(
        "slower-prefill",
        "prefill",
        when=lambda facts, _: facts.slower_prefill,
        explanation="a captured prefill falls back to a slower attention kernel than eager uses",
        source="SGLang 0.5.23, the graph hook of arg_groups",
    ),
    _note(
        "full-prefill",
        "prefill",
        spares={BREAKS},
        when=lambda *_: True,
        explanation="a full prefill graph has a fixed number of request slots; batches of more "
        "requests run eagerly",
        source=f"{_SGLANG}/pull/27988",
    ),
    _note(
        "speculation",
        "decode",
        when=lambda facts, _: facts.speculative_tokens > 0,
        explanation="verify batches are variants of their own (width = 1 + draft tokens), which is "
        "no reason to switch graphs off",
        source=f"{_VLLM}/pull/36165, {_SGLANG}/pull/25795",
    ),
    _note(
        "dynamic-speculation",
        "decode",
        when=lambda facts, _: facts.dynamic_speculation,
        explanation="declare a variant per width that occurs; a step of another width runs as "
        "prefill",
        source=f"{_VLLM}/pull/45953",
    ),
    # Ranks.
    _safety(
        "collectives",
        when=lambda facts, _: facts.collectives and not facts.collectives_capturable,
        explanation="the body holds collectives and this backend cannot capture them",
        source="devgraph: Capabilities.collectives",
    ),
    _preference(
        "pipeline-parallel",
        "prefill",
        when=lambda facts, _: facts.pipeline_parallel > 1,
        explanation="graphs of a pipeline stage pay off for small prefills only; large ones can be "
        "slower than eager",
        source=f"{_SGLANG}/pull/36248",
    ),
    _safety(
        "context-parallel",
        "prefill",
        when=lambda facts, _: facts.context_parallel > 1 and not facts.context_parallel_static,
        explanation="ranks that share a prefill exchange sizes that differ from those of capture",
        source="SGLang 0.5.23, the graph hook of arg_groups",
    ),
    _safety(
        "decode-context-parallel",
        "prefill",
        when=lambda facts, _: facts.decode_context_parallel > 1,
        explanation="prefill gathers the KV shards by a plan of each batch that a capture lacks",
        source=f"{_SGLANG}/pull/38943",
    ),
    _safety(
        "two-batch-overlap",
        spares={WHOLE},
        when=lambda facts, _: facts.two_batch_overlap,
        explanation="two interleaved halves would share the segments and break in each other's "
        "middle",
        source=f"{_SGLANG}/issues/7511, {_VLLM}/pull/23693",
    ),
    _note(
        "dp-attention",
        when=lambda facts, _: facts.data_parallel_attention,
        explanation="ranks without work must take part in every decision and step: agree on each "
        "decision and run idle ranks with it",
        source=f"{_SGLANG}/issues/19252",
    ),
    _note(
        "voted-captures",
        when=lambda facts, phase: (
            phase.capture != "eager" and (facts.collectives or facts.data_parallel_attention)
        ),
        explanation="a bucket is captured on all ranks or on none: every rank calls idle() at the "
        "same point between steps, and one that has requests passes ready=False",
        source="devgraph: docs/distributed.md",
    ),
    _safety(
        "moe-host-counts",
        **_INSIDE,
        when=lambda facts, _: facts.moe_all_to_all == "host",
        explanation="the exchange between experts reads its counts on the host; marked no_graph, "
        "it runs between segments",
        source=f"{_SGLANG}/pull/5014",
    ),
    _preference(
        "moe-unproven",
        "prefill",
        when=lambda facts, _: facts.moe_all_to_all == "unproven",
        explanation="nobody has tried this exchange between experts under capture",
        source="SGLang 0.5.23, the graph hook of arg_groups",
    ),
    _safety(
        "moe-align",
        "prefill",
        key="align",
        value=lambda facts, phase: math.lcm(facts.moe_all_to_all_align, phase.align),
        when=lambda facts, phase: phase.align % facts.moe_all_to_all_align != 0,
        explanation="the exchange between experts can hang with other prefill sizes",
        source="SGLang 0.5.23, the graph hook of arg_groups",
    ),
    _safety(
        "moe-align-buckets",
        "prefill",
        key="buckets",
        value=_aligned,
        when=lambda facts, phase: (
            phase.buckets is not None and _aligned(facts, phase) != phase.buckets
        ),
        explanation="the exchange between experts can hang with other prefill sizes",
        source="SGLang 0.5.23, the graph hook of arg_groups",
    ),
    # The model.
    _safety(
        "multimodal",
        "prefill",
        when=lambda facts, _: facts.multimodal == "outside",
        explanation="embeddings that join outside the captured body are dropped by a replay; give "
        "them an input slot",
        source=f"{_SGLANG}/pull/30620",
    ),
    _note(
        "encoder",
        "prefill",
        when=lambda facts, _: facts.multimodal != "none",
        explanation="what encodes images or audio has graphs of its own: an EncoderRunner, whose "
        "policy is its config and no phase of a mode",
        source="vLLM 0.33, CompilationConfig.cudagraph_mm_encoder",
    ),
    _safety(
        "encoder-decoder",
        "prefill",
        when=lambda facts, _: facts.encoder_decoder,
        explanation="the first decoder step takes another path than a replay would",
        source=f"{_VLLM}/pull/30072",
    ),
    _preference(
        "pooling-prefill",
        "prefill",
        **_INSIDE,
        when=lambda facts, _: facts.pooling,
        explanation="pooling reads the lengths of each batch after the body",
        source="vLLM 0.33, config/vllm.py",
    ),
    _note(
        "lora",
        when=lambda facts, _: facts.lora,
        explanation="steps with and without adapters are variants; without them one graph always "
        "pays for adapters",
        source=f"{_VLLM}/pull/25914",
    ),
    _safety(
        "host-recorder",
        spares={BREAKS, UNTRACED},
        value="breakable",
        when=lambda facts, _: facts.host_recorder,
        explanation="the recorder reads device data on the host; marked no_graph, it runs between "
        "segments",
        source="SGLang 0.5.18, server_args.py",
    ),
    # Tracing and compiling.
    _safety(
        "piecewise-backend",
        when=lambda facts, _: not facts.piecewise or not facts.compilers,
        explanation="this backend cannot capture compiled pieces",
        source=f"{_SGLANG}/pull/27811, devgraph: Capabilities.piecewise",
        **_TRACED,
    ),
    _safety(
        "piecewise-compiler",
        spares={UNTRACED},
        key="compiler",
        value=lambda facts, _: facts.compilers[0],
        when=lambda facts, phase: facts.compilers and phase.compiler not in facts.compilers,
        explanation="this backend has no such compiler for the pieces",
        source="devgraph: Capabilities.compilers",
    ),
    _safety(
        "piecewise-torch-compile",
        when=lambda facts, _: facts.torch_compile,
        explanation="the engine compiles the whole model already; it cannot be split again",
        source="SGLang 0.5.18, server_args.py",
        **_TRACED,
    ),
    _safety(
        "piecewise-traceable",
        when=lambda facts, _: not facts.traceable,
        explanation="torch.compile cannot trace this model",
        source="SGLang 0.5.18, server_args.py",
        **_TRACED,
    ),
    _safety(
        "piecewise-lora",
        when=lambda facts, _: facts.lora,
        explanation="adapter data is rebound per batch, which breaks the guards of traced code",
        source=f"{_SGLANG}/pull/19469, {_SGLANG}/pull/25783",
        **_TRACED,
    ),
    _preference(
        "piecewise-dp-attention",
        when=lambda facts, _: facts.data_parallel_attention,
        explanation="sizes gathered over ranks are host values that tracing specialises on",
        source=f"{_SGLANG}/issues/11490",
        **_TRACED,
    ),
    _preference(
        "piecewise-moe",
        when=lambda facts, _: facts.moe_all_to_all != "none",
        explanation="exchanges between experts are not proven to trace",
        source=f"{_SGLANG}/pull/13638",
        **_TRACED,
    ),
    _preference(
        "piecewise-role",
        when=lambda facts, _: facts.role != "both",
        explanation="KV transfers of disaggregated serving are not proven to trace",
        source="SGLang 0.5.18, server_args.py",
        **_TRACED,
    ),
    _preference(
        "piecewise-deterministic",
        when=lambda facts, _: facts.deterministic,
        explanation="tracing chooses kernel configurations once, for another batch size than runs",
        source=f"{_VLLM}/pull/57586",
        **_TRACED,
    ),
    _preference(
        "piecewise-symmetric-memory",
        when=lambda facts, _: facts.symmetric_memory,
        explanation="collectives over symmetric memory are not proven to trace",
        source="SGLang 0.5.18, server_args.py",
        **_TRACED,
    ),
)
"""The whole table, in the order of application."""


@attrs.frozen
class Unused:
    """One row: when nothing reads a key of a phase, whatever its value is."""

    key: str
    when: Callable[[PhaseConfig, int | None], bool]
    """Takes the phase and, where it is known, the runner's capacity."""
    because: str
    phases: tuple[str, ...] = tuple(RUNNER_POLICY)


UNUSED: tuple[Unused, ...] = (
    *(
        Unused(key, lambda phase, _: phase.policy == "disabled", "the policy is 'disabled'")
        for key in KEYS
        if key != "policy"
    ),
    Unused(
        "max_requests",
        lambda *_: True,
        "decode is sized by its buckets; request slots are of a full prefill graph",
        ("decode",),
    ),
    Unused(
        "max_requests",
        lambda phase, _: breaks(phase.policy),
        "with breaks a prefill graph takes any number of requests",
        ("prefill",),
    ),
    Unused("lazy_hits", lambda phase, _: phase.capture != "lazy", "only capture='lazy' counts"),
    Unused("min_speedup", lambda phase, _: phase.emulate, "an emulated graph is the step itself"),
    Unused("learned", lambda phase, _: phase.capture == "eager", "all buckets come at start"),
    Unused(
        "miss_budget",
        lambda phase, _: breaks(phase.policy),
        "with breaks marked code runs eagerly, so no key can be missed",
    ),
    Unused(
        "compiler",
        lambda phase, _: not compiles(phase.policy),
        f"only {' and '.join(name for name in policies() if compiles(name))} compiles",
    ),
    Unused(
        "max_bs",
        lambda phase, _: phase.buckets is not None and phase.max_bs != phase.buckets[-1],
        "the buckets are listed, and a list is kept exactly",
    ),
    Unused(
        "max_bs",
        lambda phase, most: most is not None and phase.max_bs is not None and phase.max_bs > most,
        "it is over the capacity of the runner",
    ),
)
"""The whole table; of several rows that hold for a key the first is told."""


def unused(phase: str, config: PhaseConfig, capacity: int | None = None) -> dict[str, str]:
    """Return the chosen keys of a phase that have no effect, with the reason of each."""
    found: dict[str, str] = {}
    for row in UNUSED:
        if row.key in config.explicit and phase in row.phases and row.when(config, capacity):
            found.setdefault(row.key, row.because)
    return found
