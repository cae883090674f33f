"""Comparisons of graphs with eager runs: ``prove``, and the checks of the key ``verify``."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Sequence

import attrs

from devgraph.api.capture import Captured
from devgraph.api.config.phase import Verify
from devgraph.api.errors import CaptureError
from devgraph.api.prove import Report, Terms
from devgraph.runners.decisions import Reason
from devgraph.runners.graphs import BucketGraph, Graphs
from devgraph.runners.prove import Implied, Proof
from devgraph.runners.ranks import RankGroup
from devgraph.runners.step import Step

logger = logging.getLogger(__name__)


@attrs.define(eq=False)
class GraphChecks:
    """Comparisons of graphs with eager runs. A graph that differs on any rank is dropped."""

    _step: Step
    _graphs: Graphs
    _ranks: RankGroup
    _implied: Implied | None
    _proofs: int = attrs.field(default=0, init=False)
    """Number of proofs so far, which distinguishes the tags of their exchanges."""
    _checked_at: int = attrs.field(default=0, init=False)
    """Number of steps at the last check."""

    @property
    def _name(self) -> str:
        return self._step.options.name

    @property
    def _verify(self) -> Verify | None:
        config = self._step.options.config
        return None if config.emulate else config.verify

    def proof(self, terms: Terms, chosen: Sequence[BucketGraph]) -> tuple[Report, Proof]:
        """Prove ``chosen``, which must be captured. Raises the errors of ``Runner.prove``."""
        self._step.clock.tick()
        self._proofs += 1
        tag = f"{self._name}/prove{self._proofs}"
        proof = Proof(self._step, terms, self._implied, self._ranks, tag)
        with contextlib.ExitStack() as within:
            within.enter_context(self._step.gates.held_open())
            for graph in chosen:
                if isinstance(graph.captured, Captured):
                    within.enter_context(graph.captured.uncounted_misses())
            return proof.of(self._graphs, chosen), proof

    def at_start(self, graphs: Sequence[BucketGraph]) -> None:
        """Check new graphs if the key ``verify`` requires it."""
        if self._verify is not None and self._verify.start:
            self._check([graph for graph in graphs if graph.captured is not None], cases=2)

    def are_due(self, *, ready: bool) -> bool:
        """Whether enough steps ran since the last check, and all ranks can check a graph now."""
        if self._verify is None or self._verify.every is None:
            return False
        due = self._steps_so_far - self._checked_at >= self._verify.every
        able = ready and bool(self._graphs.captured)
        not_due, all_able = self._ranks.minimum(f"{self._name}/verify", [not due, able])
        return not not_due and bool(all_able)

    def repeat(self) -> None:
        """Check one case of the next graph in rotation."""
        captured = self._graphs.captured
        self._check([captured[self._proofs % len(captured)]], cases=1)

    @property
    def _steps_so_far(self) -> int:
        return sum(graph.hits for graph in self._graphs) + self._graphs.counters.reasons.total()

    def _check(self, chosen: Sequence[BucketGraph], cases: int) -> None:
        report, proof = self.proof(Terms(cases=cases, quick=True), chosen)
        self._checked_at = self._steps_so_far
        self._graphs.counters.checks += report.cases
        own = {
            str(graph.key): causes
            for graph in chosen
            if (causes := _causes(report, proof, graph)) is not None
        }
        texts = self._ranks.gather(f"{self._name}/verified{self._proofs}", json.dumps(own))
        by_rank = [json.loads(text) for text in texts]
        dropped = []
        for graph in chosen:
            key = str(graph.key)
            if key in own:
                graph.drop(Reason.VERIFY_FAILED, own[key])
            elif failed := [rank for rank, causes in enumerate(by_rank) if key in causes]:
                graph.drop(Reason.RANKS_DROPPED, f"rank {failed[0]}: {by_rank[failed[0]][key]}")
            else:
                continue
            dropped.append(graph)
            self._graphs.counters.failed_checks += 1
            text = "%s: dropped bucket %s, because its graph differs from eager runs: %s"
            logger.warning(text, self._name, key, graph.detail)
        if dropped and self._step.options.config.strict:
            keys = ", ".join(str(graph.key) for graph in dropped)
            raise CaptureError(
                f"{self._name}: graphs differ from eager runs in buckets {keys}: "
                f"{dropped[0].detail}. Run prove() for all differences, or allow eager steps with "
                f"strict=False"
            )


def _causes(report: Report, proof: Proof, graph: BucketGraph) -> str | None:
    """Return the likely causes of the failures of one graph, or None without failures."""
    tried = tuple(case for case, other in proof.tried if other is graph)
    numbers = {case.number for case in tried}
    failures = tuple(failure for failure in report.failures if failure.case in numbers)
    if not failures:
        return None
    own = attrs.evolve(report, cases=len(tried), tried=tried, failures=failures)
    return "; ".join(own.causes)
