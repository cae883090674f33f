"""Requests, the sampling of their tokens, the conversion to text, and the scheduler.

A request is *waiting* until a slot is free, then *running* until it ends. A step is a decode step
if each running request has exactly one token to process. Otherwise it is a packed step, in which
prompts share the token budget that decoding requests leave; prompts without budget wait.
Decode steps need the slots ``0 .. n - 1``, so ``Scheduler.compact`` closes gaps before each step.
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

from devgraph.api.errors import InputError, InputTypeError, brief, counted, finite, whole

_BROKEN = "\N{REPLACEMENT CHARACTER}"

_COLDEST = 1e-30
"""Minimum temperature above 0. Logits that are divided by a lower temperature overflow."""


@attrs.frozen(kw_only=True)
class SamplingParams:
    """The sampling parameters of a request, by default greedy.

    As in transformers, the order is temperature, ``top_k``, ``top_p``.
    """

    temperature: float = 0.0
    """Divisor of the logits; 0 means greedy: the best token is always chosen."""

    top_k: int = 0
    """Number of best tokens to keep; 0 keeps all tokens."""

    top_p: float = 1.0
    """Total probability that the best tokens must reach; the other tokens are excluded."""

    seed: int | None = None
    """Seed of the random stream. Equal seeds yield equal tokens in any batch. None draws a seed."""

    def __attrs_post_init__(self) -> None:
        if finite("temperature", self.temperature) and self.temperature < _COLDEST:
            raise InputError(
                f"temperature must be 0 (greedy) or at least {_COLDEST}, got {self.temperature}"
            )
        whole("top_k", self.top_k)
        if not 0 < finite("top_p", self.top_p) <= 1:
            raise InputError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if self.seed is not None and whole("seed", self.seed, -(1 << 63)) >= 1 << 64:
            raise InputError(f"seed must fit into 64 bits, got {self.seed}")


class Sampler:
    """A sampler with its own random stream, for one request with a temperature above 0."""

    def __init__(self, params: SamplingParams, device: torch.device) -> None:
        self.draws = 0
        self._params = params
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

    @property
    def params(self) -> SamplingParams:
        """The parameters, with the seed in use."""
        return attrs.evolve(self._params, seed=self._generator.initial_seed())

    @property
    def state(self) -> Tensor:
        """The state of the random stream, uint8 on the host."""
        return self._generator.get_state()

    def resume(self, seed: int, draws: int, state: Tensor | None) -> None:
        """Continue the stream of another sampler from ``state``, or start one from ``seed``."""
        self.draws = draws
        if state is None:
            self._generator.manual_seed(seed)
        else:
            self._generator.set_state(state)

    def draw(self, logits: Tensor) -> Tensor:
        """Draw a token from logits ``[vocabulary]``; return a scalar int64 tensor on the device."""
        self.draws += 1
        kept = self.kept(logits)
        # argmax(p / exponential noise) has distribution p (the Gumbel trick without logarithms).
        noise = torch.empty_like(kept).exponential_(generator=self._generator)
        return (torch.softmax(kept, -1) / noise).argmax(-1)

    def kept(self, logits: Tensor) -> Tensor:
        """Return the filtered logits in float32, with -inf for excluded tokens."""
        scores: Tensor = self._filters(None, logits.float()[None])
        return scores[0]


def ids_of(what: str, given: Any) -> list[int]:
    try:
        return list(map(operator.index, given))
    except TypeError as error:
        raise InputTypeError(f"{what} a list of token ids, got {brief(given)}") from error


class TextStream:
    """A converter of tokens into pieces of text that never split a character."""

    def __init__(self, tokenizer: Any) -> None:
        self._decode = tokenizer.decode
        self._tokens: list[int] = []
        # The text of tokens [start:read] has already been returned. A token's text depends on the
        # previous token (spaces), so decoding starts at `start`.
        self._start = 0
        self._read = 0
        self.text = ""

    def push(self, token: int) -> str:
        """Add a token, and return the text that became final, which may be empty."""
        self._tokens.append(token)
        new = self._new()
        return "" if not new or new.endswith(_BROKEN) else self._emit(new)

    def finish(self) -> str:
        """Return the text that was not yet final."""
        return self._emit(self._new())

    def _new(self) -> str:
        """Return the text of the tokens from index ``_read`` on."""
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
    """Reasons why requests end."""

    EOS = "eos"
    """The model produced an end-of-sequence token."""
    STOP = "stop"
    """The model produced a stop token of the request."""
    LENGTH = "length"
    """The model produced ``max_new_tokens`` tokens."""
    CANCELLED = "cancelled"
    """The request was cancelled, for example because the tokenizer raised an error."""


@attrs.define(eq=False)
class Request:
    """A prompt and its continuation."""

    id: int
    tokens: list[int]
    """Prompt tokens, followed by generated tokens."""
    max_new_tokens: int
    eos: frozenset[int]
    stop: frozenset[int]
    sampler: Sampler | None
    stream: TextStream | None
    cached: int = 0
    """Number of leading ``tokens`` in the cache."""
    slot: int | None = None
    """Request slot; None while waiting."""
    finish_reason: FinishReason | None = None
    prompt_length: int = attrs.Factory(lambda self: len(self.tokens), takes_self=True)
    handoff: Any = None
    """The handoff from which the request will be filled, or to which it is exported."""
    is_exported: bool = False
    origin: str = ""
    """Identifier of the handoff that the request continues."""

    @property
    def to_go(self) -> int:
        """Number of tokens to run before the next token can be chosen."""
        return len(self.tokens) - self.cached

    @property
    def wanted(self) -> int:
        """Number of tokens that may still be generated."""
        return self.max_new_tokens - (len(self.tokens) - self.prompt_length)

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    def chunk(self, count: int) -> Chunk:
        """Return the next ``count`` tokens of a running request."""
        assert self.slot is not None
        ids = self.tokens[self.cached : self.cached + count]
        return Chunk(self.slot, self.cached, ids, count == self.to_go, self)

    def accept(self, token: int) -> str:
        """Append a token, set ``finish_reason`` if it ends the request, and return final text."""
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
    """The next tokens of one request slot."""

    slot: int
    cached: int
    """Number of tokens that are already in the slot."""
    ids: list[int]
    """Tokens to run."""
    completes: bool
    """Whether no known token is left after ``ids``, so that the step yields the next token."""

    @property
    def count(self) -> int:
        return len(self.ids)


@attrs.frozen
class Chunk(Piece):
    """The next tokens of one request."""

    request: Request


class Scheduler:
    """The waiting, running and held requests of an engine.

    A request is held from the end of its export until its release. Held requests count against the
    slots, so that an engine exports no faster than other engines admit.
    """

    def __init__(self, slots: int, *, max_step_tokens: int, alone: bool = False) -> None:
        if whole("max_step_tokens", max_step_tokens) < slots:
            raise InputError(
                f"max_step_tokens is {max_step_tokens}, which is too small for one token of each "
                f"of {counted(slots, 'request')}; raise it to at least {slots}"
            )
        self.max_step_tokens = max_step_tokens
        self._alone = alone
        self.waiting: collections.deque[Request] = collections.deque()
        self._slots: list[Request | None] = [None] * slots
        self.held: dict[int, Request] = {}

    @property
    def running(self) -> list[Request]:
        """The running requests, in the order of their slots."""
        return [r for r in self._slots if r is not None]

    @property
    def requests(self) -> list[Request]:
        return [*self.running, *self.waiting, *self.held.values()]

    def __bool__(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self.waiting or self.running)

    @property
    def free(self) -> int:
        """Number of slots that waiting requests can take."""
        return self._slots.count(None) - len(self.held)

    def admit(self) -> list[Request]:
        """Assign the lowest free slots to the longest waiting requests; return these requests."""
        requests = []
        while self.waiting and self.free > 0:
            request = self.waiting.popleft()
            request.slot = self._slots.index(None)
            self._slots[request.slot] = request
            requests.append(request)
        return requests

    def hold(self, request: Request) -> int:
        """Hold a running request. It leaves the returned slot but still counts as one slot."""
        slot = self.release(request)
        assert slot is not None
        self.held[request.id] = request
        return slot

    def compact(self) -> list[tuple[int, int, int]]:
        """Close gaps between slots of running requests; return moves (source, target, tokens)."""
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
        """Return the chunks of the next step; under ``alone``, a prompt's or all decode chunks."""
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
        """Remove ``request``; return its slot, or None if it was waiting or held."""
        slot, request.slot = request.slot, None
        if self.held.pop(request.id, None) is not None:
            return None
        if slot is None:
            self.waiting.remove(request)
        else:
            self._slots[slot] = None
        return slot

    def find(self, request_id: int) -> Request:
        """Return a waiting, running or held request, or raise InputError."""
        wanted = whole("request_id", request_id)
        for request in self.requests:
            if request.id == wanted:
                return request
        raise InputError(f"no request {request_id} is waiting, running or held")
