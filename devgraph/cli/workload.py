"""What ``bench`` runs: one decode step of a decoder with random weights."""

from __future__ import annotations

import functools
from collections.abc import Callable

import attrs
import torch
from torch import nn

from devgraph.api.errors import InputError
from devgraph.api.marks.marks import region

__all__ = ["Decoder", "Shape", "attention"]


@attrs.frozen(kw_only=True)
class Shape:
    """Sizes of the model and of its batch."""

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    batch: int
    window: int
    """Rows of the key and value cache of each request."""
    dtype: torch.dtype

    def __attrs_post_init__(self) -> None:
        for field in attrs.fields(Shape):
            value = getattr(self, field.name)
            if field.name != "dtype" and value < 1:
                raise InputError(f"{field.name} must be at least 1, got {value}")
        if self.hidden % self.heads:
            raise InputError(
                f"hidden {self.hidden} is no multiple of {self.heads} heads; choose another size"
            )

    def to_dict(self) -> dict[str, object]:
        """Return the sizes as JSON has them."""
        return {**attrs.asdict(self), "dtype": str(self.dtype).removeprefix("torch.")}


@region(host_args=("kv_len",), mutates=("out",))
def attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor, *, kv_len: int
) -> None:
    """Attend over the first ``kv_len`` rows of the cache; all are ``[batch, heads, rows, dim]``."""
    scores = torch.matmul(query, keys[:, :, :kv_len].transpose(-1, -2))
    weights = torch.softmax(scores * query.shape[-1] ** -0.5, dim=-1)
    out.copy_(torch.matmul(weights, values[:, :, :kv_len]))


class _Layer(nn.Module):
    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        hidden = shape.hidden
        self.heads = shape.heads
        self.before = nn.RMSNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.project = nn.Linear(hidden, hidden, bias=False)
        self.after = nn.RMSNorm(hidden)
        self.up = nn.Linear(hidden, 8 * hidden, bias=False)
        self.down = nn.Linear(4 * hidden, hidden, bias=False)
        rows = (shape.batch, shape.heads, shape.window, hidden // shape.heads)
        self.register_buffer("keys", torch.empty(rows))
        self.register_buffer("values", torch.empty(rows))

    def forward(
        self, x: torch.Tensor, row: torch.Tensor, *, attend: Callable[..., None]
    ) -> torch.Tensor:
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
        down: torch.Tensor = self.down(nn.functional.silu(gate) * up)
        return x + down


class Decoder(nn.Module):
    """``layers`` decoder layers with caches, an embedding and a head; random weights, no autograd.

    Args:
        shape: sizes.
        device: where weights and caches are.
    """

    def __init__(self, shape: Shape, device: torch.device) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(_Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        self.requires_grad_(False)
        self.to(device=device, dtype=shape.dtype)
        self.fill_caches()

    def fill_caches(self) -> None:
        """Put the same random keys and values into the caches every time."""
        generator = torch.Generator().manual_seed(0)
        for cache in self.buffers():
            cache.copy_(torch.randn(cache.shape, generator=generator))

    def forward(self, ids: torch.Tensor, row: torch.Tensor, *, kv_len: int) -> torch.Tensor:
        """Return logits ``[batch, vocabulary]`` of one token for each request.

        Args:
            ids: ``[batch]``.
            row: ``[1]``, where in the caches the new keys and values go.
            kv_len: cache rows to attend over.
        """
        return self.step(ids, row, functools.partial(attention, kv_len=kv_len))

    def step(
        self, ids: torch.Tensor, row: torch.Tensor, attend: Callable[..., None]
    ) -> torch.Tensor:
        """Return what ``forward`` does, with ``attend`` in the place of ``attention``."""
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, row, attend=attend)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits
