"""Clusters with several vendors: the description in a file, and the effective mode of each group.

A *group* is a set of ranks that run the same graphs together. Its devices have one backend, because
every vendor has its own collective library. docs/modes.md describes the file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from devgraph.api import html
from devgraph.api.config.document import read_file
from devgraph.api.config.facts import ROLES, EngineFacts
from devgraph.api.config.model import DeviceGraphConfig
from devgraph.api.config.phase import FLAG, as_object, check_names, count, shown, text
from devgraph.api.config.resolve import Resolution, resolve
from devgraph.api.errors import ConfigError, ConfigTypeError, counted
from devgraph.api.registry import declaration
from devgraph.api.registry import names as registered_names

_REQUIRED = ("name", "backend")
_KEYS = (*_REQUIRED, "count", "role", "collectives", "tensor_parallel", "facts")
_name: Callable[[object, str], str] = text("a name")["read"]


@attrs.frozen(kw_only=True)
class Group:
    """Ranks that run the same graphs together."""

    name: str
    backend: str
    count: int
    role: str
    tensor_parallel: int
    facts: EngineFacts
    """Facts about the engine, with backend, role and ``collectives`` of the group."""


@attrs.frozen(kw_only=True)
class Cluster:
    """The groups of one deployment."""

    groups: tuple[Group, ...]

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Cluster:
        """Read a JSON or YAML file; errors name the file and the path of the value in the file."""
        return cls.from_dict(read_file(path), source=os.fspath(path))

    @classmethod
    def from_dict(cls, document: object, *, source: str = "cluster") -> Cluster:
        """Create a cluster from ``{"groups": [...]}``."""
        top = _mapping(document, source, ("groups",), ("groups",))
        listed, path = top["groups"], f"{source}: groups"
        if not isinstance(listed, list) or not listed:
            raise ConfigTypeError(
                f"{path}: expected a non-empty list of groups, got {shown(listed)}"
            )
        groups = tuple(_group(entry, f"{path}[{index}]") for index, entry in enumerate(listed))
        names = [group.name for group in groups]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"{path}: two groups are named {name!r}; give each its own name")
        return cls(groups=groups)


@attrs.frozen(kw_only=True)
class GroupPlan:
    """The resolved mode of one group, or the error if the group cannot run the mode."""

    group: Group
    outcome: Resolution | ConfigError

    @property
    def error(self) -> ConfigError | None:
        """The error, which lists the forbidden choices, or None."""
        return self.outcome if isinstance(self.outcome, ConfigError) else None

    @property
    def resolution(self) -> Resolution:
        """The resolution; raises ``error`` if there is one."""
        if isinstance(self.outcome, ConfigError):
            raise self.outcome
        return self.outcome

    def _repr_html_(self) -> str:
        group = self.group
        title = f"{group.name}: {group.count} x {group.backend}"
        if self.error is not None:
            return html.table(title, ("error",), [(self.error,)])
        return html.table(title, ("role",), [(group.role,)]) + self.resolution._repr_html_()

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as JSON values."""
        group = attrs.asdict(self.group, filter=lambda field, _: field.name != "facts")
        return {
            "group": group.pop("name"),
            **group,
            "collectives": self.group.facts.collectives,
            "error": None if self.error is None else str(self.error),
            **({} if self.error else self.resolution.to_dict()),
        }


def plan_cluster(
    config: DeviceGraphConfig, cluster: Cluster | str | os.PathLike[str] | Mapping[str, Any]
) -> tuple[GroupPlan, ...]:
    """Resolve one configuration for every group of a cluster.

    A group that cannot run the configuration, or whose backend is not registered on this machine,
    has an ``error``; other groups are resolved.
    Capabilities are read from the class of each backend, so no device is needed. For a backend
    that is registered as a function, they are read from the facts of the group.

    Args:
        config: the configuration of the deployment.
        cluster: the groups, or the path or the content of a cluster file.

    Raises:
        ConfigError: the description of the cluster is invalid.
    """
    if isinstance(cluster, (str, os.PathLike)):
        cluster = Cluster.from_file(cluster)
    elif not isinstance(cluster, Cluster):
        cluster = Cluster.from_dict(cluster)
    plans: list[GroupPlan] = []
    for group in cluster.groups:
        outcome: Resolution | ConfigError
        try:
            check_names("backend", [group.backend], registered_names(), what="backend")
            declared = declaration(group.backend)
            facts = group.facts if declared is None else group.facts.on_backend(declared)
            outcome = resolve(config, facts, name=f"group {group.name}")
        except ConfigError as error:
            outcome = error
        plans.append(GroupPlan(group=group, outcome=outcome))
    return tuple(plans)


def _group(entry: object, path: str) -> Group:
    values = _mapping(entry, path, _KEYS, _REQUIRED)
    name, backend = (_name(values[key], f"{path}.{key}") for key in _REQUIRED)
    if not name.isprintable():  # --emit prints the name into lines that a shell evaluates.
        raise ConfigError(f"{path}.name: {name!r} contains a line break or a control character")
    number = count(values.get("count", 1), f"{path}.count")
    role = values.get("role", "both")
    check_names(f"{path}.role", [role], ROLES, what="role")
    parallel = count(values.get("tensor_parallel", 1), f"{path}.tensor_parallel")
    if number % parallel:
        hint = "" if "count" in values else f"; add count: {parallel} to the group"
        raise ConfigError(
            f"{path}.tensor_parallel: {counted(number, 'device')} cannot be divided into sets of "
            f"{parallel}{hint}"
        )
    collectives = FLAG["read"](values.get("collectives", parallel > 1), f"{path}.collectives")
    given = as_object(values.get("facts", {}), f"{path}.facts")
    for key in ("backend", "role", "collectives"):
        if key in given:
            raise ConfigError(f"{path}.facts.{key}: write {key} in the group itself")
    given = {**given, "backend": backend, "role": role, "collectives": collectives}
    facts = EngineFacts.from_dict(given, path=f"{path}.facts")
    return Group(
        name=name, backend=backend, count=number, role=role, tensor_parallel=parallel, facts=facts
    )


def _mapping(
    value: object, path: str, keys: Sequence[str], required: Sequence[str]
) -> Mapping[str, Any]:
    mapping = as_object(value, path)
    check_names(path, mapping, keys, what="key")
    for key in required:
        if key not in mapping:
            raise ConfigTypeError(f"{path}: the key {key!r} is missing")
    return mapping
