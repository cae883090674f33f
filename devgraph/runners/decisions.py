"""Decisions about batches: variants, reasons and graph keys."""

from __future__ import annotations

import enum
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch

from devgraph.api.errors import (
    AgreementError,
    CaptureError,
    ConfigError,
    ConfigTypeError,
    DeviceGraphError,
    ExecutableError,
    InputError,
    InputTypeError,
    ResourceError,
    StateError,
    UpdateError,
    UpdateTopologyError,
    UpdateUnsupportedError,
    brief,
)

Variant = tuple[tuple[str, Hashable], ...]
"""The canonical form of a variant: sorted items, without a ``width`` of 1."""


class Reason(str, enum.Enum):
    """The reason why a batch runs in a graph or eagerly; the values are keys of counters."""

    GRAPH = "graph"
    """A captured graph is replayed."""
    DISABLED = "disabled"
    """The policy of this phase is ``disabled``."""
    EMPTY_BATCH = "empty_batch"
    """The batch has no requests or no tokens."""
    OVER_LARGEST_BUCKET = "over_largest_bucket"
    """The batch has more rows than the largest bucket."""
    OVER_MAX_REQUESTS = "over_max_requests"
    """The batch has more requests than the graphs have request slots."""
    PADDING = "padding"
    """The smallest bucket with room for the batch needs more padding than ``max_padding``."""
    UNKNOWN_WIDTH = "unknown_width"
    """The requests differ in width, or no variant has their width."""
    UNKNOWN_VARIANT = "unknown_variant"
    """The names of the variant are declared, but this combination of values is not."""
    NOT_CAPTURED = "not_captured"
    """The bucket has not been captured yet."""
    CAPTURE_FAILED = "capture_failed"
    """The capture of this bucket raised an error."""
    OUT_OF_MEMORY = "out_of_memory"
    """Memory or another device resource ran out while buckets were captured."""
    MEMORY_BUDGET = "memory_budget"
    """``graph_budget_bytes`` was spent before this bucket."""
    TIME_BUDGET = "time_budget"
    """``time_budget_s`` was spent before this bucket."""
    RANKS_DROPPED = "ranks_dropped"
    """Another rank could not capture this bucket, or its check found a difference."""
    VOTED_EAGER = "voted_eager"
    """Another rank has to run this step eagerly."""
    VERIFY_FAILED = "verify_failed"
    """A check found that the graph differs from an eager run; see the key ``verify``."""
    INVALIDATED = "invalidated"
    """``invalidate`` was called and the bucket has not been captured since."""
    WEIGHTS_CHANGED = "weights_changed"
    """The weights epoch differs from the epoch at capture."""
    EVICTED = "evicted"
    """The graph was closed in favor of another graph; see ``max_graphs``."""
    SUSPENDED = "suspended"
    """``suspend`` was called."""
    EXECUTABLE_MEMORY = "executable_memory"
    """There is no memory for the executable: it was evicted and could not be rebuilt, or another
    runner released the memory of the pool."""
    UPDATE_UNSUPPORTED = "update_unsupported"
    """The backend cannot apply new host arguments to this graph."""
    UPDATE_TOPOLOGY = "update_topology"
    """The host arguments need nodes that the graph does not have."""

    def __str__(self) -> str:
        return self.value


@attrs.frozen
class GraphKey:
    """The variant and the bucket of one graph."""

    variant: Variant
    bucket: int

    def __str__(self) -> str:
        named = ", ".join(f"{name}={value}" for name, value in self.variant)
        return f"{self.bucket} ({named})" if named else str(self.bucket)


@attrs.frozen
class Decision:
    """The decision to run one batch in a graph or eagerly.

    Attributes:
        reason: ``Reason.GRAPH``, or the reason to run eagerly.
        key: variant and bucket of the graph. An eager decision has a key if a bucket was chosen.
    """

    reason: Reason
    key: GraphKey | None = None

    @property
    def ok(self) -> bool:
        """Whether a captured graph is replayed. A decision is true in this case only."""
        return self.reason is Reason.GRAPH

    def __bool__(self) -> bool:
        return self.ok

    @property
    def bucket(self) -> int | None:
        """Number of rows of the graph; None if the batch runs eagerly."""
        return self.key.bucket if self.key is not None and self.ok else None


def require_decision(decision: object) -> None:
    """Raise InputTypeError unless ``decision`` is a Decision or None."""
    if decision is not None and not isinstance(decision, Decision):
        raise InputTypeError(
            f"decision must be the result of can_run or agree, got {brief(decision)}"
        )


_REMEDIES: Mapping[Reason, tuple[type[DeviceGraphError], str]] = {
    Reason.DISABLED: (ConfigError, "choose the policy 'full' or 'breakable' for this phase"),
    Reason.OVER_LARGEST_BUCKET: (
        InputError,
        "split the batch, or raise the capacity of the runner and add a bucket of that size",
    ),
    Reason.OVER_MAX_REQUESTS: (InputError, "raise max_requests or split the batch"),
    Reason.PADDING: (InputError, "add a bucket near this size or raise max_padding"),
    Reason.UNKNOWN_WIDTH: (InputError, "declare a variant of that width"),
    Reason.UNKNOWN_VARIANT: (InputError, "declare it in variants"),
    Reason.NOT_CAPTURED: (StateError, "call capture() first"),
    Reason.CAPTURE_FAILED: (StateError, "see explain() for the error of that capture"),
    Reason.OUT_OF_MEMORY: (ResourceError, "use fewer buckets or leave more memory for graphs"),
    Reason.MEMORY_BUDGET: (ResourceError, "raise graph_budget_bytes or use fewer buckets"),
    Reason.TIME_BUDGET: (ResourceError, "raise time_budget_s or use fewer buckets"),
    Reason.RANKS_DROPPED: (AgreementError, "see explain() for the rank that dropped it"),
    Reason.VOTED_EAGER: (AgreementError, "see the reason on the other ranks"),
    Reason.VERIFY_FAILED: (CaptureError, "see explain() for the cause"),
    Reason.INVALIDATED: (StateError, "call capture() to capture again"),
    Reason.WEIGHTS_CHANGED: (StateError, "call invalidate('weights') and then capture()"),
    Reason.EVICTED: (StateError, "raise max_graphs or use fewer buckets"),
    Reason.SUSPENDED: (StateError, "call resume()"),
    Reason.EXECUTABLE_MEMORY: (
        ExecutableError,
        "call resume() on the runner that released the pool's memory, or leave more memory for "
        "graphs",
    ),
    Reason.UPDATE_UNSUPPORTED: (
        UpdateUnsupportedError,
        "choose the policy 'breakable', or pass the value in a device tensor",
    ),
    Reason.UPDATE_TOPOLOGY: (
        UpdateTopologyError,
        "choose the policy 'breakable', or pass coarser values of the host argument",
    ),
}


def refusal(decision: Decision, what: str, detail: Any = None) -> DeviceGraphError:
    """Return the error that a strict runner raises instead of running ``what`` eagerly."""
    kind, remedy = _REMEDIES[decision.reason]
    why = decision.reason.value.replace("_", " ")
    more = f" ({detail})" if detail else ""
    return kind(f"{what} cannot run in a graph: {why}{more}; {remedy}")


UNLAUNCHED = (UpdateUnsupportedError, UpdateTopologyError, ExecutableError)
"""Errors of a replay that could not launch its graph and changed nothing."""


def reason_of(error: UpdateError | ExecutableError) -> Reason:
    """Return the reason that counts an eager step after its replay raised ``error``."""
    if isinstance(error, ExecutableError):
        return Reason.EXECUTABLE_MEMORY
    if isinstance(error, UpdateTopologyError):
        return Reason.UPDATE_TOPOLOGY
    return Reason.UPDATE_UNSUPPORTED


def canonical_variant(options: Mapping[str, Any]) -> Variant:
    check_mapping(options)
    items = [(k, v) for k, v in options.items() if not (k == "width" and v == 1)]
    variant = tuple(sorted(items, key=lambda item: item[0]))
    try:
        hash(variant)
    except TypeError:
        raise InputTypeError(
            f"variant {brief(dict(options))}: values are part of the graph key and must be hashable"
        ) from None
    return variant


def check_mapping(variant: object, error: type[DeviceGraphError] = InputTypeError) -> None:
    """Raise ``error`` unless ``variant`` is a mapping with strings as keys."""
    if not isinstance(variant, Mapping):
        raise error(f"a variant is a mapping such as {{'lora': True}}, got {brief(variant)}")
    if not all(isinstance(name, str) for name in variant):
        raise error(f"variant {brief(dict(variant))}: names must be strings")


def check_values(options: Mapping[str, Any], error: type[DeviceGraphError]) -> None:
    for name, value in options.items():
        if isinstance(value, torch.Tensor) or (isinstance(value, float) and math.isnan(value)):
            raise InputTypeError(
                f"variant {name}={brief(value)}: values are part of the graph key and must be "
                f"comparable; use an int, a bool or a string instead"
            )
    width = options.get("width", 1)
    if isinstance(width, bool) or not isinstance(width, int) or width < 1:
        raise error(f"variant {brief(dict(options))}: width must be a positive int")


def check_variants(
    variants: Sequence[Mapping[str, Any]], *, with_width: bool
) -> dict[Variant, Mapping[str, Any]]:
    """Return the declared variants by canonical form."""
    declared: dict[Variant, Mapping[str, Any]] = {}
    if isinstance(variants, str | Mapping) or not isinstance(variants, Iterable):
        raise ConfigTypeError(
            f"variants is a list of mappings such as [{{}}, {{'lora': True}}], got "
            f"{brief(variants)}"
        )
    for options in variants:
        check_mapping(options, ConfigTypeError)
        check_values(options, ConfigError)
        if "width" in options and not with_width:
            raise ConfigError(
                f"variant {brief(dict(options))}: width is only for decode, where requests have "
                f"equal lengths"
            )
        variant = canonical_variant(options)
        if variant in declared:
            raise ConfigError(f"variant {brief(dict(options))} is declared twice")
        declared[variant] = dict(options)
    if not declared:
        raise ConfigError("variants is empty; pass [{}] to declare the variant without options")
    return declared
