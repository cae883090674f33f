"""Keys that have no effect in a phase, or together with the values of other keys."""

from __future__ import annotations

from collections.abc import Callable

import attrs

from devgraph.api.config.phase import KEYS, RUNNER_POLICY, PhaseConfig
from devgraph.api.policy import breaks, compiles, policies


@attrs.frozen
class Unused:
    """One row: a key, the condition under which it has no effect, and the reason."""

    key: str
    when: Callable[[PhaseConfig], bool]
    because: str
    phases: tuple[str, ...] = tuple(RUNNER_POLICY)


UNUSED: tuple[Unused, ...] = (
    *(
        Unused(key, lambda phase: phase.policy == "disabled", "the policy is 'disabled'")
        for key in KEYS
        if key != "policy"
    ),
    Unused(
        "max_requests",
        lambda _: True,
        "decode takes its sizes from its buckets; only full prefill graphs have request slots",
        ("decode",),
    ),
    Unused(
        "max_requests",
        lambda phase: breaks(phase.policy),
        "with breaks, a prefill graph takes any number of requests",
        ("prefill",),
    ),
    Unused("lazy_hits", lambda phase: phase.capture != "lazy", "only capture='lazy' counts hits"),
    Unused("verify", lambda phase: phase.emulate, "with emulate, every step runs eagerly"),
    Unused(
        "miss_budget",
        lambda phase: breaks(phase.policy),
        "with breaks, marked code runs eagerly and no key is recorded",
    ),
    Unused(
        "compiler",
        lambda phase: not compiles(phase.policy),
        f"only {' and '.join(name for name in policies() if compiles(name))} compiles",
    ),
    Unused(
        "max_bs",
        lambda phase: phase.buckets is not None and phase.max_bs != phase.buckets[-1],
        "a list of buckets is used exactly as given",
    ),
)
"""The table. If several rows apply to a key, the first one gives the reason."""


def unused(phase: str, config: PhaseConfig) -> dict[str, str]:
    """Return the keys with non-default values that have no effect, each with the reason."""
    reasons: dict[str, str] = {}
    changed = config.changed
    for row in UNUSED:
        if row.key in changed and phase in row.phases and row.when(config):
            reasons.setdefault(row.key, row.because)
    return reasons
