"""Small steps with state, and runners around them, for the tests of the runners."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import torch

import devgraph as dg
from devgraph.runners import Batch

torch.set_num_threads(1)

VOCAB, WIDTH = 50, 6
SCRATCH = 31
"""Row of the cache that pad values point to."""

IDS = dg.InputSlot("ids", ("tokens",), torch.int64, pad=dg.Pad.zero())
ROWS = dg.InputSlot("rows", ("tokens",), torch.int64, pad=dg.Pad.fill(SCRATCH))
X = dg.InputSlot("x", ("tokens", 3), torch.float32, pad=dg.Pad.zero())
OFFSETS = dg.InputSlot("offsets", ("requests+1",), torch.int64, pad=dg.Pad.last())


class CacheStep:
    """Looks tokens up, adds what an earlier step wrote to their cache rows, and writes new rows.

    The result depends on every real input row and on the cache; padded rows go to ``SCRATCH``.
    """

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.table = torch.randn(VOCAB, WIDTH, generator=generator)
        self.weight = torch.randn(WIDTH, 4, generator=generator)
        self.cache = torch.zeros(SCRATCH + 1, WIDTH)
        self.calls = 0

    def __call__(self, batch: Batch) -> torch.Tensor:
        self.calls += 1
        hidden = self.table[batch.ids] + 0.5 * self.cache[batch.rows]
        self.cache.index_copy_(0, batch.rows, hidden)
        return hidden @ self.weight

    def expected(self, cache: torch.Tensor, ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """What a step from ``cache`` returns, computed row by row."""
        hidden = torch.stack(
            [self.table[i] + 0.5 * cache[r] for i, r in zip(ids, rows, strict=True)]
        )
        return hidden @ self.weight


def tokens(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def cache_inputs(count: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random tokens for ``count`` requests, each with a cache row of its own."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "ids": torch.randint(VOCAB, (count,), generator=generator),
        "rows": torch.randperm(SCRATCH, generator=generator)[:count],
    }


def decode_of(step: Any, slots: Any = (IDS, ROWS), **options: Any) -> dg.DecodeRunner:
    """A decode runner on the CPU reference, captured unless ``captured=False``."""
    captured = options.pop("captured", True)
    options.setdefault("max_requests", 8)
    options.setdefault("backend", "cpu")
    runner = dg.DecodeRunner(step, list(slots), **options)
    if captured:
        runner.capture()
    return runner


def double(batch: Batch) -> torch.Tensor:
    return batch.x * 2


def double_runner(**options: Any) -> dg.DecodeRunner:
    return decode_of(double, (X,), **options)


def rows_of_x(count: int, start: float = 1.0) -> torch.Tensor:
    return torch.arange(count * 3, dtype=torch.float32).reshape(count, 3) + start


def encode(batch: Batch) -> dict[str, torch.Tensor]:
    """Sum over the rows of each item, in whole numbers, so that no order of summing matters."""
    x = torch.where(batch.item_ids[:, None] >= 0, batch.x, 0)
    same = batch.item_ids[:, None] == batch.item_ids[None]
    lengths = batch.offsets[1:] - batch.offsets[:-1]
    return {"attended": same.to(x.dtype) @ x + x, "pooled": lengths[:, None] * batch.scale[:, None]}


ENCODED = {"attended": dg.OutputSlot(rows="tokens"), "pooled": dg.OutputSlot(rows="requests")}


def encoder_of(forward: Any = encode, **options: Any) -> dg.EncoderRunner:
    """A captured encoder on the CPU reference: items of whole numbers in budgets of 16 and 32."""
    scale = dg.InputSlot("scale", ("requests",), torch.float32, pad=dg.Pad.fill(1))
    x = dg.InputSlot("x", ("tokens", 4), torch.float32, pad=dg.Pad.zero())
    options = {"budgets": [16, 32], "max_items": 4, "backend": "cpu", "outputs": ENCODED, **options}
    runner = dg.EncoderRunner(forward, [x, scale], **options)
    runner.capture()
    return runner


def encoder_items(lengths: Iterable[int], seed: int = 0) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            "x": torch.randint(-9, 10, (length, 4), generator=generator).float(),
            "scale": torch.tensor([float(index + 1)]),
        }
        for index, length in enumerate(lengths)
    ]


def encode_alone(item: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the step returns for one item and nothing else."""
    ids = torch.zeros(len(item["x"]), dtype=torch.int32)
    offsets = torch.tensor([0, len(ids)], dtype=torch.int32)
    return encode(SimpleNamespace(**item, item_ids=ids, offsets=offsets))
