"""The compatibility rules: a table of policies that do not suit an engine.

An engine states facts (``EngineFacts``), and ``resolve`` applies the table. The kind of a rule
decides its effect on an explicit choice:

- ``safety`` prevents wrong results, a crash or a hang: the choice is an error.
- ``preference`` prevents a loss of speed or memory: the choice is kept, with a warning.
- ``note`` changes nothing and states a requirement for the engine.
- ``scope`` disables a phase that never runs on this node, because all nodes share one
  configuration.

A rule applies to every registered policy (devgraph/api/policy), except to policies that make all
promises in the rule's ``spares``.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any

import attrs

from devgraph.api.config.facts import EngineFacts
from devgraph.api.config.phase import KEYS, PHASES, PhaseConfig
from devgraph.api.policy import BREAKS, UNTRACED, WHOLE

WEAKER = ("breakable", "disabled")
"""The policies that a rule may set, from stronger to weaker. Rules never strengthen a policy, so
they cannot undo each other."""


@attrs.frozen(kw_only=True)
class Rule:
    """One row of the table."""

    name: str
    kind: str
    when: Callable[[EngineFacts, PhaseConfig], bool]
    explanation: str
    source: str
    phases: tuple[str, ...] = PHASES
    spares: Set[str] | None = None
    """A policy that makes all of these promises is exempt; None exempts no policy."""
    key: str = "policy"
    value: Any = "disabled"
    """The new value of ``key``, or a function of the facts and the phase. Notes ignore it."""

    def result(self, facts: EngineFacts, phase: PhaseConfig) -> Any:
        """Return the value that the rule sets."""
        value = self.value(facts, phase) if callable(self.value) else self.value
        return KEYS[self.key].read(value, self.name)


_SGLANG = "https://github.com/sgl-project/sglang"
_VLLM = "https://github.com/vllm-project/vllm"


def _row(kind: str) -> Callable[..., Rule]:
    def row(name: str, *phases: str, **fields: Any) -> Rule:
        return Rule(name=name, kind=kind, phases=phases or PHASES, **fields)

    return row


_safety, _preference, _note, _scope = map(_row, ("safety", "preference", "note", "scope"))
_INSIDE = {"spares": {BREAKS}, "value": "breakable"}
"""Fields of rules about code that cannot be captured but can run eagerly between segments."""
_TRACED = {"spares": {UNTRACED}, "value": "breakable"}
"""Fields of rules about policies that trace or compile the step."""

RULES: tuple[Rule, ...] = (
    # Phases that never run on the node.
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
    # Work of the engine around a step.
    _safety(
        "weight-offload",
        when=lambda facts, _: facts.weight_offload,
        explanation="weights that move during a step leave the addresses that the graph reads",
        source=f"{_SGLANG}/pull/23664",
    ),
    _safety(
        "debug-hooks",
        when=lambda facts, _: facts.debug_hooks,
        explanation="a replay does not run Python hooks, so dumps would be incomplete",
        source=f"{_SGLANG}/pull/38439",
    ),
    _safety(
        "kv-layerwise",
        **_INSIDE,
        when=lambda facts, _: facts.kv_layerwise and not facts.gates,
        explanation="a replay skips the host's wait before each layer, so attention would read "
        "pages that have not arrived; wait at gates instead, or mark the wait with no_graph so "
        "that it runs between segments",
        source=f"{_VLLM}/pull/31057",
    ),
    _safety(
        "memory-saver",
        spares={WHOLE},
        when=lambda facts, _: facts.memory_saver and not facts.suspend_on_release,
        explanation="tensors that segments pass to eager code do not survive a release of their "
        "memory; call suspend and resume of the runner around each release",
        source="https://github.com/NVIDIA-NeMo/RL/pull/3612",
    ),
    _safety(
        "two-batch-overlap",
        spares={WHOLE},
        when=lambda facts, _: facts.two_batch_overlap,
        explanation="the interleaved halves of a batch would share segments, and a break in one "
        "half would interrupt the other",
        source=f"{_SGLANG}/issues/7511, {_VLLM}/pull/23693",
    ),
    # Attention.
    _safety(
        "attention-prefill",
        "prefill",
        **_INSIDE,
        when=lambda facts, _: facts.attention != "always",
        explanation="a full prefill graph contains attention over requests of mixed lengths, "
        "which this attention implementation cannot capture",
        source=f"{_VLLM}/pull/20059",
    ),
    _safety(
        "attention-decode",
        "decode",
        **_INSIDE,
        when=lambda facts, _: facts.attention == "never",
        explanation="this attention cannot be captured; it runs eagerly between segments",
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
        "captured only with one",
        source=f"{_VLLM}/pull/20059",
    ),
    _safety(
        "region-update",
        **_INSIDE,
        when=lambda facts, _: facts.host_lengths and not facts.region_update,
        explanation="attention reads lengths from the host, and this backend cannot update "
        "regions inside a graph, so replays would use the lengths of the capture",
        source="devgraph: Capabilities.region_update",
    ),
    _note(
        "full-prefill",
        "prefill",
        spares={BREAKS},
        when=lambda *_: True,
        explanation="a full prefill graph has max_requests request slots; batches with more "
        "requests run eagerly",
        source=f"{_SGLANG}/pull/27988",
    ),
    # Ranks.
    _safety(
        "collectives",
        when=lambda facts, _: facts.collectives and not facts.collectives_capturable,
        explanation="the step contains collectives, and this backend cannot capture them",
        source="devgraph: Capabilities.collectives",
    ),
    _preference(
        "pipeline-parallel",
        "prefill",
        when=lambda facts, _: facts.pipeline_parallel > 1,
        explanation="with pipeline stages, graphs speed up only small prefills; large prefills "
        "can be slower than eager runs",
        source=f"{_SGLANG}/pull/36248",
    ),
    _safety(
        "context-parallel",
        "prefill",
        when=lambda facts, _: facts.context_parallel > 1,
        explanation="ranks that share a prefill exchange data whose sizes depend on the batch",
        source="SGLang 0.5.23, the graph hook of arg_groups",
    ),
    _note(
        "dp-attention",
        when=lambda facts, _: facts.data_parallel_attention,
        explanation="ranks without requests must take part in every vote and step: call agree() "
        "on every rank, and then run() with the returned decision, also on idle ranks",
        source=f"{_SGLANG}/issues/19252",
    ),
    _note(
        "voted-captures",
        when=lambda facts, phase: (
            phase.capture != "eager" and (facts.collectives or facts.data_parallel_attention)
        ),
        explanation="a bucket is captured on all ranks or on none: every rank calls idle() at the "
        "same point between steps, and a rank with requests passes ready=False",
        source="devgraph: docs/distributed.md",
    ),
    # The model.
    _safety(
        "moe-host-counts",
        **_INSIDE,
        when=lambda facts, _: facts.moe_host_counts,
        explanation="the exchange between experts reads its counts on the host; mark it with "
        "no_graph so that it runs between segments",
        source=f"{_SGLANG}/pull/5014",
    ),
    _safety(
        "multimodal",
        "prefill",
        when=lambda facts, _: facts.multimodal == "outside",
        explanation="a replay ignores embeddings that are added outside the captured step; pass "
        "them through an input slot",
        source=f"{_SGLANG}/pull/30620",
    ),
    _safety(
        "encoder-decoder",
        "prefill",
        when=lambda facts, _: facts.encoder_decoder,
        explanation="the first decoder step runs code that a graph of later steps does not contain",
        source=f"{_VLLM}/pull/30072",
    ),
    _note(
        "lora",
        when=lambda facts, _: facts.lora,
        explanation="steps with and without adapters are variants; without variants, every step "
        "includes the cost of adapters",
        source=f"{_VLLM}/pull/25914",
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
        explanation="this backend does not support that compiler for pieces",
        source="devgraph: Capabilities.compilers",
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
        explanation="adapter data is rebound per batch, so the guards of traced code would fail",
        source=f"{_SGLANG}/pull/19469, {_SGLANG}/pull/25783",
        **_TRACED,
    ),
)
"""The table of rules. After each change, the application starts again at the top."""
