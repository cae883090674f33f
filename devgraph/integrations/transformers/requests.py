"""Requests: how their tokens are chosen and become text, and which of them run in a step.

A request is *waiting* until a slot is free, then *running* until it ends. All running requests
take part in every step: as a decode step when each of them has one token to go, else as a packed
step, in which prompts share what the token budget leaves beside the decoding requests. Decode
steps need the slots ``0 .. n - 1``; ``compact`` says what to move when a request left a hole.
"""

from __future__ import annotations

import collections
import enum
import operator
from typing import Any

import attrs
import torch
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from devgraph.api.errors import InputError, InputTypeError, brief, finite, whole

_BROKEN = "\N{REPLACEMENT CHARACTER}"

_COLDEST = 1e-30
"""Below it, logits over the temperature are infinite and have no probabilities."""


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
        if finite("temperature", self.temperature) and self.temperature < _COLDEST:
            raise InputError(
                f"temperature must be 0 (greedy) or at least {_COLDEST}, got {self.temperature}"
            )
        whole("top_k", self.top_k)
        if not 0 < finite("top_p", self.top_p) <= 1:
            raise InputError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if self.seed is not None and whole("seed", self.seed, -(1 << 63)) >= 1 << 64:
            raise InputError(f"a seed has 64 bits, got {self.seed}")


class Sampler:
    """Draws the tokens of one request, with a random stream of its own.

    Args:
        params: not greedy.
        device: where the logits are.
    """

    def __init__(self, params: SamplingParams, device: torch.device) -> None:
        self._filters = LogitsProcessorList([TemperatureLogitsWarper(float(params.temperature))])
        if params.top_k:
            self._filters.append(TopKLogitsWarper(int(params.top_k)))
        if params.top_p < 1:
            self._filters.append(TopPLogitsWarper(float(params.top_p)))
        self._generator = torch.Generator(device)
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(int(params.seed))

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


def ids_of(what: str, given: Any) -> list[int]:
    """Return token ids as ints."""
    try:
        return list(map(operator.index, given))
    except TypeError as error:
        raise InputTypeError(f"{what} a list of token ids, got {brief(given)}") from error


class TextStream:
    """Turns the tokens of one request into pieces of text as they come.

    A piece is held back while it ends inside a character; joined they are the whole text.

    Args:
        tokenizer: of transformers, or anything with its ``decode``.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._decode = tokenizer.decode
        self._tokens: list[int] = []
        # Text of tokens [start:read] was handed on; a token's text depends on the one before it
        # (spaces), so decoding starts a little earlier than what is new.
        self._start = 0
        self._read = 0
        self.text = ""

    def push(self, token: int) -> str:
        """Add a token and return the text that is certain now (may be empty)."""
        self._tokens.append(token)
        new = self._new()
        return "" if not new or new.endswith(_BROKEN) else self._emit(new)

    def finish(self) -> str:
        """Return what was still held back."""
        return self._emit(self._new())

    def _new(self) -> str:
        """Return the text of the tokens that were not handed on yet."""
        before, after = (
            self._decode(self._tokens[self._start : end], skip_special_tokens=True)
            for end in (self._read, None)
        )
        new: str = after[len(before) :]
        return new

    def _emit(self, new: str) -> str:
        self._start, self._read = self._read, len(self._tokens)
        self.text += new
        return new


class FinishReason(str, enum.Enum):
    """Why a request ended."""

    EOS = "eos"
    """The model produced an end-of-sequence token."""
    STOP = "stop"
    """A stop token of the request."""
    LENGTH = "length"
    """``max_new_tokens`` were produced."""
    CANCELLED = "cancelled"
    """Its tokenizer raised."""


@attrs.define(eq=False)
class Request:
    """One prompt and its continuation."""

    id: int
    tokens: list[int]
    """Those of the prompt, and then the generated ones too."""
    max_new_tokens: int
    eos: frozenset[int]
    stop: frozenset[int]
    sampler: Sampler | None
    stream: TextStream | None
    cached: int = 0
    """How many of ``tokens`` have keys and values in the cache."""
    slot: int | None = None
    """Slot of the cache, None while waiting."""
    finish_reason: FinishReason | None = None
    prompt_length: int = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.prompt_length = len(self.tokens)

    @property
    def to_go(self) -> int:
        """Tokens that must be run before the next one can be chosen."""
        return len(self.tokens) - self.cached

    @property
    def wanted(self) -> int:
        """Tokens that may still be generated."""
        return self.max_new_tokens - (len(self.tokens) - self.prompt_length)

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    def chunk(self, count: int) -> Chunk:
        """Return the next ``count`` tokens; the request has a slot."""
        assert self.slot is not None
        ids = self.tokens[self.cached : self.cached + count]
        return Chunk(self.slot, self.cached, ids, count == self.to_go, self)

    def accept(self, token: int) -> str:
        """Append a chosen token, note whether it ends the request, return its certain text."""
        self.tokens.append(token)
        if token in self.eos:
            self.finish_reason = FinishReason.EOS
        elif token in self.stop:
            self.finish_reason = FinishReason.STOP
        elif self.wanted <= 0:
            self.finish_reason = FinishReason.LENGTH
        if self.stream is None:
            return ""
        ends = self.finish_reason in (FinishReason.EOS, FinishReason.STOP)
        text = "" if ends else self.stream.push(token)
        return text if self.finish_reason is None else text + self.stream.finish()


@attrs.frozen
class Piece:
    """The next tokens of what has a slot of the cache."""

    slot: int
    cached: int
    """Tokens that the slot holds."""
    ids: list[int]
    """The tokens to run."""
    completes: bool
    """Whether the step yields the token behind them."""

    @property
    def count(self) -> int:
        return len(self.ids)


@attrs.frozen
class Chunk(Piece):
    """The next tokens of a request."""

    request: Request


class Scheduler:
    """Waiting and running requests.

    Args:
        slots: requests that run at once.
        max_step_tokens: tokens of a packed step, at least ``slots``.
        alone: whether a packed step has the tokens of one request only.
    """

    def __init__(self, slots: int, *, max_step_tokens: int, alone: bool = False) -> None:
        if whole("max_step_tokens", max_step_tokens) < slots:
            raise InputError(
                f"max_step_tokens is {max_step_tokens}, which cannot hold one token for each of "
                f"{slots} requests; raise it to at least {slots}"
            )
        self.max_step_tokens = max_step_tokens
        self._alone = alone
        self.waiting: collections.deque[Request] = collections.deque()
        self._slots: list[Request | None] = [None] * slots

    @property
    def running(self) -> list[Request]:
        """Running requests by slot."""
        return [r for r in self._slots if r is not None]

    def __bool__(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self.waiting) or any(r is not None for r in self._slots)

    def admit(self) -> None:
        """Give free slots to waiting requests, lowest slot and longest wait first."""
        for slot, holder in enumerate(self._slots):
            if holder is None and self.waiting:
                request = self.waiting.popleft()
                request.slot = slot
                self._slots[slot] = request

    def compact(self) -> list[tuple[int, int, int]]:
        """Return the moves after which the running requests have the first slots: of each, the slot
        that it is from, the slot that it is to, and how many rows."""
        count = len(self.running)
        holes = [slot for slot in range(count) if self._slots[slot] is None]
        behind = [request for request in self._slots[count:] if request is not None]
        moves = []
        for hole, request in zip(holes, reversed(behind), strict=True):
            assert request.slot is not None
            moves.append((request.slot, hole, request.cached))
            self._slots[hole], self._slots[request.slot] = request, None
            request.slot = hole
        return moves

    def plan(self) -> list[Chunk]:
        """Return the chunks of the next step, decoding requests first; empty without requests.

        It is a decode step if every chunk is the one token to go of its request.
        """
        decoding = [r.chunk(1) for r in self.running if r.to_go == 1]
        budget = self.max_step_tokens - len(decoding)
        chunks = []
        for request in sorted(self.running, key=lambda r: r.id):
            count = min(request.to_go, budget)
            if request.to_go > 1 and count > 0:
                chunks.append(request.chunk(count))
                budget -= count
        return chunks[:1] if self._alone and chunks else decoding + chunks

    def release(self, request: Request) -> int | None:
        """Take ``request`` out and return the slot it had, None if it was waiting."""
        slot, request.slot = request.slot, None
        if slot is None:
            self.waiting.remove(request)
        else:
            self._slots[slot] = None
        return slot

    def find(self, request_id: int) -> Request:
        """Return a waiting or running request; an unknown id raises ``InputError``."""
        wanted = whole("request_id", request_id)
        for request in (*self.running, *self.waiting):
            if request.id == wanted:
                return request
        raise InputError(f"no request {request_id} waits or runs")
