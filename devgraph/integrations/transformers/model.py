"""A causal language model of transformers as the step functions that the runners call.

The model is not changed: while one of its forwards runs here, its configuration names this
adapter's attention function (and, for mixtures of experts, an implementation without
data-dependent shapes); afterwards it is as it was, and ``model.generate`` works as before.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from devgraph.api.errors import InputError, StateError, whole
from devgraph.integrations.transformers.attention import (
    CacheLayer,
    KVCache,
    SlotAttention,
    decode_bounded,
    decode_mask,
    decode_whole,
    has_varlen,
    packed_exact,
    varlen_decode,
    varlen_packed,
)
from devgraph.integrations.transformers.fusion import Fusion, standing_in
from devgraph.integrations.transformers.names import NAMES
from devgraph.integrations.transformers.probe import (
    ModelShape,
    attends_itself,
    mask_of,
    ordinary_device,
    overriding,
    parameters_of,
    probe,
    refusal,
    register,
    unregister,
)
from devgraph.integrations.transformers.requests import Piece
from devgraph.runners.batch import Batch
from devgraph.runners.loop import Loop
from devgraph.runners.slots import InputSlot, Pad, Size

logger = logging.getLogger(__name__)

ROW_MULTIPLE = 64
"""Slots and ``kv_len`` are multiples of this many rows: a key of an update lasts that long."""


class _Step:
    """What the attention calls of one forward need besides their own tensors."""

    def __init__(self, batch: Batch, *, decode: bool) -> None:
        self.batch = batch
        self.decode = decode
        self.masks: dict[int | None, Tensor] = {}
        self.lengths: Tensor | None = None
        self.width = (batch.width or 1) if decode else int(batch.input_ids.shape[0])


class CausalModel:
    """Steps over ``model`` with a cache of ``max_requests`` slots of at least ``max_len`` rows.

    Two steps exist. *Decode*: ``width`` tokens for each request, and request ``i`` of the batch
    has slot ``i``. *Packed*: any number of tokens for each request, in any slot (prefill, chunks
    of it, and decoding requests beside them).

    A model that *attends by itself* (``own`` says why) runs its own attention on whole slots,
    under a mask made of device positions: nothing in its steps comes from the host. Its packed
    steps have the tokens of one request. It was seen to give the logits of the model alone.

    Args:
        model, max_requests, max_len, fuse: as of ``Engine``; a slot has the rows of ``max_len``,
            rounded up to a multiple of 64.
        updatable: whether graphs of this backend take new host arguments
            (``capabilities.region_update``). If not, decode attends over whole slots.
        slot_attention: the backend's extension of that name. The device's own attention is used
            if it has one for this model.
        pin: ``Backend.pin``: host memory from which copies are asynchronous; None copies as it is.

    Raises: as ``Engine``.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_requests: int = 8,
        max_len: int | None = None,
        updatable: bool = True,
        fuse: bool = True,
        slot_attention: Callable[..., SlotAttention | None] | None = None,
        pin: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.model = model
        self._pin = pin
        self.shape = probe(model)
        self.positions = _positions(self.shape, max_len)
        self.max_requests = max_requests = whole("max_requests", max_requests, 1)
        self.device, self.dtype = self.shape.device, self.shape.dtype
        self.own = self.shape.own
        self.bounded = updatable and self.own is None
        offered = slot_attention if self.bounded else None
        self.slotted = offered and self._choose_slotted(offered)
        multiple = self.slotted.row_multiple if self.slotted else ROW_MULTIPLE
        self.max_len = _round_up(self.positions, multiple)
        self.cache = KVCache(
            self.shape.layers,
            max_requests,
            max_len=self.max_len,
            rows_first=self.slotted is not None,
            dtype=self.dtype,
            device=self.device,
            answers=self.shape.uses_length,
        )
        self.varlen = self.slotted is None and self.own is None and self._has_varlen()
        self._step: _Step | None = None
        self._windows = sorted({layer.window for layer in self.shape.layers}, key=str)
        self._rows = torch.arange(self.max_len, device=self.device)
        starts = torch.arange(max_requests + 1, dtype=torch.int32, device=self.device)
        self._starts, self._row_starts = starts, starts * self.max_len
        self.fusion = Fusion(self.shape.seen) if fuse and self.own is None else None
        self._name = f"devgraph_{id(self):x}"
        # The registry must not keep the model alive, nor what its layers would call afterwards.
        if self.own is None:
            register(self._name, functools.partial(CausalModel._attend, weakref.proxy(self)))
        else:
            mask = functools.partial(CausalModel._mask, weakref.proxy(self))
            register(self._name, attends_itself(model), mask)
        self._finalizer = weakref.finalize(self, unregister, self._name)
        self._takes_positions = "position_ids" in parameters_of(self.shape.body)
        both = {"position_ids", NAMES.length}
        self._placed = [
            module
            for module in self.shape.body.modules()
            if not self._takes_positions and both <= parameters_of(module)
        ]
        overrides = self.shape.overrides | {"_attn_implementation": self._name}
        self._overriding = overriding(model, **overrides)
        if self.own is not None:
            with ordinary_device():
                self._verify()

    def _choose_slotted(self, offered: Callable[..., SlotAttention | None]) -> SlotAttention | None:
        shapes = set(self.shape.layers)
        if len(shapes) > 1:
            return None  # One list of lengths serves all layers.
        shape = shapes.pop()
        if shape.window or shape.softcap or shape.key_dim != shape.value_dim:
            return None
        return offered(
            slots=self.max_requests,
            rows=self.positions,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.key_dim,
            dtype=self.dtype,
        )

    def _has_varlen(self) -> bool:
        kinds = {(layer.key_dim, layer.value_dim, layer.softcap) for layer in self.shape.layers}
        return all(
            key_dim == value_dim
            and softcap is None
            and has_varlen(key_dim, dtype=self.dtype, device=self.device)
            for key_dim, value_dim, softcap in kinds
        )

    # -- what the runners are told ---------------------------------------------------------------

    def decode_inputs(self, steps: int = 1) -> list[InputSlot]:
        """Return the input slots of a decode step, or of a launch of several."""
        slots = self._token_slots(steps)
        if steps > 1:
            slots.append(
                InputSlot(
                    "left",
                    ("requests",),
                    torch.int64,
                    pad=Pad.zero(),
                    sample=lambda shape, _: torch.full(shape, steps),
                )
            )
        return slots

    def packed_inputs(self) -> list[InputSlot]:
        """Return the input slots of a packed step."""
        slots = self._token_slots()
        if self.varlen:
            slots += [
                InputSlot("query_starts", ("requests+1",), torch.int32, pad=Pad.last()),
                InputSlot("row_starts", ("requests+1",), torch.int32, pad=Pad.zero()),
                InputSlot("lengths", ("requests",), torch.int32, pad=Pad.zero()),
            ]
        return [*slots, InputSlot("last_tokens", ("requests",), torch.int64, pad=Pad.zero())]

    def _token_slots(self, steps: int = 1) -> list[InputSlot]:
        def drawn(high: int) -> Callable[[tuple[int, ...], torch.Generator], Tensor]:
            return lambda shape, generator: torch.randint(0, high, shape, generator=generator)

        highest = max(1, min(ROW_MULTIPLE, self.positions) - steps + 1)
        ids, positions = drawn(self.shape.vocabulary), drawn(highest)
        scratch = Pad.fill(self.cache.scratch_row)
        return [
            InputSlot("input_ids", ("tokens",), torch.int64, pad=Pad.zero(), sample=ids),
            InputSlot("position_ids", ("tokens",), torch.int64, pad=Pad.zero(), sample=positions),
            # No sample: a proof must not write to the slots of live requests.
            InputSlot("slot_mapping", ("tokens",), torch.int64, pad=scratch),
        ]

    @property
    def decode_host_args(self) -> dict[str, Any]:
        """Host arguments of a decode step, with the values to capture with."""
        if self.varlen or not self.bounded:
            return {}
        if self.slotted:
            return {"spans": ()}
        return {"kv_len": ROW_MULTIPLE, "kv_from": 0}

    @property
    def packed_host_args(self) -> dict[str, tuple[int, ...]]:
        """Host arguments of a packed step, with the values to capture with."""
        return {} if self.varlen or self.own is not None else {"spans": ()}

    def decode_host_values(
        self, positions: list[int], width: int = 1, *, longest: int | None = None
    ) -> dict[str, Any]:
        """Return the host arguments for requests whose first new token is at ``positions``.

        Rounded so that they repeat, and the rows they make readable are cleared.

        Args:
            longest: tokens of the longest sequence after a launch of several steps.
        """
        if self.varlen:
            return {}
        if self.slotted:
            spans = ((slot, position, width) for slot, position in enumerate(positions))
            return {"spans": tuple(itertools.chain.from_iterable(spans))}
        longest = longest or max(positions) + width
        high = _round_up(longest, ROW_MULTIPLE) if self.bounded else self.max_len
        for slot, position in enumerate(positions):
            self.cache.prepare(slot, position + width, high)
        if not self.bounded:
            return {}
        low = min(positions) // ROW_MULTIPLE * ROW_MULTIPLE if self._windows != [None] else 0
        return {"kv_len": high, "kv_from": low}

    def decode_data(
        self, pieces: Sequence[Piece], left: Sequence[int] | None = None, *, steps: int = 1
    ) -> dict[str, Any]:
        """Return what a runner runs for a decode step; piece ``i`` has one token and slot ``i``.

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
        host_args = self.decode_host_values(positions, longest=longest)
        return {"inputs": inputs, "host_args": host_args, "longest": longest}

    def packed_data(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """Return what a runner runs for a packed step over pieces of any length in any slots."""
        inputs = self._tokens(pieces)
        ends = list(itertools.accumulate(piece.count for piece in pieces))
        lengths = [piece.cached + piece.count for piece in pieces]
        inputs["last_tokens"] = self.tensor([end - 1 for end in ends])
        host_args: dict[str, Any] = {}
        if self.varlen:
            rows = [piece.slot * self.max_len for piece in pieces]
            inputs["query_starts"] = self.tensor([0, *ends], torch.int32)
            inputs["row_starts"] = self.tensor([*rows, 0], torch.int32)
            inputs["lengths"] = self.tensor(lengths, torch.int32)
        elif self.own is not None:
            for piece, length in zip(pieces, lengths, strict=True):
                self.cache.prepare(piece.slot, length, self.max_len)
        else:
            spans = ((p.slot, p.cached, p.count) for p in pieces)
            host_args["spans"] = tuple(itertools.chain.from_iterable(spans))
        return {"inputs": inputs, "host_args": host_args, "longest": max(lengths)}

    def _tokens(self, pieces: Sequence[Piece]) -> dict[str, Tensor]:
        ids: list[int] = []
        positions: list[int] = []
        rows: list[int] = []
        for piece in pieces:
            first, last = piece.cached, piece.cached + piece.count
            start = piece.slot * self.max_len
            ids += piece.ids
            positions += range(first, last)
            rows += range(start + first, start + last)
        # One transfer for all three.
        all_three = self.tensor([ids, positions, rows])
        return dict(zip(("input_ids", "position_ids", "slot_mapping"), all_three, strict=True))

    def tensor(self, values: list[Any], dtype: torch.dtype = torch.int64) -> Tensor:
        """Return ``values`` as a tensor on the device."""
        made = torch.tensor(values, dtype=dtype, device="cpu")
        if self._pin is None or self.device.type == "cpu":
            return made.to(self.device)
        return self._pin(made).to(self.device, non_blocking=True)

    # -- steps -----------------------------------------------------------------------------------

    @torch.no_grad()
    def decode(self, batch: Batch) -> dict[str, Tensor]:
        """Run one decode step: logits ``[tokens, vocabulary]`` and their argmax ``[tokens]``."""
        step = _Step(batch, decode=True)
        width = step.width
        if self.varlen:
            ends = batch.position_ids.view(-1, width)[:, -1]
            step.lengths = (ends + 1).to(torch.int32)
        elif not self.slotted and self.own is None:
            for window in self._windows:
                step.masks[window] = decode_mask(
                    batch.position_ids, self._rows, width, window, self.dtype
                )
        with self._running(step):
            logits = self.model(**self._inputs(step)).logits.flatten(0, 1)
        return {"logits": logits, "tokens": logits.argmax(-1)}

    def loop(self, steps: int, ends: Iterable[int]) -> Loop:
        """Return how a launch of several decode steps goes on: greedily, until a request has one of
        the tokens ``ends`` or as many as ``left`` says."""
        last = torch.tensor(sorted(ends), dtype=torch.int64, device=self.device)

        def advance(batch: Batch, tokens: Tensor) -> None:
            batch.input_ids.copy_(tokens)
            batch.position_ids.add_(1)
            batch.slot_mapping.add_(1)
            batch.left.sub_(1)

        def done(batch: Batch, tokens: Tensor) -> Tensor:
            return (tokens[:, None] == last).any(1) | (batch.left <= 0)

        return Loop(steps=steps, advance=advance, done=done)

    @torch.no_grad()
    def packed(self, batch: Batch) -> Tensor:
        """Run one packed step up to the last hidden states, ``[tokens, hidden]``."""
        step = _Step(batch, decode=False)
        with self._running(step):
            output = self.shape.body(**self._inputs(step))
        return output.last_hidden_state[0]  # type: ignore[no-any-return]

    @torch.no_grad()
    def tail(self, hidden: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Finish a packed step: what ``decode`` returns, for the last token of every request.

        The model's own head is whatever its forward does after its base model (scaling, capping),
        so that forward runs with the hidden states ``[tokens, hidden]`` in place of that.
        """
        hidden = hidden.index_select(0, batch.last_tokens)
        output = self.shape.output_type(last_hidden_state=hidden[None])
        with standing_in([(self.shape.body, "forward", lambda *args, **kwargs: output)]):
            ids = hidden.new_zeros((1, hidden.shape[0]), dtype=torch.int64)
            logits = self.model(input_ids=ids, use_cache=False).logits[0]
        return {"logits": logits, "tokens": logits.argmax(-1)}

    def _inputs(self, step: _Step) -> dict[str, Any]:
        shape = (1, -1) if self.own is None else (-1, step.width)
        inputs = {
            "input_ids": step.batch.input_ids.view(shape),
            NAMES.cache: self.cache,
            "use_cache": True,
        }
        if self._takes_positions:
            inputs["position_ids"] = step.batch.position_ids.view(shape)
        return inputs

    @contextlib.contextmanager
    def _running(self, step: _Step) -> Iterator[None]:
        if self._step is not None:
            raise StateError("a step of this model is already running; an engine is one thread's")
        self._step = step
        rows = step.batch.slot_mapping
        if self.own is None:
            self.cache.aim(rows)
        else:
            slots: int | Tensor = rows.shape[0] // step.width
            if not step.decode:  # Padding has the scratch row, which is in no slot.
                slots = (rows[:1] // self.max_len).clamp(max=self.max_requests - 1)
            self.cache.aim(rows, slots, width=step.width)
        try:
            placed = [(module, "forward", _at_positions(module, step)) for module in self._placed]
            fused = contextlib.nullcontext() if self.fusion is None else self.fusion.active()
            with standing_in([*self._overriding, *placed]), fused:
                yield
        finally:
            self.cache.aim(None)
            self._step = None

    def _verify(self) -> None:
        """Refuse the model unless steps over slots give the logits that it gives alone: those of
        the last two tokens of texts that run in two packed steps each and a decode step of all."""
        draw = torch.Generator().manual_seed(0)
        texts = [
            torch.randint(self.shape.vocabulary, (n,), generator=draw, device="cpu").tolist()
            for n in (7, 5)[: self.max_requests]
        ]
        got, alone = [], []
        try:
            for slot, text in enumerate(texts):
                for first, end in ((0, 3), (3, len(text) - 1)):
                    piece = Piece(slot, first, text[first:end], completes=True)
                    batch = self._batch(self.packed_data([piece]), 1, padding=2)
                    last = self.tail(self.packed(batch), batch)["logits"][0]
                got.append(last)
            ends = [Piece(slot, len(t) - 1, t[-1:], completes=True) for slot, t in enumerate(texts)]
            got += self.decode(self._batch(self.decode_data(ends), len(ends)))["logits"]
            with torch.no_grad(), standing_in(overriding(self.model, pad_token_id=None)):
                for text in texts:
                    ids = torch.tensor([text], device=self.device)
                    alone.append(self.model(input_ids=ids, use_cache=False).logits[0])
        except Exception as error:
            raise refusal(
                self.model, f"{self.own}; and its own attention fails on whole slots ({error})"
            ) from error
        for slot in range(len(texts)):
            self.cache.release(slot)
        want = torch.stack([logits[at] for at in (-2, -1) for logits in alone]).float()
        limit = 1e-3 if self.dtype == torch.float32 else 5e-2
        if not (torch.stack(got).float() - want).abs().max() <= limit * want.abs().max():
            raise refusal(
                self.model, f"{self.own}; and its own attention gives other logits on whole slots"
            )

    def _batch(self, data: dict[str, Any], requests: int, *, padding: int = 0) -> Batch:
        pads = {"slot_mapping": self.cache.scratch_row}
        inputs = {
            name: F.pad(tensor, (0, padding), value=pads.get(name, 0))
            for name, tensor in data["inputs"].items()
        }
        return Batch(inputs, Size(requests, len(inputs["input_ids"])), host={}, variant={})

    # -- attention -------------------------------------------------------------------------------

    def _mask(self, *args: Any, mask_function: Callable[..., Any], **kwargs: Any) -> Tensor:
        step = self._step
        assert step is not None
        positions = step.batch.position_ids.view(-1, step.width)
        return mask_of(mask_function, positions, self._rows, self.dtype)

    def _attend(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        scaling: float | None = None,
        softcap: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        layer, step = self.cache.take(), self._step
        assert step is not None  # or nothing was written
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        window, host = layer.shape.window, step.batch.host
        if self.varlen:
            return self._attend_varlen(step, layer, query, scale), None
        shape = (1, query.shape[2], query.shape[1], layer.shape.value_dim)
        # Zeros: tokens that belong to no request must have results that do not change by chance.
        out = query.new_empty(shape) if step.decode else query.new_zeros(shape)
        scoring = (scale, softcap, window)
        keys, values = layer.keys_by_slot, layer.values_by_slot
        if self.slotted:
            self.slotted.attend(
                query[0].transpose(0, 1).contiguous(),
                layer.keys_by_row,
                layer.values_by_row,
                out[0],
                scale=scale,
                spans=host.spans,
            )
        elif not step.decode:
            packed_exact(query, keys, values, self._rows, out, scoring, spans=host.spans)
        elif self.bounded:
            bounds = {"kv_len": host.kv_len, "kv_from": host.kv_from}
            decode_bounded(query, keys, values, step.masks[window], out, scoring, **bounds)
        else:
            decode_whole(query, keys, values, step.masks[window], out, scoring)
        return out, None

    def _attend_varlen(self, step: _Step, layer: CacheLayer, query: Tensor, scale: float) -> Tensor:
        window, keys, values = layer.shape.window, layer.keys, layer.values
        if step.lengths is None:
            return varlen_packed(query, keys, values, step.batch, scale, window, self.max_len)
        requests = step.lengths.shape[0]
        width, starts = query.shape[2] // requests, self._starts[: requests + 1]
        if width > 1:
            starts = starts * width
        spans = (starts, self._row_starts[: requests + 1], step.lengths)
        return varlen_decode(query, keys, values, spans, scale, window, width, self.max_len)

    def close(self) -> None:
        """Take what belongs to this adapter out of transformers and the model; idempotent."""
        self._finalizer()
        if self.fusion is not None:
            self.fusion.close()


def _at_positions(module: torch.nn.Module, step: _Step) -> Callable[..., Tensor]:
    """Return the forward of an embedding of positions that takes them from ``step``, and not from
    the length of a cache."""
    own = module.forward
    taken = inspect.signature(own)

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        given = taken.bind(*args, **kwargs)
        given.arguments["position_ids"] = step.batch.position_ids.clone()
        made: Tensor = own(*given.args, **given.kwargs)
        return made.reshape(-1, step.width, made.shape[-1])

    return forward


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _positions(shape: ModelShape, max_len: int | None) -> int:
    limit = shape.positions
    if max_len is None:
        max_len = min(limit or 2048, 2048)
    max_len = whole("max_len", max_len, 1)
    if limit is not None and max_len > limit:
        raise InputError(
            f"max_len {max_len} is over the {limit} positions that the model has and its cache "
            f"keeps; use at most {limit}"
        )
    return max_len
