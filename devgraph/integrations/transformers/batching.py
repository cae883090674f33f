"""Chunks of requests as the inputs and host arguments of a step."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import attrs
import torch

from devgraph.api.backend import Backend
from devgraph.integrations.transformers.model import CausalModel
from devgraph.integrations.transformers.scheduler import Chunk


@attrs.frozen(kw_only=True)
class StepData:
    """The arguments of one ``run`` of a runner."""

    inputs: dict[str, torch.Tensor]
    host_args: dict[str, Any]
    longest: int
    """Tokens of the longest sequence, the new ones included."""


class Batcher:
    """Makes the data of steps for one model.

    Args:
        model: whose slots and kernels decide what a step needs.
        backend: provides host memory from which copies are asynchronous.
    """

    def __init__(self, model: CausalModel, backend: Backend) -> None:
        self._model = model
        self._backend = backend

    def decode(self, chunks: Sequence[Chunk]) -> StepData:
        """Return a decode step; chunk ``i`` has one token and slot ``i``."""
        positions = [chunk.request.cached for chunk in chunks]
        return StepData(
            inputs=self._tokens(chunks),
            host_args=dict(self._model.decode_host_values(positions)),
            longest=max(positions) + 1,
        )

    def packed(self, chunks: Sequence[Chunk]) -> StepData:
        """Return a step over chunks of any length in any slots."""
        inputs = self._tokens(chunks)
        ends = list(itertools.accumulate(chunk.count for chunk in chunks))
        lengths = [chunk.request.cached + chunk.count for chunk in chunks]
        inputs["last_tokens"] = self.tensor([end - 1 for end in ends])
        host_args: dict[str, Any] = {}
        if self._model.varlen:
            rows = [chunk.slot * self._model.max_len for chunk in chunks]
            inputs["query_starts"] = self.tensor([0, *ends], torch.int32)
            inputs["row_starts"] = self.tensor([*rows, 0], torch.int32)
            inputs["lengths"] = self.tensor(lengths, torch.int32)
        else:
            spans = ((c.slot, c.request.cached, c.count) for c in chunks)
            host_args["spans"] = tuple(itertools.chain.from_iterable(spans))
        return StepData(inputs=inputs, host_args=host_args, longest=max(lengths))

    def _tokens(self, chunks: Sequence[Chunk]) -> dict[str, torch.Tensor]:
        ids: list[int] = []
        positions: list[int] = []
        rows: list[int] = []
        for chunk in chunks:
            first, last = chunk.request.cached, chunk.request.cached + chunk.count
            start = chunk.slot * self._model.max_len
            ids += chunk.request.tokens[first:last]
            positions += range(first, last)
            rows += range(start + first, start + last)
        # One transfer for all three.
        all_three = self.tensor([ids, positions, rows])
        return dict(zip(("input_ids", "position_ids", "slot_mapping"), all_three, strict=True))

    def tensor(self, values: list[Any], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """Return ``values`` as a tensor on the device."""
        made = torch.tensor(values, dtype=dtype)
        if self._model.device.type == "cpu":
            return made
        return self._backend.pin(made).to(self._model.device, non_blocking=True)
