"""The decoder that ``update.py`` times, and its attention under every kind of mark.

A step runs ``tokens`` new tokens through all layers; each layer writes their keys and values into
its cache in front of position ``kv_len`` and attends over the ``kv_len`` cached tokens. The
attention's host argument is ``kv_len``: it sets the shapes, and so the kernels, of the attention.
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
        """KV lengths whose newly written rows do not overlap, in a shuffled order."""
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
    """Gated attention of ``q`` over the first ``kv_len`` cached rows, after adding ``k`` and ``v``.

    Five kernels: two writes into the cache, the attention in two steps, the gate.
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
    """The same signature and no work."""


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
    """A break that does nothing."""


class Model:
    """The layers, with weights and caches of noise in bfloat16."""

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
        """Run all layers; ``host`` goes to ``attention``."""
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
