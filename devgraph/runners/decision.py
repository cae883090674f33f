"""Whether a batch runs in a graph: the decision and its reason."""

from __future__ import annotations

import enum
from collections.abc import Hashable, Mapping
from typing import Any

import attrs

from devgraph.api.errors import (
    AgreementError,
    ConfigError,
    DeviceGraphError,
    InputError,
    ResourceError,
    StateError,
    UpdateError,
    UpdateTopologyError,
    UpdateUnsupportedError,
)

__all__ = ["Decision", "GraphKey", "Reason", "Variant", "refusal"]

Variant = tuple[tuple[str, Hashable], ...]
"""A variant in the form that keys use: sorted items, without ``width`` where that is 1."""


class Reason(str, enum.Enum):
    """Why a batch runs as it does; the values are the keys of the runner's counters."""

    GRAPH = "graph"
    """A captured graph is replayed."""
    DISABLED = "disabled"
    """The mode of this phase is ``disabled``: eager was chosen."""
    EMPTY_BATCH = "empty_batch"
    """The batch has no requests."""
    OVER_LARGEST_BUCKET = "over_largest_bucket"
    """More rows than the largest bucket."""
    OVER_MAX_REQUESTS = "over_max_requests"
    """More requests than the graphs have request slots."""
    OVER_MAX_SEQ_LEN = "over_max_seq_len"
    """A sequence is longer than the configured limit for graphs."""
    PADDING = "padding"
    """The smallest bucket that holds the batch would be mostly padding."""
    UNKNOWN_WIDTH = "unknown_width"
    """The requests do not all have the same captured width."""
    UNKNOWN_VARIANT = "unknown_variant"
    """The variant was not declared."""
    NOT_CAPTURED = "not_captured"
    """The bucket has not been captured yet."""
    CAPTURE_FAILED = "capture_failed"
    """The capture of this bucket raised."""
    OUT_OF_MEMORY = "out_of_memory"
    """Memory or another device resource ran out while buckets were captured."""
    MEMORY_BUDGET = "memory_budget"
    """The memory budget for graphs was spent before this bucket."""
    TIME_BUDGET = "time_budget"
    """The time budget for captures was spent before this bucket."""
    RANKS_DROPPED = "ranks_dropped"
    """Another rank could not capture this bucket."""
    VOTED_EAGER = "voted_eager"
    """Another rank has to run this step eagerly."""
    INVALIDATED = "invalidated"
    """``invalidate`` was called and the bucket has not been captured again."""
    WEIGHTS_CHANGED = "weights_changed"
    """The weights epoch is not that of the capture."""
    SUSPENDED = "suspended"
    """``suspend`` was called."""
    UPDATE_UNSUPPORTED = "update_unsupported"
    """The backend cannot apply new host arguments to this graph."""
    UPDATE_TOPOLOGY = "update_topology"
    """The host arguments need other nodes than the captured ones."""

    def __str__(self) -> str:
        return self.value


@attrs.frozen
class GraphKey:
    """What one captured graph is for: a variant and a bucket."""

    variant: Variant
    bucket: int

    def __str__(self) -> str:
        named = ", ".join(f"{name}={value}" for name, value in self.variant)
        return f"{self.bucket} ({named})" if named else str(self.bucket)


@attrs.frozen
class Decision:
    """How one batch will run.

    Attributes:
        ok: whether a captured graph will be replayed.
        bucket: rows of that graph; None when the batch runs eagerly.
        reason: why; ``Reason.GRAPH`` exactly when ``ok``.
        key: variant and bucket of the graph; also given where the bucket exists but its graph
            does not.
    """

    ok: bool
    bucket: int | None
    reason: Reason
    key: GraphKey | None

    @classmethod
    def graph(cls, key: GraphKey) -> Decision:
        """Return the decision to replay the graph ``key``."""
        return cls(True, key.bucket, Reason.GRAPH, key)

    @classmethod
    def eager(cls, reason: Reason, key: GraphKey | None = None) -> Decision:
        """Return the decision to run eagerly; ``key`` is the graph that could have served."""
        return cls(False, None, reason, key)


_WAYS_OUT: Mapping[Reason, tuple[type[DeviceGraphError], str]] = {
    Reason.DISABLED: (ConfigError, "choose the policy 'full' or 'breakable' for this phase"),
    Reason.OVER_LARGEST_BUCKET: (InputError, "raise the maximum of the runner or split the batch"),
    Reason.OVER_MAX_REQUESTS: (InputError, "raise max_requests or split the batch"),
    Reason.OVER_MAX_SEQ_LEN: (InputError, "raise max_seq_len in the configuration"),
    Reason.PADDING: (InputError, "add a bucket near this size or raise max_padding"),
    Reason.UNKNOWN_WIDTH: (InputError, "declare a variant of that width"),
    Reason.UNKNOWN_VARIANT: (InputError, "declare it in variants"),
    Reason.NOT_CAPTURED: (StateError, "call capture() first"),
    Reason.CAPTURE_FAILED: (StateError, "see explain() for the error of that capture"),
    Reason.OUT_OF_MEMORY: (ResourceError, "use fewer buckets or leave more memory for graphs"),
    Reason.MEMORY_BUDGET: (ResourceError, "raise memory_budget_bytes or use fewer buckets"),
    Reason.TIME_BUDGET: (ResourceError, "raise time_budget_s or use fewer buckets"),
    Reason.RANKS_DROPPED: (AgreementError, "see explain() for the rank that dropped it"),
    Reason.VOTED_EAGER: (AgreementError, "see the reason on the other ranks"),
    Reason.INVALIDATED: (StateError, "call capture() to capture again"),
    Reason.WEIGHTS_CHANGED: (StateError, "call invalidate('weights') and then capture()"),
    Reason.SUSPENDED: (StateError, "call resume()"),
    Reason.UPDATE_UNSUPPORTED: (
        UpdateUnsupportedError,
        "choose the policy 'breakable', or hand the value over in a device tensor",
    ),
    Reason.UPDATE_TOPOLOGY: (
        UpdateTopologyError,
        "choose the policy 'breakable', or reduce the host argument",
    ),
}


def refusal(decision: Decision, what: str, detail: Any = None) -> DeviceGraphError:
    """Return the error that a strict runner raises instead of running ``what`` eagerly."""
    kind, way_out = _WAYS_OUT[decision.reason]
    why = decision.reason.value.replace("_", " ")
    more = f" ({detail})" if detail else ""
    return kind(f"{what} cannot run in a graph: {why}{more}; {way_out}")


def update_reason(error: UpdateError) -> Reason:
    """Return the reason under which a step that failed to update its graph runs eagerly."""
    if isinstance(error, UpdateTopologyError):
        return Reason.UPDATE_TOPOLOGY
    return Reason.UPDATE_UNSUPPORTED
