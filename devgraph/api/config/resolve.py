"""Resolve a configuration for one engine and backend, and explain each decision.

``resolve`` merges the part for the backend into the general part, sets the policies that the
backend recommends for phases without a chosen policy, and applies the compatibility rules. A rule
may change a default. An explicit choice that violates a safety rule is an error. A choice that
violates a preference rule is kept, with a warning. A scope rule disables a phase that never runs on
the node.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from typing import Any

import attrs

from devgraph.api import html
from devgraph.api.config.facts import EngineFacts
from devgraph.api.config.model import DeviceGraphConfig
from devgraph.api.config.phase import (
    KEYS,
    PHASES,
    PhaseConfig,
    check_names,
    in_environment,
    plain,
)
from devgraph.api.config.rules import RULES, WEAKER, Rule
from devgraph.api.errors import ConfigError, ConfigTypeError, brief
from devgraph.api.marks.source import warn
from devgraph.api.policy import registration

logger = logging.getLogger(__name__)


@attrs.frozen(kw_only=True)
class FiredRule:
    """A rule that applied to a phase, and its outcome."""

    phase: str
    rule: str
    kind: str
    outcome: str
    """``changed`` (a default), ``kept`` (an explicit choice), ``ignored`` (a phase that never
    runs on the node) or ``noted``."""
    key: str | None
    before: Any
    after: Any
    explanation: str
    source: str

    def __str__(self) -> str:
        change = f".{self.change}" if self.change else ""
        return f"{self.phase}{change} [{self.rule}]: {self.explanation} ({self.source})"

    @property
    def change(self) -> str:
        """The key with its value before and after the rule, as text; empty for a note."""
        if self.outcome == "noted":
            return ""
        form = "{!r} kept, {!r} is preferable" if self.outcome == "kept" else "{!r} becomes {!r}"
        return f"{self.key}: {form.format(self.before, self.after)}"

    @property
    def reason(self) -> str:
        """The change and its explanation, for tables."""
        return f"{self.change}: {self.explanation}" if self.change else self.explanation


@attrs.frozen(kw_only=True)
class Resolution:
    """The requested and the effective configuration, and every rule that applied."""

    backend: str | None
    requested: DeviceGraphConfig
    """The configuration for ``backend`` (the general part if None) before any rule."""
    effective: DeviceGraphConfig
    """The configuration after all rules. Decisions of rules are recorded as explicit choices, so
    that other nodes can reuse the configuration."""
    fired: tuple[FiredRule, ...]

    def __str__(self) -> str:
        """A line for each policy, for each key without its default value, and for each rule."""
        rows = [f"{phase}.{key}: {old} -> {new}" for phase, key, old, new in self.rows()]
        return "\n".join([*rows, *map(str, self.fired)])

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as JSON values, with every key of both configurations."""
        return {
            "backend": self.backend,
            "requested": self.requested.to_dict(everything=True),
            "effective": self.effective.to_dict(everything=True),
            "rules": [attrs.asdict(fired) for fired in self.fired],
        }

    def in_environment(self) -> Resolution:
        """Return the resolution with the environment variables that runners apply to modes."""
        phases: dict[str, Any] = {p: in_environment(self.effective.phase(p)) for p in PHASES}
        return attrs.evolve(self, effective=attrs.evolve(self.effective, **phases))

    def _repr_html_(self) -> str:
        title = "mode" if self.backend is None else f"mode on {self.backend}"
        fired = [(rule.phase, rule.rule, rule.outcome, rule.reason) for rule in self.fired]
        return html.table(
            title, ("phase", "key", "requested", "effective"), self.rows()
        ) + html.table("rules that fired", ("phase", "rule", "outcome", "why"), fired)

    def rows(self) -> list[tuple[str, str, str, str]]:
        """Return rows (phase, key, requested, effective) of policies and non-default values."""
        rows: list[tuple[str, str, str, str]] = []
        for phase in PHASES:
            requested, effective = self.requested.phase(phase), self.effective.phase(phase)
            changed = {"policy", *requested.changed, *effective.changed}
            for key in (key for key in KEYS if key in changed):
                before, after = getattr(requested, key), getattr(effective, key)
                rows.append((phase, key, _json(before), _json(after)))
        return rows


def resolve(
    config: DeviceGraphConfig,
    facts: EngineFacts | None = None,
    *,
    phases: Iterable[str] = PHASES,
    name: str = "",
) -> Resolution:
    """Apply the compatibility rules to the configuration for ``facts.backend``.

    An explicit choice that violates a preference rule causes a ``DeviceGraphWarning``. The warning
    is not repeated if ``config`` or ``effective`` of the result is resolved again, for example by a
    runner. Changes of defaults are logged and listed in the result.

    Args:
        config: the configuration of the deployment.
        facts: the properties of the engine; ``EngineFacts.on_backend`` adds those of a backend.
        phases: the phases to resolve; other phases keep their requested configuration.
        name: prefix of warnings and log records, such as the name of a group of a cluster.

    Raises:
        ConfigError: safety rules forbid explicit choices. The message lists every such choice
            with the reason and the allowed value.
        ConfigTypeError: an argument has the wrong type.
    """
    facts = EngineFacts() if facts is None else facts
    if not isinstance(config, DeviceGraphConfig):
        raise ConfigTypeError(
            f"expected a DeviceGraphConfig (from from_args() or from_json()), got {brief(config)}"
        )
    if not isinstance(facts, EngineFacts):
        raise ConfigTypeError(f"expected EngineFacts(...), got {brief(facts)}")
    phases = tuple(phases)
    check_names("phases", phases, PHASES, what="phase")
    requested = config.for_backend(facts.backend) if facts.backend else config
    effective: dict[str, PhaseConfig] = {phase: requested.phase(phase) for phase in PHASES}
    fired: list[FiredRule] = []
    refused: list[str] = []
    for phase in phases:
        effective[phase], applied, conflicts = _apply(phase, requested.phase(phase), facts)
        fired += applied
        refused += conflicts
    if refused:
        lines = "".join(f"\n- {line}" for line in refused)
        raise ConfigError(f"the engine cannot run the chosen mode:{lines}")
    prefix = name and f"{name}: "
    for rule in fired:
        if rule.outcome == "kept":
            one = effective[rule.phase]
            if str(rule) not in one.kept:
                warn(f"{prefix}{rule}")
                effective[rule.phase] = attrs.evolve(one, kept=one.kept | {str(rule)})
                if not prefix:  # A runner that receives ``config`` must not warn again.
                    object.__setattr__(config.phase(rule.phase), "kept", one.kept | {str(rule)})
        else:
            level = logging.WARNING if rule.outcome == "changed" else logging.INFO
            logger.log(level, "%s%s", prefix, rule)
    return Resolution(
        backend=facts.backend,
        requested=requested,
        effective=attrs.evolve(requested, **effective, overlays={}),
        fired=tuple(fired),
    )


def _apply(
    phase: str, config: PhaseConfig, facts: EngineFacts
) -> tuple[PhaseConfig, list[FiredRule], list[str]]:
    """Apply the table to a phase until no rule fires; each rule fires at most once.

    Return the new configuration, the rules that fired, and messages about forbidden choices.
    """
    chosen, recommended = config.explicit, facts.recommended.get(phase, config.policy)
    first = Rule(
        name="recommended",
        kind="preference",
        when=lambda *_: True,
        explanation="the backend recommends this policy for the phase",
        source="devgraph: Backend.recommended_mode",
        value=recommended,
    )
    fired: list[FiredRule] = []
    conflicts: list[str] = []
    done = {first.name} if config.policy in (recommended, "disabled") else set[str]()
    changed = True
    while changed:
        changed = False
        for rule in (first, *_rules_for(config.policy, phase)):
            if rule.name in done or not rule.when(facts, config):
                continue
            if rule.kind == "note":
                done.add(rule.name)
                fired.append(_fired(phase, rule, "noted", None, None))
                continue
            before, after = getattr(config, rule.key), rule.result(facts, config)
            if after in WEAKER and before in WEAKER[WEAKER.index(after) :]:
                continue  # The policy is already weak enough.
            done.add(rule.name)
            if rule.kind == "scope" or rule.key not in chosen:
                outcome = "ignored" if rule.kind == "scope" else "changed"
                fired.append(_fired(phase, rule, outcome, before, after))
                config = config.with_checked({rule.key: after}, config.explicit | {rule.key})
                changed = True  # Earlier rules may apply to the new value.
                break
            if rule.kind == "safety":
                conflicts.append(
                    f"{phase}.{rule.key}={_json(before)} does not work [{rule.name}]: "
                    f"{rule.explanation} ({rule.source}). Choose {_json(after)} instead"
                )
            else:
                fired.append(_fired(phase, rule, "kept", before, after))
    # Drop notes about a policy that a later rule replaced.
    valid = {rule.name for rule in _rules_for(config.policy, phase)}
    return config, [rule for rule in fired if rule.kind != "note" or rule.rule in valid], conflicts


def _rules_for(policy: str, phase: str) -> list[Rule]:
    """Return the rules for a phase under ``policy``, whose promises may exempt it from some."""
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


def _json(value: Any) -> str:
    return json.dumps(plain(value))
