"""Capture of a runner's graphs: order, agreement between ranks, and handling of failures."""

from __future__ import annotations

import contextlib
import enum
import functools
import gc
import json
import logging
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

from devgraph.api.backend import Backend
from devgraph.api.capture import Captured, capture
from devgraph.api.errors import (
    AgreementError,
    CaptureError,
    DeviceGraphError,
    InputTypeError,
    StateError,
    brief,
    counted,
    format_bytes,
    note,
)
from devgraph.api.executable import EXHAUSTED
from devgraph.api.policy import compiles
from devgraph.api.policy.job import UpdateBudget
from devgraph.api.pool import Pool
from devgraph.api.process import collector
from devgraph.api.prove import addresses
from devgraph.api.session import session
from devgraph.api.snapshots import Snapshot
from devgraph.runners.checks import GraphChecks
from devgraph.runners.decisions import Decision, Reason, refusal
from devgraph.runners.graphs import BucketGraph, EmulatedGraph, Graphs
from devgraph.runners.ranks import PeerFailed, RankGroup
from devgraph.runners.report import ReplayPace
from devgraph.runners.step import BoundSteps, StaticBatch, Step

logger = logging.getLogger(__name__)

_fastest_paces: weakref.WeakKeyDictionary[Backend, float] = weakref.WeakKeyDictionary()
"""Fastest pace of replays on each backend in this process, in microseconds per kernel."""

_RETRY_RUNS = 2  # warm-up runs before a failed capture is retried

_RAISED = (Reason.CAPTURE_FAILED, Reason.RANKS_DROPPED)
"""Reasons after which ``capture`` retries a graph, but ``idle`` does not."""

_ELIGIBLE = (Reason.NOT_CAPTURED, Reason.INVALIDATED, Reason.EVICTED)
"""Reasons after which batches that need a missing graph may trigger its capture."""


class Outcome(enum.Enum):
    """Outcome of one capture on one rank."""

    CAPTURED = "captured"
    RETRY = "retry"
    """The capture failed and should be retried after warm-up runs."""
    DROPPED = "dropped"
    """This rank cannot capture the graph; all ranks drop it."""
    PEER_FAILED = "peer failed"
    """The capture was aborted because another rank failed; that rank reports the reason."""
    RAISED = "raised"
    """The capture raised an error; all ranks stop."""


@attrs.frozen
class RankOutcome:
    """The outcome of a capture with its explanation, for an exchange between ranks."""

    outcome: Outcome
    text: str = ""
    reason: Reason | None = None
    """The reason why a graph is dropped; None for all other outcomes."""

    @classmethod
    def of(cls, reason: Reason | None, text: str = "") -> RankOutcome:
        """Return the outcome of a graph that is dropped for ``reason``; None means captured."""
        return cls(Outcome.CAPTURED if reason is None else Outcome.DROPPED, text, reason)

    @classmethod
    def of_error(cls, error: BaseException) -> RankOutcome:
        return cls(Outcome.RAISED, f"raised {type(error).__name__}: {error}")

    def encoded(self) -> str:
        return json.dumps([self.outcome.value, self.text, self.reason])

    @classmethod
    def decoded(cls, encoded: str) -> RankOutcome:
        outcome, text, reason = json.loads(encoded)
        return cls(Outcome(outcome), text, reason and Reason(reason))


class CaptureScheduler:
    """The captures of a runner's graphs, in rounds in which all ranks take part."""

    def __init__(
        self,
        step: Step,
        steps: BoundSteps,
        graphs: Graphs,
        checks: GraphChecks,
        *,
        ranks: RankGroup,
        facts: Mapping[str, Any],
        share: CaptureScheduler | None,
    ) -> None:
        self._share = share
        self._step = step
        self._steps = steps
        self._graphs = graphs
        self._checks = checks
        self._ranks = ranks
        self._options = step.options
        self._config = step.options.config
        self._name = step.options.name
        # These settings of the share= runner determine the number of barriers in ``_run_largest``.
        lent = share and {name: share.facts[name] for name in ("variants", "share")}
        self.facts: Mapping[str, Any] = {**facts, "share": lent}
        self._backend, self._pool = step.backend, step.pool
        self._held = 0  # bytes of the pool before the current capture
        self._outputs_known = False  # whether all ranks know the shapes of the outputs
        self.rounds = 0
        self.pace: ReplayPace | None = None

    @property
    def pending(self) -> list[BucketGraph]:
        """The graphs that may be captured within ``max_graphs``, largest first."""
        pending, most = self._graphs.pending, self._options.max_graphs
        return pending if most is None else pending[: most - len(self._graphs.captured)]

    def want(self, decision: Decision) -> BucketGraph | None:
        """Count a batch that ran eagerly; return its graph if the graph should be captured now."""
        graph = self._graphs.get(decision.key)
        if graph is None or decision.reason not in _ELIGIBLE:
            return None
        graph.wants += 1
        # With several ranks, no rank may capture alone; they capture together in ``idle``.
        is_alone = self._ranks.size == 1 and not self._pool.recordings.released
        return graph if is_alone and self._is_due(graph) and not graph.dropped else None

    def elect(self, *, ready: bool) -> BucketGraph | None:
        """Return the largest graph that a rank proposes, or None if there is none or no time."""
        all_graphs, has_room = list(self._graphs), bool(self.pending)
        is_lazy = self._config.capture == "lazy"
        left = [graph for graph in self._graphs.pending if graph.reason not in _RAISED]
        candidates = [graph for graph in left if (self._is_due(graph) if is_lazy else has_room)]
        number = self._ranks.elect(
            min(map(all_graphs.index, candidates), default=None),
            self._name,
            ready=ready,
            state=f"{self.rounds}: {', '.join(str(graph.key) for graph in left)}",
        )
        return None if number is None else all_graphs[number]

    def _is_due(self, graph: BucketGraph) -> bool:
        config = self._config
        return config.capture == "lazy" and graph.wants >= config.lazy_hits

    def capture(self, graphs: Sequence[BucketGraph], profile: str | None = None) -> None:
        """Capture ``graphs``, and check them if the key ``verify`` requires it."""
        self._steps.clear()
        self._step.clock.tick()
        try:
            self.round(graphs, profile)
            self._checks.at_start(graphs)
        finally:
            self._steps.clear()

    def round(self, graphs: Sequence[BucketGraph], profile: str | None = None) -> None:
        """Capture ``graphs``, which must be in descending order of size."""
        self._begin(graphs)
        if graphs and not self.pending:  # ``max_graphs`` is reached.
            oldest = min(self._graphs.captured, key=lambda other: other.used)
            oldest.forget(Reason.EVICTED, f"made room for {graphs[0].key}")
        self._held = self._pool.bytes
        if self._backend not in _fastest_paces:
            _measure_pace(self._backend)  # Captures may slow replays down.
        started = time.perf_counter()
        done: list[BucketGraph] = []
        with (
            _collector_paused(),
            self._step.trial() as before,
            _progress(f"{self._name}: capturing", len(graphs), self._options.progress) as advance,
        ):
            for index, graph in enumerate(graphs):
                advance(str(graph.key))
                with _traced(profile, f"{self._name} {graph.key}"):
                    dropped = self._take_turn(graph, self._config.warmup)
                if dropped is not None:
                    self._drop(graphs[index:], *dropped)
                    break
                done.append(graph)
            self._require_unwritten(done, before)
        # Keep addresses of earlier captures, so that proofs report tensors replaced since then.
        self._step.addresses = {**addresses(self._step.tensors()), **self._step.addresses}
        self.pace = _measure_pace(self._backend)
        if self.pace is not None and self.pace.slow:
            logger.warning(
                "%s: graphs of this process now take %.2f us from kernel to kernel, instead of "
                "%.2f before: other launches slow them down (docs/fast-replay.md)",
                self._name,
                self.pace.microseconds,
                self.pace.fastest,
            )
        logger.info(
            "%s: %s %d of %d buckets in %.2f s, %s (%s on %s)",
            self._name,
            "emulates" if self._config.emulate else "captured",
            len(done),
            len(graphs),
            time.perf_counter() - started,
            format_bytes(sum(graph.bytes for graph in done)),
            self._config.policy,
            self._backend.device,
        )

    def _require_unwritten(self, graphs: Sequence[BucketGraph], before: Snapshot) -> None:
        """Raise if a capture on any rank wrote a tensor above ``snapshot_limit``."""
        tag, mine = f"{self._name}/state{self.rounds}", RankOutcome(Outcome.CAPTURED)
        try:
            before.require_unwritten()
        except CaptureError as error:
            for graph in graphs:
                graph.forget(Reason.CAPTURE_FAILED, str(error))
            self._ranks.post(tag, RankOutcome.of_error(error).encoded())
            raise
        for rank, other in enumerate(self._exchange(tag, mine)):
            if other.outcome is Outcome.RAISED:
                for graph in graphs:
                    graph.forget(Reason.RANKS_DROPPED, other.text)
                raise AgreementError(f"the captures of rank {rank} are invalid: it {other.text}")

    def require(self, profile: str | None) -> None:
        """Check whether this rank can capture; if not, inform the other ranks and raise."""
        try:
            if profile is not None:
                _require_folder(profile)
            self._pool.recordings.require_memory()
        except Exception as error:
            self._ranks.refuse(f"{self._name}/{self.rounds}", error)
            raise

    def _begin(self, graphs: Sequence[BucketGraph]) -> None:
        self._step.settle_autocast()
        keys = [str(graph.key) for graph in graphs]
        self._ranks.handshake(f"{self._name}/{self.rounds}", {**self.facts, "to_capture": keys})
        self.rounds += 1

    def learn_together(self) -> None:
        """Learn the shapes of the step's outputs on all ranks, in a round without captures."""
        self._begin(())
        tag = f"{self._name}/outputs{self.rounds}"
        with self._ranks.reporting(f"{tag}/outcome"):
            self._learn_outputs(self._barrier(tag))

    def _learn_outputs(self, barrier: Callable[[], None]) -> None:
        """Learn the shapes of the outputs and allocate them, once and together with all ranks."""
        if self._outputs_known:
            return
        self._run_largest(barrier)
        if self._ranks.size > 1:
            # If a rank has no memory for the outputs, this barrier fails on all ranks, so that all
            # of them repeat the runs.
            barrier()
        self._outputs_known = True

    def _run_largest(self, barrier: Callable[[], None]) -> None:
        """Run every variant once at its largest size and allocate the outputs.

        A rank whose outputs exist already must call ``barrier`` as often as the other ranks.
        """
        step = self._step
        if self._share is not None:  # Outputs may use the buffers of the share= runner.
            self._share._run_largest(barrier)
        if step.outputs.buffers is not None:
            for _ in self._graphs.variants:
                barrier()
            return
        with session(self._pool):
            for variant in self._graphs.variants:
                graph = self._graphs.largest(variant)
                with step.trial():
                    static = StaticBatch(step, graph)
                    batch = static.batch(static.prepared())
                    try:
                        step.outputs.learn(variant, step.function(batch), graph.size)
                    except Exception as error:
                        note(error, f"in the first run of {self._name}, bucket {graph.key}")
                        raise
                    barrier()
        step.outputs.allocate(self._backend.device)
        if self._share is not None and step.outputs.shares:
            step.clock = self._share._step.clock.joined(self._name)

    def sample_bytes(self) -> list[int]:
        """Capture the two largest graphs into a temporary pool; return the bytes of each.

        The first number counts only memory that the runner's own pool cannot provide. Each smaller
        graph needs about as much memory as the second graph.
        """
        pool, existing = self._backend.make_pool(), self._pool.segments
        added: list[int] = []
        samples: list[Captured | EmulatedGraph] = []
        sync = self._backend.synchronize
        with self._step.trial() as before:
            try:
                for graph in list(self._graphs)[:2]:
                    if self._step.outputs.buffers is None:
                        self._run_largest(sync)
                    held = pool.bytes
                    runs = max(_RETRY_RUNS, self._config.warmup)
                    samples.append(self._captured(graph, sync, pool, runs))
                    grown = pool.bytes - held if added else _beyond(pool.segments, existing)
                    added.append(max(0, grown) + samples[-1].info().bytes)
            finally:
                for captured in reversed(samples):
                    captured.close()
            before.require_unwritten()
        return added

    def _take_turn(self, graph: BucketGraph, runs: int) -> tuple[Reason, str] | None:
        """Capture one graph on every rank, after ``runs`` warm-up runs.

        A capture that fails after fewer than two warm-up runs is retried once, after two runs.
        Return the reason to drop the graph and an explanation, or None if all ranks captured it.
        """
        tag = f"{self._name}/capture{self.rounds}/{graph.key}/{runs}"
        barrier = self._barrier(tag)
        begun = self._exchange(f"{tag}/begin", RankOutcome.of(self._spent_budget()))
        if dropped := self._common_drop(begun):
            return dropped
        try:
            self._capture(graph, barrier, runs)
            mine = RankOutcome.of(self._spent_graph_budget())
        except PeerFailed:
            mine = RankOutcome(Outcome.PEER_FAILED)
        except EXHAUSTED as error:
            mine = RankOutcome.of(Reason.OUT_OF_MEMORY, self._shortage(graph, error))
            error.__traceback__ = None  # Its frames would keep the memory of the capture alive.
        except BaseException as error:
            # Some code synchronizes with the device in its first run, to tune or initialize, which
            # captures forbid. Warm-up runs help, unless devgraph itself refused the step.
            is_refusal = isinstance(error, DeviceGraphError) and not isinstance(error, CaptureError)
            if runs >= _RETRY_RUNS or is_refusal or not isinstance(error, Exception):
                graph.forget(Reason.CAPTURE_FAILED, f"{type(error).__name__}: {error}")
                self._ranks.post(f"{tag}/outcome", RankOutcome.of_error(error).encoded())
                note(
                    error,
                    f"in the capture of {self._name}, bucket {graph.key}, which calls the step "
                    f"with one Batch of pad values",
                )
                raise
            logger.info("%s %s is retried after warm-up runs: %s", self._name, graph.key, error)
            mine, error.__traceback__ = RankOutcome(Outcome.RETRY), None
        outcomes = self._exchange(f"{tag}/outcome", mine)
        for rank, other in enumerate(outcomes):
            if other.outcome is Outcome.RAISED:
                graph.forget(Reason.RANKS_DROPPED, other.text)
                raise AgreementError(f"rank {rank} could not capture {graph.key}: it {other.text}")
        if any(other.outcome is Outcome.RETRY for other in outcomes):
            graph.close()
            return self._take_turn(graph, _RETRY_RUNS)
        return self._common_drop(outcomes)

    def _common_drop(self, outcomes: Sequence[RankOutcome]) -> tuple[Reason, str] | None:
        """Return the reason for which a rank drops the graph, or None if no rank drops it."""
        mine = outcomes[self._ranks.rank]
        if mine.reason is not None:
            return mine.reason, mine.text
        for rank, other in enumerate(outcomes):
            if other.reason is not None:
                text = f": {other.text}" if other.text else ""
                return Reason.RANKS_DROPPED, f"rank {rank}: {other.reason}{text}"
        return None

    def _exchange(self, tag: str, mine: RankOutcome) -> list[RankOutcome]:
        return [RankOutcome.decoded(text) for text in self._ranks.gather(tag, mine.encoded())]

    def _capture(self, graph: BucketGraph, barrier: Callable[[], None], runs: int) -> None:
        options, outputs = self._options, self._step.outputs
        self._learn_outputs(barrier)
        for name, tensor in self._step.inputs.buffers.bound.items():
            outputs.refuse_overlap(name, tensor)
        epoch = options.weights_epoch() if options.weights_epoch else None
        captured = self._captured(graph, barrier, self._pool, runs)
        captured.pin(graph.pinned)
        graph.captured = captured
        graph.epoch = epoch
        graph.used = self._step.clock.now
        graph.seconds = captured.capture_seconds
        held, self._held = self._held, self._pool.bytes
        graph.bytes = captured.info().bytes + max(0, self._held - held)
        graph.detail = ""
        self._graphs.counters.captures += not isinstance(captured, EmulatedGraph)
        graph.reason = Reason.NOT_CAPTURED

    def _captured(
        self, graph: BucketGraph, barrier: Callable[[], None], pool: Pool, runs: int
    ) -> Captured | EmulatedGraph:
        """Capture one graph; ``barrier`` follows each warm-up run and precedes eager bodies."""
        step, config, options = self._step, self._config, self._options
        write = step.outputs.writer(graph.key.variant, graph.size)
        static = StaticBatch(step, graph)

        def run(**host: Any) -> Any:
            # The capture may have changed the grad mode.
            with torch.no_grad():
                return write(step.function(static.batch(host)))

        def settle() -> None:
            # Even after the last warm-up run, no rank may start to record while another still
            # runs, and a step that writes its inputs must find pad values again.
            barrier()
            step.reset_state()
            static.refill()
            static.prepared()

        if config.emulate:
            return EmulatedGraph(functools.partial(step.called, run), step.gates)
        misses = config.miss_budget
        first = not self._graphs.captured
        with step.trial() as saved, step.names_kept(graph.key.variant, first=first):
            return capture(
                run,
                policy=config.policy,
                backend=self._backend,
                host_args=static.prepared(),
                warmup=runs,
                pool=pool,
                compiler=config.compiler if compiles(config.policy) else None,
                before_break=barrier if self._ranks.size > 1 else None,
                after_warmup=settle,
                budget=None if misses is None else UpdateBudget(misses=misses),
                check=bool(options.debug),
                name_nodes=options.name_nodes,
                gates=step.gates,
                # The capture does not search the runner's own functions for generators.
                bound={f"generator {i}": g for i, g in enumerate(saved.generators)},
            )

    def _barrier(self, tag: str) -> Callable[[], None]:
        """Return a callable that waits for the device and for all ranks."""

        def barrier() -> None:
            escape = f"{tag}/outcome"
            if self._ranks.size > 1:
                # A warm-up run with a collective never ends if another rank has exited.
                self._ranks.wait(self._backend.fence(), f"{tag}/warm-up", escape=escape)
            self._backend.synchronize()
            self._ranks.gather(f"{tag}/barrier", "", escape=escape)

        return barrier

    def _spent_budget(self) -> Reason | None:
        budget = self._config.time_budget_s
        if budget is not None and sum(graph.seconds for graph in self._graphs) >= budget:
            return Reason.TIME_BUDGET
        return self._spent_graph_budget()

    def _spent_graph_budget(self) -> Reason | None:
        budget = self._config.graph_budget_bytes
        used = self._step.state_bytes + sum(graph.bytes for graph in self._graphs)
        return Reason.MEMORY_BUDGET if budget is not None and used > budget else None

    def _shortage(self, graph: BucketGraph, error: BaseException) -> str:
        info = self._backend.memory_info()
        free = f"{format_bytes(info[0])} of {format_bytes(info[1])} free, " if info else ""
        return (
            f"the device ran out of a resource while {self._name} captured bucket {graph.key} "
            f"({free}{counted(len(self._graphs.captured), 'graph')} captured, "
            f"{format_bytes(self._pool.bytes)} in their pool): {error}"
        )

    def _drop(self, graphs: Sequence[BucketGraph], reason: Reason, detail: str) -> None:
        for graph in graphs:
            graph.drop(reason, detail)
        keys = ", ".join(str(graph.key) for graph in graphs)
        logger.warning(
            "%s: dropped %d buckets (%s): %s%s",
            self._name,
            len(graphs),
            keys,
            reason.value.replace("_", " "),
            f", {detail}" if detail else "",
        )
        if self._config.strict:
            raise refusal(Decision(reason), f"{self._name}: the steps of buckets {keys}", detail)


def _beyond(wanted: Sequence[int], existing: Sequence[int]) -> int:
    """Return the bytes of the ``wanted`` segments that no ``existing`` segment can provide."""
    left, missing = sorted(existing), 0
    for size in sorted(wanted, reverse=True):
        if left and left[-1] >= size:
            left.pop()
        else:
            missing += size
    return missing


def _require_folder(profile: object) -> None:
    """Create the folder for traces. Raises the errors of ``Runner.capture``."""
    if not isinstance(profile, str | os.PathLike):
        raise InputTypeError(f"profile must be the path of a folder, got {brief(profile)}")
    if torch._C._autograd._profiler_enabled():
        raise StateError(
            "capture(profile=...) cannot run under a torch profiler, because it would stop that "
            "profiler. Leave profile= out; the running profiler shows the captures."
        )
    Path(profile).mkdir(parents=True, exist_ok=True)


@contextlib.contextmanager
def _traced(folder: str | None, title: str) -> Iterator[None]:
    """Write a Chrome trace of the block into ``folder``, in a file named after ``title``."""
    if folder is None:
        yield
        return
    name = "".join(char if char.isalnum() else "-" for char in title)
    with torch.profiler.profile() as trace:
        yield
    trace.export_chrome_trace(str(Path(folder) / f"{name.strip('-')}.json"))


PROGRESS_SECONDS = 3.0
"""Interval between progress lines if standard error is not a terminal."""


@contextlib.contextmanager
def _progress(title: str, total: int, wanted: bool) -> Iterator[Callable[[str], None]]:
    """Show progress on standard error; yield a callable that counts one more item as done."""
    if wanted and sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import Progress, TextColumn

        # The default column would parse brackets in the runner's name as markup.
        named = TextColumn("{task.description}", markup=False)
        columns = (named, *Progress.get_default_columns()[1:])
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(title, total=total)
            yield lambda label: bar.update(task, advance=1, description=f"{title} {label}")
        return
    started = last = time.perf_counter()
    done = 0

    def advance(label: str) -> None:
        nonlocal done, last
        done, now = done + 1, time.perf_counter()
        if wanted and now - last >= PROGRESS_SECONDS:
            last = now
            sys.stderr.write(f"{title} {label}, {done} of {total}, {now - started:.0f} s\n")

    yield advance


def _measure_pace(backend: Backend) -> ReplayPace | None:
    pace = backend.after_captures()
    if pace is None:
        return None
    fastest = _fastest_paces[backend] = min(pace, _fastest_paces.get(backend, pace))
    return ReplayPace(microseconds=pace, fastest=fastest)


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """Pause the garbage collector in the block; a collection could unload kernels."""
    with collector.paused():
        frozen = gc.get_freeze_count()
        # Collect recent garbage only: a full collection takes longer than capturing a small model.
        gc.collect(1)
        if not frozen:  # gc.unfreeze would also unfreeze objects that the program froze.
            gc.freeze()
        try:
            yield
        finally:
            if not frozen:
                gc.unfreeze()
