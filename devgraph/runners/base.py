"""Runner: data through fixed buffers, a graph per bucket, and eager steps with a reason."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch

from devgraph.api.backend import Backend
from devgraph.api.buffers import StaticBuffers
from devgraph.api.config.model import PhaseConfig
from devgraph.api.errors import ConfigError, ConfigTypeError
from devgraph.api.policy import get_policy
from devgraph.api.pool import Pool
from devgraph.runners.batch import Batch, Live
from devgraph.runners.buckets import Buckets, Phase
from devgraph.runners.capturing import Round, check_ranks
from devgraph.runners.decision import GraphKey, Reason, Variant
from devgraph.runners.entries import Entries, Entry
from devgraph.runners.host import HostArgs
from devgraph.runners.inputs import InputArena
from devgraph.runners.outputs import OutputStore
from devgraph.runners.parts import Parts
from devgraph.runners.prove import Hooks, RunnerReport, prove_runner
from devgraph.runners.ranks import ranks_of
from devgraph.runners.report import RunnerPlan, explain_runner, plan_runner, runner_stats
from devgraph.runners.running import Stepping
from devgraph.runners.settings import Options
from devgraph.runners.slots import InputSlot, Size
from devgraph.runners.stats import Counters, RunnerStats
from devgraph.runners.steps import GraphStep

__all__ = ["Runner"]

logger = logging.getLogger(__name__)


class Runner(Stepping):
    """What decode and prefill have in common. Make a ``DecodeRunner`` or a ``PrefillRunner``.

    A runner belongs to one process. Its methods may be called from any thread; steps of runners
    that share a pool follow each other.
    """

    phase: Phase

    def __init__(
        self,
        *,
        slots: Mapping[str, InputSlot],
        step: Callable[[Batch], Any],
        eager: Callable[[Batch], Any],
        tail: Callable[[Any, Batch], Any] | None,
        outputs: Any,
        variants: Mapping[Variant, Mapping[str, Any]],
        host_args: Mapping[str, Any] | None,
        config: PhaseConfig,
        options: Options,
        backend: Backend,
        pool: Pool | None,
        group: Any,
        buckets: Buckets,
        sizes: Mapping[GraphKey, Size],
        largest: Size,
        run_slots: frozenset[str],
    ) -> None:
        if options.strict is not None:
            config = attrs.evolve(config, strict=options.strict)
        _check_config(config)
        for what, function in (("step", step), ("tail", tail)):
            if function is not None and not callable(function):
                raise ConfigTypeError(f"the {what} of a runner must be callable: {function!r}")
        pool = backend.own_pool(pool)
        arena = InputArena(slots, largest, backend)
        for name, tensor in options.bound.items():
            arena.buffers.bind(name, tensor)
        pool.register(arena.buffers)
        parts = Parts(
            backend=backend,
            pool=pool,
            ranks=ranks_of(group),
            config=config,
            options=options,
            step=step,
            arena=arena,
            run_slots=run_slots,
            store=OutputStore(outputs),
            host=HostArgs(host_args),
            live=Live(),
            entries=Entries(variants, buckets, sizes, config.max_padding),
            counters=Counters(),
        )
        check_ranks(parts, config.capture)
        super().__init__(parts, eager=eager, tail=tail)
        self._rounds = 0

    # Capture.

    def capture(self) -> None:
        """Capture the buckets that are not captured yet, largest first; failed ones again.

        With ``capture="lazy"`` or ``"background"`` in the configuration it only finds out what the
        step returns; buckets follow after enough batches wanted one, or one per ``idle`` call.

        Every capture starts from pad values in all slots; memory of buckets is shared. When memory
        runs out, the rest is dropped: the steps that wanted it run eagerly, counted.

        Raises:
            ResourceError: memory or another resource ran out and the runner is strict.
            AgreementError: ranks differ, or one failed, is late or gone.
            Exception: what the step raised in warm-up or capture; earlier captures are kept.
        """
        with self._lock:
            self._require_open("capture")
            parts = self._parts
            if parts.config.policy == "disabled":
                return
            parts.ranks.handshake(f"{parts.options.name}/{self._rounds}", self._facts())
            if parts.config.capture == "eager":
                self._round(parts.entries.pending)
            elif not parts.store.ready:
                Round(parts, [], self._rounds).learn_outputs()

    def idle(self) -> bool:
        """Capture one bucket while the engine has nothing else to do; False when none is left.

        For ``capture="background"`` and ``"lazy"``. Outputs of earlier runs are overwritten.
        """
        with self._lock:
            self._require_open("capture")
            pending = [
                entry
                for entry in self._parts.entries.pending
                if entry.reason is not Reason.CAPTURE_FAILED
            ]
            if not pending or self._parts.config.policy == "disabled" or self._suspended:
                return False
            check_ranks(self._parts, "background")
            self._round(pending[:1])
            return True

    def _round(self, entries: Sequence[Entry]) -> None:
        self._rounds += 1
        self._steps.clear()
        self._clock.tick()
        try:
            Round(self._parts, entries, self._rounds).run()
        finally:
            self._steps.clear()

    # Life.

    def invalidate(self, reason: str = "") -> None:
        """Close all graphs, because what they captured (weights, buffers) is no longer valid.

        Steps run eagerly until ``capture`` captures again; with ``capture="lazy"`` or
        ``"background"`` buckets come back as they did at first. Bound tensors are bound again at
        their present addresses.
        """
        with self._lock:
            self._require_open("invalidate")
            self._steps.clear()
            for entry in reversed(list(self._parts.entries)):
                entry.forget(Reason.INVALIDATED, reason)
            self._parts.arena.buffers.rebind()

    def suspend(self) -> None:
        """Run eagerly until ``resume``; graphs are kept. Idempotent."""
        with self._lock:
            self._require_open("suspend")
            self._suspended = True
            self._steps.clear()

    def resume(self) -> None:
        """Use the graphs again. Idempotent."""
        with self._lock:
            self._require_open("resume")
            self._suspended = False

    def close(self) -> None:
        """Free all graphs. Idempotent. Close a runner before the communicators its graphs use."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._steps.clear()
            self._clock.now += 1
            for entry in reversed(list(self._parts.entries)):
                entry.close()

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        parts = self._parts
        policy = "closed" if self._closed else self.effective_policy
        graphs = f"{len(parts.entries.captured)} of {len(list(parts.entries))} graphs"
        return f"<{type(self).__name__} {self._name}: {policy} on {parts.backend.name}, {graphs}>"

    def __reduce__(self) -> Any:
        raise TypeError("a runner owns graphs of its process and cannot be pickled or copied")

    # Reports.

    @property
    def backend(self) -> Backend:
        return self._parts.backend

    @property
    def pool(self) -> Pool:
        """Graph memory; hand it to other runners of the engine so that they share it."""
        return self._parts.pool

    @property
    def buckets(self) -> Buckets:
        return self._parts.entries.buckets

    @property
    def buffers(self) -> StaticBuffers:
        """The static buffers of the input slots."""
        return self._parts.arena.buffers

    @property
    def requested_policy(self) -> str:
        """The policy of the configuration."""
        return self._parts.config.policy

    @property
    def effective_policy(self) -> str:
        """The policy that graphs run under now; ``disabled`` while there is none to run."""
        usable = self._parts.entries.captured and not self._suspended and not self._closed
        return self._parts.config.policy if usable else "disabled"

    def stats(self) -> RunnerStats:
        """Return a snapshot of the counters."""
        return runner_stats(self._parts, self.phase, self.effective_policy)

    def plan(self, *, sample: bool = False) -> RunnerPlan:
        """Return buckets, rows and bytes.

        Args:
            sample: capture the two largest graphs into a throwaway pool, if they are not all
                captured, and estimate the rest from them.
        """
        with self._lock:
            self._require_open("plan")
            return plan_runner(self._parts, self.phase, self.effective_policy, sample=sample)

    def explain(self) -> str:
        """Return slots, buckets, segments, reasons and counters as text."""
        return explain_runner(self._parts, self.phase, self.effective_policy)

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
        with self._lock:
            self._require_open("prove")
            hooks = Hooks(
                eager=self._eager,
                step_for=self._step_for,
                finish=self._finish,
                real_size=self._real_size,
            )
            self._clock.tick()
            return prove_runner(
                self._parts, hooks, cases=cases, host_args=host_args, rtol=rtol, atol=atol
            )

    def _step_for(self, key: GraphKey, size: Size) -> GraphStep:
        return GraphStep(self._parts, self._parts.entries[key], size, self._rows(size))

    def _facts(self) -> dict[str, Any]:
        parts = self._parts
        return {
            "phase": self.phase,
            "mode": parts.config.to_dict(everything=True),
            "buckets": list(self.buckets),
            "variants": [dict(options) for options in parts.entries.variants.values()],
            "inputs": {n: f"{s.dtype} {s.dims}" for n, s in parts.arena.slots.items()},
            "backend": parts.backend.name,
            "backend_version": parts.backend.version,
            "torch": torch.__version__,
            "devgraph": _version(),
        }


def _check_config(config: PhaseConfig) -> None:
    """Raise ConfigError or CapabilityError for what this version cannot do, before building."""
    if config.policy != "disabled":
        get_policy(config.policy)
    if config.strict and config.capture != "eager":
        raise ConfigError(
            f"strict with capture={config.capture!r} would refuse every batch whose bucket is not "
            f"captured yet; use capture='eager' or strict=False"
        )


def _version() -> str:
    from devgraph import __version__

    return __version__
