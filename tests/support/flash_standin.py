"""The fused attention kernel of devices with lengths in tensors, computed on the CPU.

Engines use this kernel wherever the device has it. The CPU has none, so without the stand-in their
code of such devices would run on hardware only.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    max_q: int,
    max_k: int,
    dropout: float,
    is_causal: bool,
    debug: bool,
    *,
    scale: float,
    window_size_left: int,
    window_size_right: int,
    seqused_k: Tensor,
    **options: Any,
) -> tuple[Tensor, ...]:
    assert not dropout
    assert not options
    # The device's kernel leaves rows without a request as they are in memory.
    out = torch.full((*query.shape[:2], value.shape[-1]), math.nan, dtype=query.dtype)
    starts, group = query_starts.tolist(), query.shape[1] // key.shape[1]
    requests = zip(starts, starts[1:], key_starts.tolist(), seqused_k.tolist(), strict=False)
    for first, end, row, length in requests:
        assert 0 <= first <= end <= len(query)
        assert end - first <= max_q
        assert 0 <= length <= max_k
        own = slice(row, row + length)
        k, v = (t[own].repeat_interleave(group, 1).transpose(0, 1).float() for t in (key, value))
        scores = query[first:end].transpose(0, 1).float() @ k.mT * scale
        at = torch.arange(length - (end - first), length)[:, None]
        rows = torch.arange(length)
        hidden = rows > at if is_causal or window_size_right == 0 else rows > length
        if window_size_left >= 0:
            hidden = hidden | (rows < at - window_size_left)
        weights = torch.softmax(scores.masked_fill(hidden, -math.inf), -1)
        out[first:end] = (weights @ v).transpose(0, 1).to(out.dtype)
    meta = (t.to("meta") for t in (query, key, value, query_starts, key_starts))
    sizes = (max_q, max_k, dropout, is_causal, debug)
    others = torch.ops.aten._flash_attention_forward(*meta, *sizes)[1:]
    return out, *(torch.empty_like(other, device="cpu") for other in others)


@contextlib.contextmanager
def flash_on_cpu() -> Iterator[None]:
    """Give the CPU the kernel inside the block."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", _attend, "CPU")
    try:
        yield
    finally:
        library._destroy()
