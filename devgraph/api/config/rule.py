"""What one compatibility rule is; the table is in rules.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

from devgraph.api.config.facts import EngineFacts
from devgraph.api.config.model import PhaseConfig
from devgraph.api.config.values import PHASES, check

__all__ = ["ANY", "SGLANG", "VLLM", "Rule", "row"]

ANY = ("full", "breakable", "piecewise")
"""Every policy that captures."""

SGLANG = "https://github.com/sgl-project/sglang"
VLLM = "https://github.com/vllm-project/vllm"


@attrs.frozen(kw_only=True)
class Rule:
    """One row: in which phases and under which policies, when, and what follows.

    ``key`` and ``value`` say what is set; ``value`` may be a function of facts and phase
    configuration. A note sets nothing.
    """

    name: str
    kind: str = attrs.field(
        validator=attrs.validators.in_(("safety", "preference", "note", "scope"))
    )
    policies: tuple[str, ...]
    when: Callable[[EngineFacts, PhaseConfig], bool]
    explanation: str
    source: str
    phases: tuple[str, ...] = PHASES
    key: str = "policy"
    value: Any = None

    def result(self, facts: EngineFacts, phase: PhaseConfig) -> Any:
        """Return the value that the rule sets."""
        value = self.value(facts, phase) if callable(self.value) else self.value
        return check(self.key, value, self.name)


def row(name: str, kind: str, policies: tuple[str, ...] | str, **rest: Any) -> Rule:
    """Return one row of the table; a single policy may be given as a string."""
    return Rule(
        name=name,
        kind=kind,
        policies=(policies,) if isinstance(policies, str) else policies,
        **rest,
    )
