"""Continuous batching of a transformers model on device graphs."""

from __future__ import annotations

import argparse
import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor
from transformers import PreTrainedModel

from devgraph.api.backend import Backend, own_pool
from devgraph.api.config.facts import EngineFacts
from devgraph.api.config.model import DeviceGraphConfig
from devgraph.api.config.phase import PhaseConfig
from devgraph.api.environment import DEBUG_VARIABLE, switch
from devgraph.api.errors import (
    HandoffError,
    InputError,
    InputTypeError,
    StateError,
    brief,
    counted,
    finite,
    note,
    whole,
)
from devgraph.api.registry import get_backend
from devgraph.integrations.transformers.handoff import (
    Handoff,
    LayerStream,
    Progress,
    check_fit,
    copy_layers,
    geometry_of,
)
from devgraph.integrations.transformers.model import CausalModel
from devgraph.integrations.transformers.probe import eos_of
from devgraph.integrations.transformers.requests import (
    Chunk,
    FinishReason,
    Request,
    Sampler,
    SamplingParams,
    Scheduler,
    TextStream,
    ids_of,
)
from devgraph.runners.decode import DecodeRunner
from devgraph.runners.prefill import PrefillRunner
from devgraph.runners.runner import Runner
from devgraph.runners.slots import OutputSlot

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int]


@attrs.frozen(kw_only=True)
class TokenEvent:
    """One new token of one request."""

    request_id: int
    token: int
    text: str
    """The text that became final with this token; empty without a tokenizer."""
    finish_reason: FinishReason | None
    """The reason why the request ended, in its last event; otherwise None."""


@attrs.frozen(kw_only=True)
class Completion:
    """The result of one prompt."""

    token_ids: tuple[int, ...]
    """The generated tokens, including the token that ended the request."""
    text: str
    finish_reason: FinishReason

    @classmethod
    def of(cls, request: Request) -> Completion:
        text = "" if request.stream is None else request.stream.text
        assert request.finish_reason is not None
        ids, reason = tuple(request.generated), request.finish_reason
        return cls(token_ids=ids, text=text, finish_reason=reason)


@attrs.define(kw_only=True)
class EngineStats:
    """Time and decoded tokens since the engine was created or ``reset_stats`` was called.

    ``engine.decode.stats()`` and ``engine.prefill.stats()`` count steps, graphs and fallbacks.
    """

    seconds: float = 0.0
    """Time inside ``step`` in seconds."""
    decode_seconds: float = 0.0
    """The part of ``seconds`` in decode steps, which return ``decode_tokens`` tokens."""
    decode_tokens: int = 0


class Engine:
    """A prefill runner and a decode runner that share a pool and process requests.

    Requests join and leave between steps. By default, graphs are captured when batches need them,
    so that no prompt waits for unused graphs. ``capture`` captures all graphs in advance. With the
    policy ``disabled``, the same steps and kernels run eagerly. Autocast is refused because steps
    compute in the dtype of the model. An engine belongs to one thread.

    Args:
        model: a causal language model of transformers in evaluation mode, on the device of
            ``backend``.
        tokenizer: converts text to ids and tokens to text; if there is none, prompts must be ids.
        config: the mode of each phase, as a configuration, a dictionary or JSON text; None means
            ``DEVGRAPH_MODE`` and ``[tool.devgraph]``, as for ``DeviceGraphConfig.from_args``.
        backend: a backend or its name.
        max_requests: maximum number of running requests.
        max_len: maximum number of tokens per request, including its prompt; None means the limit of
            the model, but at most 2048.
        max_step_tokens: maximum number of tokens in a step; longer prompts run in chunks. A model
            that runs its own attention (see ``engine.model.own``) runs one prompt at a time.
        eos_token_ids: tokens that end a request; None means the model's own end-of-sequence tokens.
        steps_per_launch: number of decode steps in a launch while all running requests are greedy
            and one of them needs at least half of these steps (and at least two). Other launches
            have one step. A launch returns its tokens together, and waiting requests join after it.
        fuse: whether to replace operations with fewer, larger kernels (see ``fusion``). Fusion
            moves weights in memory and may change a token whose two best candidates are nearly
            equal. ``engine.model.fusion`` reports the replacements.
        layerwise: whether steps with prompts signal each finished layer, so that the handoffs of
            ``export(layerwise=True)`` are filled while later layers are computed.
        facts: facts for the compatibility rules; by default, the only fact is whether the model has
            hooks. ``traceable`` is always false, because steps replace attributes of the model.

    Raises:
        UnsupportedModelError: the model has a requirement that the engine does not support.
        InputError, ConfigError: an argument is invalid, the model is on another device, or a rule
            forbids the chosen policy.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any = None,
        *,
        config: DeviceGraphConfig | Mapping[str, Any] | str | None = None,
        backend: Backend | str = "auto",
        max_requests: int = 8,
        max_len: int | None = None,
        max_step_tokens: int = 512,
        eos_token_ids: Sequence[int] | None = None,
        steps_per_launch: int = 1,
        fuse: bool = True,
        layerwise: bool = False,
        facts: EngineFacts | None = None,
    ) -> None:
        self.backend = backend if isinstance(backend, Backend) else get_backend(backend)
        self.config = config_of(config).for_backend(self.backend.name)
        self.max_step_tokens = max_step_tokens
        self.steps_per_launch = whole("steps_per_launch", steps_per_launch, 1)
        if tokenizer is not None and not callable(getattr(tokenizer, "decode", None)):
            raise InputTypeError(f"tokenizer has no method decode: {brief(tokenizer)}")
        if not isinstance(fuse, bool):
            raise InputTypeError(f"fuse must be true or false, got {brief(fuse)}")
        # Slot attention takes lengths from the host, which cannot change them within a launch.
        single = self.steps_per_launch == 1
        self.model = CausalModel(
            model,
            max_requests=max_requests,
            max_len=max_len,
            updatable=self.backend.capabilities.region_update,
            slot_attention=self.backend.extensions.get("slot_attention") if single else None,
            fuse=fuse,
            pin=self.backend.pin,
            layerwise=layerwise,
        )
        if self.model.device.type != self.backend.device.type:
            raise InputError(
                f"the model is on {self.model.device}, but backend {self.backend.name!r} captures "
                f"{self.backend.device}; move the model there or choose another backend"
            )
        self._scheduler = Scheduler(
            max_requests, max_step_tokens=max_step_tokens, alone=self.model.own is not None
        )
        self.tokenizer = tokenizer
        if eos_token_ids is None:
            eos_token_ids = eos_of(model.generation_config, model.config)
        self._eos = frozenset(ids_of("eos_token_ids must be", eos_token_ids))
        self._next_id = 0
        self._stats = EngineStats()
        self._events: list[TokenEvent] = []
        """Events that ``step`` has not yet returned."""
        self.closed = False
        self._captured = False
        facts = EngineFacts(debug_hooks=has_hooks(model)) if facts is None else facts
        releasable = self.config.prefill.releasable or self.config.decode.releasable
        self.pool = own_pool(self.backend, None, releasable=releasable)
        self._options: dict[str, Any] = {
            "backend": self.backend,
            "pool": self.pool,
            "name_nodes": model if switch(DEBUG_VARIABLE) else False,
            "facts": attrs.evolve(facts, traceable=False),
            "state": self.model.states.slots,
        }
        self._make_runners(max_requests, max_step_tokens)

    def _make_runners(self, max_requests: int, max_step_tokens: int) -> None:
        model = self.model
        self.prefill = PrefillRunner(
            model.packed,
            model.packed_inputs(),
            tail=model.tail,
            hidden=OutputSlot(rows="tokens"),
            outputs=OutputSlot(rows="requests"),
            host_args=model.packed_host_args,
            config=_with_defaults(self.config.prefill, model.model),
            max_tokens=max_step_tokens,
            max_requests=max_requests,
            **self._options,
        )
        decode = self.config.decode
        shared = self.prefill if model.states else None
        self.decode = self.make_decode(decode, max_requests=max_requests, share=shared)
        self.runners: list[Runner] = [self.prefill, self.decode]
        self.several: DecodeRunner | None = None
        """Runner for launches of several decode steps."""
        if self.steps_per_launch != 1:
            self.several = self.make_decode(
                decode,
                self.steps_per_launch,
                max_requests=max_requests,
                name=f"decode by {self.steps_per_launch}",
                share=self.decode,
            )
            self.runners.append(self.several)

    def make_decode(self, config: PhaseConfig, steps: int = 1, **options: Any) -> DecodeRunner:
        """Return a runner for decode steps; with several ``steps`` per launch, it returns tokens.

        The caller must append the runner to ``runners``, so that the engine suspends and closes it.
        """
        model = self.model
        return DecodeRunner(
            model.decode if steps == 1 else lambda batch: model.decode(batch)["tokens"],
            model.decode_inputs(steps),
            loop=None if steps == 1 else model.loop(steps, self._eos),
            outputs=OutputSlot(rows="tokens"),
            host_args=model.decode_host_args,
            config=_with_defaults(config, self.model.model),
            **self._options,
            **options,
        )

    def clear(self, slot: int) -> None:
        """Mark the cache rows of a slot as unclean and zero its state, for a new request."""
        self.model.cache.release(slot)
        if self.model.states:
            self.decode.assign(slot)

    # -- requests --------------------------------------------------------------------------------

    def add_request(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 64,
        sampling: SamplingParams | None = None,
        stop_token_ids: Sequence[int] = (),
    ) -> int:
        """Queue a prompt and return its request id.

        Args:
            prompt: text (with a tokenizer) or token ids.
            max_new_tokens: maximum number of tokens to generate.
            sampling: sampling parameters; None means greedy.
            stop_token_ids: tokens that end the request, in addition to end-of-sequence tokens.

        Raises:
            InputError, InputTypeError: the prompt is empty, an id is outside the vocabulary, the
                request needs more than ``max_len`` positions, or another argument is invalid.
        """
        self._check_open()
        ids = self._ids(prompt)
        max_new_tokens = whole("max_new_tokens", max_new_tokens, 1)
        needed = len(ids) + max_new_tokens
        if needed > self.model.positions:
            raise InputError(
                f"{len(ids)} prompt tokens and {max_new_tokens} new tokens need {needed} "
                f"positions; this engine has {self.model.positions} per request. Shorten the "
                f"prompt, lower max_new_tokens or raise max_len"
            )
        sampling = SamplingParams() if sampling is None else sampling
        stop = frozenset(ids_of("stop_token_ids must be", stop_token_ids))
        ends = {"max_new_tokens": max_new_tokens, "stop": stop, "eos": self._eos}
        return self._queue(self._new_request(ids, sampling, **ends))

    def _queue(self, request: Request) -> int:
        self._next_id += 1
        self._scheduler.waiting.append(request)
        return request.id

    def _new_request(self, tokens: list[int], sampling: SamplingParams, **fields: Any) -> Request:
        if not isinstance(sampling, SamplingParams):
            raise InputTypeError(f"sampling must be SamplingParams, got {brief(sampling)}")
        return Request(
            self._next_id,
            tokens,
            sampler=Sampler(sampling, self.model.device) if sampling.temperature else None,
            stream=None if self.tokenizer is None else TextStream(self.tokenizer),
            **fields,
        )

    def _ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise InputTypeError("a text prompt needs a tokenizer; pass token ids instead")
            ids = list(self.tokenizer(prompt)["input_ids"])
        else:
            ids = ids_of("a prompt must be text or", prompt)
        if not ids:
            raise InputError("the prompt is empty; it needs at least one token")
        self._check_ids(ids)
        return ids

    def _check_ids(self, ids: Sequence[int]) -> None:
        worst = min(ids) if min(ids) < 0 else max(ids)
        if not 0 <= worst < self.model.shape.vocabulary:
            raise InputError(
                f"token id {worst} is outside the vocabulary, which has "
                f"{counted(self.model.shape.vocabulary, 'token')}"
            )

    def cancel(self, request_id: int) -> None:
        """End a request, and discard its events that ``step`` has not returned."""
        self._check_open()
        self._drop(self._scheduler.find(request_id))

    @property
    def has_work(self) -> bool:
        """Whether a request is waiting or running, or ``step`` has events to return."""
        return bool(self._scheduler or self._events)

    # -- handoffs --------------------------------------------------------------------------------

    def export(
        self, request_id: int, layerwise: bool = False, *, timeout_s: float = 60.0
    ) -> Handoff:
        """Hold a running request and return its state.

        The request must have its first token. A held request takes part in no step, but counts
        against ``max_requests`` until it is cancelled, is released by ``release`` or a transport,
        or times out. Further calls return the handoff of the first call.

        With ``layerwise``, the prompt must not have run yet. The step that completes the prompt
        fills the handoff layer by layer and then holds the request. ``TorchTransport`` sends each
        layer when it is ready; ``fetch`` returns when the last layer and the first token are there.

        Args:
            request_id: id of the request.
            layerwise: whether to export before the prompt has run; the engine must have been
                created with ``layerwise``.
            timeout_s: time in seconds from this call after which an unreleased request ends. A
                warning in the log then names the request and the rank that fetched the handoff.

        Raises:
            StateError: the prompt has not run (with ``layerwise``: it has already run), or the
                engine was created without ``layerwise``.
            InputError: no waiting, running or held request has this id.
        """
        self._check_open()
        request = self._scheduler.find(request_id)
        deadline = time.monotonic() + finite("timeout_s", timeout_s)
        if request.is_exported:
            return request.handoff  # type: ignore[no-any-return]
        if layerwise and not self.model.layerwise:
            raise StateError("this engine signals no layers; create it with layerwise=True")
        if layerwise == bool(request.generated):
            state = "has run; export it without layerwise"
            if not layerwise:
                state = (
                    f"has not run ({counted(request.to_go, 'token')} to go); call step() until the "
                    f"request has its first token"
                )
            raise StateError(f"the prompt of request {request.id} {state}")
        request.handoff = Handoff.allocated(
            self.model.device,
            **self._geometry,
            **_header_of(request),
            backend=self.backend.name,
            cached=request.prompt_length if layerwise else request.cached,
            progress=Progress(deadline=deadline),
        )
        request.is_exported = True
        if not layerwise:
            self._hold(request)
        return request.handoff  # type: ignore[no-any-return]

    def _hold(self, request: Request) -> None:
        """Hold a running request, and complete its handoff."""
        handoff: Handoff = request.handoff
        assert request.slot is not None
        source = self.model.slot_tensors(request.slot, handoff.cached)
        state = self.decode.export_state(request.slot) if self.model.states else {}
        for index, named in self.model.states.named.items():
            source[index] |= {name: state[slot.name] for name, slot in named.items()}
        ready = handoff.progress.ready
        with self.pool.lock:
            copy_layers(handoff.by_layer(handoff.data)[ready:], source[ready:])
        request.handoff = attrs.evolve(handoff, **_header_of(request))
        handoff.progress.complete(request.handoff, self.backend.fence())
        self.model.cache.release(self._scheduler.hold(request))

    @contextlib.contextmanager
    def _streamed(self, chunks: Sequence[Chunk]) -> Iterator[None]:
        """Fill the layer-wise handoffs of ``chunks`` while the block runs their step."""
        exports = [
            (
                chunk.request.handoff,
                self.model.slot_tensors(chunk.slot, chunk.cached + chunk.count),
            )
            for chunk in chunks
            if chunk.completes and chunk.request.is_exported
        ]
        stream = LayerStream(self.prefill.gates, exports) if exports else None
        with contextlib.closing(stream) if stream else contextlib.nullcontext():
            yield

    def admit(self, handoff: Handoff, convert: bool = False, *, wait: bool = True) -> int:
        """Continue a request of another engine, and return its request id in this engine.

        The request takes a free slot immediately or waits for one. Its first event is the first
        token after the tokens in the handoff. On the same backend, a sampled request continues the
        random stream of the exporter. On another backend, it starts a new stream. After the request
        has ended or was cancelled, its handoff can be admitted again.

        Args:
            handoff: the handoff. Its tensors must not change before the request has a slot.
            convert: whether to accept another dtype and convert the tensors. If the dtypes differ,
                the weights of the engines are not compared.
            wait: whether the request may wait for a slot.

        Raises:
            HandoffError: the handoff does not match this engine (``fields`` names each difference),
                has ended or was not received, a request of this engine already continues it, or no
                slot is free without ``wait`` (``retriable``).
        """
        self._check_open()
        if not isinstance(handoff, Handoff):
            raise InputTypeError(f"a handoff must be a Handoff, got {brief(handoff)}")
        if handoff.progress.ended not in (None, "released"):
            raise HandoffError(f"the handoff has ended: it was {handoff.progress.ended}")
        for request in self._scheduler.requests:
            if request.origin == handoff.id:
                raise HandoffError(
                    f"request {request.id} already continues this handoff; admit it again only "
                    f"after the request has ended, or cancel the request",
                    fields=("id",),
                )
        check_fit(handoff, self._geometry, positions=self.model.positions, convert=convert)
        handoff.require_received()
        request = self._continued(handoff)
        self._expire()
        if not wait and self._scheduler.free <= len(self._scheduler.waiting):
            raise HandoffError(
                f"no slot is free: {counted(len(self._scheduler.running), 'request')} running, "
                f"{len(self._scheduler.waiting)} waiting, {len(self._scheduler.held)} held; "
                f"retry after a request has ended",
                retriable=True,
            )
        request.handoff = handoff
        self._queue(request)
        self._join()
        return request.id

    def _continued(self, handoff: Handoff) -> Request:
        tokens = list(handoff.token_ids)
        generated = len(tokens) - handoff.prompt_length
        if not (
            0 < handoff.prompt_length <= handoff.cached == len(tokens) - 1
            and generated < handoff.max_new_tokens
        ):
            raise HandoffError(
                f"the handoff caches {handoff.cached} of {counted(len(tokens), 'token')} "
                f"({handoff.prompt_length} in the prompt, at most {handoff.max_new_tokens} after "
                f"it); it must cache the prompt and all tokens but the last, and its request must "
                f"not have ended"
            )
        try:
            self._check_ids(tokens)
        except InputError as error:
            raise HandoffError(f"in the handoff, {error}", fields=("token_ids",)) from error
        request = self._new_request(
            tokens,
            handoff.sampling,
            max_new_tokens=handoff.max_new_tokens,
            eos=frozenset(handoff.eos_token_ids),
            stop=frozenset(handoff.stop_token_ids),
            cached=handoff.cached,
            prompt_length=handoff.prompt_length,
            origin=handoff.id,
        )
        if request.sampler is not None:
            try:
                request.sampler.resume(*handoff.stream_for(self.backend.name))
            except (RuntimeError, TypeError, ValueError) as error:
                raise HandoffError(
                    f"the random state of the handoff does not fit the generator here: {error}",
                    fields=("random_state",),
                ) from error
        if request.stream is not None:
            for token in request.generated:
                request.stream.push(token)  # The exporter has already returned this text.
        return request

    def release(self, request_id: int) -> None:
        """Free the slot of an exported request that another engine continues.

        Raises:
            InputError: the request is not held, for example because its timeout has passed.
        """
        self._check_open()
        request = self._scheduler.held.get(request_id)
        if request is None:
            raise InputError(
                f"request {request_id} is not held: it was not exported, or it was released, "
                f"cancelled, or freed after its timeout"
            )
        request.handoff.progress.end("released")
        self._leave(request)

    def _expire(self) -> None:
        """Free the slots of held requests that were released by a transport or have timed out."""
        for request in list(self._scheduler.held.values()):
            progress = request.handoff.progress
            if progress.ended is None and time.monotonic() > progress.deadline:
                progress.end("freed after its timeout")
                logger.warning(
                    "request %d was exported and not released in time; its slot is free again "
                    "(%s fetched the handoff)",
                    *(request.id, progress.receiver or "no process"),
                )
            if progress.ended is not None:
                self._leave(request)

    def _join(self) -> None:
        """Assign free slots to waiting requests, and fill the slots of admitted handoffs."""
        self._expire()
        for request in self._scheduler.admit():
            assert request.slot is not None
            if request.handoff is None or request.is_exported:
                self.clear(request.slot)
                continue
            self.model.cache.release(request.slot)
            try:
                self._fill(request.slot, request.handoff)
            except BaseException as error:
                note(error, f"in the handoff of request {request.id}, which is cancelled")
                self._drop(request)
                raise
            request.handoff = None

    def _fill(self, slot: int, handoff: Handoff) -> None:
        """Copy a handoff into a slot, from any device and dtype."""
        # One transfer of the whole buffer is faster than a transfer per tensor.
        layers = handoff.by_layer(handoff.data.to(self.model.device))
        with self.pool.lock:
            copy_layers(self.model.slot_tensors(slot, handoff.cached), layers)
        if self.model.states:
            self.decode.import_state(slot, self.model.states.split(layers))

    @functools.cached_property
    def _geometry(self) -> dict[str, Any]:
        return geometry_of(self.model)

    # -- steps -----------------------------------------------------------------------------------

    def step(self) -> list[TokenEvent]:
        """Run one step of all running requests, and return its events.

        Waiting requests join first. If the step raises an error, no request advances, and the next
        call repeats the step. An error in a handoff or in the tokenizer cancels its request, which
        a note on the error names. The next call then returns the events of the failed call too.
        """
        self._check_able()
        begin = time.perf_counter()
        self._join()
        for source, target, length in self._scheduler.compact():
            self.model.cache.move(source, target, length)
            if self.model.states:
                self.decode.import_state(target, self.decode.export_state(source))
        chunks = sorted(self._scheduler.plan(), key=lambda chunk: chunk.slot)
        if not chunks:
            return self._collected()
        decode = all(chunk.count == 1 and chunk.completes for chunk in chunks)
        if decode and self._launch_pays(chunks):
            steps = self._launch(chunks)
        else:
            # Request i of a decode step has slot i, because the scheduler has closed the gaps.
            runner: Runner = self.decode if decode else self.prefill
            data = self.model.decode_data(chunks) if decode else self.model.packed_data(chunks)
            with self._streamed(chunks):
                out = runner.run(**data)
                steps = [self._chosen(chunks, out)]
        before = len(self._events)
        failed = self._accept([pair for tokens in steps for pair in tokens])
        for chunk in chunks:
            if chunk.request.is_exported and chunk.request.generated:
                self._hold(chunk.request)
        seconds = time.perf_counter() - begin
        self._stats.seconds += seconds
        if decode:
            self._stats.decode_seconds += seconds
            self._stats.decode_tokens += len(self._events) - before
        if failed is not None:
            raise failed
        return self._collected()

    def _collected(self) -> list[TokenEvent]:
        events, self._events = self._events, []
        return events

    def _launch_pays(self, chunks: Sequence[Chunk]) -> bool:
        wanted = max(chunk.request.wanted for chunk in chunks)
        if self.several is None or 2 * wanted < max(4, self.steps_per_launch):
            return False
        return not any(chunk.request.sampler or chunk.request.is_exported for chunk in chunks)

    def _launch(self, chunks: Sequence[Chunk]) -> list[list[tuple[Request, int]]]:
        """Run several decode steps in one launch; return the tokens of each step."""
        assert self.several is not None
        left = [chunk.request.wanted for chunk in chunks]
        data = self.model.decode_data(chunks, left, steps=self.steps_per_launch)
        out = self.several.run(**data)
        # Use one transfer for both tensors.
        *tokens, taken = torch.cat([out.outputs, out.taken[None]]).tolist()
        for chunk, count in zip(chunks, taken, strict=True):
            chunk.request.cached += count
        return [
            [
                (chunk.request, token)
                for chunk, token, count in zip(chunks, row, taken, strict=True)
                if step < count
            ]
            for step, row in enumerate(tokens[: max(taken)])
        ]

    def _chosen(
        self, chunks: Sequence[Chunk], out: Mapping[str, Tensor]
    ) -> list[tuple[Request, int]]:
        """Return the next token of each chunk that completes, and count all chunks as cached."""
        best = out["tokens"]
        samplers = [chunk.request.sampler if chunk.completes else None for chunk in chunks]
        if any(samplers):
            rows = zip(best, out["logits"], samplers, strict=True)
            best = torch.stack([token if s is None else s.draw(row) for token, row, s in rows])
        for chunk in chunks:
            chunk.request.cached += chunk.count
        if not any(chunk.completes for chunk in chunks):
            return []  # Reading the tokens would wait for the device.
        tokens = zip(chunks, best.tolist(), strict=True)
        return [(chunk.request, token) for chunk, token in tokens if chunk.completes]

    def _accept(self, tokens: Sequence[tuple[Request, int]]) -> Exception | None:
        """Append tokens to the requests that have not ended; return the first tokenizer error."""
        failed: Exception | None = None
        for request, token in tokens:
            if request.finish_reason is not None:
                continue
            text = ""
            try:
                text = request.accept(token)
            except Exception as error:
                note(error, f"in the text of request {request.id}, which is cancelled")
                request.finish_reason, failed = FinishReason.CANCELLED, failed or error
            reason = request.finish_reason
            self._events.append(
                TokenEvent(request_id=request.id, token=token, text=text, finish_reason=reason)
            )
            if reason is not None:
                self._leave(request)
        return failed

    def _drop(self, request: Request) -> None:
        request.finish_reason = FinishReason.CANCELLED
        self._leave(request)
        self._events = [event for event in self._events if event.request_id != request.id]

    def _leave(self, request: Request) -> None:
        if request.is_exported:
            is_done = request.finish_reason not in (None, FinishReason.CANCELLED)
            request.handoff.progress.end("finished" if is_done else "cancelled")
        request.handoff, request.is_exported = None, False
        slot = self._scheduler.release(request)
        if slot is not None:
            self.model.cache.release(slot)

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        max_new_tokens: int = 64,
        sampling: SamplingParams | Sequence[SamplingParams | None] | None = None,
        stop_token_ids: Sequence[int] = (),
        on_event: Callable[[TokenEvent], None] | None = None,
    ) -> list[Completion]:
        """Complete all ``prompts``, and return the completions in the same order.

        Prompts wait for free slots. Any error, including an error in ``on_event``, cancels all
        prompts.

        Args:
            prompts: texts or lists of token ids.
            max_new_tokens: as for ``add_request``.
            sampling: sampling parameters for all prompts, or a list with one entry per prompt.
            stop_token_ids: as for ``add_request``.
            on_event: a function that is called with every event.

        Raises:
            StateError: other requests are waiting or running. Call ``step`` until they have ended.
        """
        self._check_able()
        if self.has_work:
            raise StateError("requests are waiting or running: call step() until has_work is false")
        if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Iterable):
            raise InputTypeError(
                f"prompts must be a list of prompts, got {brief(prompts)}; put a single prompt "
                f"into a list"
            )
        if on_event is not None and not callable(on_event):
            raise InputTypeError(f"on_event must be a function, got {brief(on_event)}")
        prompts = list(prompts)
        if isinstance(sampling, str) or not isinstance(sampling, Sequence):
            sampling = [sampling] * len(prompts)
        if len(sampling) != len(prompts):
            raise InputError(
                f"got {counted(len(sampling), 'sampling parameter')} for "
                f"{counted(len(prompts), 'prompt')}; pass one for each prompt"
            )
        options: Any = {"max_new_tokens": max_new_tokens, "stop_token_ids": stop_token_ids}
        try:
            for prompt, params in zip(prompts, sampling, strict=True):
                self.add_request(prompt, sampling=params, **options)
            requests = list(self._scheduler.waiting)
            self.ready()
            while self._scheduler:
                for event in self.step():
                    if on_event is not None:
                        on_event(event)
        except BaseException:
            # The caller cannot cancel the requests, because it does not know their ids.
            for request in (*self._scheduler.running, *self._scheduler.waiting):
                self._drop(request)
            self._events = []
            raise
        return list(map(Completion.of, requests))

    # -- graphs ----------------------------------------------------------------------------------

    def ready(self) -> None:
        """Capture the graphs that must exist before the first step.

        The call does nothing if they exist or if their memory is released.
        """
        if not self._captured and not self.pool.recordings.released:
            for runner in self.runners:
                if runner.captures_first:
                    runner.capture()
            self._captured = True

    def capture(self) -> None:
        """Capture all graphs, prefill first, unless the mode sets lazy or background captures."""
        self._check_able()
        for runner in self.runners:
            asked = self.config.phase(runner.phase).capture
            runner.capture(everything=asked == "eager")
        self._captured = True

    def idle(self) -> bool:
        """Capture or verify one graph, as ``Runner.idle`` does; return False if none is due."""
        self._check_able()
        return any(runner.idle() for runner in reversed(self.runners))

    def invalidate(self, reason: str) -> None:
        """Close all graphs, for example because weights were replaced. ``capture`` captures again.

        Graphs read weights in place, so weights that were overwritten in place need no call.
        """
        self._check_open()
        for runner in reversed(self.runners):
            runner.invalidate(reason)
        self._captured = False
        vars(self).pop("_geometry", None)

    def suspend(self, *, release: str | None = None) -> None:
        """Run steps eagerly until ``resume``; ``release`` is as for ``Runner.suspend``."""
        self._check_open()
        for runner in self.runners:
            runner.suspend(release=release)

    def resume(self) -> None:
        """Use the graphs again. Raises the errors of ``Runner.resume``."""
        self._check_open()
        for runner in self.runners:
            runner.resume()

    def stats(self) -> EngineStats:
        """Return a copy of the counters."""
        return attrs.evolve(self._stats)

    def reset_stats(self) -> None:
        """Reset the engine's counters to zero, but not the counters of the runners."""
        self._stats = EngineStats()

    def close(self) -> None:
        """Free the graphs, and end the handoffs of exported requests. Idempotent."""
        if self.closed:
            return
        self.closed = True
        for request in self._scheduler.requests:
            if request.is_exported:
                request.handoff.progress.end("closed with its engine")
        for runner in reversed(self.runners):
            runner.close()
        self.model.close()

    def _check_open(self) -> None:
        if self.closed:
            raise StateError("this engine is closed; create a new one")

    def _check_able(self) -> None:
        """Raise StateError if no step can run or be captured now."""
        self._check_open()
        if torch.is_autocast_enabled(self.model.device.type):
            raise StateError(
                "the steps of an engine compute in the dtype of its model, but autocast is on: "
                "leave torch.autocast, or load the model in the dtype that you need"
            )

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def config_of(given: DeviceGraphConfig | Mapping[str, Any] | str | None) -> DeviceGraphConfig:
    """Return the configuration in an object, a dictionary or JSON text; see ``Engine`` for None."""
    if given is None:
        return DeviceGraphConfig.from_args(argparse.Namespace())
    if isinstance(given, DeviceGraphConfig):
        return given
    if isinstance(given, str):
        return DeviceGraphConfig.from_json(given)
    return DeviceGraphConfig.from_dict(given)


def has_hooks(model: PreTrainedModel) -> bool:
    """Whether a module of ``model`` has forward hooks that its user or another library registered.

    Hooks of devgraph do not count: another thread may be probing a model with the same layers.
    """
    return any(
        not str(getattr(hook, "__module__", "")).startswith(
            ("transformers.", "torch.", "devgraph.")
        )
        for module in model.modules()
        for hooks in (module._forward_hooks, module._forward_pre_hooks)
        for hook in hooks.values()
    )


def _with_defaults(phase: PhaseConfig, model: PreTrainedModel) -> PhaseConfig:
    """Return ``phase`` with the engine's defaults for keys that are not set explicitly.

    Graphs are captured lazily unless the phase is strict or sets its capture or its buckets. If all
    modules are classes of transformers or torch, which initialize nothing in their first run, there
    are no warm-up runs.
    """
    changes: dict[str, Any] = {}
    if not (phase.strict or phase.explicit & {"capture", "buckets", "max_bs"}):
        changes["capture"] = "lazy"
    ours = (
        type(module).__module__.startswith(("transformers.", "torch."))
        for module in model.modules()
    )
    if "warmup" not in phase.explicit and all(ours):
        changes["warmup"] = 0
    return attrs.evolve(phase, **changes)


def _header_of(request: Request) -> dict[str, Any]:
    """Return the header fields that depend on the request."""
    sampler = request.sampler
    return {
        "token_ids": tuple(request.tokens),
        "prompt_length": request.prompt_length,
        "max_new_tokens": request.max_new_tokens,
        "stop_token_ids": tuple(sorted(request.stop)),
        "eos_token_ids": tuple(sorted(request.eos)),
        "sampling": SamplingParams() if sampler is None else sampler.params,
        "draws": 0 if sampler is None else sampler.draws,
        "random_state": "" if sampler is None else sampler.state.numpy().tobytes().hex(),
    }
