"""The decoder that ``update.py`` times, and a variant of its attention for each kind of mark.

A step runs ``tokens`` new tokens through all layers. Each layer writes their keys and values to the
last of the first ``kv_len`` rows of its cache, and attends over these ``kv_len`` rows. The host
argument ``kv_len`` determines the shapes and therefore the kernels of attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch.nn import functional as F

import devgraph as dg

Attend = Callable[..., None]


@attrs.frozen
class Work:
    """One size of the model."""

    width: int
    tokens: int
    layers: int = 36
    window: int = 3072

    @property
    def head_dim(self) -> int:
        return 64 if self.width <= 1024 else 128

    @property
    def heads(self) -> int:
        return self.width // self.head_dim

    def __str__(self) -> str:
        return f"d={self.width}, {self.tokens} tokens"

    def lengths(self) -> list[int]:
        """Return KV lengths in random order, whose new rows do not overlap."""
        step = max(self.tokens, 40)
        order = torch.randperm((3000 - 512) // step, generator=torch.Generator().manual_seed(0))
        return [512 + step * int(i) for i in order]


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gate: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    *,
    kv_len: int,
) -> None:
    """Write ``k`` and ``v`` to the cache; compute gated attention of ``q`` over ``kv_len`` rows.

    The function launches five kernels: two cache writes, two for attention, and the gate.
    """
    tokens = q.shape[0]
    keys[kv_len - tokens : kv_len].copy_(k)
    values[kv_len - tokens : kv_len].copy_(v)
    attended = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        keys[:kv_len].transpose(0, 1)[None],
        values[:kv_len].transpose(0, 1)[None],
    )
    torch.mul(attended[0].transpose(0, 1).reshape(out.shape), gate, out=out)


def nothing(*_: torch.Tensor, kv_len: int) -> None:
    """Do nothing, with the signature of ``attend``."""


attend_region = dg.region(host_args=("kv_len",), mutates=("keys", "values", "out"))(attend)


@dg.region(host_args=("kv_len",))
def nothing_region(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gate: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    *,
    kv_len: int,
) -> None:
    """Do nothing, as a region."""


class Model:
    """The layers, with random weights and caches in bfloat16."""

    def __init__(self, work: Work, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(1)
        width = work.width

        def noise(*shape: int, scale: float = 1.0) -> torch.Tensor:
            made = torch.randn(*shape, device=device, dtype=torch.bfloat16, generator=generator)
            return made * scale

        def weight(rows: int, columns: int) -> torch.Tensor:
            return noise(rows, columns, scale=rows**-0.5)

        self.work = work
        self.weights = [
            (
                weight(width, 4 * width),
                weight(width, width),
                weight(width, 2 * width),
                weight(2 * width, width),
            )
            for _ in range(work.layers)
        ]
        rows = (work.window, work.heads, work.head_dim)
        self.keys = [noise(*rows) for _ in range(work.layers)]
        self.values = [noise(*rows) for _ in range(work.layers)]
        self.x = noise(work.tokens, width)

    def step(self, x: torch.Tensor, attention: Attend, **host: Any) -> torch.Tensor:
        """Run all layers; ``host`` has the host arguments of ``attention``."""
        work = self.work
        for weights, keys, values in zip(self.weights, self.keys, self.values, strict=True):
            qkvg, proj, up, down = weights
            h = F.rms_norm(x, (work.width,))
            q, k, v, gate = (h @ qkvg).view(work.tokens, 4, work.width).unbind(1)
            heads = (work.tokens, work.heads, work.head_dim)
            out = torch.zeros_like(x)
            attention(q.view(heads), k.view(heads), v.view(heads), gate, keys, values, out, **host)
            x = x + out @ proj
            x = x + F.silu(F.rms_norm(x, (work.width,)) @ up) @ down
        return x
