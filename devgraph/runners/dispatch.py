"""Dispatch of batches to graphs, eager steps, or idle steps on pad values."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import attrs

from devgraph.api.config.phase import PhaseConfig
from devgraph.api.errors import ExecutableError, InputError, InputTypeError, UpdateError, note
from devgraph.runners.capturing import CaptureScheduler
from devgraph.runners.decisions import (
    UNLAUNCHED,
    Decision,
    Reason,
    canonical_variant,
    reason_of,
    refusal,
    require_decision,
)
from devgraph.runners.graphs import BucketGraph, Graphs
from devgraph.runners.outputs import copied, lease
from devgraph.runners.slots import Size
from devgraph.runners.step import BoundSteps, GraphStep, Step

logger = logging.getLogger(__name__)


@attrs.define(eq=False)
class Dispatcher:
    """The part of a runner that runs its batches and counts eager steps by reason."""

    _step: Step
    _steps: BoundSteps
    _graphs: Graphs
    _scheduler: CaptureScheduler
    _warned: bool = attrs.field(default=False, init=False)
    """Whether the warning about a run before ``capture`` was logged."""

    @property
    def _config(self) -> PhaseConfig:
        return self._step.options.config

    @property
    def _name(self) -> str:
        return self._step.options.name

    def dispatch(
        self,
        inputs: Mapping[str, Any] | None,
        host_args: Mapping[str, Any] | None,
        variant: Mapping[str, Any] | None,
        decision: Decision | None,
        clone: bool,
    ) -> Any:
        """Check a batch, choose how to run it, and run it. Raises the errors of ``Runner.run``."""
        self._step.inputs.buffers.check()
        require_decision(decision)
        if variant is None and decision is not None and decision.key is not None:
            variant = dict(decision.key.variant)
        options = self._graphs.checked_variant(variant)
        if inputs is None:
            return self._join_agreed_step(decision, options)
        shown = self._steps.measured(inputs)
        size = self._graphs.counting.size(*shown, options)
        agreed = None if decision is None else decision.bucket
        if decision is None:
            decision = self._graphs.decide(size, options)
        elif decision.ok:
            self._graphs.require_fit(decision, size, options)
        if decision.reason is Reason.EMPTY_BATCH:
            if not size.is_empty:
                raise InputError(
                    f"the decision is for an empty batch, but the batch has {size}; pass a "
                    f"decision for this batch"
                )
            return self._handle_empty_batch(options)
        if self._step.options.idle_dummy and not decision.ok and size.is_empty:
            self._join_agreed_step(decision, options)
            return self._empty(options)
        if decision.ok:
            assert decision.key is not None
            bound = self._steps.get(shown, options, agreed, decision.key, size)
            return self.replay(bound, inputs, host_args, clone)
        if self._config.strict and decision.reason is not Reason.DISABLED:
            graph = self._graphs.get(decision.key)
            details = {
                Reason.OVER_LARGEST_BUCKET: f"the largest is {self._graphs.buckets.maximum}",
                Reason.UNKNOWN_VARIANT: f"{options} is none of {[*self._graphs.variants.values()]}",
            }
            detail = graph.detail if graph else details.get(decision.reason)
            raise refusal(decision, f"{self._name}: {size}", detail)
        return self._run_eager(inputs, host_args, size, options, decision, clone)

    def replay(
        self,
        step: GraphStep,
        inputs: Mapping[str, Any],
        host_args: Mapping[str, Any] | None,
        clone: bool,
    ) -> Any:
        """Replay a bound step, or run it eagerly if its graph cannot launch; return the outputs."""
        self._step.require_names()
        try:
            step.run(inputs, host_args)
        except UNLAUNCHED as error:
            decision = self._fallback(step.graph, error)
            inputs, options = step.loaded(inputs), step.graph.options
            return self._run_eager(inputs, host_args, step.real, options, decision, clone)
        outputs = step.outputs() if step.tail is None else step.result(host_args)
        return self._delivered(outputs, clone)

    def _fallback(self, graph: BucketGraph, error: UpdateError | ExecutableError) -> Decision:
        """Return the decision after a failed launch; raise ``error`` if no eager run is allowed."""
        if self._config.strict or (isinstance(error, ExecutableError) and error.partly):
            raise error
        logger.debug("%s: %s", self._name, error)
        return Decision(reason_of(error), graph.key)

    def _run_eager(
        self,
        inputs: Mapping[str, Any],
        host_args: Mapping[str, Any] | None,
        size: Size,
        options: Mapping[str, Any],
        decision: Decision,
        clone: bool,
    ) -> Any:
        is_early = self._config.capture == "eager" and not self._step.captured
        if decision.reason is Reason.NOT_CAPTURED and is_early and not self._warned:
            self._warned = True
            logger.warning(
                "%s runs eagerly because its graphs are not captured; call capture() first, or set "
                "capture='lazy' in the configuration to capture buckets while serving",
                self._name,
            )
        try:
            outputs = self._step.run_eagerly(inputs, size, host_args, options)
        except Exception as error:
            note(error, f"in an eager step of {self._name} ({decision.reason}), {size}")
            raise
        self._graphs.counters.reasons[decision.reason] += 1
        graph = self._scheduler.want(decision)
        if graph is not None:
            outputs = copied(outputs)  # Warm-up runs may overwrite the originals.
            try:
                self._scheduler.capture([graph])
            except Exception:
                # The step itself succeeded, so run() must not fail.
                logger.exception("%s: capture of bucket %s failed", self._name, graph.key)
        return self._delivered(outputs, clone)

    def _delivered(self, outputs: Any, clone: bool) -> Any:
        """Return the outputs of a step copied, leased, or unchanged."""
        if clone:
            return copied(outputs)
        return lease(outputs, self._step.clock) if self._step.options.debug else outputs

    def _empty(self, options: Mapping[str, Any]) -> Any:
        options = self._graphs.pad_variant(options)
        return self._step.empty_result(options, self._graphs.counting.some(1, options))

    def _handle_empty_batch(self, options: Mapping[str, Any]) -> Any:
        """Return an empty result. With ``idle_dummy``, run the smallest graph on pad values."""
        if not self._step.options.idle_dummy:
            self._graphs.counters.reasons[Reason.EMPTY_BATCH] += 1
            return self._empty(options)
        options = self._graphs.pad_variant(options)
        variant = canonical_variant(options)
        usable = [graph for graph in self._graphs.captured if graph.key.variant == variant]
        if usable and not self._graphs.suspended:
            decision = self._graphs.launchable(Decision(Reason.GRAPH, usable[-1].key))
        else:
            decision = Decision(Reason.EMPTY_BATCH)
        self._run_on_pads(decision, options)
        return self._empty(options)

    def _join_agreed_step(self, decision: Decision | None, options: Mapping[str, Any]) -> None:
        """Run an agreed step on a rank without requests."""
        options = self._graphs.pad_variant(options)
        if decision is None:
            raise InputTypeError(
                "run(None) runs an agreed step on a rank without requests; pass the result of "
                "agree(None) as decision="
            )
        if decision.ok:
            self._graphs.require_fit(decision, self._graphs.counting.some(1, options), options)
        if decision.reason is Reason.EMPTY_BATCH:
            self._graphs.counters.reasons[decision.reason] += 1
            return
        if self._config.strict and self._graphs and not decision.ok:
            # The ranks with requests raise the same error.
            raise refusal(decision, f"{self._name}: a step without requests on this rank")
        self._run_on_pads(decision, options)

    def _run_on_pads(self, decision: Decision, options: Mapping[str, Any]) -> None:
        self._step.pool.order()
        if decision.ok:
            assert decision.key is not None
            graph = self._graphs[decision.key]
            try:
                self._step.replay_pads(graph)
            except UNLAUNCHED as error:
                decision = self._fallback(graph, error)
            else:
                self._graphs.counters.idle += 1
                return
        self._step.clock.tick()
        self._step.run_pads(self._step.whole, self._graphs.counting.some(1, options), options)
        self._graphs.counters.reasons[decision.reason] += 1
