"""The base runner: static buffers, one graph for each bucket, and eager steps by reason."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch

from devgraph.api import __version__
from devgraph.api.backend import Backend, own_pool
from devgraph.api.buffers import StaticBuffers
from devgraph.api.device import raise_if_lost, require_alive
from devgraph.api.errors import (
    CapabilityError,
    ConfigError,
    ConfigTypeError,
    DeviceGraphError,
    InputError,
    InputTypeError,
    NestedCaptureError,
    StateError,
    brief,
    counted,
    did_you_mean,
    whole,
)
from devgraph.api.gates import Gates
from devgraph.api.marks.marks import current_scope
from devgraph.api.pool import Pool
from devgraph.api.process import identity
from devgraph.api.prove import Draw, Report, Terms
from devgraph.api.snapshots import DEFAULT_LIMIT
from devgraph.runners.batch import Batch, HostArgs
from devgraph.runners.buckets import Buckets, ByTokens, Phase, spans
from devgraph.runners.capturing import CaptureScheduler
from devgraph.runners.checks import GraphChecks
from devgraph.runners.decisions import Decision, Reason, require_decision
from devgraph.runners.dispatch import Dispatcher
from devgraph.runners.graphs import BucketGraph, Graphs
from devgraph.runners.inputs import InputArena
from devgraph.runners.options import Options, check_functions
from devgraph.runners.outputs import LeaseClock, OutputStore
from devgraph.runners.ranks import ranks_of
from devgraph.runners.report import RunnerStats
from devgraph.runners.slots import STATE_SLOTS, InputSlot, Size
from devgraph.runners.state import StateStore
from devgraph.runners.step import BoundSteps, Step
from devgraph.runners.timing import ReplayTimer

logger = logging.getLogger(__name__)

_OMITTED: Any = object()
"""The default of ``inputs`` in ``run``."""


class Runner:
    """The base of all runners; use a subclass, for example ``DecodeRunner``.

    A runner belongs to one process. Its methods may be called from any thread. Steps of runners
    that share a pool run one at a time.

    Lifecycle: ``capture`` captures the buckets and ``run`` replays them. ``invalidate`` closes the
    graphs; call ``capture`` to capture them again. ``suspend`` and ``resume`` switch graphs off and
    on, and ``close`` frees them.

    Attributes:
        phase: ``"decode"``, ``"prefill"`` or ``"encoder"``.
        backend: the backend that captures and replays.
        pool: graph memory; pass it to other runners of the engine to share it.
        graphs: the graphs by variant and bucket, largest first.
        state: the state of requests, or None.
        gates: the gates of all graphs and eager steps, by name.
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
        state: StateStore | None = None,
        engine: Sequence[Callable[..., Any]] = (),
    ) -> None:
        config, pool, backend, share = options.config, options.pool, options.backend, options.share
        check_functions(function, tail)
        buckets = _buckets_of(options, counting, capacity)
        largest = [counting.padded(buckets.maximum, named) for named in options.variants.values()]
        if share is not None:
            pool = _pool_with(share, pool)
        lender = share if share is not None and share.graphs else None  # lends its output buffers
        pool = own_pool(backend, pool, releasable=config.releasable)
        arena = InputArena(
            slots,
            Size(max(size.requests for size in largest), max(size.tokens for size in largest)),
            backend,
            run_slots,
            share and share._step.inputs,
            divides_tokens=counting.phase == "prefill",
        )
        for name, tree in options.bound.items():
            arena.buffers.bind(name, tree)
        self.phase: Phase = counting.phase
        self.backend: Backend = backend
        self.pool: Pool = pool
        self._options = options
        self._config = config
        self._name = options.name
        self._steps_per_launch = steps_per_launch
        self.state = state
        self.gates = Gates(
            backend, options.name, timeout=options.gate_timeout, turns=steps_per_launch
        )
        self._keeps_versions = (
            state is not None
            and state.earlier is not None
            and counting.phase == "decode"
            and steps_per_launch == 1
        )
        self._step = Step(
            function=function,
            whole=whole_step or function,
            tail=tail,
            inputs=arena,
            outputs=OutputStore(outputs, lender and lender._step.outputs),
            host=HostArgs(options.host_args, partly=options.prepare is not None),
            clock=LeaseClock(options.name),
            options=options,
            backend=backend,
            pool=pool,
            gates=self.gates,
            state=state,
            engine=engine or (function,),
        )
        self.graphs = Graphs(options, buckets, counting, pool)
        self._steps = BoundSteps(self._step, self.graphs)
        self._ranks = ranks_of(options.group)
        self._checks = GraphChecks(self._step, self.graphs, self._ranks, implied)
        self._scheduler = CaptureScheduler(
            self._step,
            self._steps,
            self.graphs,
            self._checks,
            ranks=self._ranks,
            facts=_common_facts(self),
            share=lender and lender._scheduler,
        )
        self._dispatcher = Dispatcher(self._step, self._steps, self.graphs, self._scheduler)
        self._process = identity.token
        self._busy: list[Runner] = [] if share is None else share._busy
        """The runner in a step or another call, if any; one list for runners that share buffers."""
        self._closed = False
        # A bound step needs no further decision, because bound steps are dropped whenever a
        # decision could change, except if the weights epoch changes.
        self._decide_always = options.weights_epoch is not None
        # Change the pool last, because an error above must leave a shared pool unchanged.
        if config.executable_budget is not None:
            pool.limit(config.executable_budget)
        pool.register(arena.buffers)
        if state is not None:
            for buffers in state.memory:
                pool.register(buffers)

    # Decisions.

    def can_run(
        self, requests: int, tokens: int | None = None, variant: Mapping[str, Any] | None = None
    ) -> Decision:
        """Return the decision that ``run`` would make for a batch of this size, without running it.

        Args:
            requests: number of requests of the batch.
            tokens: number of tokens of the batch.
            variant: a declared variant. A decode runner derives a missing ``width`` from
                ``requests`` and ``tokens``. An undeclared combination of declared names runs
                eagerly.

        Raises:
            InputError: a number is negative, the numbers contradict each other, or a name belongs
                to no declared variant (a ValueError).
            InputTypeError: a number is not an int.
        """
        self._require_open("decide")
        options = self.graphs.checked_variant(variant)
        count = None if tokens is None else whole("tokens", tokens)
        size = self.graphs.counting.size(whole("requests", requests), count, options)
        return self.graphs.decide(size, options)

    def agree(self, decision: Decision | None) -> Decision:
        """Return the common decision of all ranks for this step; every rank must call it.

        A step runs in a graph only if every rank can run it in a graph. The ranks use the largest
        bucket that any of them needs. A rank without requests passes None and then calls
        ``run(None, decision=...)``. If such a rank cannot launch all of its captured graphs, for
        example while it is suspended, all ranks run eagerly.

        Raises:
            AgreementError: ranks request different variants, or a rank did not vote.
            GateTimeoutError: a gate of an earlier step was not opened on one of the ranks.
            StateError: the state of the step has changed on one of the ranks since its captures.
            InputError: the decision belongs to another runner.
        """
        self._require_open("agree")
        require_decision(decision)
        if decision is not None and decision.key and self.graphs.get(decision.key) is None:
            raise InputError(
                f"the decision is for graph {decision.key}, which {self._name} does not have; pass "
                f"the result of can_run of the same runner"
            )
        unable = None
        invalid: DeviceGraphError | None = self.gates.untold
        changed: StateError | None = None
        self.gates.untold = None
        if self._ranks.size > 1:
            if decision is None or decision.reason is Reason.EMPTY_BATCH:
                unable = self.graphs.unusable()
            else:  # The runner may have changed since ``can_run``.
                decision = self.graphs.launchable(decision)
            try:
                self.buffers.check()
            except StateError as error:
                invalid = invalid or error
            try:
                self._step.require_names()
            except StateError as error:
                changed = error
        return self._ranks.agree(
            decision,
            [*self.graphs.variants],
            self._name,
            unable=unable,
            dummy=self._options.idle_dummy,
            invalid=invalid,
            changed=changed,
        )

    # Running.

    def run(
        self,
        inputs: Mapping[str, torch.Tensor] | None = _OMITTED,
        *,
        host_args: Mapping[str, Any] | None = None,
        variant: Mapping[str, Any] | None = None,
        decision: Decision | None = None,
        clone: bool = False,
        state_slots: Sequence[int] | torch.Tensor | None = None,
        accepted: Sequence[int | None] | None = None,
        **unknown: NoReturn,
    ) -> Any:
        """Run one step and return the real rows of its outputs.

        The inputs are copied first, on the current stream, so outputs of the previous run are valid
        inputs. The next run of this runner overwrites the returned tensors.

        After an interrupt (Ctrl-C), the runner is usable and its locks are free. The outputs of the
        interrupted step are invalid.

        Args:
            inputs: a tensor for every slot, on the device or on the host; None on a rank without
                requests, where the call returns None.
            host_args: a value for every declared host argument.
            variant: as for ``can_run``; the default is the variant of ``decision``.
            decision: the result of ``agree`` or ``can_run``; by default, the runner decides itself.
            clone: whether to return copies, which later runs do not overwrite.
            state_slots: the request slot of each request, if the runner declares ``state``. Call
                ``assign`` for each slot before its first step.
            accepted: after a step of several tokens, the number of its tokens that each request
                accepted, or None for all. The state of rejected tokens is discarded first.
            **unknown: other keywords, which are refused with a hint.

        Returns:
            the outputs of the step; tensors without rows for an empty batch.

        Raises:
            InputError, InputTypeError, HostArgumentError: invalid data; nothing was changed except
                that ``accepted`` has discarded state.
            StateError: the runner is closed, or a bound tensor has moved or has another layout.
            DeviceGraphError: the step cannot run in a graph and the runner is strict.
            GateTimeoutError: a gate of an earlier step was not opened in time.
            DeviceLost: the device is in a sticky error state.
        """
        if unknown or inputs is _OMITTED:
            self._refuse_keywords(unknown)
        if current_scope() is not None:
            raise NestedCaptureError(
                f"{self._name} cannot run inside a capture; leave the capture first"
            )
        if identity.token is not self._process:
            identity.require(self._process, f"run {self._name}")
        with self.pool.lock:
            self._require_outside("run")
            try:
                self._busy.append(self)
                slots: tuple[int, ...] = ()
                if self.state is not None or state_slots is not None or accepted is not None:
                    inputs, slots = self._with_state(inputs, state_slots, accepted)
                if self._options.debug and isinstance(inputs, Mapping):
                    self._step.inputs.require_ranges(inputs)
                step = None
                if decision is None and not self._decide_always and inputs is not None:
                    step = self._steps.find(inputs, variant)
                if step is None or inputs is None:
                    self._require_open("run")
                    out = self._dispatcher.dispatch(inputs, host_args, variant, decision, clone)
                else:
                    if self._options.bound:
                        self.buffers.check()
                    out = self._dispatcher.replay(step, inputs, host_args, clone)
                if slots and self.state is not None:
                    self.state.note(slots, self._width(inputs, variant))
                return out
            except Exception as error:
                raise_if_lost(self.backend, error)
                raise
            finally:
                self._busy.clear()

    def _refuse_keywords(self, unknown: Iterable[str]) -> NoReturn:
        slots = [name for name in self._step.inputs.given if name != STATE_SLOTS]
        wrong = [name for name in unknown if name not in slots]
        known = Runner.run.__kwdefaults__ or ()
        hint = f" There is no option {wrong[0]!r}. {did_you_mean(wrong[0], known)}" if wrong else ""
        example = ", ".join(f"{name!r}: ..." for name in slots)
        raise InputTypeError(f"run takes all inputs in one mapping: run({{{example}}}).{hint}")

    def _with_state(
        self,
        inputs: Mapping[str, Any] | None,
        state_slots: Sequence[int] | torch.Tensor | None,
        accepted: Sequence[int | None] | None,
    ) -> tuple[Any, tuple[int, ...]]:
        """Roll back the state of the requests; return inputs with their slots, and the slots."""
        state = self._require_state("run")
        if inputs is None:
            return None, ()
        slots = state.admit(state_slots)
        if isinstance(inputs, Mapping):
            inputs = {**inputs, STATE_SLOTS: state.tensor(slots)}
        if accepted is not None:
            self._require_open("run")
            self.pool.order()
            state.roll_back(slots, accepted)
        return inputs, slots

    def _require_outside(self, call: str) -> None:
        """Raise StateError inside a step that uses this pool or these buffers."""
        if self.pool.occupied:
            self.pool.require_free(f"{call} {self._name}")
        if self._busy:
            (busy,) = self._busy
            step = "its own step" if busy is self else f"a step of {busy._name}"
            raise StateError(
                f"cannot {call} {self._name} inside {step}, which uses its buffers. Call "
                f"it before or after the step, or create another runner."
            )

    @contextlib.contextmanager
    def _between_steps(self, call: str) -> Iterator[None]:
        """Hold the pool's lock in the block, which must run between steps of an open runner."""
        with self.pool.lock:
            self._require_outside(call)
            self._require_open(call)
            try:
                self._busy.append(self)
                yield
            finally:
                self._busy.clear()

    def _require_open(self, call: str) -> None:
        if self._closed:
            raise StateError(f"cannot {call}: {self._name} is closed; create a new runner")
        require_alive(self.backend)

    # State of requests.

    def assign(self, slot: int) -> None:
        """Zero the state of a request slot, for a new request.

        Raises:
            StateError: the runner declares no state, or is closed.
            InputError: there is no such request slot. InputTypeError: ``slot`` is not an integer.
        """
        with self._state_row("assign", slot) as (state, number):
            state.clear(number)

    def export_state(self, slot: int, *, accepted: int | None = None) -> dict[str, torch.Tensor]:
        """Return copies of the state of an assigned request slot, by name.

        Args:
            slot: the request slot.
            accepted: the number of accepted tokens of the request's last step; None for all.

        Raises:
            StateError, InputError, InputTypeError: as in ``assign``, or ``accepted`` is invalid.
        """
        with self._state_row("export_state", slot, used=True) as (state, number):
            return state.export(number, accepted)

    def import_state(self, slot: int, rows: Mapping[str, torch.Tensor]) -> None:
        """Load the result of ``export_state`` into a request slot.

        Args:
            slot: the request slot.
            rows: a tensor for every state slot, on any device.

        Raises:
            StateError, InputError, InputTypeError: as in ``assign``, or a tensor is missing,
                unknown or does not fit; nothing was changed.
        """
        with self._state_row("import_state", slot) as (state, number):
            state.load(number, rows)

    @contextlib.contextmanager
    def _state_row(
        self, call: str, slot: int, *, used: bool = False
    ) -> Iterator[tuple[StateStore, int]]:
        """Yield the state and a checked request slot, between steps and after ``pool.order()``."""
        with self._between_steps(call):
            state = self._require_state(call)
            number = state.check(slot, used=used)
            self.pool.order()
            yield state, number

    def _require_state(self, call: str) -> StateStore:
        if self.state is None:
            raise StateError(
                f"cannot {call} with state: {self._name} declares no state; pass "
                f"state=[dg.StateSlot(name, shape, dtype)] to the runner"
            )
        return self.state

    def _width(self, inputs: Any, variant: Mapping[str, Any] | None) -> int:
        """Return the tokens per request of a step that can be rolled back, or 0."""
        if not self._keeps_versions:
            return 0
        shown = self._steps.measured(inputs)
        return self.graphs.counting.size(*shown, variant or {}).width or 0

    # Capture.

    def capture(self, *, everything: bool = False, profile: str | None = None) -> None:
        """Capture the buckets that are not captured yet, largest first, and retry failed captures.

        With ``capture="lazy"`` or ``"background"`` in the configuration, this only runs the step to
        allocate its outputs. Afterwards, ``idle`` captures at most one bucket per call, and ``run``
        captures a lazy bucket that enough batches have needed. With several ranks, only ``idle``
        captures.

        The caller's autocast settings apply to all captures and steps until the graphs are captured
        again. If ``idle`` or ``run`` captures first, the settings of the last step apply.

        Every capture starts from pad values in all slots, and buckets share their memory. If memory
        or a budget is exhausted, the remaining buckets are dropped, and their batches run eagerly.

        Args:
            everything: whether to capture all buckets now, regardless of the ``capture`` setting.
            profile: folder for a Chrome trace of each capture and its warm-up.

        Raises:
            InputTypeError: ``profile`` is not a path.
            OSError: the folder cannot be created.
            StateError: a torch profiler is running already.
            ResourceError: memory, another resource or a budget is exhausted and the runner is
                strict, or another runner released the memory of the pool.
            AgreementError: ranks have different settings, or a rank failed, is late or has exited.
            Exception: an error of the step in warm-up or capture; earlier captures are kept.
        """
        with self._between_steps("capture"):
            if self._config.policy == "disabled":
                return
            self._scheduler.require(profile)
            if not self.graphs.captured:
                self._step.autocast = None  # Take the settings of the caller.
            if everything or self.captures_first:
                self._scheduler.capture(self._scheduler.pending, profile)
            else:
                self._scheduler.learn_together()

    def idle(self, *, ready: bool = True) -> bool:
        """Capture one bucket. If none is due, repeat one check of the key ``verify``.

        Call this while the engine is idle. With ``capture="lazy"``, the call captures a bucket only
        if enough batches have needed it. Otherwise it captures the largest remaining bucket.
        Outputs of earlier runs are overwritten. A call takes at most as long as one capture.

        With several ranks, every rank must call this method at the same point, like ``agree``.
        Either all ranks capture the same bucket, or none captures a bucket.

        Args:
            ready: False on a rank that has requests to serve; then no rank captures.

        Returns:
            Whether a bucket was captured or checked.

        Raises:
            AgreementError: a rank did not call the method, failed, or has other buckets left.
            Exception: an error of the step; only ``capture`` retries the bucket.
        """
        with self._between_steps("capture"):
            if self._config.policy == "disabled":
                return False
            usable = not (self.graphs.suspended or self.pool.recordings.released)
            graph = self._scheduler.elect(ready=ready and usable)
            if graph is not None:
                self._scheduler.capture([graph])
                return True
            if not self._checks.are_due(ready=ready and usable):
                return False
            self._steps.clear()
            self._checks.repeat()
            self._steps.clear()
            return True

    # Lifecycle.

    def invalidate(self, reason: str = "") -> None:
        """Close all graphs, because captured weights or buffers are no longer valid.

        Steps run eagerly until ``capture`` is called. With ``capture="lazy"`` or ``"background"``,
        they run eagerly until ``run`` or ``idle`` captures their bucket. Bound tensors are bound
        again with their current address and layout.
        """
        with self._between_steps("invalidate"):
            self._steps.clear()
            self.graphs.each(lambda graph: graph.forget(Reason.INVALIDATED, reason))
            self._step.addresses = {}
            self._step.forget_names()
            self.buffers.rebind()

    def pin(self, *buckets: int, pinned: bool = True) -> None:
        """Prevent the eviction of the executables of buckets.

        Args:
            *buckets: the bucket sizes; all by default.
            pinned: False to allow eviction again.

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
            release: "memory" also frees the device memory of the pool and of its executables. Then
                steps of other runners on the pool run eagerly as well.

        Raises:
            CapabilityError: the pool cannot release memory; set ``releasable`` in the
                configuration.
            InputError: ``release`` has another value.
        """
        with self._between_steps("suspend"):
            if release == "memory":
                if not self.pool.releasable:
                    raise CapabilityError(
                        f"suspend(release='memory') of {self._name} needs a pool that can release "
                        f"its memory; set releasable=True in the configuration of the runner, or "
                        f"pass pool=backend.make_pool(releasable=True)"
                    )
                self.pool.release()
            elif release is not None:
                raise InputError(f"release must be 'memory' or None, got {brief(release)}")
            self.graphs.suspended = True
            self._steps.clear()

    def resume(self) -> None:
        """Use the graphs again, at the addresses of their capture. Idempotent.

        Raises:
            ResourceError: there is not enough device memory; the runner stays suspended.
        """
        with self._between_steps("resume"):
            self.pool.restore()
            self.graphs.suspended = False

    def close(self) -> None:
        """Free all graphs. Idempotent. Call this before closing communicators of the graphs."""
        with self.pool.lock:
            self._require_outside("close")
            if self._closed:
                return
            self._closed = True
            self._steps.clear()
            self._step.clock.tick()
            self.graphs.each(BucketGraph.close)

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "suspended" if self.graphs.suspended else ""
        graphs = f"{len(self.graphs.captured)} of {counted(len(self.graphs), 'graph')} captured"
        return (
            f"<{type(self).__name__} {self._name}: {state or self._config.policy} on "
            f"{self.backend.name}, {graphs}>"
        )

    def __reduce__(self) -> Any:
        raise InputTypeError("a runner owns graphs of its process and cannot be pickled or copied")

    # Reports.

    @property
    def buckets(self) -> Buckets:
        """The bucket sizes, ascending."""
        return self.graphs.buckets

    @property
    def buffers(self) -> StaticBuffers:
        """The static buffers of the input slots."""
        return self._step.inputs.buffers

    @property
    def captures_first(self) -> bool:
        """Whether steps run eagerly until ``capture`` is called."""
        return self._config.capture == "eager"

    @property
    def effective_policy(self) -> str:
        """The policy in effect.

        ``disabled`` while there is no graph to run, and ``emulated`` if eager steps replace graphs.
        """
        if not self.graphs.captured or self.graphs.suspended or self._closed:
            return "disabled"
        return "emulated" if self._config.emulate else self._config.policy

    def stats(self, *, timing: bool = False) -> RunnerStats:
        """Return a snapshot of the counters.

        Args:
            timing: whether to include the device time of replays. The first such call starts the
                timers, which add some microseconds to every later step.
        """
        if timing:
            with self._between_steps("time"):
                for graph in self.graphs:
                    if graph.timing is None:
                        graph.timing = ReplayTimer(self.backend)
                        self._steps.clear()  # Bind steps again, with the timer.
                    graph.timing.read()
        return self._stats(())

    def plan(self, *, sample: bool = False) -> RunnerStats:
        """Return ``stats()``, optionally with estimates of the memory that captures will need.

        Args:
            sample: whether to capture the two largest graphs into a temporary pool and estimate
                the others from them (unless all graphs are captured). Outputs of earlier runs are
                overwritten.
        """
        with self._between_steps("plan"):
            if not sample or len(self.graphs) == len(self.graphs.captured):
                return self._stats(())
            self._step.clock.tick()
            return self._stats(self._scheduler.sample_bytes())

    def _stats(self, estimates: Sequence[int]) -> RunnerStats:
        return RunnerStats.of(
            self.graphs,
            emulated=self._config.emulate,
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
            state_bytes=self._step.state_bytes,
            executables=self.pool.recordings.residency(),
            replay_pace=self._scheduler.pace,
        )

    def _repr_html_(self) -> str:
        return self.stats()._repr_html_()

    def explain(self) -> str:
        """Return buckets, segments, reasons and counters as text."""
        lines = [str(self.stats())]
        for graph in self.graphs:
            detail = f": {graph.detail}" if graph.detail else ""
            lines.append(f"  bucket {graph.key}: {graph.state}{detail}")
            if graph.captured is not None:
                lines += [f"    {line}" for line in graph.captured.summary().splitlines()]
        return "\n".join(lines)

    def prove(
        self,
        cases: int = 2,
        *,
        host_args: Sequence[Mapping[str, Any]] | None = None,
        sample: Mapping[str, Draw] | None = None,
        state: bool = True,
        rtol: float | None = None,
        atol: float | None = None,
        snapshot_limit: int = DEFAULT_LIMIT,
    ) -> Report:
        """Replay every captured graph and compare it with eager runs on fresh inputs.

        A case runs a batch eagerly and as a graph from the same state: ``bound`` tensors, tensors
        that the step reaches, and random generators. A replay must equal an eager run of the
        padded batch bit for bit, in outputs and state. Other data in padding must not change its
        outputs. It must equal an eager run of the real batch within a tolerance, because kernels
        may depend on the number of rows. If a compiler generated kernels of the graph, this
        tolerance applies to every comparison. Padding must not write rows of state that real rows
        use. After the proof, the state is restored bit for bit. Outputs of earlier runs are
        overwritten.

        Integers come from ``sample``, from the sample or the range of their slot, or from the last
        batch that ran in a graph, with its requests in another order. Other integer slots keep
        their pad value.

        With several ranks, every rank must call this method.

        Args:
            cases: number of batch sizes to try per bucket, beginning with the largest and smallest.
            host_args: sets of host arguments to try. The entries of a ``HostSlot`` are repeated
                or cut to the size of the case. By default, the values at capture, the values of the
                last run, and the smallest and largest values that ``sample`` draws.
            sample: callables by name of a slot or host argument, in place of the samples of slots.
                Each takes a shape and a ``torch.Generator`` and returns legal data on the host.
            state: whether to compare state in addition to outputs.
            rtol: relative tolerance against the real batch; torch's default if None.
            atol: absolute tolerance against the real batch; torch's default if None.
            snapshot_limit: maximum size of the copies of the state, in bytes. In a larger tensor,
                only the rows whose indices are in an integer slot of the case are restored; the
                other rows are hashed.

        Returns:
            a report with ``ok``, ``failures``, ``causes`` and ``not_varied``.

        Raises:
            AgreementError: a rank did not call the method, failed, or used other arguments.
            CaptureError: a case wrote a row that was hashed instead of copied.
        """
        with self._between_steps("prove"):
            terms = Terms(
                cases=cases,
                host_args=host_args,
                sample=sample,
                state=state,
                rtol=rtol,
                atol=atol,
                snapshot_limit=snapshot_limit,
            )
            return self._checks.proof(terms, self.graphs.captured)[0]


def _common_facts(runner: Runner) -> dict[str, Any]:
    """Return the settings that must be equal on all ranks."""
    return {
        "phase": runner.phase,
        **{f"mode.{k}": v for k, v in runner._config.to_dict(everything=True).items()},
        "buckets": list(runner.buckets),
        "variants": [dict(options) for options in runner.graphs.variants.values()],
        "steps_per_launch": runner._steps_per_launch,
        "inputs": {n: f"{s.dtype} {s.dims}" for n, s in runner._step.inputs.slots.items()},
        "backend": runner.backend.name,
        "backend_version": runner.backend.version,
        "torch": torch.__version__,
        "devgraph": __version__,
    }


def _buckets_of(options: Options, counting: ByTokens, capacity: int) -> Buckets:
    """Return the buckets of a runner, and warn about sizes without a suitable bucket."""
    config = options.config
    maximum = min(config.max_bs or capacity, capacity)
    if config.policy == "disabled":
        return Buckets((maximum,))
    buckets = Buckets.of(
        config.buckets, phase=counting.phase, maximum=maximum, multiple_of=config.align
    )
    missing = buckets.uncovered(capacity, config.max_padding)
    # Default buckets also leave out sizes below the smallest bucket, but without a warning.
    if missing and missing[-1][0] > buckets[0]:
        logger.warning(
            "%s: steps of %s %s %s, because no bucket of %s is at least as large and at most %g "
            "times as large",
            options.name,
            spans(missing),
            counting.counts,
            "raise an error (strict)" if config.strict else "run eagerly",
            list(buckets),
            config.max_padding,
        )
    return buckets


def _pool_with(share: object, pool: Pool | None) -> Pool:
    """Return the pool for a runner that shares buffers; both runners must use the same pool."""
    if not isinstance(share, Runner):
        raise ConfigTypeError(f"share must be another runner, got {brief(share)}")
    share._require_open("share its buffers")
    if pool is not None and pool is not share.pool:
        raise ConfigError(
            f"a runner that shares buffers with {share._name} must use the same pool, so that "
            f"their runs never overlap; leave pool= out"
        )
    return share.pool
