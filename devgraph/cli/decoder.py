"""The decode step that ``bench`` times: a decoder with random weights."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from devgraph.api.errors import InputError
from devgraph.api.marks.marks import region


@region(host_args=("kv_len",), mutates=("out",))
def attention(query: Tensor, keys: Tensor, values: Tensor, out: Tensor, *, kv_len: int) -> None:
    """Compute attention over the first ``kv_len`` rows of caches ``[batch, heads, rows, dim]``."""
    scores = torch.matmul(query, keys[:, :, :kv_len].transpose(-1, -2))
    weights = torch.softmax(scores * query.shape[-1] ** -0.5, dim=-1)
    out.copy_(torch.matmul(weights, values[:, :, :kv_len]))


class _Layer(nn.Module):
    keys: Tensor
    values: Tensor

    def __init__(self, hidden: int, heads: int, batch: int, window: int) -> None:
        super().__init__()
        self.heads = heads
        self.before = nn.RMSNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.project = nn.Linear(hidden, hidden, bias=False)
        self.after = nn.RMSNorm(hidden)
        self.up = nn.Linear(hidden, 8 * hidden, bias=False)
        self.down = nn.Linear(4 * hidden, hidden, bias=False)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.empty(batch, heads, window, hidden // heads))

    def forward(self, x: Tensor, row: Tensor, *, attend: Callable[..., None]) -> Tensor:
        query, key, value = (
            part.view(x.shape[0], self.heads, 1, -1)
            for part in self.qkv(self.before(x)).chunk(3, dim=-1)
        )
        self.keys.index_copy_(2, row, key)
        self.values.index_copy_(2, row, value)
        out = torch.empty_like(query)
        attend(query, self.keys, self.values, out)
        x = x + self.project(out.view(x.shape[0], -1))
        gate, up = self.up(self.after(x)).chunk(2, dim=-1)
        down: Tensor = self.down(nn.functional.silu(gate) * up)
        return x + down


class Decoder(nn.Module):
    """A decoder with random weights and a cache of ``window`` rows per request."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        *,
        layers: int,
        hidden: int,
        heads: int,
        vocabulary: int,
        batch: int,
        window: int,
    ) -> None:
        super().__init__()
        if hidden % heads:
            raise InputError(
                f"hidden {hidden} is not a multiple of {heads} heads; choose another size"
            )
        torch.manual_seed(0)
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList(_Layer(hidden, heads, batch, window) for _ in range(layers))
        self.norm = nn.RMSNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)
        self.requires_grad_(False)
        self.to(device=device, dtype=dtype)
        self.fill_caches()

    def fill_caches(self) -> None:
        generator = torch.Generator().manual_seed(0)
        for cache in self.buffers():
            cache.copy_(torch.randn(cache.shape, generator=generator))

    def forward(
        self, ids: Tensor, row: Tensor, *, kv_len: int, attend: Callable[..., None] = attention
    ) -> Tensor:
        """Return the logits ``[batch, vocabulary]`` of one token per request."""
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, row, attend=functools.partial(attend, kv_len=kv_len))
        logits: Tensor = self.head(self.norm(x))
        return logits
