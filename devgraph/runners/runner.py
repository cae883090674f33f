"""Runner: data through fixed buffers, a graph per bucket, and eager steps with a reason."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from threading import get_ident
from typing import Any

import torch

from devgraph.api import __version__
from devgraph.api.backend import Backend, own_pool
from devgraph.api.buffers import StaticBuffers
from devgraph.api.device import raise_if_lost, require_alive
from devgraph.api.errors import (
    ConfigError,
    ConfigTypeError,
    ExecutableError,
    InputError,
    InputTypeError,
    NestedCaptureError,
    StateError,
    UpdateError,
    brief,
    whole,
)
from devgraph.api.marks.marks import current_scope
from devgraph.api.policy import get_policy
from devgraph.api.pool import Pool
from devgraph.api.process import identity
from devgraph.api.prove import compare_near
from devgraph.api.registry import get_backend
from devgraph.runners.batch import Batch, HostArgs
from devgraph.runners.buckets import Buckets, ByTokens, Phase, spans
from devgraph.runners.capturing import Capturing
from devgraph.runners.decisions import (
    UNLAUNCHED,
    Decision,
    Reason,
    canonical_variant,
    reason_of,
    refusal,
)
from devgraph.runners.graphs import BucketGraph, Graphs, Timing
from devgraph.runners.inputs import InputArena
from devgraph.runners.options import Options, check_functions
from devgraph.runners.outputs import LeaseClock, OutputStore, copied, lease
from devgraph.runners.prove import Proof, RunnerReport
from devgraph.runners.ranks import ranks_of
from devgraph.runners.report import Counters, RunnerStats
from devgraph.runners.slots import InputSlot, Size
from devgraph.runners.step import BoundSteps, GraphStep, Step

logger = logging.getLogger(__name__)


class Runner:
    """What all runners have in common; make one of its kinds, a ``DecodeRunner`` for example.

    A runner belongs to one process. Its methods may be called from any thread; steps of runners
    that share a pool follow each other.

    Attributes:
        backend: where it runs.
        pool: graph memory; hand it to other runners of the engine so that they share it.
        graphs: the graphs by variant and bucket, largest first.
    """

    def __init__(
        self,
        *,
        slots: Mapping[str, InputSlot],
        function: Callable[[Batch], Any],
        outputs: Any,
        options: Options,
        capacity: int,
        counting: ByTokens,
        whole_step: Callable[[Batch], Any] | None = None,
        tail: Callable[[Any, Batch], Any] | None = None,
        run_slots: frozenset[str] = frozenset(),
        steps_per_launch: int = 1,
        implied: Callable[[Size], Mapping[str, torch.Tensor]] | None = None,
    ) -> None:
        config, pool, backend = options.config, options.pool, options.backend
        _check_config(options)
        check_functions(function, tail)
        maximum, off = min(config.max_bs or capacity, capacity), config.policy == "disabled"
        buckets = Buckets.of(
            (maximum,) if off else config.buckets,  # no graph has the sizes that are listed
            phase=counting.phase,
            maximum=maximum,
            multiple_of=1 if off else config.align,
        )
        _report_uncovered(buckets, capacity, counting.counts, options)
        largest = [counting.padded(buckets.maximum, named) for named in options.variants.values()]
        share = options.share
        if share is not None:
            pool = _pool_with(share, pool)
        lender = share if share is not None and share.graphs else None  # of outputs of graphs
        backend = backend if isinstance(backend, Backend) else get_backend(backend)
        pool = own_pool(backend, pool, releasable=config.releasable)
        arena = InputArena(
            slots,
            Size(max(size.requests for size in largest), max(size.tokens for size in largest)),
            backend,
            run_slots,
            share and share._step.inputs,
        )
        for name, tree in options.bound.items():
            arena.buffers.bind(name, tree)
        self.phase: Phase = counting.phase
        self.backend: Backend = backend
        self.pool: Pool = pool
        self._config = config
        self._options = options
        self._name = options.name
        self._debug = options.debug
        self._steps_per_launch = steps_per_launch
        self._implied = implied
        self._step = Step(
            function=function,
            whole=whole_step or function,
            tail=tail,
            inputs=arena,
            outputs=OutputStore(outputs, lender and lender._step.outputs),
            host=HostArgs(options.host_args, partly=options.prepare is not None),
            reset_state=options.reset_state or (lambda: None),
            clock=LeaseClock(options.name),
            options=options,
            backend=backend,
            pool=pool,
        )
        self.graphs = Graphs(options, buckets, counting, pool)
        self._steps = BoundSteps(self._step, self.graphs)
        self._counters = Counters()
        self._ranks = ranks_of(options.group)
        self._capturing = Capturing(
            self._step,
            self.graphs,
            self._counters,
            ranks=self._ranks,
            facts=self._facts(),
            share=lender and lender._capturing,
        )
        self._lock = pool.lock
        self._process = identity.token
        self._busy: list[Runner] = [] if share is None else share._busy
        """The runner that is at work under the lock, of those that share buffers."""
        self._closed = False
        # Where this is False, a size that once ran in a graph needs no decision any more: the
        # table of bound steps is emptied whenever a decision could change.
        self._decide_always = bool(options.weights_epoch or config.max_seq_len is not None)
        # Last: a runner that is refused changes nothing of a pool that others use.
        if config.memory is not None:
            pool.limit(config.memory)
        pool.register(arena.buffers)

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
                Values that were not declared are a reason to run eagerly.
            longest: tokens of the longest sequence, needed where ``max_seq_len`` is configured.

        Raises:
            InputError: a number is negative, the numbers do not go together, or a name is of no
                declared variant (a ValueError).
            InputTypeError: it is no int.
        """
        self._require_open("decide")
        options = self.graphs.asked(variant)
        count = None if tokens is None else whole("tokens", tokens)
        size = self.graphs.counting.size(whole("requests", requests), count, options)
        return self.graphs.decide(size, options, longest)

    def agree(self, decision: Decision | None) -> Decision:
        """Return the decision that all ranks take for this step; every rank must call it.

        A step runs in a graph only if every rank can, and then in the largest bucket that a rank
        needs. A rank without requests passes None and then calls ``run(None, decision=...)``; where
        it is suspended, or a graph of it is of other weights, all run eagerly.

        Raises:
            AgreementError: ranks want different variants, or one did not vote.
            InputError: the decision is another runner's.
        """
        self._require_open("agree")
        _require_decision(decision)
        if decision and decision.key and self.graphs.get(decision.key) is None:
            raise InputError(
                f"the decision is for graph {decision.key}, which {self._name} does not have; give "
                f"agree what can_run of the same runner returned"
            )
        unable = None
        if self._ranks.size > 1:
            if decision is None or decision.reason is Reason.EMPTY_BATCH:
                unable = self.graphs.unusable()
            else:  # of what may have changed since
                decision = self.graphs.launchable(decision)
        dummy = self._options.idle_dummy
        return self._ranks.agree(
            decision, [*self.graphs.variants], self._name, unable=unable, dummy=dummy
        )

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
            variant: as for ``can_run``; with a decision that names a graph, that of the graph.
            decision: what ``agree`` or ``can_run`` returned; without it the runner decides itself.
            longest: as for ``can_run``.
            clone: return copies that stay.

        Returns:
            what the step returns; of an empty batch tensors without rows.

        Raises:
            InputError, InputTypeError, HostArgumentError: bad data; nothing was changed.
            StateError: closed, or a bound tensor has moved or has another layout.
            DeviceGraphError: the step cannot run in a graph and the runner is strict.
            DeviceLost: the device is in a sticky error state.
        """
        if current_scope() is not None:
            raise NestedCaptureError(
                f"{self._name} cannot run inside a capture; leave the capture first"
            )
        if identity.token is not self._process:
            identity.require(self._process, f"run {self._name}")
        with self._lock:
            if self._busy or self.pool.occupied:
                self._require_outside("run")
            try:  # around the call too, behind which an interrupt may come
                self._busy.append(self)
                if not clone and self._step.clock.caller != get_ident():
                    self._step.clock.called_by(get_ident())
                if decision is None and not self._decide_always and inputs is not None:
                    step = self._steps.find(inputs, variant)
                    if step is not None:
                        if self._options.bound:
                            self.buffers.check()
                        return self._replay(step, inputs, host_args, clone)
                return self._run_decided(inputs, host_args, variant, decision, longest, clone)
            except Exception as error:
                raise_if_lost(self.backend, error)
                raise
            finally:
                self._busy.clear()

    def _run_decided(
        self,
        inputs: Mapping[str, Any] | None,
        host_args: Mapping[str, Any] | None,
        variant: Mapping[str, Any] | None,
        decision: Decision | None,
        longest: int | None,
        clone: bool,
    ) -> Any:
        self._require_open("run")
        self.buffers.check()
        _require_decision(decision)
        if variant is None and decision is not None and decision.key is not None:
            variant = dict(decision.key.variant)
        options = self.graphs.asked(variant)
        if inputs is None:
            return self._run_without_requests(decision, self.graphs.of_pads(options))
        shown = self._steps.measured(inputs)
        size = self.graphs.counting.size(*shown, options)
        agreed = None if decision is None else decision.bucket
        if decision is None:
            decision = self.graphs.decide(size, options, longest)
        elif decision.ok:
            self._check_agreed(decision, size, options)
        if decision.reason is Reason.EMPTY_BATCH:
            if size.requests and size.tokens:
                raise InputError(
                    f"the decision is for an empty batch, and the batch has {_counted(size)}; "
                    f"decide for this batch"
                )
            return self._run_empty(self.graphs.of_pads(options))
        if self._options.idle_dummy and not decision.ok and not (size.requests and size.tokens):
            self._run_without_requests(decision, self.graphs.of_pads(options))
            return self._empty(self.graphs.of_pads(options))
        if decision.ok:
            assert decision.key is not None
            step = self._steps.get(shown, options, agreed, decision.key, size)
            return self._replay(step, inputs, host_args, clone)
        if self._config.strict and decision.reason is not Reason.DISABLED:
            what = f"{self._name}: {size.requests} requests, {size.tokens} tokens"
            graph = self.graphs.get(decision.key)
            raise refusal(decision, what, graph.detail if graph else None)
        return self._run_eager(inputs, host_args, size, options, decision, clone)

    def _replay(
        self,
        step: GraphStep,
        inputs: Mapping[str, Any],
        host_args: Mapping[str, Any] | None,
        clone: bool,
    ) -> Any:
        try:
            step.run(inputs, host_args)
        except UNLAUNCHED as error:
            decision = self._instead(step.graph, error)
            inputs, options = step.loaded(inputs), step.graph.options
            return self._run_eager(inputs, host_args, step.real, options, decision, clone)
        outputs = step.outputs() if step.tail is None else step.result(host_args)
        return self._handed(outputs, clone) if clone or self._debug else outputs

    def _instead(self, graph: BucketGraph, error: UpdateError | ExecutableError) -> Decision:
        """Return what to do where ``graph`` could not be launched; raises ``error`` where that is
        not to run eagerly."""
        if self._config.strict or (isinstance(error, ExecutableError) and error.partly):
            raise error
        logger.debug("%s: %s", self._name, error)
        return Decision.eager(reason_of(error), graph.key)

    def _run_eager(
        self,
        inputs: Mapping[str, Any],
        host_args: Mapping[str, Any] | None,
        size: Size,
        options: Mapping[str, Any],
        decision: Decision,
        clone: bool,
    ) -> Any:
        outputs = self._step.run_eagerly(inputs, size, host_args, options)
        self._counters.reasons[decision.reason] += 1
        graph = self._capturing.want(decision)
        if graph is not None:  # Enough batches wanted it.
            outputs = copied(outputs)  # They may lie where warm-up runs write.
            try:
                self._capture([graph])
            except Exception:
                # The step itself is done and right; its bucket stays eager, with this reason.
                logger.exception("%s: capture of bucket %s failed", self._name, graph.key)
        return self._handed(outputs, clone) if clone or self._debug else outputs

    def _handed(self, outputs: Any, clone: bool) -> Any:
        return copied(outputs) if clone else lease(outputs, self._step.clock)

    def _check_agreed(self, decision: Decision, size: Size, options: Mapping[str, Any]) -> None:
        graph, graphs = self.graphs.get(decision.key), self.graphs
        now = graphs.launchable(decision)
        if graph is None or not now.ok:
            raise StateError(
                f"the decision asks for graph {decision.key}, and here {refusal(now, self._name)}, "
                f"or decide again, on all ranks together"
            )
        if (
            graphs.rows(size) > graph.key.bucket
            or not graphs.counting.fits(size)
            # No requests are of no width.
            or (
                size.requests
                and graphs.counting.variant(size, options, graphs.variants) != graph.key.variant
            )
        ):
            raise InputError(
                f"the decision asks for bucket {graph.key}, and the batch has {_counted(size)} of "
                f"the variant {dict(options)}"
            )

    def _empty(self, options: Mapping[str, Any]) -> Any:
        return self._step.empty_result(options, self.graphs.counting.some(1, options))

    def _run_empty(self, options: Mapping[str, Any]) -> Any:
        """Run nothing for an empty batch, or the declared idle dummy; return an empty result."""
        if not self._options.idle_dummy:
            self._counters.reasons[Reason.EMPTY_BATCH] += 1
            return self._empty(options)
        usable = [g for g in self.graphs.captured if g.key.variant == canonical_variant(options)]
        if usable and not self.graphs.suspended:
            decision = self.graphs.launchable(Decision.graph(usable[-1].key))
        else:
            decision = Decision.eager(Reason.EMPTY_BATCH)
        self._run_pads(decision, options)
        return self._empty(options)

    def _run_without_requests(self, decision: Decision | None, options: Mapping[str, Any]) -> None:
        if decision is None:
            raise InputTypeError(
                "run(None) is for a rank without requests in an agreed step: pass decision=, as "
                "agree(None) returned it"
            )
        if decision.ok:
            self._check_agreed(decision, self.graphs.counting.some(1, options), options)
        if decision.reason is Reason.EMPTY_BATCH:
            self._counters.reasons[decision.reason] += 1
            return
        if self._config.strict and self.graphs and not decision.ok:  # as the ranks with requests do
            raise refusal(decision, f"{self._name}: a step of no requests here")
        self._run_pads(decision, options)

    def _run_pads(self, decision: Decision, options: Mapping[str, Any]) -> None:
        """Take part in a step on pad values only."""
        self.pool.order()
        if decision.ok:
            assert decision.key is not None
            graph = self.graphs[decision.key]
            try:
                self._step.replay_pads(graph)
            except UNLAUNCHED as error:
                decision = self._instead(graph, error)
            else:
                self._counters.idle += 1
                return
        self._step.run_pads(self.graphs.counting.some(1, options), options)
        self._counters.reasons[decision.reason] += 1

    def _require_outside(self, call: str) -> None:
        """Raise StateError in the runner's own step, in that of one that it shares buffers with,
        and in an eager body of a step on its pool; called under the pool's lock."""
        self.pool.require_free(f"{call} {self._name}")
        if self._busy:
            (busy,) = self._busy
            step = "its own step" if busy is self else f"a step of {busy._name}"
            raise StateError(
                f"cannot {call} {self._name} inside {step}, which uses its buffers. Do it "
                f"before or after the step, or make another runner."
            )

    @contextlib.contextmanager
    def _between_steps(self, call: str) -> Iterator[None]:
        """Hold the pool's lock for what an open runner may do while it runs no step."""
        with self.pool.lock:
            self._require_outside(call)
            self._require_open(call)
            try:  # as in ``run``
                self._busy.append(self)
                yield
            finally:
                self._busy.clear()

    def _require_open(self, call: str) -> None:
        if self._closed:
            raise StateError(f"cannot {call}: {self._name} is closed; make a new one")
        require_alive(self.backend)

    # Capture.

    def capture(self, *, everything: bool = False, profile: str | None = None) -> None:
        """Capture the buckets that are not captured yet, largest first; failed ones again.

        With ``capture="lazy"`` or ``"background"`` in the configuration it only finds out what the
        step returns; buckets follow after enough batches wanted one, or one per ``idle`` call (with
        several ranks both in ``idle``). ``everything`` captures them now. ``profile`` names a
        folder that gets a Chrome trace of each capture, warm-up included.

        The autocast in force is that of all captures and steps from here on, whatever they are
        called under, until graphs are captured anew. Where ``idle`` or a step captures first, it is
        that of the last step.

        Every capture starts from pad values in all slots; memory of buckets is shared. When memory
        runs out, the rest is dropped: the steps that wanted it run eagerly, counted.

        Raises:
            InputTypeError, StateError: ``profile`` is no path, or torch profiles already, which it
                does once at a time. OSError: there cannot be such a folder.
            ResourceError: memory or another resource ran out and the runner is strict, or another
                runner on the pool was suspended and gave the memory back.
            AgreementError: ranks differ, or one failed, is late or gone.
            Exception: what the step raised in warm-up or capture; earlier captures are kept.
        """
        with self._between_steps("capture"):
            if self._config.policy == "disabled":
                return
            self._capturing.require(profile)
            if not self.graphs.captured:
                self._step.autocast = None  # that of the caller
            if everything or self.captures_first:
                self._capture(self._capturing.pending, profile)
            else:
                self._capturing.learn_together()

    def idle(self, *, ready: bool = True) -> bool:
        """Capture one bucket while the engine has nothing else to do; return whether it did.

        For ``capture="background"`` and ``"lazy"``. Outputs of earlier runs are overwritten.

        With several ranks every rank calls it at the same point, as it does ``agree``, and all of
        them capture the same bucket or none does. That one capture is the longest pause.

        Args:
            ready: False for a rank that has requests to serve: then no rank captures.

        Raises:
            AgreementError: a rank did not come, failed, or has other buckets left.
            Exception: what the step raised; the bucket waits for ``capture``.
        """
        with self._between_steps("capture"):
            if self._config.policy == "disabled":
                return False
            graph = self._capturing.elect(ready=ready and not self.graphs.suspended)
            if graph is None:
                return False
            self._capture([graph])
            return True

    def _capture(self, graphs: Sequence[BucketGraph], profile: str | None = None) -> None:
        self._steps.clear()
        self._step.clock.tick()
        try:
            self._capturing.round(graphs, profile)
        finally:
            self._steps.clear()

    def _facts(self) -> dict[str, Any]:
        """Return what all ranks must have in common."""
        return {
            "phase": self.phase,
            "mode": self._config.to_dict(everything=True),
            "buckets": list(self.buckets),
            "variants": [dict(options) for options in self.graphs.variants.values()],
            "steps_per_launch": self._steps_per_launch,
            "inputs": {n: f"{s.dtype} {s.dims}" for n, s in self._step.inputs.slots.items()},
            "backend": self.backend.name,
            "backend_version": self.backend.version,
            "torch": torch.__version__,
            "devgraph": __version__,
        }

    # Life.

    def invalidate(self, reason: str = "") -> None:
        """Close all graphs, because what they captured (weights, buffers) is no longer valid.

        Steps run eagerly until ``capture`` captures again; with ``capture="lazy"`` or
        ``"background"`` buckets come back as they did at first. Bound tensors are bound again
        where and as they are now.
        """
        with self._between_steps("invalidate"):
            self._steps.clear()
            self.graphs.each(lambda graph: graph.forget(Reason.INVALIDATED, reason))
            self.buffers.rebind()

    def pin(self, *buckets: int, pinned: bool = True) -> None:
        """Keep the executables of ``buckets``, all if none is named, whatever ``memory`` says.

        Args:
            pinned: False to let them go with the others again.

        Raises:
            InputError: there is no such bucket.
        """
        with self._between_steps("pin"):
            for bucket in buckets:
                if bucket not in self.buckets:
                    raise InputError(f"there is no bucket {bucket!r}; {list(self.buckets)} exist")
            for graph in self.graphs:
                if not buckets or graph.key.bucket in buckets:
                    graph.pinned = pinned
                    if graph.captured is not None:
                        graph.captured.pin(pinned)

    def suspend(self, *, release: str | None = None) -> None:
        """Run eagerly until ``resume``; graphs are kept. Idempotent.

        Args:
            release: "memory" gives the device memory of the graphs' pool, with its executables,
                back to the device; steps of other runners on that pool run eagerly as well.

        Raises:
            CapabilityError: the pool cannot do that: see ``Pool.release``, and ``releasable`` in
                the configuration.
        """
        with self._between_steps("suspend"):
            if release == "memory":
                self.pool.release()
            elif release is not None:
                raise InputError(f"release must be 'memory' or None, got {brief(release)}")
            self.graphs.suspended = True
            self._steps.clear()

    def resume(self) -> None:
        """Use the graphs again, in the memory that they were captured in. Idempotent.

        Raises:
            ResourceError: there is no device memory for them; the runner stays suspended.
        """
        with self._between_steps("resume"):
            self.pool.restore()
            self.graphs.suspended = False

    def close(self) -> None:
        """Free all graphs. Idempotent. Close a runner before the communicators its graphs use."""
        with self.pool.lock:
            self._require_outside("close")
            if self._closed:
                return
            self._closed = True
            self._steps.clear()
            self._step.clock.tick()
            self._capturing.close()

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "suspended" if self.graphs.suspended else ""
        graphs = f"{len(self.graphs.captured)} of {len(self.graphs)} graphs captured"
        return (
            f"<{type(self).__name__} {self._name}: {state or self._config.policy} on "
            f"{self.backend.name}, {graphs}>"
        )

    def __reduce__(self) -> Any:
        raise TypeError("a runner owns graphs of its process and cannot be pickled or copied")

    # Reports.

    @property
    def buckets(self) -> Buckets:
        return self.graphs.buckets

    @property
    def buffers(self) -> StaticBuffers:
        """The static buffers of the input slots."""
        return self._step.inputs.buffers

    @property
    def captures_first(self) -> bool:
        """Whether ``capture`` is to be called before the first step, which would run eagerly."""
        return self._config.capture == "eager"

    @property
    def effective_policy(self) -> str:
        """The policy that graphs run under now; ``disabled`` while there is none to run, and
        ``emulated`` where steps take their place."""
        if not self.graphs.captured or self.graphs.suspended or self._closed:
            return "disabled"
        return "emulated" if self._config.emulate else self._config.policy

    def stats(self, *, timing: bool = False) -> RunnerStats:
        """Return a snapshot of the counters.

        Args:
            timing: with the device's time of replays. The first such call begins to take it, which
                costs every later step some microseconds.
        """
        if timing:
            with self._between_steps("time"):
                for graph in self.graphs:
                    if graph.timing is None:
                        graph.timing = Timing(self.backend)
                        self._steps.clear()  # which are bound without
                    graph.timing.read()
        return self._stats(())

    def plan(self, *, sample: bool = False) -> RunnerStats:
        """Return what ``stats`` does: buckets with their rows and bytes.

        Args:
            sample: capture the two largest graphs into a throwaway pool, if they are not all
                captured, and estimate the rest from them. Outputs of earlier runs are overwritten.
        """
        with self._between_steps("plan"):
            if not sample or len(self.graphs) == len(self.graphs.captured):
                return self._stats(())
            self._step.clock.tick()
            return self._stats(self._capturing.sample_bytes())

    def _stats(self, estimates: Sequence[int]) -> RunnerStats:
        return RunnerStats.of(
            self.graphs,
            self._counters,
            per_request=not self._step.inputs.run_slots,
            estimates=estimates,
            name=self._name,
            phase=self.phase,
            backend=self.backend.name,
            requested=self._config.policy,
            effective=self.effective_policy,
            steps_per_launch=self._steps_per_launch,
            input_bytes=self.buffers.nbytes,
            output_bytes=self._step.outputs.nbytes,
            executables=self.pool.recordings.residency(),
            replay_pace=self._capturing.pace,
        )

    def explain(self) -> str:
        """Return buckets, segments, reasons and counters as text."""
        lines = [str(self.stats())]
        for graph in self.graphs:
            detail = f": {graph.detail}" if graph.detail else ""
            if graph.speedup is not None:
                detail = f", {graph.speedup:.2f} times as fast as eager{detail}"
            lines.append(f"  bucket {graph.key}: {graph.state}{detail}")
            if graph.captured is not None:
                lines += [f"    {line}" for line in graph.captured.explain().splitlines()]
        return "\n".join(lines)

    def prove(
        self,
        cases: int = 2,
        *,
        host_args: Mapping[str, Any] | None = None,
        rtol: float | None = None,
        atol: float | None = None,
    ) -> RunnerReport:
        """Replay every captured graph against eager runs on fresh random inputs.

        A replay must equal the same padded batch run eagerly bit for bit, also with padding that
        is poisoned, and the real batch run eagerly within tolerance (another number of rows may
        choose other kernels). Where a compiler chose other kernels than eager, every comparison
        with eager is within tolerance.

        Args:
            cases: batch sizes to try per bucket: the full one, the smallest, and between.
            host_args: host arguments for all cases; those of capture by default.
            rtol, atol: tolerances against the real batch; torch's by default.
        """
        with self._between_steps("prove"):
            whole("cases", cases)
            self._step.clock.tick()
            near = functools.partial(compare_near, rtol=rtol, atol=atol)
            return Proof(self._step, host_args, near).of(self.graphs, cases, self._implied)


def _report_uncovered(buckets: Buckets, capacity: int, counts: str, options: Options) -> None:
    config = options.config
    missing = buckets.uncovered(capacity, config.max_padding)
    # Below the smallest bucket the defaults leave sizes out as well.
    if config.policy != "disabled" and missing and missing[-1][0] > buckets[0]:
        logger.warning(
            "%s: steps of %s %s run eagerly: no bucket of %s holds them with at most %g times "
            "their rows",
            options.name,
            spans(missing),
            counts,
            list(buckets),
            config.max_padding,
        )


def _check_config(options: Options) -> None:
    """Raise ConfigError or CapabilityError for what this version cannot do, before building."""
    config = options.config
    if config.policy != "disabled":
        get_policy(config.policy)
    if config.strict and config.capture != "eager":
        raise ConfigError(
            f"strict with capture={config.capture!r} would refuse every batch whose bucket is not "
            f"captured yet; use capture='eager' or strict=False"
        )
    if options.max_graphs is not None and config.capture != "lazy":
        raise ConfigError(
            f"max_graphs={options.max_graphs} is for graphs that are captured when they are wanted "
            f"(capture='lazy'), not with capture={config.capture!r}; list the buckets to have"
        )


def _pool_with(share: object, pool: Pool | None) -> Pool:
    """Return the pool of a runner that shares buffers, whose runs must follow the other's.

    Raises:
        ConfigError: another pool was given. ConfigTypeError: ``share`` is no runner.
    """
    if not isinstance(share, Runner):
        raise ConfigTypeError(f"share must be another runner, got {brief(share)}")
    share._require_open("share its buffers")
    if pool is not None and pool is not share.pool:
        raise ConfigError(
            f"a runner that shares buffers with {share._name} uses its pool, so that their runs "
            f"follow each other; leave pool= out"
        )
    return share.pool


def _counted(size: Size) -> str:
    return f"{size.requests} requests and {size.tokens} tokens"


def _require_decision(decision: object) -> None:
    if decision is not None and not isinstance(decision, Decision):
        raise InputTypeError(
            f"decision must be what can_run or agree returned, got {brief(decision)}"
        )
