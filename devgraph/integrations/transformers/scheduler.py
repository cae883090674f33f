"""Which requests run in a step, with how many tokens, and in which slots of the cache.

A request is *waiting* until a slot is free, then *running* until it ends. All running requests
take part in every step: as a decode step when each of them has one token to go, else as a packed
step, in which prompts share what the token budget leaves beside the decoding requests. Decode
steps need the slots ``0 .. n - 1``; ``compact`` says what to move when a request left a hole.
"""

from __future__ import annotations

import collections
import enum

import attrs

from devgraph.api.errors import InputError, did_you_mean
from devgraph.integrations.transformers.sampling import Sampler
from devgraph.integrations.transformers.text import TextStream


class FinishReason(str, enum.Enum):
    """Why a request ended."""

    EOS = "eos"
    """The model produced an end-of-sequence token."""
    STOP = "stop"
    """A stop token or stop string of the request."""
    LENGTH = "length"
    """``max_new_tokens`` were produced."""
    CANCELLED = "cancelled"
    """``cancel`` was called."""

    def __str__(self) -> str:
        return self.value


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
        if self.finish_reason is not None:
            text += self.stream.finish()
        if self.stream.stopped:
            self.finish_reason = FinishReason.STOP
        return text


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
        if max_step_tokens < slots:
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

    def add(self, request: Request) -> None:
        self.waiting.append(request)

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
        moves = []
        last = len(self._slots)
        for hole, holder in enumerate(self._slots):
            if holder is not None:
                continue
            last = next((s for s in range(last - 1, hole, -1) if self._slots[s] is not None), -1)
            if last < 0:
                break
            request = self._slots[last]
            assert request is not None
            self._slots[hole], self._slots[last] = request, None
            request.slot = hole
            moves.append((last, hole, request.cached))
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
        known = {r.id: r for r in (*self.running, *self.waiting)}
        if request_id not in known:
            names = [str(i) for i in known]
            raise InputError(
                f"no request {request_id} waits or runs. {did_you_mean(str(request_id), names)}"
            )
        return known[request_id]
