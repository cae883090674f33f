"""A capture round: which graphs are captured, in which order, and what happens when one fails."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from devgraph.api.capture import Captured, capture
from devgraph.api.errors import AgreementError, InputError, ResourceError
from devgraph.api.policy import UpdateBudget
from devgraph.api.pool import Pool
from devgraph.runners.collector import collector_at_rest
from devgraph.runners.decision import Reason
from devgraph.runners.entries import Entries, Entry
from devgraph.runners.parts import Parts, StaticBatch
from devgraph.runners.progress import progress_bar
from devgraph.runners.ranks import PeerFailed
from devgraph.runners.stats import format_bytes

__all__ = ["Round", "captured_seconds", "check_ranks", "sample_bytes"]

logger = logging.getLogger(__name__)

_EXHAUSTED = (ResourceError, torch.OutOfMemoryError, MemoryError)


class Round:
    """One call of ``capture``: the graphs in ``entries``, largest first.

    Args:
        parts: the runner's.
        number: how many rounds came before, which keeps the exchanges of ranks apart.
    """

    def __init__(self, parts: Parts, entries: Sequence[Entry], number: int) -> None:
        self._parts = parts
        self._entries = list(entries)
        self._tag = f"{parts.options.name}/capture{number}"
        self._held = parts.pool.bytes
        self._first = True

    def run(self) -> list[Entry]:
        """Capture; return what was captured.

        Raises:
            ResourceError: memory or another resource ran out and the runner is strict.
            AgreementError: another rank failed, is late, or is gone.
            Exception: whatever the step raised. Earlier captures of the round are kept.
        """
        parts = self._parts
        started = time.perf_counter()
        done: list[Entry] = []
        name = parts.options.name
        with (
            collector_at_rest(sweep=len(self._entries) > 1),
            torch.no_grad(),
            progress_bar(f"{name}: capturing", len(self._entries), parts.options.progress) as step,
        ):
            for index, entry in enumerate(self._entries):
                step(str(entry.key))
                reason, detail = self._turn(entry)
                if reason is not None:
                    self._drop(self._entries[index:], reason, detail)
                    break
                done.append(entry)
        self._share_growth(done[1:])
        self._summarise(done, time.perf_counter() - started)
        return done

    def _turn(self, entry: Entry) -> tuple[Reason | None, str]:
        """Capture one graph on every rank; return why it and the rest are dropped, if they are."""
        parts, tag = self._parts, f"{self._tag}/{entry.key}"
        spent = self._over_budget()
        begun = parts.ranks.gather(f"{tag}/begin", spent.value if spent else "")
        if any(begun):
            return self._common(begun, spent)
        problem: Reason | None = None
        detail = ""
        try:
            self._capture(entry, tag)
            problem = self._over_memory()
        except PeerFailed as error:
            problem, detail = Reason.RANKS_DROPPED, str(error)
        except _EXHAUSTED as error:
            problem, detail = Reason.OUT_OF_MEMORY, self._shortage(entry, error)
            error.__traceback__ = None  # It holds the frames, and so the memory, of the capture.
        except BaseException as error:
            entry.forget(Reason.CAPTURE_FAILED, f"{type(error).__name__}: {error}")
            parts.ranks.post(f"{tag}/outcome", f"raised {type(error).__name__}: {error}")
            raise
        mine = f"{problem.value}: {detail}" if problem else ""
        outcomes = parts.ranks.gather(f"{tag}/outcome", mine)
        for rank, text in enumerate(outcomes):
            if text.startswith("raised "):
                entry.drop(Reason.RANKS_DROPPED, text)
                raise AgreementError(f"rank {rank} could not capture {entry.key}: it {text}")
        if any(outcomes):
            return self._common(outcomes, problem, detail)
        return None, ""

    def _common(
        self, texts: Sequence[str], mine: Reason | None, detail: str = ""
    ) -> tuple[Reason, str]:
        """Return this rank's own reason, or that of the first rank that has one."""
        if mine is not None and mine is not Reason.RANKS_DROPPED:
            return mine, detail
        rank = next(rank for rank, text in enumerate(texts) if text)
        return Reason.RANKS_DROPPED, detail or f"rank {rank}: {texts[rank]}"

    def _capture(self, entry: Entry, tag: str) -> None:
        parts = self._parts
        if not parts.store.ready:
            self.learn_outputs(self._barrier(tag))
        for name, tensor in parts.arena.buffers.bound.items():
            parts.store.refuse_overlap(name, tensor)
        epoch = parts.options.weights_epoch() if parts.options.weights_epoch else None
        captured = capture_graph(parts, entry, self._barrier(tag))
        if parts.options.reset_state is not None:
            parts.options.reset_state()
        entry.captured = captured
        entry.epoch = epoch
        entry.seconds = captured.capture_seconds
        entry.bytes = captured.info().bytes
        if self._first or parts.config.memory_budget_bytes is not None:
            entry.bytes += self._grown()
        self._first = False
        entry.detail = ""
        parts.counters.captures += 1
        if entry.reason is Reason.INVALIDATED:
            parts.counters.recaptures += 1
        entry.reason = Reason.NOT_CAPTURED

    def learn_outputs(self, barrier: Callable[[], None] | None = None) -> None:
        """Run every variant once at its largest size, to see what it returns."""
        parts = self._parts
        rng = parts.backend.get_rng_state()
        with parts.backend.capturing(parts.pool):
            for variant in parts.entries.variants:
                entry = parts.entries.largest(variant)
                static = StaticBatch(parts, entry)
                batch = static.batch(parts.host.at_capture(entry.size))
                parts.store.learn(variant, parts.step(batch), entry.size)
                entry.warm = 1
                (barrier or parts.backend.synchronize)()
        parts.backend.set_rng_state(rng)
        parts.store.allocate(parts.backend.device)

    def _barrier(self, tag: str) -> Callable[[], None]:
        ranks = self._parts.ranks

        def barrier() -> None:
            escape = f"{tag}/outcome"
            if ranks.size > 1:
                # A warm-up with a collective in it never ends where another rank is gone.
                ranks.wait(self._parts.backend.fence(), f"{tag}/warm-up", escape=escape)
            self._parts.backend.synchronize()
            ranks.gather(f"{tag}/barrier", "", escape=escape)

        return barrier

    def _grown(self) -> int:
        """Return by how many bytes the pool grew since the last call; looking takes 0.2 ms."""
        held = self._parts.pool.bytes
        grown, self._held = max(0, held - self._held), held
        return grown

    def _share_growth(self, entries: Sequence[Entry]) -> None:
        if entries:
            share = self._grown() // len(entries)
            for entry in entries:
                entry.bytes += share

    def _over_budget(self) -> Reason | None:
        budget = self._parts.config.time_budget_s
        if budget is not None and captured_seconds(self._parts.entries) >= budget:
            return Reason.TIME_BUDGET
        return self._over_memory()

    def _over_memory(self) -> Reason | None:
        budget = self._parts.config.memory_budget_bytes
        if budget is not None and sum(e.bytes for e in self._parts.entries) > budget:
            return Reason.MEMORY_BUDGET
        return None

    def _shortage(self, entry: Entry, error: BaseException) -> str:
        parts = self._parts
        info = parts.backend.memory_info()
        free = f"{format_bytes(info[0])} of {format_bytes(info[1])} free, " if info else ""
        kept = parts.entries.captured
        return (
            f"capturing {entry.key} of {parts.options.name} exhausted the device ({free}"
            f"{len(kept)} graphs captured, {format_bytes(parts.pool.bytes)} in their pool): {error}"
        )

    def _drop(self, entries: Sequence[Entry], reason: Reason, detail: str) -> None:
        parts = self._parts
        for entry in entries:
            entry.drop(reason, detail)
        keys = ", ".join(str(entry.key) for entry in entries)
        logger.warning(
            "%s: dropped %d buckets (%s): %s%s",
            parts.options.name,
            len(entries),
            keys,
            reason.value.replace("_", " "),
            f", {detail}" if detail else "",
        )
        if reason is Reason.OUT_OF_MEMORY and parts.config.strict:
            raise ResourceError(
                f"{detail}. Buckets not captured: {keys}. Use fewer or smaller buckets, leave more "
                f"memory for graphs, or allow eager steps with strict=False."
            )

    def _summarise(self, done: Sequence[Entry], seconds: float) -> None:
        parts = self._parts
        logger.info(
            "%s: captured %d of %d buckets in %.2f s, %s (%s on %s)",
            parts.options.name,
            len(done),
            len(self._entries),
            seconds,
            format_bytes(sum(entry.bytes for entry in done)),
            parts.config.policy,
            parts.backend.device,
        )


def capture_graph(
    parts: Parts, entry: Entry, barrier: Callable[[], None], pool: Pool | None = None
) -> Captured:
    """Capture one graph of a runner: the only place that knows how a step becomes a capture.

    Args:
        barrier: called after each warm-up run, the last one included, and before each eager body
            of a breakable capture.
        pool: memory to capture into, if it is not the runner's.
    """
    config = parts.config
    write = parts.store.writer(entry.key.variant, entry.size)
    static = StaticBatch(parts, entry)

    def step(**host: Any) -> Any:
        # Capture may change the grad mode that the engine set for the step; apply it again.
        with torch.no_grad():
            return write(parts.step(static.batch(host)))

    def settle() -> None:
        # Also after the last warm-up: a rank must not begin to record while another still
        # runs, and a step that writes its inputs must find pad values again.
        barrier()
        if parts.options.reset_state is not None:
            parts.options.reset_state()
        static.refill()

    misses = config.miss_budget
    return capture(
        step,
        policy=config.policy,
        backend=parts.backend,
        host_args=parts.host.at_capture(entry.size),
        warmup=max(0, config.warmup - entry.warm),
        pool=pool or parts.pool,
        compiler=config.compiler if config.policy == "piecewise" else None,
        before_break=barrier if parts.ranks.size > 1 else None,
        after_warmup=settle,
        budget=None if misses is None else UpdateBudget(misses=misses),
    )


def captured_seconds(entries: Entries) -> float:
    """Return the time that captures took so far."""
    return sum(entry.seconds for entry in entries)


def sample_bytes(parts: Parts) -> list[int]:
    """Capture the two largest graphs into a throwaway pool and return what each added to it.

    In a shared pool the first costs what it needs and every later one about what the second
    added, so that the list's last number stands for all the rest.
    """
    pool = parts.backend.make_pool()
    round_ = Round(parts, [], -1)
    added, kept = [], []
    with torch.no_grad():
        try:
            for entry in list(parts.entries)[:2]:
                if not parts.store.ready:
                    round_.learn_outputs()
                before = pool.bytes
                kept.append(capture_graph(parts, entry, parts.backend.synchronize, pool))
                added.append(max(0, pool.bytes - before) + kept[-1].info().bytes)
        finally:
            for captured in reversed(kept):
                captured.close()
    return added


def check_ranks(parts: Parts, capture_mode: str) -> None:
    """Raise InputError where a rank would capture alone."""
    if parts.ranks.size > 1 and capture_mode != "eager":
        raise InputError(
            f"capture={capture_mode!r} lets a rank capture alone, and this runner has a group of "
            f"{parts.ranks.size} ranks; use capture='eager'"
        )
