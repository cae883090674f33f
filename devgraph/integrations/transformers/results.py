"""What an engine reports: events, completions, counters."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from devgraph.integrations.transformers.scheduler import Chunk, FinishReason, Request

__all__ = ["Completion", "EngineStats", "TokenEvent", "completion_of"]


@attrs.frozen(kw_only=True)
class TokenEvent:
    """One new token of one request."""

    request_id: int
    token: int | None
    """None only when the request was cancelled."""
    text: str
    """Text that became certain with this token; empty without a tokenizer."""
    finish_reason: FinishReason | None
    """Set on the last event of a request."""


@attrs.frozen(kw_only=True)
class Completion:
    """What became of one prompt."""

    request_id: int
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    """Generated tokens, the one that ended the request included."""
    text: str
    finish_reason: FinishReason


@attrs.define(kw_only=True)
class EngineStats:
    """Counters since the engine was made or ``reset_stats`` was called.

    How many of the steps ran in graphs, with what padding, and why others did not, is in
    ``engine.decode.stats()`` and ``engine.prefill.stats()``.
    """

    decode_steps: int = 0
    packed_steps: int = 0
    prompt_tokens: int = 0
    """Prompt tokens that were run."""
    generated_tokens: int = 0
    finished: int = 0
    moves: int = 0
    """Requests that were moved to another slot because one before them left."""
    seconds: float = 0.0
    """Time inside ``step``."""
    decode_seconds: float = 0.0
    """Of that, decode steps."""
    decode_tokens: int = 0
    """Tokens that decode steps generated."""

    def count(self, chunks: Sequence[Chunk], new: int, decode: bool, seconds: float) -> None:
        """Add one step that ran ``chunks`` and generated ``new`` tokens."""
        self.seconds += seconds
        self.generated_tokens += new
        if decode:
            self.decode_steps += 1
            self.decode_seconds += seconds
            self.decode_tokens += new
        else:
            self.packed_steps += 1
        for chunk in chunks:
            before = chunk.request.cached - chunk.count
            self.prompt_tokens += max(0, min(chunk.count, chunk.request.prompt_length - before))


def completion_of(request: Request) -> Completion:
    """Return what became of a request that ended."""
    assert request.finish_reason is not None
    return Completion(
        request_id=request.id,
        prompt_ids=tuple(request.tokens[: request.prompt_length]),
        token_ids=tuple(request.generated),
        text="" if request.stream is None else request.stream.text,
        finish_reason=request.finish_reason,
    )
