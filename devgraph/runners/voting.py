"""The vote of a step: all ranks take the same path, or none takes a graph."""

from __future__ import annotations

from devgraph.api.errors import AgreementError
from devgraph.runners.decision import Decision, GraphKey, Reason
from devgraph.runners.entries import Entries
from devgraph.runners.ranks import Solo

__all__ = ["agree_on"]

_NEUTRAL = 2**31
"""In a vote of minima: this rank has no opinion."""


def agree_on(decision: Decision | None, ranks: Solo, entries: Entries, name: str) -> Decision:
    """Implement ``Runner.agree``: one vote of minima over all ranks."""
    if ranks.size == 1:
        return decision if decision is not None else Decision.eager(Reason.EMPTY_BATCH)
    variants = list(entries.variants)
    ok, bucket, variant = 1, 0, None
    if decision is not None and decision.reason is not Reason.EMPTY_BATCH:
        ok = int(decision.ok)
        if decision.key is not None:
            bucket, variant = decision.key.bucket, variants.index(decision.key.variant)
    low, high = (_NEUTRAL, _NEUTRAL) if variant is None else (variant, -variant)
    ok, bucket, low, high = ranks.minimum(f"{name}/vote", (ok, -bucket, low, high))
    key = None if low == _NEUTRAL else GraphKey(variants[low], -bucket)
    if not ok:
        if decision is not None and not decision.ok:
            return decision
        return Decision.eager(Reason.VOTED_EAGER, decision.key if decision else key)
    if key is None:
        return Decision.eager(Reason.EMPTY_BATCH)
    if low != -high:
        raise AgreementError(
            f"the ranks of {name} want different variants in one step: {dict(variants[low])} and "
            f"{dict(variants[-high])}; give all ranks of a step the same variant"
        )
    return Decision.graph(key)
