"""The cache of one ``model.generate``, held in the slots of an engine.

A cache of transformers is a list of layers. Seating it replaces them by layers that answer for the
rows of the engine's slots, row ``b`` of the batch in slot ``b``; leaving puts plain layers with the
same keys and values back. So the cache object stays the caller's, and whatever transformers or the
caller does with it that slots cannot do (beams reordered, rows repeated) makes it leave first, and
a copy of it has plain layers. One cache is seated at a time::

    plain --enter--> seated --leave, or the cache is gone--> plain
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from devgraph.integrations.transformers.engine import Engine
from devgraph.integrations.transformers.requests import Piece
from devgraph.runners.decode import DecodeRunner

_PLAIN = (DynamicLayer, DynamicSlidingWindowLayer)


class Seat:
    """The slots that one cache has, and the steps over them.

    Args:
        engine: whose slots and runners these are.
        cache: an empty or filled ``DynamicCache`` that ``fits``.
        pads: tokens of padding at the left of each row of the batch.

    Attributes:
        length: tokens of a row, padding included, as transformers counts.
        deterministic: whether a step too many would draw no random numbers.
        records: whether plain layers must be able to crop when it leaves; slots always can.
    """

    def __init__(self, engine: Engine, cache: DynamicCache, pads: Sequence[int]) -> None:
        self.pads = list(pads)
        self.length: int = cache.get_seq_length()
        self.deterministic = False
        self._engine = engine
        self._rows = engine.model.cache
        self._cache = weakref.ref(cache)
        self.records = False
        self._next: Tensor | None = None
        self._kind = cache.layer_class_to_replicate
        self._windows = [getattr(layer, "sliding_window", None) for layer in cache.layers]
        for slot in range(len(pads)):
            self._rows.release(slot)
        if self.length:
            self._fill(cache.layers)
        cache.layers[:] = [_SeatedLayer(self, index) for index in range(len(self._rows.layers))]
        cache.layer_class_to_replicate = None

    @staticmethod
    def fits(engine: Engine, cache: Any, batch: int) -> bool:
        """Return whether ``cache`` holds nothing but keys and values that slots can hold."""
        if type(cache) is not DynamicCache or cache.offloading:
            return False
        shapes = [(batch, one.kv_heads, one.key_dim) for one in engine.model.shape.layers]
        if not cache.get_seq_length():
            # Pegasus gets more layers than its decoder writes. Fewer: it was told to run fewer.
            missing = 0 < len(cache.layers) < len(shapes)
            return not missing and all(type(layer) in _PLAIN for layer in cache.layers)
        return len(cache.layers) == len(shapes) and all(
            type(layer) in _PLAIN
            and (*layer.keys.shape[:2], layer.keys.shape[3]) == shape
            and layer.keys.device == engine.model.device
            and layer.keys.dtype == engine.model.dtype
            for layer, shape in zip(cache.layers, shapes, strict=True)
        )

    def _fill(self, layers: Sequence[Any]) -> None:
        for rows, layer in zip(self._rows.layers, layers, strict=True):
            kept = layer.keys.shape[2]
            for slot, pad in enumerate(self.pads):
                # Of a sliding window only the last rows are left. Those before are never read,
                # but a masked row must be a number.
                first = max(0, self.length - kept - pad)
                last = self.length - pad
                for by_slot, held in (
                    (rows.keys_by_slot, layer.keys),
                    (rows.values_by_slot, layer.values),
                ):
                    by_slot[slot, :, :first].zero_()
                    by_slot[slot, :, first:last].copy_(held[slot, :, kept - (last - first) :])

    def leave(self) -> list[CacheLayerMixin]:
        """Give the cache plain layers with copies of the rows, and return them."""
        cache = self._cache()
        if cache is None:
            return []
        if seat_of(cache) is not self:
            return list(cache.layers)
        layers = [self.plain(index) for index in range(len(cache.layers))]
        cache.layers[:] = layers
        cache.layer_class_to_replicate = self._kind
        return layers

    def plain(self, index: int) -> CacheLayerMixin:
        """Return a layer of the kind that the cache came with, and copies of the rows in it."""
        window = self._windows[index] if self._windows else None
        layer = DynamicLayer() if window is None else DynamicSlidingWindowLayer(window)
        if self.records and window is not None:
            layer.activate_past_recording()
        if self.length:
            layer.update(*self.rows(index))
        return layer

    def rows(self, index: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of a layer as transformers keeps them, padding at the left."""
        keys, values = self._rows.layers[index].read(len(self.pads))
        return self._padded(keys[:, :, : self.length]), self._padded(values[:, :, : self.length])

    def _padded(self, rows: Tensor) -> Tensor:
        if not any(self.pads):
            return rows
        out = rows.new_zeros(rows.shape)
        for slot, pad in enumerate(self.pads):
            out[slot, :, pad:] = rows[slot, :, : self.length - pad]
        return out

    def crop(self, tokens: int) -> None:
        """Forget tokens: the last ``-tokens``, or all after the first ``tokens``."""
        if tokens:
            length = min(self.length, tokens) if tokens > 0 else self.length + tokens
            self.length, self._next = max(0, length), None

    def follow(self, positions: Tensor | None, count: int) -> bool:
        """Whether so many tokens at ``positions`` are those behind the tokens of every row."""
        if positions is None:
            return True
        ends = [self.length + count - 1 - pad for pad in self.pads]
        last = torch.tensor(ends, device="cpu")
        return bool(((positions[:, -1].cpu() == last) | (last < 0)).all())

    # -- steps -----------------------------------------------------------------------------------

    def decode(self, ids: Tensor, runner: DecodeRunner, widths: Sequence[int] = (1,)) -> Tensor:
        """Run ``ids``, ``[batch, n]``, in one decode step; return ``[batch, n, vocabulary]``.

        Tokens are added up to the next of ``widths``: they write rows behind the last token, which
        the next step writes again before anything reads them.
        """
        batch, count = ids.shape
        model = self._engine.model
        starts = [self.length - pad for pad in self.pads]
        width = next((w for w in widths if w >= count), count)
        if max(starts) + width > model.positions:
            width = count
        if self._next is None:
            slots = [start + slot * model.max_len for slot, start in enumerate(starts)]
            self._next = model.tensor([starts, slots])
        at = self._next
        if width > 1:
            at = (at[:, :, None] + torch.arange(width, device=at.device)).flatten(1)
            ids = F.pad(ids, (0, width - count))
        out = runner.run(
            {"input_ids": ids.reshape(-1).long(), "position_ids": at[0], "slot_mapping": at[1]},
            host_args=model.decode_host_values(starts, width),
            variant={"width": width} if width > 1 else None,
            longest=max(starts) + width,
        )
        self.length += count
        self._next += count
        # The caller may keep the logits, and the next step writes over those of the runner.
        logits: Tensor = out["logits"].view(batch, width, -1)[:, :count].clone()
        return logits

    def packed(self, ids: Tensor) -> Tensor:
        """Run ``ids``, ``[batch, n]``, in packed steps; return ``[batch, 1, vocabulary]``."""
        engine = self._engine
        logits: Tensor | None = None
        for pieces in self._steps(ids.tolist()):
            found = engine.prefill.run(**engine.model.packed_data(pieces))["logits"]
            if logits is None:
                logits = found.new_zeros(ids.shape[0], found.shape[1])
            for i, piece in enumerate(pieces):
                if piece.completes:
                    logits[piece.slot] = found[i]
        if logits is None:  # Of nothing but padding, which nobody reads.
            shape = ids.shape[0], engine.model.shape.vocabulary
            logits = torch.zeros(shape, dtype=engine.model.dtype, device=engine.model.device)
        self.length, self._next = self.length + ids.shape[1], None
        return logits[:, None]

    def _steps(self, rows: list[list[int]]) -> list[list[Piece]]:
        """Cut the rows of a batch, without their padding, into steps of at most so many tokens."""
        budget, alone = self._engine.max_step_tokens, self._engine.model.own is not None
        steps: list[list[Piece]] = []
        room = 0
        for slot, (row, pad) in enumerate(zip(rows, self.pads, strict=True)):
            cached = max(0, self.length - pad)
            ids = row[max(0, pad - self.length) :]
            while ids:
                if not room or (alone and steps[-1]):
                    steps.append([])
                    room = budget
                steps[-1].append(Piece(slot, cached, ids[:room], len(ids) <= room))
                taken = len(steps[-1][-1].ids)
                ids, cached, room = ids[taken:], cached + taken, room - taken
        return steps


class _SeatedLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of a seated cache; what is asked of all layers in turn is done at the first."""

    is_croppable = True
    is_initialized = True

    def __init__(self, seat: Seat, index: int) -> None:
        self.seat = seat
        self._index = index

    @property
    def keys(self) -> Tensor:
        """The rows as they are now; the next step writes behind them."""
        return self.seat.rows(self._index)[0]

    @property
    def values(self) -> Tensor:
        return self.seat.rows(self._index)[1]

    def get_seq_length(self) -> int:
        return self.seat.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seat.length + query_length, 0

    def get_max_length(self) -> int:
        return -1

    # The name of get_max_length before transformers 5.18.
    get_max_cache_shape = get_max_length

    def activate_past_recording(self) -> None:
        self.seat.records = True

    def __reduce__(self) -> Any:
        """A copy, or a pickle, is a plain layer."""
        return copy.copy, (self.seat.plain(self._index),)

    def crop(self, tokens_to_remove: int) -> None:
        if self._index == 0:
            self.seat.crop(tokens_to_remove)

    def _leave_for(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.seat.leave()[self._index], name)(*args, **kwargs)

    lazy_initialization = functools.partialmethod(_leave_for, "lazy_initialization")
    update = functools.partialmethod(_leave_for, "update")
    reset = functools.partialmethod(_leave_for, "reset")
    reorder_cache = functools.partialmethod(_leave_for, "reorder_cache")
    batch_repeat_interleave = functools.partialmethod(_leave_for, "batch_repeat_interleave")
    batch_select_indices = functools.partialmethod(_leave_for, "batch_select_indices")


def seat_of(cache: Any) -> Seat | None:
    """Return the seat of a cache, None for one that has none."""
    layers = getattr(cache, "layers", None)
    return layers[0].seat if layers and type(layers[0]) is _SeatedLayer else None
