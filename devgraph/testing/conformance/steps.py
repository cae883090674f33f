"""A step with state for the tests of runners, and checks of whole batches against eager."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

import devgraph as dg
from devgraph.testing.conformance.support import Kit, same

VOCAB, WIDTH, ROWS = 32, 8, 48
SCRATCH = ROWS
"""The row of the cache that padded rows write."""


@dg.region()
def mixed(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Work in the middle of a step that breaks a breakable graph."""
    return hidden @ weight


class Model:
    """A step with state. All numbers are small integers, so that every order of summing and every
    number of padded rows gives the same bits."""

    def __init__(self, kit: Kit) -> None:
        generator = torch.Generator().manual_seed(3)

        def integers(*shape: int) -> torch.Tensor:
            return torch.randint(-2, 3, shape, generator=generator).float().to(kit.device)

        self.table = integers(VOCAB, WIDTH)
        self.weight = integers(WIDTH, WIDTH)
        self.cache = torch.zeros(ROWS + 1, WIDTH, device=kit.device)

    def step(self, cache: torch.Tensor, ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Add each token to its row of the cache and return what the row then gives."""
        hidden = self.table[ids] + cache[rows]
        cache.index_copy_(0, rows, hidden)
        out: torch.Tensor = mixed(hidden, self.weight)
        return out + hidden

    def decode(self, batch: Any) -> torch.Tensor:
        return self.step(self.cache, batch.ids, batch.rows)

    def summed(self, hidden: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """Sum of the tokens of each request; ``starts`` are offsets, one more than requests."""
        position = torch.arange(hidden.shape[0], device=hidden.device)
        inside = (position >= starts[:-1, None]) & (position < starts[1:, None])
        return torch.where(inside[:, :, None], hidden, 0.0).sum(1)


def slot(name: str, dims: Any, dtype: torch.dtype, pad: dg.Pad) -> dg.InputSlot:
    return dg.InputSlot(name, dims, dtype, pad=pad)


SLOTS = (
    slot("ids", ("tokens",), torch.int64, dg.Pad.zero()),
    slot("rows", ("tokens",), torch.int64, dg.Pad.fill(SCRATCH)),
)
STARTS = slot("starts", ("requests+1",), torch.int64, dg.Pad.last())
X = slot("x", ("tokens", WIDTH), torch.float32, dg.Pad.zero())


def batch_of(kit: Kit, count: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random tokens, each with a row of the cache of its own."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCAB, (count,), generator=generator)
    rows = torch.randperm(ROWS, generator=generator)[:count]
    return {"ids": ids.to(kit.device), "rows": rows.to(kit.device)}


def runner_of(
    kit: Kit, forward: Any, slots: Sequence[dg.InputSlot] = (X,), **options: Any
) -> dg.DecodeRunner:
    """A captured decode runner for four requests, whose input is ``X``."""
    options = {"max_requests": 4, "backend": kit.backend, "progress": False, **options}
    runner = dg.DecodeRunner(forward, list(slots), **options)
    runner.capture()
    return runner


def decoder(kit: Kit, model: Model, **options: Any) -> dg.DecodeRunner:
    """A captured decode runner with the buckets 1, 2, 4 and 8."""
    return runner_of(kit, model.decode, SLOTS, **{"max_requests": 8, **options})


def prefiller(kit: Kit, model: Model, **options: Any) -> dg.PrefillRunner:
    """A captured prefill runner whose tail sums the tokens of each request."""
    options = {
        "max_tokens": 16,
        "max_requests": 4,
        "backend": kit.backend,
        "progress": False,
        "tail": lambda hidden, batch: model.summed(hidden, batch.starts),
        **options,
    }
    config = options.pop("config", {"policy": "breakable", "buckets": [4, 8, 16]})
    runner = dg.PrefillRunner(model.decode, [*SLOTS, STARTS], config=config, **options)
    runner.capture()
    return runner


def check_decode(kit: Kit, runner: dg.DecodeRunner, model: Model, count: int, seed: int) -> None:
    """Run a batch and fail unless outputs and state are those of an eager step."""
    inputs = batch_of(kit, count, seed)
    state = model.cache.clone()
    want = model.step(state, inputs["ids"], inputs["rows"])
    kit.same(runner.run(inputs), want, f"the output of {count} requests")
    same(model.cache[:ROWS], state[:ROWS], f"the state after {count} requests")


def check_prefill(
    kit: Kit, runner: dg.PrefillRunner, model: Model, lengths: tuple[int, ...], seed: int
) -> None:
    """Run requests of these lengths and fail unless outputs and state are those of eager."""
    inputs = batch_of(kit, sum(lengths), seed)
    starts = torch.tensor([0, *itertools.accumulate(lengths)], device=kit.device)
    state = model.cache.clone()
    want = model.summed(model.step(state, inputs["ids"], inputs["rows"]), starts)
    out = runner.run({**inputs, "starts": starts})
    kit.same(out, want, f"the output of requests of {lengths} tokens")
    same(model.cache[:ROWS], state[:ROWS], f"the state after requests of {lengths} tokens")
