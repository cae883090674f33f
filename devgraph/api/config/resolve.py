"""What a configuration comes to for one engine on one backend, and why.

``resolve`` lays the part for the backend over the general part and applies the compatibility
rules. A rule may change what nobody chose; what somebody chose is refused (safety) or kept with a
warning (preference). Only a phase that does not occur on the node is set aside (scope).
"""

from __future__ import annotations

import json
import logging
import warnings
from typing import Any

import attrs

from devgraph.api.config.facts import EngineFacts
from devgraph.api.config.model import DeviceGraphConfig
from devgraph.api.config.phase import PHASES, DeviceGraphWarning, PhaseConfig, plain
from devgraph.api.config.rules import RULES, WEAKER, Rule
from devgraph.api.errors import ConfigError, ConfigTypeError, brief
from devgraph.api.policy import registration

logger = logging.getLogger(__name__)


@attrs.frozen(kw_only=True)
class FiredRule:
    """One rule that applied to one phase, and what came of it."""

    phase: str
    rule: str
    kind: str
    outcome: str
    """``changed`` a default, ``kept`` an explicit choice, ``set aside`` a phase that does not
    occur, or ``noted``."""
    key: str | None
    before: Any
    after: Any
    explanation: str
    source: str

    def __str__(self) -> str:
        if self.outcome in ("changed", "set aside"):
            what = f"{self.phase}.{self.key}: {self.before!r} becomes {self.after!r}"
        elif self.outcome == "kept":
            what = f"{self.phase}.{self.key}: {self.before!r} kept, {self.after!r} is preferable"
        else:
            what = f"{self.phase}"
        return f"{what} [{self.rule}]: {self.explanation} ({self.source})"


@attrs.frozen(kw_only=True)
class Resolution:
    """What was asked for, what holds, and every rule that had a say."""

    backend: str | None
    requested: DeviceGraphConfig
    """What was asked for on this backend (without one: in general), before any rule."""
    effective: DeviceGraphConfig
    """What holds. What the rules decided counts as chosen in it, so that it can be sent on."""
    fired: tuple[FiredRule, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON has it, all keys spelled out."""
        return {
            "backend": self.backend,
            "requested": self.requested.to_dict(everything=True),
            "effective": self.effective.to_dict(everything=True),
            "rules": [attrs.asdict(one) for one in self.fired],
        }

    def rows(self) -> list[tuple[str, str, str, str]]:
        """Return (phase, key, requested, effective) for the policy and all that differs from the
        defaults, as a table has it."""
        found: list[tuple[str, str, str, str]] = []
        for phase in PHASES:
            asked = self.requested.phase(phase).to_dict(everything=True)
            holds = self.effective.phase(phase)
            for key, value in holds.to_dict(everything=True).items():
                if key == "policy" or key in holds.explicit:
                    found.append((phase, key, _shown(asked[key]), _shown(value)))
        return found


def resolve(config: DeviceGraphConfig, facts: EngineFacts | None = None) -> Resolution:
    """Apply the rules to what ``config`` says for ``facts.backend``.

    Raises ``ConfigError`` that lists every explicit choice which a safety rule forbids, with the
    reason and what the rule allows. Preference rules against explicit choices are
    ``DeviceGraphWarning``; changes to defaults are logged and listed in the result.
    """
    facts = EngineFacts() if facts is None else facts
    if not isinstance(config, DeviceGraphConfig):
        raise ConfigTypeError(
            f"expected a DeviceGraphConfig, as from_args or from_json returns it, got "
            f"{brief(config)}"
        )
    if not isinstance(facts, EngineFacts):
        raise ConfigTypeError(f"expected EngineFacts(...), got {brief(facts)}")
    requested = config.for_backend(facts.backend) if facts.backend else config
    effective: dict[str, PhaseConfig] = {}
    fired: list[FiredRule] = []
    refused: list[str] = []
    for phase in PHASES:
        effective[phase], said, conflicts = _apply(phase, requested.phase(phase), facts)
        fired += said
        refused += conflicts
    if refused:
        lines = "".join(f"\n- {line}" for line in refused)
        raise ConfigError(f"the engine cannot run what was chosen:{lines}")
    for one in fired:
        if one.outcome == "kept":
            warnings.warn(str(one), DeviceGraphWarning, stacklevel=2)
        elif one.outcome == "changed":
            logger.warning("%s", one)
        else:
            logger.info("%s", one)
    return Resolution(
        backend=facts.backend,
        requested=requested,
        effective=attrs.evolve(
            requested, decode=effective["decode"], prefill=effective["prefill"], overlays={}
        ),
        fired=tuple(fired),
    )


def _apply(
    phase: str, asked: PhaseConfig, facts: EngineFacts
) -> tuple[PhaseConfig, list[FiredRule], list[str]]:
    """Run the table over one phase until nothing fires any more; each rule fires once. Return what
    holds then, the rules that fired, and what speaks against choices."""
    holds = asked
    fired: list[FiredRule] = []
    conflicts: list[str] = []
    done: set[str] = set()
    changed = True
    while changed:
        changed = False
        for rule in _rules_for(holds.policy, phase):
            if rule.name in done or not rule.when(facts, holds):
                continue
            if rule.kind == "note":
                done.add(rule.name)
                fired.append(_fired(phase, rule, "noted", None, None))
                continue
            before, after = getattr(holds, rule.key), rule.result(facts, holds)
            if rule.key == "policy" and before in WEAKER[WEAKER.index(after) :]:
                continue  # as weak already
            done.add(rule.name)
            if rule.kind == "scope" or rule.key not in asked.explicit:
                outcome = "set aside" if rule.kind == "scope" else "changed"
                fired.append(_fired(phase, rule, outcome, before, after))
                holds = holds.with_checked({rule.key: after}, holds.explicit)
                changed = True  # and so other rules may have become true, earlier ones too
                break
            if rule.kind == "safety":
                conflicts.append(
                    f"{phase}.{rule.key}={_shown(before)} does not work [{rule.name}]: "
                    f"{rule.explanation} ({rule.source}). It would have to be {_shown(after)}"
                )
            else:
                fired.append(_fired(phase, rule, "kept", before, after))
    # Notes about a policy that a later rule replaced are no longer true.
    true = {rule.name for rule in _rules_for(holds.policy, phase)}
    return holds, [one for one in fired if one.kind != "note" or one.rule in true], conflicts


def _rules_for(policy: str, phase: str) -> list[Rule]:
    """Return the rules that hold for a policy in a phase, by what it promises."""
    if policy == "disabled":
        return []
    promises = registration(policy).promises
    return [
        rule
        for rule in RULES
        if phase in rule.phases and (rule.spares is None or not rule.spares <= promises)
    ]


def _fired(phase: str, rule: Rule, outcome: str, before: Any, after: Any) -> FiredRule:
    return FiredRule(
        phase=phase,
        rule=rule.name,
        kind=rule.kind,
        outcome=outcome,
        key=None if rule.kind == "note" else rule.key,
        before=before,
        after=after,
        explanation=rule.explanation,
        source=rule.source,
    )


def _shown(value: Any) -> str:
    return json.dumps(plain(value))
