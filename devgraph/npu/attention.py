"""torch_npu's fused attention over a cache of request slots, with lengths as host arguments.

One operator serves prefill, chunked prefill and decode. Packed queries (layout ``TND``) attend to a
paged cache. The block table is constant, because each slot is a row of blocks. Only two lists of
lengths depend on the host argument ``spans``, so an update replaces only these lists.
"""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Sequence
from typing import Any

import torch

from devgraph.api.errors import RegionError, counted
from devgraph.api.marks.marks import region

logger = logging.getLogger(__name__)

BLOCK = 128
"""Rows per block. The operator accepts this block size for queries of any length."""
DTYPES = (torch.float16, torch.bfloat16)
HEAD_DIMS = range(16, 513, 16)
_MASK = 2048  # side length of the triangular mask that the compressed causal mode requires
_CAUSAL = 3  # the causal mode in which the last query row attends to all key rows
_NAMES = {
    1: ("actual_seq_lengths", "actual_seq_lengths_kv", "num_heads", "scale"),
    2: ("actual_seq_qlen", "actual_seq_kvlen", "num_query_heads", "softmax_scale"),
}
"""Names of arguments by version of the operator."""


def lengths_of(
    spans: Sequence[int], slots: int, tokens: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ends of the packed queries and the numbers of keys, by slot.

    The last entry of both tuples represents padding. Padding has no keys, so its rows become zero.
    """
    new, keys, last = [0] * slots, [0] * slots, -1
    for slot, cached, count in zip(spans[::3], spans[1::3], spans[2::3], strict=True):
        if not last < slot < slots:
            raise RegionError(
                f"attention received slot {slot} after slot {last}; slots must ascend and be below "
                f"{slots}"
            )
        new[slot], keys[slot], last = count, cached + count, slot
    ends = list(itertools.accumulate(new))
    if ends[-1] > tokens:
        raise RegionError(
            f"attention received lengths of {counted(ends[-1], 'token')} for {tokens} query rows; "
            f"pass a row for each new token"
        )
    return (*ends, tokens), (*keys, 0)


@region(host_args=("spans",), mutates=("out",))
def fused_slot_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    fixed: FusedSlotAttention,
    *,
    spans: tuple[int, ...],
) -> None:
    """Run ``FusedSlotAttention.attend`` through the operator of ``fixed.version``."""
    npu = sys.modules["torch_npu"]
    suffix = "_v2" if fixed.version == 2 else ""
    operator = getattr(npu, f"npu_fused_infer_attention_score{suffix}")
    workspace_of = getattr(npu, f"_npu_fused_infer_attention_score{suffix}_get_max_workspace")
    pages = [t.view(-1, BLOCK, t.shape[1] * t.shape[2]) for t in (keys, values)]
    arguments = fixed.arguments(query, keys, scale, spans)
    # Calls cannot share a workspace, because its size depends on the lengths.
    workspace = workspace_of(query, *pages, **arguments)
    operator.out(query, *pages, **arguments, workspace=workspace, out=[out, fixed.no_sums])


fused_slot_attention.__devgraph_mark__.raises_before_launch = True  # type: ignore[attr-defined]


class FusedSlotAttention:
    """Attention over request slots with ``version`` 1 or 2 of the operator.

    The calls of one instance share a block table and a mask.
    """

    row_multiple = BLOCK

    def __init__(self, slots: int, rows: int, *, version: int, device: torch.device) -> None:
        blocks = rows // BLOCK
        self.slots, self.version = slots, version
        # The last row is for padding. The operator never reads it, because padding has no keys.
        table = torch.arange(slots * blocks, dtype=torch.int32).view(slots, blocks)
        self.table = torch.cat([table, table[:1]]).to(device)
        self.mask = torch.ones(_MASK, _MASK, dtype=torch.bool).triu(1).to(device)
        self.no_sums = torch.empty(1, dtype=torch.float32, device=device)

    def arguments(
        self, query: torch.Tensor, keys: torch.Tensor, scale: float, spans: Sequence[int]
    ) -> dict[str, Any]:
        """Return the operator's keyword arguments, without workspace and outputs."""
        ends, lengths = lengths_of(spans, self.slots, query.shape[0])
        versioned = list(ends), list(lengths), query.shape[1], scale
        return {
            "block_table": self.table,
            "atten_mask": self.mask,
            "input_layout": "TND",
            "block_size": BLOCK,
            "sparse_mode": _CAUSAL,
            "num_key_value_heads": keys.shape[1],
            **dict(zip(_NAMES[self.version], versioned, strict=True)),
        }

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
        """Compute causal attention for packed requests, each over the rows of its own slot.

        Args:
            query: ``[tokens, heads, dim]``: the requests in order, followed by padding.
            keys: ``[slots * rows, kv_heads, dim]``, contiguous.
            values: like ``keys``.
            out: the result, ``[tokens, heads, dim]``; zero in padded rows.
            scale: factor by which the scores are multiplied.
            spans: three numbers per request, in ascending order of slots: slot, cached tokens, new
                tokens. A host argument, so pass it on unchanged.
        """
        fused_slot_attention(query, keys, values, out, scale, self, spans=spans)
