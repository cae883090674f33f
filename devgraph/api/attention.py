"""Attention that a backend brings for a cache of fixed slots, with lengths from the host."""

from __future__ import annotations

from typing import Protocol

import torch

__all__ = ["SlotAttention"]


class SlotAttention(Protocol):
    """A backend's own attention over slots, as an updatable region.

    The graph holds it under the policy ``full``, whatever the number of requests: only the
    lengths in it change. It is an eager segment under ``breakable``.
    """

    row_multiple: int
    """What the rows of a slot must be a multiple of."""

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        out: torch.Tensor,
        *,
        scale: float,
        spans: tuple[int, ...],
    ) -> None:
        """Attend the packed tokens of requests causally to the rows that each of them owns.

        Args:
            query: ``[tokens, heads, dim]``, requests one after another, padding behind them.
            keys, values: ``[slots * rows, kv_heads, dim]``, contiguous.
            out: written, ``[tokens, heads, dim]``; zero for padding.
            spans: three numbers a request: its slot, the tokens it has cached, its new tokens;
                slots ascend. A host argument: hand it over as it was received.
        """
        ...
