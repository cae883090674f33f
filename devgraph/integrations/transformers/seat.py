"""The cache of a ``model.generate`` call, stored in the slots of an engine.

A cache of transformers is a list of layers. *Seating* a cache replaces its layers with layers that
read the slots of the engine: row ``b`` of the batch has slot ``b``. *Leaving* restores ordinary
layers, which contain copies of the rows. The caller keeps the same cache object. Before an
operation that slots do not support, such as a reordering of beams, the cache leaves its slots.
Copies of a seated cache have ordinary layers. An engine seats one cache at a time::

    ordinary --enter--> seated --leave, or the cache is collected--> ordinary
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

from devgraph.api.errors import StateError, counted
from devgraph.integrations.transformers.engine import Engine
from devgraph.integrations.transformers.requests import Piece
from devgraph.integrations.transformers.state import state_tensors
from devgraph.runners.decode import DecodeRunner

_KEY_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)


def length_of(cache: DynamicCache) -> int | None:
    """Return the length of a cache, or None if it contains recurrent state of unknown length."""
    if any(isinstance(layer, CacheLayerMixin) for layer in cache.layers):
        return int(cache.get_seq_length())
    used = any(any(_flags(layer)) for layer in cache.layers)
    return None if used else 0


def _flags(layer: Any) -> list[bool]:
    """Return for each recurrent state of a layer whether it contains earlier tokens."""
    flags = getattr(layer, "has_previous_state", False)
    return list(flags.values()) if isinstance(flags, dict) else [flags]


class Seat:
    """The request slots of a cache. ``pads`` contains the number of left padding tokens per row."""

    def __init__(self, engine: Engine, cache: DynamicCache, pads: Sequence[int]) -> None:
        self.pads = list(pads)
        self.length: int = length_of(cache) or 0
        """Number of tokens per row, including padding, as transformers counts them."""
        self.can_defer = False
        """Whether the loop of ``generate`` may run an extra step and undo it."""
        self.assisted = False
        """Whether steps check proposed tokens, so that the cache must support cropping."""
        self.records = False
        """Whether the cache must support cropping after it has left the slots."""
        self._engine = engine
        self._rows = engine.model.cache
        self._states = engine.model.states
        self._holder: DecodeRunner = engine.decode
        """Runner that contains the state; ``engine.prefill`` and ``engine.decode`` share state."""
        self._cache = weakref.ref(cache)
        self._next: Tensor | None = None
        self._accepted: int | None = None
        """Number of accepted tokens in the last step of the checking runner; None elsewhere."""
        self._kind = cache.layer_class_to_replicate
        self._originals = list(cache.layers)
        for slot in range(len(pads)):
            engine.clear(slot)
        if self.length:
            self._fill(cache.layers)
        cache.layers[:] = [_SeatedLayer(self, index) for index in range(len(self._rows.layers))]
        cache.layer_class_to_replicate = None

    @staticmethod
    def fits(engine: Engine, cache: Any, batch: int) -> bool:
        """Return whether ``cache`` can be seated in the slots of ``engine``."""
        if type(cache) is not DynamicCache or cache.offloading:
            return False
        shapes, states = engine.model.shape.layers, engine.model.states
        for index, layer in enumerate(cache.layers):
            if index in states.layers:
                is_supported = type(layer) is type(states.layers[index])
            else:
                unused = index < len(shapes) and shapes[index] is None
                is_supported = unused or type(layer) in _KEY_LAYERS
            if not is_supported:
                return False
        length = length_of(cache)
        if not length:
            # An empty cache may have more layers than the model writes (Pegasus), but not fewer.
            missing = 0 < len(cache.layers) < len(shapes) or bool(states and not cache.layers)
            return length == 0 and not missing
        if len(cache.layers) != len(shapes):
            return False
        model = engine.model
        for index, (layer, shape) in enumerate(zip(cache.layers, shapes, strict=True)):
            if shape is not None:
                keys, want = layer.keys, (batch, shape.kv_heads, shape.key_dim)
                if (*keys.shape[:2], keys.shape[3]) != want:
                    return False
                if (keys.device, keys.dtype) != (model.device, model.dtype):
                    return False
            if index in states.layers:
                own = [(*t.shape, t.dtype) for t in state_tensors(layer).values()]
                template = state_tensors(states.layers[index]).values()
                if own != [(batch, *t.shape[1:], t.dtype) for t in template]:
                    return False
        return True

    def _fill(self, layers: Sequence[Any]) -> None:
        if self._states:
            tensors = {index: state_tensors(layers[index]) for index in self._states.layers}
            for slot in range(len(self.pads)):
                self._holder.import_state(slot, self._states.split(tensors, slot))
        for rows, layer in zip(self._rows.layers, layers, strict=True):
            if rows is None:
                continue
            kept = layer.keys.shape[2]
            for slot, pad in enumerate(self.pads):
                # Layers with a sliding window contain only the last rows. Earlier rows are masked,
                # but they must not contain NaN.
                last = self.length - pad
                first = max(0, last - kept)
                targets = (rows.keys_by_slot[slot], rows.values_by_slot[slot])
                for target, source in zip(
                    targets, (layer.keys[slot], layer.values[slot]), strict=True
                ):
                    target[:, :first].zero_()
                    target[:, first:last].copy_(source[:, kept - (last - first) :])

    def leave(self) -> list[Any]:
        """Replace the layers of the cache with ordinary copies, and return the new layers."""
        cache = self._cache()
        if cache is None:
            return []
        if seat_of(cache) is not self:
            return list(cache.layers)
        states = self.exported()
        layers = [self.ordinary(index, states) for index in range(len(cache.layers))]
        cache.layers[:] = layers
        cache.layer_class_to_replicate = self._kind
        return layers

    def exported(self) -> list[dict[str, Tensor]]:
        """Return a copy of the recurrent state of each row."""
        if not self._states:
            return []
        export = self._holder.export_state
        return [export(slot, accepted=self._accepted) for slot in range(len(self.pads))]

    def ordinary(self, index: int, states: list[dict[str, Tensor]]) -> Any:
        """Return a layer of the original kind, with copies of the rows and of ``states``."""
        original = self._originals[index] if self._originals else None
        window = getattr(original, "sliding_window", None)
        has_keys = self._rows.layers[index] is not None
        layer: Any = original
        if index in self._states.layers:
            layer = self._states.layer(index, states, carried=bool(self.length))
            if has_keys:
                layer.is_initialized, layer.cumulative_length = False, 0
        elif has_keys:
            layer = DynamicSlidingWindowLayer(sliding_window=window) if window else DynamicLayer()
        else:
            return original
        if self.records and hasattr(layer, "activate_past_recording"):
            layer.activate_past_recording()
        if self.length and has_keys:
            layer.update(*self.rows(index))
        return layer

    def rows(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a layer with left padding, as in transformers."""
        keys, values = self._rows.layers[index].read(len(self.pads))
        return self._padded(keys[:, :, : self.length]), self._padded(values[:, :, : self.length])

    def _padded(self, rows: Tensor) -> Tensor:
        if not any(self.pads):
            return rows
        out = rows.new_zeros(rows.shape)
        for slot, pad in enumerate(self.pads):
            out[slot, :, pad:] = rows[slot, :, : self.length - pad]
        return out

    @property
    def croppable(self) -> bool:
        """Whether transformers may call ``crop``, which checks how many tokens it can remove."""
        return not self._states or self._accepted is not None or self.assisted

    def crop(self, tokens: int) -> None:
        """Keep the first ``tokens`` tokens, or remove the last ``-tokens`` if it is negative."""
        length = min(self.length, tokens) if tokens > 0 else max(0, self.length + tokens)
        removed = self.length - length
        if not removed:
            return
        if self._states:
            if self._accepted is None or removed > self._accepted:
                raise StateError(
                    f"a cache with recurrent state cannot remove {counted(removed, 'token')} here: "
                    f"only tokens of the last step can be removed, if it ran several"
                )
            self._accepted -= removed
        self.length, self._next = length, None

    def _state_options(self, runner: DecodeRunner) -> dict[str, Any]:
        """Move the state to ``runner``; return the state arguments for its next step."""
        if not self._states:
            return {}
        if runner is not self._holder:
            for slot, state in enumerate(self.exported()):
                runner.import_state(slot, state)
            self._holder, self._accepted = runner, None
        accepted, self._accepted = self._accepted, None
        slots = list(range(len(self.pads)))
        return {"state_slots": slots, "accepted": None if accepted is None else [accepted]}

    def are_next(self, positions: Tensor | None, count: int) -> bool:
        """Whether the last of ``positions`` is that of the ``count``-th next token in every row."""
        if positions is None:
            return True
        ends = [self.length + count - 1 - pad for pad in self.pads]
        last = torch.tensor(ends, device="cpu")
        return bool(((positions[:, -1].cpu() == last) | (last < 0)).all())

    # -- steps -----------------------------------------------------------------------------------

    def decode(self, ids: Tensor, runner: DecodeRunner, widths: Sequence[int] = (1,)) -> Tensor:
        """Run ``ids``, ``[batch, n]``, in a decode step; return logits ``[batch, n, vocabulary]``.

        Tokens are padded to the next larger width in ``widths``. Padding writes rows after the last
        token, which the next step overwrites before they are read.
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
            **self._state_options(runner),
        )
        self.length += count
        self._next += count
        if self._states and len(widths) > 1:
            self._accepted = count
        # Copy the logits: the caller may keep them, but the next step overwrites the runner's.
        logits: Tensor = out["logits"].view(batch, width, -1)[:, :count].clone()
        return logits

    def packed(self, ids: Tensor) -> Tensor:
        """Run packed steps of ``ids``, ``[batch, n]``; return the logits of the last tokens."""
        engine = self._engine
        self._state_options(engine.decode)
        logits: Tensor | None = None
        for pieces in self._steps(ids.tolist()):
            step_logits = engine.prefill.run(**engine.model.packed_data(pieces))["logits"]
            if logits is None:
                logits = step_logits.new_zeros(ids.shape[0], step_logits.shape[1])
            for i, piece in enumerate(pieces):
                if piece.completes:
                    logits[piece.slot] = step_logits[i]
        if logits is None:  # All tokens are padding, whose logits are unused.
            shape = ids.shape[0], engine.model.shape.vocabulary
            logits = torch.zeros(shape, dtype=engine.model.dtype, device=engine.model.device)
        self.length, self._next = self.length + ids.shape[1], None
        return logits[:, None]

    def _steps(self, rows: list[list[int]]) -> list[list[Piece]]:
        """Divide the rows of a batch, without padding, into steps of limited size."""
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
                piece = Piece(slot, cached, ids[:room], len(ids) <= room)
                steps[-1].append(piece)
                ids, cached, room = ids[room:], cached + piece.count, room - piece.count
        return steps


class _SeatedLayer(CacheLayerMixin):  # type: ignore[misc]
    """A layer of a seated cache. transformers calls ``crop`` on all layers; the first crops all."""

    is_initialized = True

    def __init__(self, seat: Seat, index: int) -> None:
        self.seat = seat
        self._index = index

    @property
    def is_croppable(self) -> bool:
        return self.seat.croppable

    @property
    def keys(self) -> Tensor:
        """A copy or a view of the rows so far; the next step writes the rows after them."""
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

    # Name of get_max_length before transformers 5.18.
    get_max_cache_shape = get_max_length

    def activate_past_recording(self) -> None:
        self.seat.records = True

    def __reduce__(self) -> Any:
        """Copy or pickle this layer as an ordinary layer."""
        return copy.copy, (self.seat.ordinary(self._index, self.seat.exported()),)

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
    layers = getattr(cache, "layers", None)
    return layers[0].seat if layers and type(layers[0]) is _SeatedLayer else None
