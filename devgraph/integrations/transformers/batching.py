"""Chunks of requests as the inputs and host arguments of a step."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import attrs
import torch

from devgraph.api.backend import Backend
from devgraph.integrations.transformers.model import CausalModel
from devgraph.integrations.transformers.scheduler import Piece


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

    def decode(
        self, pieces: Sequence[Piece], left: Sequence[int] | None = None, *, steps: int = 1
    ) -> StepData:
        """Return a decode step; piece ``i`` has one token and slot ``i``.

        Args:
            left: tokens that each may still generate, for a launch of ``steps`` steps.
        """
        inputs = self._tokens(pieces)
        positions = [piece.cached for piece in pieces]
        longest = max(positions) + 1
        if left is not None:
            inputs["left"] = self.tensor(list(left))
            ends = zip(positions, left, strict=True)
            longest = max(position + min(steps, count) for position, count in ends)
        host_args = dict(self._model.decode_host_values(positions, longest=longest))
        return StepData(inputs=inputs, host_args=host_args, longest=longest)

    def packed(self, pieces: Sequence[Piece]) -> StepData:
        """Return a step over pieces of any length in any slots."""
        inputs = self._tokens(pieces)
        ends = list(itertools.accumulate(piece.count for piece in pieces))
        lengths = [piece.cached + piece.count for piece in pieces]
        inputs["last_tokens"] = self.tensor([end - 1 for end in ends])
        host_args: dict[str, Any] = {}
        if self._model.varlen:
            rows = [piece.slot * self._model.max_len for piece in pieces]
            inputs["query_starts"] = self.tensor([0, *ends], torch.int32)
            inputs["row_starts"] = self.tensor([*rows, 0], torch.int32)
            inputs["lengths"] = self.tensor(lengths, torch.int32)
        elif self._model.own is not None:
            for piece, length in zip(pieces, lengths, strict=True):
                self._model.cache.prepare(piece.slot, length, self._model.max_len)
        else:
            spans = ((p.slot, p.cached, p.count) for p in pieces)
            host_args["spans"] = tuple(itertools.chain.from_iterable(spans))
        return StepData(inputs=inputs, host_args=host_args, longest=max(lengths))

    def _tokens(self, pieces: Sequence[Piece]) -> dict[str, torch.Tensor]:
        ids: list[int] = []
        positions: list[int] = []
        rows: list[int] = []
        for piece in pieces:
            first, last = piece.cached, piece.cached + piece.count
            start = piece.slot * self._model.max_len
            ids += piece.ids
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
