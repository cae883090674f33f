"""Estimates of what graphs of a model will take, before any of them exists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from devgraph.api.capabilities import Capabilities
from devgraph.api.config.model import PhaseConfig
from devgraph.runners.buckets import Buckets, Phase

__all__ = ["Estimate", "ModelSizes", "estimate", "ranges"]


@attrs.frozen(kw_only=True)
class ModelSizes:
    """The sizes of a decoder that the memory of its graphs depends on."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    item_bytes: int
    """Bytes of one number."""

    @classmethod
    def from_config(cls, config: Any, item_bytes: int) -> ModelSizes:
        """Read the configuration of a transformers model."""
        text = config.get_text_config()
        heads = text.num_attention_heads
        return cls(
            layers=text.num_hidden_layers,
            hidden=text.hidden_size,
            # Some older families leave the common factor out of their configuration.
            intermediate=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
            heads=heads,
            kv_heads=getattr(text, "num_key_value_heads", None) or heads,
            head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
            vocabulary=text.vocab_size,
            item_bytes=item_bytes,
        )

    @property
    def token_bytes(self) -> int:
        """Most memory that the intermediate results of one token take at one time.

        In attention: residual, its norm, query, key, value and the result. In the MLP: residual,
        its norm, gate, up and their product. Nothing of one layer outlives the next.
        """
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = 2 * self.hidden + 2 * queries + 2 * keys
        mlp = 2 * self.hidden + 3 * self.intermediate
        return max(attention, mlp) * self.item_bytes

    @property
    def logit_bytes(self) -> int:
        """Memory of the logits of one row."""
        return self.vocabulary * self.item_bytes


@attrs.frozen(kw_only=True)
class Estimate:
    """What one phase will capture."""

    phase: str
    policy: str
    buckets: tuple[int, ...]
    graphs_per_bucket: int | None
    """1 under ``full``; else the segments between the regions, one region a layer."""
    graphs: int | None
    streams: int | None
    """At least one a graph; None on a backend where captured graphs hold none."""
    bytes: int | None
    """Graph memory: the largest bucket where graphs share a pool, else the sum of all."""


def estimate(
    phase: Phase,
    config: PhaseConfig,
    *,
    capacity: int,
    sizes: ModelSizes | None,
    capabilities: Capabilities | None,
) -> Estimate:
    """Return what ``config`` will capture for a phase.

    Args:
        phase: "decode" or "prefill".
        config: what holds for it, after all rules.
        capacity: most requests (decode) or tokens (prefill) of a step.
        sizes: the model; None leaves out what depends on it.
        capabilities: of the backend; None takes the careful defaults.

    Raises:
        ConfigError: a bucket is over the capacity or not aligned.
    """
    if config.policy == "disabled":
        return Estimate(
            phase=phase,
            policy=config.policy,
            buckets=(),
            graphs_per_bucket=0,
            graphs=0,
            streams=0,
            bytes=0,
        )
    top = capacity if config.max_bs is None else min(config.max_bs, capacity)
    buckets = Buckets.of(config.buckets, phase=phase, maximum=top, multiple_of=config.align)
    each = 1 if config.policy == "full" else None if sizes is None else sizes.layers + 1
    graphs = None if each is None else each * len(buckets)
    able = capabilities or Capabilities()
    scarce = capabilities is None or capabilities.max_streams is not None
    return Estimate(
        phase=phase,
        policy=config.policy,
        buckets=tuple(buckets),
        graphs_per_bucket=each,
        graphs=graphs,
        streams=graphs if scarce else None,
        bytes=None if sizes is None else _bytes(phase, config.policy, buckets, sizes, able),
    )


def _bytes(
    phase: Phase, policy: str, buckets: Sequence[int], sizes: ModelSizes, able: Capabilities
) -> int:
    rows = [buckets[-1]] if able.shared_pool else list(buckets)
    # Logits of every row are inside a decode graph; a prefill's tail runs after the replay.
    row_bytes = sizes.token_bytes + (sizes.logit_bytes if phase == "decode" else 0)
    return sum(rows) * row_bytes


def ranges(sizes: Sequence[int]) -> str:
    """Return ascending numbers for people: ``1 2 4..12 by 4 16..256 by 8``."""
    parts: list[str] = []
    at = 0
    while at < len(sizes):
        end = at + 1
        while end + 1 < len(sizes) and sizes[end + 1] - sizes[end] == sizes[at + 1] - sizes[at]:
            end += 1
        if end - at >= 3:
            parts.append(f"{sizes[at]}..{sizes[end]} by {sizes[at + 1] - sizes[at]}")
            at = end + 1
        else:
            parts.append(str(sizes[at]))
            at += 1
    return " ".join(parts)
