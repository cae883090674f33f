"""How the next token is chosen from logits, on the device and outside the graph."""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs
import torch
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from devgraph.api.errors import InputError


@attrs.frozen(kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen; the default is greedy.

    Filters apply in the order temperature, ``top_k``, ``top_p``, as transformers applies them.
    """

    temperature: float = 0.0
    """Logits are divided by this; 0 chooses the best token always."""

    top_k: int = 0
    """Keep this many best tokens; 0 keeps all."""

    top_p: float = 1.0
    """Keep the fewest best tokens whose probabilities sum to at least this."""

    seed: int | None = None
    """The same seed, prompt and parameters give the same tokens whatever else is in the batch.
    None takes a seed that nobody chose."""

    def __attrs_post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise InputError(f"temperature must be 0 (greedy) or positive, got {self.temperature}")
        if self.top_k < 0:
            raise InputError(f"top_k must be 0 (all tokens) or positive, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if self.seed is not None and not -(1 << 63) <= self.seed < 1 << 63:
            raise InputError(f"a seed has 64 bits, got {self.seed}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


class Sampler:
    """Draws the tokens of one request, with a random stream of its own.

    Args:
        params: not greedy.
        device: where the logits are.
    """

    def __init__(self, params: SamplingParams, device: torch.device) -> None:
        self._filters = LogitsProcessorList([TemperatureLogitsWarper(float(params.temperature))])
        if params.top_k:
            self._filters.append(TopKLogitsWarper(params.top_k))
        if params.top_p < 1:
            self._filters.append(TopPLogitsWarper(params.top_p))
        self._generator = torch.Generator(device)
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params.seed)

    def draw(self, logits: Tensor) -> Tensor:
        """Return one token, a scalar int64 tensor on the device, from logits ``[vocabulary]``."""
        kept = self.kept(logits)
        # The largest of log p + Gumbel noise is a sample of p; exponential noise says the same.
        noise = torch.empty_like(kept).exponential_(generator=self._generator)
        return (torch.softmax(kept, -1) / noise).argmax(-1)

    def kept(self, logits: Tensor) -> Tensor:
        """Return float32 ``logits`` over the temperature, -inf for tokens that may not be drawn."""
        scores: Tensor = self._filters(None, logits.float()[None])
        return scores[0]


def draw_rows(logits: Tensor, best: Tensor, samplers: Sequence[Sampler | None]) -> list[int]:
    """Return a token for every row, with one transfer to the host.

    Args:
        logits: ``[rows, vocabulary]``.
        best: argmax of every row, which greedy requests take.
        samplers: one per row; None for greedy.
    """
    if any(sampler is not None for sampler in samplers):
        rows = [
            best[i] if sampler is None else sampler.draw(logits[i])
            for i, sampler in enumerate(samplers)
        ]
        best = torch.stack(rows)
    tokens: list[int] = best.tolist()
    return tokens


def per_prompt(
    sampling: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    """Return ``count`` parameters from one for all, one for each, or None for greedy."""
    if sampling is None or isinstance(sampling, SamplingParams):
        return [sampling or SamplingParams()] * count
    if len(sampling) != count:
        raise InputError(f"{len(sampling)} sampling parameters for {count} prompts; give one each")
    return list(sampling)
