"""The contenders of ``bench``, a decode step eagerly, under every policy and by a peer."""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from devgraph.api.backend import Backend
from devgraph.api.capture import Captured, capture
from devgraph.api.errors import InputError
from devgraph.api.marks.marks import region
from devgraph.api.policy import breaks, compiles, policies
from devgraph.cli.measure import Comparison, Contender, Lengths
from devgraph.cli.tables import working

Peer = Callable[[Backend, "Decoder", Tensor, Tensor, int], Callable[..., Tensor] | None]
"""Captures the step with another package; returns its replay, or None if it cannot run."""


def measure(
    backend: Backend,
    sizes: Mapping[str, int],
    kv_len: int,
    args: argparse.Namespace,
    peers: Mapping[str, Peer],
) -> Comparison:
    """Time one step of a decoder with all contenders that can run here."""
    compared = Comparison(backend, args)
    model = Decoder(backend.device, getattr(torch, args.dtype), **sizes)
    ids = torch.arange(sizes["batch"], device=backend.device) % sizes["vocabulary"]
    row = torch.zeros(1, dtype=torch.int64, device=backend.device)
    ways = [Contender("eager", functools.partial(model, ids, row), _in_turn(kv_len))]
    frozen: list[Contender] = []  # replays at the length of the capture only
    with contextlib.ExitStack() as captures:
        with working("capturing"):
            for policy in args.policy or policies():
                compilers = tuple(args.compiler or backend.capabilities.compilers)
                for compiler in compilers if compiles(policy) else (None,):
                    name = policy if compiler is None else f"{policy}, {compiler}"
                    how: dict[str, Any] = {"policy": policy, "compiler": compiler}
                    how |= {"backend": backend, "host_args": {"kv_len": kv_len}}
                    step = functools.partial(capture, model, ids, row, **how)
                    captured = compared.attempt(name, step)
                    if captured is None:
                        continue
                    captures.enter_context(captured)
                    exact = compiler in (None, "eager")
                    replays = _replays(name, captured, kv_len, sizes["window"], exact=exact)
                    if not _takes_lengths(captured):
                        frozen += replays
                    ways += replays
            for name, make in peers.items():
                replay = make(backend, model, ids, row, kv_len)
                if replay is not None:
                    ways.append(Contender(name, replay, _in_turn(kv_len)))
        # Compare on new data and another length.
        model.fill_caches()  # captures wrote to the caches
        ids.copy_((ids + 1) % sizes["vocabulary"])
        row.fill_(kv_len - 1)
        other = max(1, kv_len - 1)
        expected = {n: model(ids, row, kv_len=n).clone() for n in (kv_len, other)}
        for way in ways:
            length = kv_len if way in frozen else other
            way.compare(expected[length], way.call(kv_len=length))
        with working("timing"):
            compared.time(ways)
    return compared


def _in_turn(*lengths: int) -> Lengths:
    return lambda: itertools.cycle(lengths)


def _takes_lengths(captured: Captured) -> bool:
    return breaks(captured.policy) or captured.backend.capabilities.region_update


def _replays(
    name: str, captured: Captured, kv_len: int, window: int, *, exact: bool
) -> list[Contender]:
    """Return contenders for one capture at a fixed, a recurring and an always new length."""
    lengths: dict[str, Lengths] = {name: _in_turn(kv_len)}
    if not breaks(captured.policy) and _takes_lengths(captured) and window > 1:
        known = [max(1, kv_len - i) for i in range(min(4, kv_len))]
        fresh = itertools.cycle(range(1, window + 1))
        lengths[f"{name}, 4 lengths in turn"] = _in_turn(*known)
        lengths[f"{name}, other length each step"] = lambda: fresh
    info = captured.info()
    figures = {
        "capture_seconds": captured.capture_seconds,
        "pool_bytes": captured.pool.bytes,
        "segments": info.segments,
        "nodes": info.nodes,
    }
    return [
        Contender(one, captured.replay, turns, figures, exact=exact)
        for one, turns in lengths.items()
    ]


@region(host_args=("kv_len",), mutates=("out",))
def attention(query: Tensor, keys: Tensor, values: Tensor, out: Tensor, *, kv_len: int) -> None:
    """Attend over the first ``kv_len`` rows of caches ``[batch, heads, rows, dim]``."""
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
        rows = (batch, heads, window, hidden // heads)
        self.register_buffer("keys", torch.empty(rows))
        self.register_buffer("values", torch.empty(rows))

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
    """A decoder with random weights and a cache of ``window`` rows per request.

    Raises:
        InputError: the width is not a multiple of the number of heads.
    """

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
        """Fill the caches with fixed random keys and values."""
        generator = torch.Generator().manual_seed(0)
        for cache in self.buffers():
            cache.copy_(torch.randn(cache.shape, generator=generator))

    def forward(self, ids: Tensor, row: Tensor, *, kv_len: int) -> Tensor:
        """Return logits ``[batch, vocabulary]`` of one token for each request.

        Args:
            ids: ``[batch]``.
            row: ``[1]``, the cache row of the new keys and values.
            kv_len: number of cache rows to attend over.
        """
        return self.step(ids, row, functools.partial(attention, kv_len=kv_len))

    def step(self, ids: Tensor, row: Tensor, attend: Callable[..., None]) -> Tensor:
        """Compute ``forward`` with ``attend`` instead of ``attention``."""
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, row, attend=attend)
        logits: Tensor = self.head(self.norm(x))
        return logits
