"""A cluster of several vendors, described in a file, and what one mode string comes to on it.

::

    groups:
      - name: prefill
        backend: acme                # a name that dg.backends() lists
        count: 8
        role: prefill
        tensor_parallel: 8          # so its graphs hold collectives
      - name: decode
        members: [{backend: cpu, count: 4}]
        role: decode
        facts: {lora: true}

A *group* is the set of ranks that run the same graphs together. Vendors may differ between groups;
inside one they may differ only where no graph holds a collective, because every vendor has its own
collective library.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import attrs

from devgraph.api.config.document import read_file
from devgraph.api.config.facts import ROLES, EngineFacts
from devgraph.api.config.model import DeviceGraphConfig
from devgraph.api.config.phase import (
    FLAG,
    PHASES,
    DeviceGraphWarning,
    as_object,
    check_names,
    count,
    shown,
    text,
)
from devgraph.api.config.resolve import Resolution, resolve
from devgraph.api.errors import ConfigError, ConfigTypeError, did_you_mean
from devgraph.api.registry import OTHER_NAMES, declaration
from devgraph.api.registry import names as registered_names

_GROUP_KEYS = """
    name backend vendor count members role collectives tensor_parallel facts
""".split()
_MEMBER_KEYS = ("backend", "vendor", "count")
_Read = TypeVar("_Read")
_name: Callable[[object, str], str] = text("a name")["read"]


@attrs.frozen(kw_only=True)
class Member:
    """Devices of one kind inside a group."""

    backend: str
    vendor: str
    """Whose collective library the devices use; the backend's name unless told otherwise."""
    count: int


@attrs.frozen(kw_only=True)
class Group:
    """Ranks that run the same graphs together."""

    name: str
    members: tuple[Member, ...]
    role: str
    tensor_parallel: int
    facts: EngineFacts
    """The engine there; its ``collectives`` say whether graphs hold any."""


@attrs.frozen(kw_only=True)
class Cluster:
    """All groups of one deployment."""

    groups: tuple[Group, ...]

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Cluster:
        """Read a JSON or YAML file; ``ConfigError`` names the file and the path inside it."""
        return cls.from_dict(read_file(path), source=os.fspath(path))

    @classmethod
    def from_dict(cls, document: object, *, source: str = "cluster") -> Cluster:
        """Build a cluster from ``{"groups": [...]}``."""
        top = _mapping(document, source, ("groups",))
        groups = _listed(top.get("groups"), f"{source}: groups", _group)
        names = [group.name for group in groups]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"{source}: two groups are named {name!r}; names must differ")
        return cls(groups=groups)

    @property
    def backends(self) -> tuple[str, ...]:
        """Every backend that occurs."""
        return tuple(sorted({one.backend for group in self.groups for one in group.members}))


@attrs.frozen(kw_only=True)
class MemberPlan:
    """What the mode string comes to for the devices of one kind in one group."""

    group: Group
    member: Member
    resolution: Resolution


@attrs.frozen(kw_only=True)
class ClusterPlan:
    """What one mode string comes to everywhere in a cluster."""

    config: DeviceGraphConfig
    members: tuple[MemberPlan, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON has it."""
        return {
            "mode": self.config.to_dict(),
            "groups": [
                {
                    "group": one.group.name,
                    "role": one.group.role,
                    "vendor": one.member.vendor,
                    "count": one.member.count,
                    "tensor_parallel": one.group.tensor_parallel,
                    "collectives": one.group.facts.collectives,
                    **one.resolution.to_dict(),
                }
                for one in self.members
            ],
        }


def plan_cluster(
    config: DeviceGraphConfig, cluster: Cluster, *, capabilities: Mapping[str, Any] | None = None
) -> ClusterPlan:
    """Resolve one configuration for every group of a cluster.

    ``capabilities`` are the ``Capabilities`` of backends by name, such as those of this node; of
    the others holds what they declare, which is known where their devices are not. Where a
    backend is registered as a function, and so declares nothing, a group's own facts say it.

    Raises ``ConfigError`` that lists, group by group, what a safety rule forbids and which groups
    mix vendors around a collective. Warns (``DeviceGraphWarning``) about parts of the
    configuration for backends that the cluster does not have, and about a phase that no group
    runs.
    """
    known: dict[str, Any] = {**(capabilities or {})}
    for name in cluster.backends:
        declared = None if name in known else declaration(name)
        if declared is not None:
            known[name] = declared.capabilities
    for name in config.backends:
        if name not in cluster.backends:
            _warn(
                f"the cluster has no backend {name!r}, so its part of the configuration is not "
                f"used. {did_you_mean(name, cluster.backends, OTHER_NAMES)}"
            )
    for phase in PHASES:
        if not any(group.role in ("both", phase) for group in cluster.groups):
            _warn(f"no group of the cluster runs {phase}")
    plans: list[MemberPlan] = []
    problems: list[str] = []
    for group in cluster.groups:
        resolved: list[MemberPlan] = []
        for member in group.members:
            facts = attrs.evolve(group.facts, backend=member.backend, role=group.role)
            if member.backend in known:
                facts = facts.on_backend(member.backend, known[member.backend])
            try:
                resolution = resolve(config, facts)
            except ConfigError as error:
                problems.append(f"group {group.name!r} on {member.backend}: {error}")
                continue
            resolved.append(MemberPlan(group=group, member=member, resolution=resolution))
        plans.extend(resolved)
        problems.extend(_mixed(group, resolved))
    if problems:
        raise ConfigError("\n".join(problems))
    return ClusterPlan(config=config, members=tuple(plans))


def _mixed(group: Group, plans: list[MemberPlan]) -> list[str]:
    """Say what is wrong with several vendors in one group: a shared collective inside a graph."""
    captured = sorted(
        {
            phase
            for plan in plans
            for phase in PHASES  # one that does not run here is set aside already
            if plan.resolution.effective.phase(phase).policy != "disabled"
        }
    )
    vendors = sorted({member.vendor for member in group.members})
    if len(vendors) < 2 or not group.facts.collectives or not captured:
        return []
    return [
        f"group {group.name!r} mixes the vendors {', '.join(vendors)}, and its graphs of "
        f"{' and '.join(captured)} hold collectives, which no two vendors share. Make one group "
        f"per vendor, or switch graphs off for the group"
    ]


def _warn(text: str) -> None:
    warnings.warn(text, DeviceGraphWarning, stacklevel=3)


def _group(entry: object, path: str) -> Group:
    values = _mapping(entry, path, _GROUP_KEYS)
    name = _name(values.get("name"), f"{path}.name")
    role = values.get("role", "both")
    check_names(f"{path}.role", [role], ROLES, what="role")
    members = _members(values, path)
    parallel = count(values.get("tensor_parallel", 1), f"{path}.tensor_parallel")
    total = sum(member.count for member in members)
    if total % parallel:
        raise ConfigError(
            f"{path}.tensor_parallel: {total} devices do not divide into sets of {parallel}"
        )
    collectives = FLAG["read"](values.get("collectives", parallel > 1), f"{path}.collectives")
    given = as_object(values.get("facts", {}), f"{path}.facts")
    for key in ("backend", "role", "collectives"):
        if key in given:
            raise ConfigError(f"{path}.facts.{key}: write {key} in the group itself")
    facts = EngineFacts.from_dict({**given, "collectives": collectives}, path=f"{path}.facts")
    return Group(name=name, members=members, role=role, tensor_parallel=parallel, facts=facts)


def _members(values: Mapping[str, Any], path: str) -> tuple[Member, ...]:
    only = {key: values[key] for key in _MEMBER_KEYS if key in values}
    if "members" not in values:
        return (_member(only, path),)
    if only:
        raise ConfigError(f"{path}: give either members or {min(only)}, not both")
    return _listed(values["members"], f"{path}.members", _member)


def _member(entry: object, path: str) -> Member:
    values = _mapping(entry, path, _MEMBER_KEYS)
    backend = _name(values.get("backend"), f"{path}.backend")
    check_names(f"{path}.backend", [backend], registered_names(), what="backend")
    return Member(
        backend=backend,
        vendor=_name(values.get("vendor", backend), f"{path}.vendor"),
        count=count(values.get("count", 1), f"{path}.count"),
    )


def _listed(value: object, path: str, read: Callable[[object, str], _Read]) -> tuple[_Read, ...]:
    if not isinstance(value, list) or not value:
        raise ConfigTypeError(f"{path}: expected a list, got {shown(value)}")
    return tuple(read(entry, f"{path}[{index}]") for index, entry in enumerate(value))


def _mapping(value: object, path: str, known: Sequence[str]) -> Mapping[str, Any]:
    found = as_object(value, path)
    check_names(path, found, known, what="key")
    return found
