"""Decisions and steps: the part of a runner that runs once per batch."""

from __future__ import annotations

import abc
import logging
from collections.abc import Callable, Mapping, Sequence
from threading import get_ident
from typing import Any

import torch
from torch.utils import _pytree as pytree

from devgraph.api.errors import (
    InputError,
    InputTypeError,
    NestedCaptureError,
    StateError,
    UpdateTopologyError,
    UpdateUnsupportedError,
)
from devgraph.api.marks.marks import is_capturing
from devgraph.runners.batch import Batch
from devgraph.runners.decision import Decision, Reason, Variant, refusal, update_reason
from devgraph.runners.entries import Entry, canonical_variant
from devgraph.runners.lease import LeaseClock, lease
from devgraph.runners.parts import Parts, StaticBatch, eager_batch
from devgraph.runners.slots import InputSlot, Size, whole
from devgraph.runners.steps import GraphStep
from devgraph.runners.voting import agree_on

__all__ = ["Stepping"]

logger = logging.getLogger(__name__)

MAX_STEPS = 4096
"""Bound steps that are kept; a step is a few KiB and costs some 20 us to bind again."""


class Stepping(abc.ABC):
    """Decides how each batch runs, and runs it.

    Args:
        parts: what the runner is made of.
        eager: the whole step.
        tail: what follows a replay; None where the graph is the whole step.
    """

    def __init__(
        self,
        parts: Parts,
        *,
        eager: Callable[[Batch], Any],
        tail: Callable[[Any, Batch], Any] | None,
    ) -> None:
        options, config = parts.options, parts.config
        self._parts = parts
        self._name = options.name
        self._eager = eager
        self._tail = tail
        self._lock = parts.pool.lock
        self._order = parts.pool.order
        self._host = parts.host
        self._live = parts.live
        self._debug = options.debug
        self._steps: dict[Any, GraphStep] = {}
        self._clock = LeaseClock(self._name)
        self._suspended = False
        self._closed = False
        self._token_lead = _lead(parts.arena.slots, by_requests=False)
        self._request_lead = _lead(parts.arena.slots, by_requests=True)
        # Where this is False, a size that once ran in a graph needs no decision any more: the
        # table of bound steps is emptied whenever a decision could change.
        self._decide_always = bool(
            options.weights_epoch or options.bound or config.max_seq_len is not None
        )

    # What the phases differ in.

    @abc.abstractmethod
    def _rows(self, size: Size) -> int:
        """Return what buckets count: requests or tokens."""

    @abc.abstractmethod
    def _variant_of(
        self, requests: int, tokens: int, options: Mapping[str, Any]
    ) -> Variant | Reason:
        """Return the declared variant of a batch, or why there is none."""

    @abc.abstractmethod
    def _fits_requests(self, requests: int) -> bool:
        """Whether the graphs have enough request slots."""

    @abc.abstractmethod
    def _size_of(self, requests: int, tokens: int, options: Mapping[str, Any]) -> Size:
        """Return the size of a real batch."""

    @abc.abstractmethod
    def _infer(self, requests: int | None, tokens: int | None, options: Mapping[str, Any]) -> Size:
        """Return requests and tokens where the inputs show only one of them."""

    @abc.abstractmethod
    def _dummy_size(self, options: Mapping[str, Any]) -> Size:
        """Return the smallest batch that an idle rank can take part with."""

    @abc.abstractmethod
    def _real_size(self, entry: Entry, rows: int, index: int) -> Size:
        """Return the size of a batch with ``rows`` rows for ``prove``; ``index`` varies it."""

    # Decisions.

    def can_run(
        self,
        requests: int,
        tokens: int | None = None,
        variant: Mapping[str, Any] | None = None,
        *,
        longest: int | None = None,
    ) -> Decision:
        """Return how a batch would run now. Changes nothing and counts nothing.

        It is the only rule of eligibility: ``run`` asks it too.

        Args:
            requests, tokens: real sizes of the batch.
            variant: the variant as declared; without ``width``, decode takes tokens per request.
            longest: tokens of the longest sequence, needed where ``max_seq_len`` is configured.

        Raises:
            InputError: a number is negative (a ValueError). InputTypeError: it is no int.
        """
        self._require_open("decide")
        options = _options_of(variant)
        count = None if tokens is None else whole("tokens", tokens)
        size = self._infer(whole("requests", requests), count, options)
        return self._decide(size.requests, size.tokens, options, longest)

    def _decide(
        self, requests: int, tokens: int, options: Mapping[str, Any], longest: int | None
    ) -> Decision:
        config = self._parts.config
        if not requests or not tokens:
            return Decision.eager(Reason.EMPTY_BATCH)
        if config.policy == "disabled":
            return Decision.eager(Reason.DISABLED)
        if self._suspended:
            return Decision.eager(Reason.SUSPENDED)
        if config.max_seq_len is not None:
            if longest is None:
                raise InputError(
                    f"max_seq_len={config.max_seq_len} is configured: pass longest=, the tokens "
                    f"of the longest sequence of the batch"
                )
            if whole("longest", longest) > config.max_seq_len:
                return Decision.eager(Reason.OVER_MAX_SEQ_LEN)
        variant = self._variant_of(requests, tokens, options)
        if isinstance(variant, Reason):
            return Decision.eager(variant)
        if not self._fits_requests(requests):
            return Decision.eager(Reason.OVER_MAX_REQUESTS)
        rows = self._rows(Size(requests, tokens))
        decision = self._parts.entries.choose(variant, rows)
        return self._at_epoch(decision)

    def _at_epoch(self, decision: Decision) -> Decision:
        epoch_of = self._parts.options.weights_epoch
        if decision.ok and epoch_of is not None:
            assert decision.key is not None
            if self._parts.entries[decision.key].epoch != epoch_of():
                return Decision.eager(Reason.WEIGHTS_CHANGED, decision.key)
        return decision

    def agree(self, decision: Decision | None) -> Decision:
        """Return the decision that all ranks take for this step; every rank must call it.

        A step runs in a graph only if every rank can, and then in the largest bucket that a rank
        needs. A rank without requests passes None and then calls ``run(None, decision=...)``.

        Raises:
            AgreementError: ranks want different variants, or one did not vote.
        """
        self._require_open("agree")
        _require_decision(decision)
        return agree_on(decision, self._parts.ranks, self._parts.entries, self._name)

    # Running.

    def run(
        self,
        inputs: Mapping[str, torch.Tensor] | None,
        *,
        host_args: Mapping[str, Any] | None = None,
        variant: Mapping[str, Any] | None = None,
        decision: Decision | None = None,
        longest: int | None = None,
        clone: bool = False,
    ) -> Any:
        """Run one step and return its outputs, real rows only.

        The inputs are copied first, in order on the current stream, so that an output of the last
        run may be an input of this one. The returned tensors are valid until the next run of this
        runner, which overwrites them.

        Args:
            inputs: a tensor for every slot, on the device or on the host; None for a rank that
                takes part without requests, which returns None.
            host_args: a value for every declared host argument.
            variant: as for ``can_run``.
            decision: what ``agree`` returned; without it the runner decides itself.
            longest: as for ``can_run``.
            clone: return copies that stay.

        Returns:
            what the step returns; None for an empty batch.

        Raises:
            InputError, InputTypeError, HostArgumentError: bad data; nothing was changed.
            StateError: closed, or a bound tensor has moved.
            DeviceGraphError: the step cannot run in a graph and the runner is strict.
            DeviceLost: the device is in a sticky error state.
        """
        if is_capturing():
            raise NestedCaptureError(
                f"{self._name} cannot run inside a capture; leave the capture first"
            )
        with self._lock:
            if not clone and self._clock.caller != get_ident():
                self._clock.called_by(get_ident())
            try:
                if decision is None and not self._decide_always and inputs is not None:
                    requests, tokens = self._measure(inputs)
                    key = canonical_variant(variant) if variant else ()
                    step = self._steps.get((requests, tokens, key, None))
                    if step is not None:
                        return self._run_graph(step, inputs, host_args, clone)
                options = _options_of(variant)
                return self._run_decided(inputs, host_args, options, decision, longest, clone)
            except Exception as error:
                self._parts.backend.raise_if_lost(error)
                raise

    def _measure(self, inputs: Mapping[str, Any]) -> tuple[int | None, int | None]:
        requests = tokens = None
        if type(inputs) is not dict:
            self._require_open("run")
            self._parts.arena.require_mapping(inputs)
        lead = self._token_lead
        try:
            if lead is not None:
                tokens = inputs[lead[0]].shape[lead[1]]
            lead = self._request_lead
            if lead is not None:
                requests = inputs[lead[0]].shape[lead[1]] - lead[2]
        except (KeyError, TypeError, AttributeError, IndexError):
            assert lead is not None
            self._require_open("run")
            self._parts.arena.extent(inputs, lead[0])
            raise
        return requests, tokens

    def _run_decided(
        self,
        inputs: Mapping[str, Any] | None,
        host_args: Mapping[str, Any] | None,
        options: Mapping[str, Any],
        decision: Decision | None,
        longest: int | None,
        clone: bool,
    ) -> Any:
        self._require_open("run")
        parts = self._parts
        parts.arena.buffers.check()
        _require_decision(decision)
        if inputs is None:
            return self._run_without_requests(decision)
        measured = self._measure(inputs)
        size = self._infer(*measured, options)
        size = self._size_of(size.requests, size.tokens, options)
        agreed = decision
        if decision is None:
            decision = self._decide(size.requests, size.tokens, options, longest)
        elif decision.ok:
            self._check_agreed(decision, size)
        if decision.reason is Reason.EMPTY_BATCH:
            return self._run_empty(options)
        if decision.ok:
            key = (*measured, canonical_variant(options), agreed and agreed.bucket)
            step = self._steps.get(key) or self._bind(key, decision, size)
            return self._run_graph(step, inputs, host_args, clone)
        if parts.config.strict and decision.reason is not Reason.DISABLED:
            what = f"{self._name}: {size.requests} requests, {size.tokens} tokens"
            entry = parts.entries.get(decision.key)
            raise refusal(decision, what, entry.detail if entry else None)
        return self._run_eager(inputs, host_args, size, options, decision, clone)

    def _bind(self, key: Any, decision: Decision, size: Size) -> GraphStep:
        assert decision.key is not None
        entry = self._parts.entries[decision.key]
        step = GraphStep(self._parts, entry, size, self._rows(size))
        if self._parts.arena.holds(size):  # Any other step has memory of its own.
            if len(self._steps) >= MAX_STEPS:
                del self._steps[next(iter(self._steps))]
            self._steps[key] = step
        return step

    def _run_graph(
        self,
        step: GraphStep,
        inputs: Mapping[str, Any],
        host_args: Mapping[str, Any] | None,
        clone: bool,
    ) -> Any:
        # Everything is bound beforehand: this is host time of every step.
        host, entry, live = self._host, step.entry, self._live
        values = host.resolve(host_args, step.real, step.padded) if host_args or host else {}
        self._order()
        step.load(inputs)
        live.size, live.tensors = step.real, step.run_tensors
        self._clock.now += 1
        try:
            step.replay(**values)
        except (UpdateUnsupportedError, UpdateTopologyError) as error:
            if self._parts.config.strict:
                raise
            logger.debug("%s: %s", self._name, error)
            decision = Decision.eager(update_reason(error), entry.key)
            return self._run_eager(inputs, host_args, step.real, entry.options, decision, clone)
        entry.hits += 1
        entry.real_rows += step.rows
        outputs = step.outputs()
        if self._tail is not None:
            outputs = self._finish(step, outputs, host.resolve(host_args, step.real, step.real))
        return outputs if not clone and not self._debug else self._handed(outputs, clone)

    def _finish(self, step: GraphStep, outputs: Any, host: Mapping[str, Any]) -> Any:
        if self._tail is None:
            return outputs
        batch = Batch(step.tensors, step.real, host=host, variant=step.entry.options)
        with torch.no_grad():
            return self._tail(outputs, batch)

    def _run_eager(
        self,
        inputs: Mapping[str, Any],
        host_args: Mapping[str, Any] | None,
        size: Size,
        options: Mapping[str, Any],
        decision: Decision,
        clone: bool,
    ) -> Any:
        parts = self._parts
        host = parts.host.resolve(host_args, size, size)
        views = parts.arena.eager_views(inputs, size)
        self._clock.now += 1
        with torch.no_grad(), eager_batch(parts, views, size, host=host, variant=options) as batch:
            outputs = self._eager(batch)
        parts.counters.count(decision.reason)
        parts.counters.eager_tokens += size.tokens
        self._want(decision)
        return outputs if not clone and not self._debug else self._handed(outputs, clone)

    def _want(self, decision: Decision) -> None:
        """Capture a bucket that enough batches wanted; after the step, whose outputs are safe."""
        entry = self._parts.entries.get(decision.key)
        if entry is None or decision.reason not in (Reason.NOT_CAPTURED, Reason.INVALIDATED):
            return
        entry.wants += 1
        config = self._parts.config
        if config.capture == "lazy" and entry.wants >= config.lazy_hits and not entry.dropped:
            try:
                self._round([entry])
            except Exception:
                # The step itself is done and right; its bucket stays eager, with this reason.
                logger.exception("%s: capture of bucket %s failed", self._name, entry.key)

    def _handed(self, outputs: Any, clone: bool) -> Any:
        if clone:
            return pytree.tree_map(
                lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, outputs
            )
        return lease(outputs, self._clock)

    def _check_agreed(self, decision: Decision, size: Size) -> None:
        entry = self._parts.entries.get(decision.key)
        if entry is None or entry.captured is None:
            raise StateError(
                f"the decision asks for graph {decision.key}, which is not captured here "
                f"({entry.reason.value if entry else 'unknown'}); capture on all ranks together"
            )
        if self._rows(size) > entry.key.bucket or not self._fits_requests(size.requests):
            raise InputError(
                f"the decision asks for bucket {entry.key}, and the batch has {size.requests} "
                f"requests and {size.tokens} tokens"
            )

    def _run_empty(self, options: Mapping[str, Any]) -> None:
        """An empty batch: nothing, or the declared idle dummy."""
        parts = self._parts
        if not parts.options.idle_dummy:
            parts.counters.count(Reason.EMPTY_BATCH)
            return
        usable = [e for e in parts.entries.captured if e.key.variant == canonical_variant(options)]
        if usable and not self._suspended:
            decision = self._at_epoch(Decision.graph(usable[-1].key))
        else:
            decision = Decision.eager(Reason.EMPTY_BATCH)
        self._run_dummy(decision, options)

    def _run_without_requests(self, decision: Decision | None) -> None:
        if decision is None:
            raise InputTypeError(
                "run(None) is for a rank without requests in an agreed step: pass decision=, as "
                "agree(None) returned it"
            )
        if decision.ok:
            self._check_agreed(decision, Size(0, 0))
        if decision.reason is Reason.EMPTY_BATCH:
            self._parts.counters.count(decision.reason)
            return
        options = dict(decision.key.variant) if decision.key else {}
        self._run_dummy(decision, options)

    def _run_dummy(self, decision: Decision, options: Mapping[str, Any]) -> None:
        """Take part in a step on pad values only."""
        parts = self._parts
        parts.pool.order()
        self._clock.now += 1
        if decision.ok:
            assert decision.key is not None
            entry = parts.entries[decision.key]
            assert entry.captured is not None
            StaticBatch(parts, entry)
            entry.captured.replay(**parts.host.at_capture(entry.size))
            entry.hits += 1
            parts.counters.idle += 1
            return
        size = self._dummy_size(options)
        views = parts.arena.views(size)
        parts.arena.filler(views)()
        host = parts.host.at_capture(size)
        with torch.no_grad(), eager_batch(parts, views, size, host=host, variant=options) as batch:
            self._eager(batch)
        parts.counters.count(decision.reason)

    def _require_open(self, call: str) -> None:
        if self._closed:
            raise StateError(f"cannot {call}: {self._name} is closed; make a new one")
        self._parts.backend.require_alive()

    @abc.abstractmethod
    def _round(self, entries: Sequence[Entry]) -> None:
        """Capture ``entries``."""


def _options_of(variant: object) -> Mapping[str, Any]:
    if variant is None:
        return {}
    if not isinstance(variant, Mapping):
        raise InputTypeError(f"a variant is a mapping such as {{'lora': True}}, got {variant!r}")
    width = variant.get("width", 1)
    if isinstance(width, bool) or not isinstance(width, int) or width < 1:
        raise InputError(f"variant {dict(variant)}: width must be a positive int")
    return variant


def _require_decision(decision: object) -> None:
    if decision is not None and not isinstance(decision, Decision):
        raise InputTypeError(f"decision must be what can_run or agree returned, got {decision!r}")


def _lead(slots: Mapping[str, InputSlot], *, by_requests: bool) -> tuple[str, int, int] | None:
    """Return (name, axis, rows beyond the count) of the slot that shows tokens or requests."""
    for slot in slots.values():
        if slot.axis is not None and slot.by_requests == by_requests:
            return slot.name, slot.axis, slot.shape(Size(0, 0))[slot.axis]
    return None
