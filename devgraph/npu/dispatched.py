"""Operators that torch_npu itself records as task groups, updated through devgraph's queue.

torch_npu's own update runs on a stream of its own, does not wait for earlier replays and ignores
names that it does not know. Here its records are updated like regions: in launch order, fenced,
and validated first.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from devgraph.api.errors import HostArgumentError, did_you_mean

__all__ = ["DispatchedCall", "checked_inputs"]

logger = logging.getLogger(__name__)


class DispatchedCall:
    """One recorded operator. It stands where a region's call and its mark stand elsewhere.

    Args:
        record: torch_npu's dispatch record.
    """

    def __init__(self, record: Any) -> None:
        self._record = record
        self.name = str(record.op_cache_entry.__name__)
        registry = sys.modules["torch_npu.npu._npugraph_handlers.npugraph_handler"]
        self._handler = registry._NPU_GRAPH_OP_HANDLERS[self.name]
        self._positions = {
            key: where
            for kind, where, key in self._handler.UPDATE_SPECS.get(self.name, ())
            if kind == "arg" and where < len(record.args)
        }

    @property
    def mark(self) -> DispatchedCall:
        """The key of its values."""
        return self

    def values(self) -> dict[str, Any]:
        """Return what can be updated, with the values that it has."""
        found = {key: self._record.args[where] for key, where in self._positions.items()}
        for key, value in self._record.kwargs.items():
            if isinstance(value, (int, float, bool, str, list, tuple, type(None))) and not _holds(
                value
            ):
                found[key] = value
        return found

    def run(self, values: Mapping[str, Any]) -> None:
        """Issue the operator again with ``values``, in update mode."""
        record = self._record
        for key, value in values.items():
            if key in record.kwargs:
                record.kwargs[key] = value
        self._handler.update_args(record, dict(values))
        record.op_cache_entry(*record.args, **record.kwargs)


def _holds(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and any(isinstance(v, torch.Tensor) for v in value)


def checked_inputs(
    calls: Sequence[DispatchedCall],
    inputs: Sequence[Mapping[str, Any]],
    current: Mapping[Any, dict[str, Any]],
) -> dict[Any, dict[str, Any]]:
    """Return the values of every call after ``inputs``: one mapping for all, or one for each.

    Raises:
        HostArgumentError: another number of mappings, or a name that an operator does not have.
    """
    if len(inputs) not in (1, len(calls)):
        raise HostArgumentError(
            f"this graph has {len(calls)} operators to update and got {len(inputs)} mappings; pass "
            f"one for all of them or one for each, in capture order"
        )
    given = list(inputs) * (len(calls) if len(inputs) == 1 else 1)
    result: dict[Any, dict[str, Any]] = {}
    for call, values in zip(calls, given, strict=True):
        known = call.values()
        for name in values:
            if name not in known:
                raise HostArgumentError(
                    f"operator {call.name} has no {name!r} to update. "
                    f"{did_you_mean(name, sorted(known))}"
                )
        result[call] = {**current[call], **values}
    return result
