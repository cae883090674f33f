"""How the graphs of a runner are captured: in which order, and what happens when one fails."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from devgraph.api.backend import Backend
from devgraph.api.capture import Captured, capture
from devgraph.api.errors import (
    AgreementError,
    CaptureError,
    DeviceGraphError,
    InputTypeError,
    ResourceError,
    StateError,
    brief,
)
from devgraph.api.executable import EXHAUSTED
from devgraph.api.policy import compiles
from devgraph.api.policy.job import UpdateBudget
from devgraph.api.pool import Pool
from devgraph.api.process import collector
from devgraph.api.session import session
from devgraph.runners.decisions import Decision, Reason
from devgraph.runners.graphs import BucketGraph, Emulated, Graphs, Learned
from devgraph.runners.ranks import PeerFailed, RankGroup
from devgraph.runners.report import Counters, ReplayPace, format_bytes
from devgraph.runners.step import StaticBatch, Step

logger = logging.getLogger(__name__)

_SLOW = "slow"
"""What a rank tells the others of a bucket that is fine but for its speed."""

_COLD = "cold"
"""What a rank tells the others of a capture that failed after fewer runs than ``_WARMUPS``."""

_fastest_paces: weakref.WeakKeyDictionary[Backend, float] = weakref.WeakKeyDictionary()
"""Fastest pace of replays on each backend in this process, in microseconds a kernel."""

_WARMUPS = 2
"""Runs before a capture that failed after fewer, as many as torch recommends."""

_TRIALS = 4
"""Runs of which the fastest counts: a first replay may have to instantiate its graph."""

_RAISED = (Reason.CAPTURE_FAILED, Reason.RANKS_DROPPED)
"""Why a graph waits for the next ``capture``, and is not tried again between steps."""

_WANTED = (Reason.NOT_CAPTURED, Reason.INVALIDATED, Reason.EVICTED)
"""Why a graph is missing that may be captured as soon as batches want it."""


class Capturing:
    """Captures the graphs of a runner, in rounds that all ranks take part in.

    Args:
        facts: what all ranks must have in common.
        share: that of the runner whose buffers this one uses.

    Attributes:
        rounds: how many rounds there were, which keeps the exchanges of ranks apart.
    """

    def __init__(
        self,
        step: Step,
        graphs: Graphs,
        counters: Counters,
        *,
        ranks: RankGroup,
        facts: Mapping[str, Any],
        share: Capturing | None,
    ) -> None:
        self._share = share
        self._step = step
        self._graphs = graphs
        self._counters = counters
        self._ranks = ranks
        self._options = step.options
        self._config = step.options.config
        self._name = step.options.name
        # Of a lender, what it says of how often all ranks meet in its first look.
        lent = share and {name: share.facts[name] for name in ("variants", "share")}
        self.facts: Mapping[str, Any] = {**facts, "share": lent}
        # What must be the same for hits of buckets to say something of another process.
        known = {n: fact for n, fact in facts.items() if n not in ("mode", "buckets")}
        known |= {"name": self._name, "device": step.backend.device_name}
        self._learned = Learned(self._config.learned, known)
        self._backend, self._pool = step.backend, step.pool
        self._held = 0
        self._met = False
        """Whether all ranks have seen what the step returns."""
        self.rounds = 0
        self.pace: ReplayPace | None = None
        """How fast graphs went after the last round, where a device has several paces."""

    @property
    def pending(self) -> list[BucketGraph]:
        """The graphs that may be captured beside those that are, largest first."""
        pending, most = self._graphs.pending, self._options.max_graphs
        return pending if most is None else pending[: most - len(self._graphs.captured)]

    def want(self, decision: Decision) -> BucketGraph | None:
        """Note a batch that ran eagerly; return the graph that is to be captured for such ones."""
        graph = self._graphs.get(decision.key)
        if graph is None or decision.reason not in _WANTED:
            return None
        graph.wants += 1
        graph.missed += 1
        # A rank alone never captures: several of them do so in ``idle``.
        alone = self._ranks.size == 1 and not self._pool.recordings.released
        return graph if alone and self._deserves(graph) and not graph.dropped else None

    def elect(self, *, ready: bool) -> BucketGraph | None:
        """Return the graph that all ranks capture between two steps, if there is one now.

        It is the most used in earlier processes, or the largest where nothing was learnt. With
        ``capture="lazy"`` those that enough batches of a rank wanted come first.

        Where there is no room for one more graph, only one that batches want is elected.

        Args:
            ready: whether this rank has time for it.

        Raises:
            AgreementError: ranks differ in what is left, or one did not come.
        """
        ready = ready and not self._pool.recordings.released
        everything, room = list(self._graphs), bool(self.pending)
        left = [graph for graph in self._graphs.pending if graph.reason not in _RAISED]
        numbers = [
            everything.index(graph) + len(everything) * self._place(graph)
            for graph in left
            if room or self._deserves(graph)
        ]
        wanted = min(numbers, default=None)
        state = f"{self.rounds}: {', '.join(str(graph.key) for graph in left)}"
        elected = self._ranks.elect(wanted, self._name, ready=ready, state=state)
        return None if elected is None else everything[elected % len(everything)]

    def _place(self, graph: BucketGraph) -> int:
        return 0 if self._deserves(graph) else 1 + self._learned.place(graph)

    def _deserves(self, graph: BucketGraph) -> bool:
        """Whether enough batches wanted ``graph`` for ``capture="lazy"``."""
        config = self._config
        return config.capture == "lazy" and graph.wants >= config.lazy_hits

    def round(self, graphs: Sequence[BucketGraph], profile: str | None = None) -> None:
        """Capture ``graphs``, which are ordered largest first; ``profile`` is a folder for traces.

        Raises:
            ResourceError: memory or another resource ran out and the runner is strict.
            AgreementError: another rank failed, is late, or is gone.
            Exception: whatever the step raised. Earlier captures of the round are kept.
        """
        self._begin(graphs)
        if graphs and not self.pending:  # one more, in the place of the one that ran longest ago
            oldest = min(self._graphs.captured, key=lambda other: other.used)
            oldest.forget(Reason.EVICTED, f"made room for {graphs[0].key}")
        self._held = self._pool.bytes
        if self._backend not in _fastest_paces:  # the pace that the captures must leave
            _measure_pace(self._backend)
        started = time.perf_counter()
        done: list[BucketGraph] = []
        with (
            _collector_at_rest(),
            _progress(f"{self._name}: capturing", len(graphs), self._options.progress) as advance,
        ):
            for index, graph in enumerate(graphs):
                advance(str(graph.key))
                with _traced(profile, f"{self._name} {graph.key}"):
                    reason, detail = self._turn(graph)
                if reason is not None:
                    self._drop(graphs[index:], reason, detail)
                    break
                if graph.captured is not None:
                    done.append(graph)
        self.pace = _measure_pace(self._backend)
        if self.pace is not None and self.pace.slow:
            logger.warning(
                "%s: graphs of this process now take %.2f us from kernel to kernel, and took %.2f "
                "before: some program launches kernels on further streams (docs/fast-replay.md)",
                self._name,
                self.pace.microseconds,
                self.pace.fastest,
            )
        logger.info(
            "%s: captured %d of %d buckets in %.2f s, %s (%s on %s)",
            self._name,
            len(done),
            len(graphs),
            time.perf_counter() - started,
            format_bytes(sum(graph.bytes for graph in done)),
            self._config.policy,
            self._backend.device,
        )

    def require(self, profile: str | None) -> None:
        """Raise what keeps this rank from a round, before anything is captured, and let the others
        know; as ``Runner.capture``."""
        try:
            if profile is not None:
                _require_folder(profile)
            self._pool.recordings.require_memory()
        except Exception as error:
            self._ranks.refuse(f"{self._name}/{self.rounds}", error)
            raise

    def _begin(self, graphs: Sequence[BucketGraph]) -> None:
        self._step.settle_autocast()
        wanted = [str(graph.key) for graph in graphs]
        self._ranks.handshake(f"{self._name}/{self.rounds}", {**self.facts, "to_capture": wanted})
        self.rounds += 1

    def learn_together(self) -> None:
        """``learn_outputs`` with the other ranks, as a round without captures.

        Raises:
            AgreementError: another rank failed, is late, or is gone.
        """
        self._begin(())
        tag = f"{self._name}/outputs{self.rounds}"
        try:
            self.learn_outputs(self._barrier(tag))
        except BaseException as error:
            self._ranks.post(f"{tag}/outcome", f"raised {type(error).__name__}: {error}")
            raise

    def learn_outputs(self, barrier: Callable[[], None]) -> None:
        """Run every variant once at its largest size, to see what it returns. Idempotent.

        Args:
            barrier: called after each run, and in the place of those that this rank made alone.
        """
        if not self._met:
            self._look(barrier)
            if self._ranks.size > 1:
                barrier()  # where a rank had no memory for the outputs, all look again
            self._met = True

    def _look(self, barrier: Callable[[], None]) -> None:
        step = self._step
        if self._share is not None:  # what it returns says which buffers there are
            self._share._look(barrier)
        if step.outputs.buffers is not None:
            for _ in self._graphs.variants:  # also of a lender that has no ranks of its own
                barrier()
            return
        with session(self._pool):
            for variant in self._graphs.variants:
                graph = self._graphs.largest(variant)
                with step.trial():
                    static = StaticBatch(step, graph)
                    batch = static.batch(static.prepared())
                    step.outputs.learn(variant, step.function(batch), graph.size)
                    graph.warm = 1
                    barrier()
        step.outputs.allocate(self._backend.device)
        if self._share is not None and step.outputs.shares:
            step.clock = self._share._step.clock.joined(self._name)

    def close(self) -> None:
        """Free all graphs, and keep what was learnt of the buckets."""
        self._graphs.each(BucketGraph.close)
        if self._ranks.rank == 0:
            self._learned.write(self._graphs)

    def sample_bytes(self) -> list[int]:
        """Capture the two largest graphs into a throwaway pool and return what each will add.

        The first takes what finds no place in the runner's own pool, and every later one about what
        the second added, so that the list's last number stands for all the rest.
        """
        pool, there = self._backend.make_pool(), self._pool.segments
        added: list[int] = []
        kept: list[Captured | Emulated] = []
        sync = self._backend.synchronize
        try:
            for graph in list(self._graphs)[:2]:
                if self._step.outputs.buffers is None:
                    self._look(sync)
                before = pool.bytes
                runs = max(_WARMUPS, self._config.warmup)
                kept.append(self._captured(graph, sync, pool, runs))
                grown = pool.bytes - before if added else _beyond(pool.segments, there)
                added.append(max(0, grown) + kept[-1].info().bytes)
        finally:
            for captured in reversed(kept):
                captured.close()
        return added

    def _turn(self, graph: BucketGraph, *, runs: int = 0) -> tuple[Reason | None, str]:
        """Capture one graph on every rank, after at least ``runs`` runs of the step; return why it
        and the rest are dropped, if they are."""
        ranks, tag = self._ranks, f"{self._name}/capture{self.rounds}/{graph.key}/{runs}"
        barrier = self._barrier(tag)
        spent = self._over_budget()
        begun = ranks.gather(f"{tag}/begin", spent.value if spent else "")
        if any(begun):
            return self._common(begun, spent)
        problem: Reason | None = None
        detail, mine = "", ""
        try:
            self._capture(graph, barrier, runs=runs)
            problem = self._over_memory()
            mine = _SLOW if self._loses(graph, barrier) else ""
        except PeerFailed as error:
            problem, detail = Reason.RANKS_DROPPED, str(error)
        except EXHAUSTED as error:
            problem, detail = Reason.OUT_OF_MEMORY, self._shortage(graph, error)
            error.__traceback__ = None  # It holds the frames, and so the memory, of the capture.
        except BaseException as error:
            warm = max(runs, self._config.warmup) >= _WARMUPS or graph.captured is not None
            # Code that tunes or sets itself up in its first run asks the device, which no capture
            # allows: a capture that had no run before it may have failed for want of that.
            refused = isinstance(error, DeviceGraphError) and not isinstance(error, CaptureError)
            if warm or refused or not isinstance(error, Exception):
                graph.forget(Reason.CAPTURE_FAILED, f"{type(error).__name__}: {error}")
                ranks.post(f"{tag}/outcome", f"raised {type(error).__name__}: {error}")
                raise
            logger.info("%s %s needs a run before: %s", self._name, graph.key, error)
            mine, error.__traceback__ = _COLD, None
        mine = f"{problem.value}: {detail}" if problem else mine
        outcomes = ranks.gather(f"{tag}/outcome", mine)
        for rank, text in enumerate(outcomes):
            if text.startswith("raised "):
                graph.forget(Reason.RANKS_DROPPED, text)
                raise AgreementError(f"rank {rank} could not capture {graph.key}: it {text}")
        if _COLD in outcomes:
            graph.close()
            return self._turn(graph, runs=_WARMUPS)
        problems = ["" if text == _SLOW else text for text in outcomes]
        if any(problems):
            return self._common(problems, problem, detail)
        if any(outcomes):  # and other buckets may be worth it
            graph.drop(Reason.TOO_SLOW, f"min_speedup is {self._config.min_speedup}")
        return None, ""

    def _loses(self, graph: BucketGraph, barrier: Callable[[], None]) -> bool:
        """Time a graph that was just captured against eager; return whether it is to be dropped."""
        least, captured, step = self._config.min_speedup, graph.captured, self._step
        if least is None or not isinstance(captured, Captured):
            return False
        self._pool.order()
        static = StaticBatch(step, graph)
        values = static.prepared()
        with step.trial():
            barrier()  # the step may wait for all ranks, of which one may have failed
            eager = self._seconds(lambda: step.function(static.batch(values)))
            graph.speedup = eager / self._seconds(lambda: captured.run(values))
        return graph.speedup < least

    def _seconds(self, run: Callable[[], Any]) -> float:
        """Return the seconds of the fastest of some runs, as many on every rank."""
        taken = []
        for _ in range(_TRIALS):
            self._backend.synchronize()
            begin = time.perf_counter()
            run()
            self._backend.synchronize()
            taken.append(time.perf_counter() - begin)
        return min(taken)

    def _common(
        self, texts: Sequence[str], mine: Reason | None, detail: str = ""
    ) -> tuple[Reason, str]:
        """Return this rank's own reason, or that of the first rank that has one."""
        if mine is not None and mine is not Reason.RANKS_DROPPED:
            return mine, detail
        rank = next(rank for rank, text in enumerate(texts) if text)
        return Reason.RANKS_DROPPED, detail or f"rank {rank}: {texts[rank]}"

    def _capture(self, graph: BucketGraph, barrier: Callable[[], None], *, runs: int) -> None:
        options, outputs = self._options, self._step.outputs
        self.learn_outputs(barrier)
        for name, tensor in self._step.inputs.buffers.bound.items():
            outputs.refuse_overlap(name, tensor)
        epoch = options.weights_epoch() if options.weights_epoch else None
        # Also where it fails: it did on this rank only, and the next one has as many runs on all.
        warm, graph.warm = graph.warm, 0
        runs = max(runs, self._config.warmup - warm)
        captured = self._captured(graph, barrier, self._pool, runs)
        captured.pin(graph.pinned)
        graph.captured = captured
        graph.epoch = epoch
        graph.used = self._step.clock.now
        graph.seconds = captured.capture_seconds
        held, self._held = self._held, self._pool.bytes
        graph.bytes = captured.info().bytes + max(0, self._held - held)
        graph.detail = ""
        self._counters.captures += 1
        graph.reason = Reason.NOT_CAPTURED

    def _captured(
        self, graph: BucketGraph, barrier: Callable[[], None], pool: Pool, runs: int
    ) -> Captured | Emulated:
        """Capture one graph into ``pool``: the only place where a step becomes a capture.

        Args:
            barrier: called after each warm-up run, the last one included, and before each eager
                body of a breakable capture.
            runs: how often the step runs before.
        """
        step, config, options = self._step, self._config, self._options
        write = step.outputs.writer(graph.key.variant, graph.size)
        static = StaticBatch(step, graph)

        def run(**host: Any) -> Any:
            # Capture may change the grad mode that the engine set for the step; apply it again.
            with torch.no_grad():
                return write(step.function(static.batch(host)))

        def settle() -> None:
            # Also after the last warm-up: a rank must not begin to record while another still
            # runs, and a step that writes its inputs must find pad values again.
            barrier()
            step.reset_state()
            static.refill()
            static.prepared()

        if config.emulate:
            return Emulated(functools.partial(step.called, run))
        misses = config.miss_budget
        with step.trial():
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
            )

    def _barrier(self, tag: str) -> Callable[[], None]:
        def barrier() -> None:
            escape = f"{tag}/outcome"
            if self._ranks.size > 1:
                # A warm-up with a collective in it never ends where another rank is gone.
                self._ranks.wait(self._backend.fence(), f"{tag}/warm-up", escape=escape)
            self._backend.synchronize()
            self._ranks.gather(f"{tag}/barrier", "", escape=escape)

        return barrier

    def _over_budget(self) -> Reason | None:
        budget = self._config.time_budget_s
        if budget is not None and sum(graph.seconds for graph in self._graphs) >= budget:
            return Reason.TIME_BUDGET
        return self._over_memory()

    def _over_memory(self) -> Reason | None:
        budget = self._config.memory_budget_bytes
        if budget is not None and sum(graph.bytes for graph in self._graphs) > budget:
            return Reason.MEMORY_BUDGET
        return None

    def _shortage(self, graph: BucketGraph, error: BaseException) -> str:
        info = self._backend.memory_info()
        free = f"{format_bytes(info[0])} of {format_bytes(info[1])} free, " if info else ""
        return (
            f"capturing {graph.key} of {self._name} exhausted the device ({free}"
            f"{len(self._graphs.captured)} graphs captured, {format_bytes(self._pool.bytes)} in "
            f"their pool): {error}"
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
        if reason is Reason.OUT_OF_MEMORY and self._config.strict:
            raise ResourceError(
                f"{detail}. Buckets not captured: {keys}. Use fewer or smaller buckets, leave more "
                f"memory for graphs, or allow eager steps with strict=False."
            )


def _beyond(wanted: Sequence[int], there: Sequence[int]) -> int:
    """Return the bytes of the segments that have no counterpart of their size ``there``."""
    left, missing = sorted(there), 0
    for size in sorted(wanted, reverse=True):
        if left and left[-1] >= size:
            left.pop()
        else:
            missing += size
    return missing


def _require_folder(profile: object) -> None:
    """Make the folder for traces; raises as ``Runner.capture``, before anything is captured."""
    if not isinstance(profile, str | os.PathLike):
        raise InputTypeError(f"profile must be the path of a folder, got {brief(profile)}")
    if torch._C._autograd._profiler_enabled():
        raise StateError(
            "capture(profile=...) inside a profile of torch would end that one: leave profile= "
            "out, and the profile that runs shows the captures"
        )
    Path(profile).mkdir(parents=True, exist_ok=True)


@contextlib.contextmanager
def _traced(folder: str | None, title: str) -> Iterator[None]:
    """Write a Chrome trace of the block into ``folder``, under a file name made of ``title``."""
    if folder is None:
        yield
        return
    name = "".join(each if each.isalnum() else "-" for each in title)
    with torch.profiler.profile() as trace:
        yield
    trace.export_chrome_trace(str(Path(folder) / f"{name.strip('-')}.json"))


PROGRESS_SECONDS = 3.0
"""Between two lines about a capture where standard error is no terminal."""


@contextlib.contextmanager
def _progress(title: str, total: int, wanted: bool) -> Iterator[Callable[[str], None]]:
    """Show on standard error how far the block is, by a bar on a terminal and else by a line every
    few seconds; yields a function that advances it by one."""
    if wanted and sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import Progress, TextColumn

        # rich's own column takes brackets in the runner's name for styles.
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
def _collector_at_rest() -> Iterator[None]:
    """Keep the garbage collector from running meanwhile; a collection may unload kernels."""
    with collector.paused():
        frozen = gc.get_freeze_count()
        # What was just dropped; a full collection takes longer than captures of a small model.
        gc.collect(1)
        if not frozen:  # thawing ours would thaw what the program froze as well
            gc.freeze()
        try:
            yield
        finally:
            if not frozen:
                gc.unfreeze()
