"""A causal language model of transformers as the step functions that the runners call.

The model is not changed: while one of its forwards runs here, its configuration names this
adapter's attention function (and, for mixtures of experts, an implementation without
data-dependent shapes); afterwards it is as it was, and ``model.generate`` works as before.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_utils import AttentionInterface

from devgraph.api.backend import SlotAttention
from devgraph.api.errors import InputError, StateError
from devgraph.integrations.transformers.attention import (
    decode_bounded,
    decode_mask,
    decode_whole,
    has_varlen,
    packed_exact,
    ramp_mask,
    varlen_decode,
    varlen_packed,
)
from devgraph.integrations.transformers.cache import CacheLayer, KVCache
from devgraph.integrations.transformers.fusion import Fusion
from devgraph.integrations.transformers.probe import (
    ModelShape,
    configs_of,
    overridden,
    probe,
    standing_in,
)
from devgraph.runners.batch import Batch
from devgraph.runners.slots import InputSlot, Pad

logger = logging.getLogger(__name__)

ROW_MULTIPLE = 64
"""Slots and ``kv_len`` are multiples of this many rows: a key of an update lasts that long."""


class _Step:
    """What the attention calls of one forward need besides their own tensors."""

    def __init__(self, batch: Batch, *, decode: bool) -> None:
        self.batch = batch
        self.decode = decode
        self.masks: dict[int | None, torch.Tensor] = {}
        self.lengths: torch.Tensor | None = None


class CausalModel:
    """Steps over ``model`` with a cache of ``max_requests`` slots of at least ``max_len`` rows.

    Two steps exist. *Decode*: ``width`` tokens for each request, and request ``i`` of the batch
    has slot ``i``. *Packed*: any number of tokens for each request, in any slot (prefill, chunks
    of it, and decoding requests beside them).

    Args:
        model: a causal language model in evaluation mode, on one device.
        max_requests: slots.
        max_len: positions of a request; None means what the model allows, at most 2048. A slot
            has this many rows, rounded up to a multiple of 64.
        updatable: whether graphs of this backend take new host arguments
            (``capabilities.region_update``). If not, decode attends over whole slots.
        varlen: force the kernel with device lengths on or off; None tries it.
        fuse: compute norms, rotary embeddings and neighbouring projections with fewer kernels
            (see ``fusion``); results then differ from the model's own by rounding.
        slot_attention: ``Backend.slot_attention``: the device's own attention is used where it
            has one for this model.

    Raises:
        UnsupportedModelError: the model cannot run correctly here.
        InputError: a size that is not positive, or more positions than the model has or its cache
            keeps.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_requests: int = 8,
        max_len: int | None = None,
        updatable: bool = True,
        varlen: bool | None = None,
        fuse: bool = True,
        slot_attention: Callable[..., SlotAttention | None] | None = None,
    ) -> None:
        self.model = model
        self.shape = probe(model)
        self.positions = _positions(self.shape, max_len)
        if max_requests < 1:
            raise InputError(f"max_requests must be at least 1, got {max_requests}")
        self.max_requests = max_requests
        self.device, self.dtype = self.shape.device, self.shape.dtype
        self.bounded = updatable
        offered = slot_attention if updatable and not varlen else None
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
        self.varlen = self.slotted is None and self._choose_varlen(varlen)
        self._step: _Step | None = None
        self._windows = sorted({layer.window for layer in self.shape.layers}, key=str)
        self._rows = torch.arange(self.max_len, device=self.device)
        starts = torch.arange(max_requests + 1, dtype=torch.int32, device=self.device)
        self._starts, self._row_starts = starts, starts * self.max_len
        self._ramps = {} if self.varlen or self.slotted else self._make_ramps()
        self.fusion = Fusion(self.shape.seen) if fuse else None
        self._configs = configs_of(model)
        self._name = f"devgraph_{id(self):x}"
        # The registry must not keep the model alive, nor what its layers would call afterwards.
        AttentionInterface.register(self._name, _weakly(self._attend))
        self._finalizer = weakref.finalize(
            self, AttentionInterface._global_mapping.pop, self._name, None
        )
        self._overrides = self._choose_overrides()

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

    def _choose_varlen(self, wanted: bool | None) -> bool:
        dims = {(s.key_dim, s.value_dim) for s in self.shape.layers}
        able = (
            all(k == v for k, v in dims)
            and all(s.softcap is None for s in self.shape.layers)
            and all(has_varlen(k, dtype=self.dtype, device=self.device) for k, _ in dims)
        )
        if wanted and not able:
            raise InputError(
                f"varlen=True, but {self.device.type} has no kernel with device lengths for "
                f"{self.dtype}, head sizes {sorted(dims)} and these layers; leave varlen out"
            )
        return able if wanted is None else wanted

    def _make_ramps(self) -> dict[int | None, torch.Tensor]:
        return {
            window: ramp_mask(self.max_len, window, dtype=self.dtype, device=self.device)
            for window in self._windows
        }

    def _choose_overrides(self) -> dict[str, Any]:
        # pad_token_id: some models look for padding among the ids, on the host, when it is set.
        overrides: dict[str, Any] = {"_attn_implementation": self._name, "pad_token_id": None}
        if any(getattr(c, "_experts_implementation", None) is not None for c in self._configs):
            # Grouped products read the group sizes on the host unless the device has the kernel.
            fused = self.device.type != "cpu" and self.dtype == torch.bfloat16
            overrides["_experts_implementation"] = "grouped_mm" if fused else "batched_mm"
        return overrides

    # -- what the runners are told ---------------------------------------------------------------

    def decode_inputs(self) -> list[InputSlot]:
        """Return the input slots of a decode step."""
        return self._token_slots()

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

    def _token_slots(self) -> list[InputSlot]:
        def drawn(high: int) -> Callable[[tuple[int, ...], torch.Generator], torch.Tensor]:
            return lambda shape, generator: torch.randint(0, high, shape, generator=generator)

        ids, positions = drawn(self.shape.vocabulary), drawn(min(ROW_MULTIPLE, self.positions))
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
        return {} if self.varlen else {"spans": ()}

    def decode_host_values(self, positions: list[int], width: int = 1) -> dict[str, Any]:
        """Return the host arguments for requests whose first new token is at ``positions``.

        Rounded so that they repeat, and the rows they make readable are cleared.
        """
        if self.varlen:
            return {}
        if self.slotted:
            spans = ((slot, position, width) for slot, position in enumerate(positions))
            return {"spans": tuple(itertools.chain.from_iterable(spans))}
        if not self.bounded:
            self._prepare(positions, width, self.max_len)
            return {}
        high = _round_up(max(positions) + width, ROW_MULTIPLE)
        self._prepare(positions, width, high)
        low = min(positions) // ROW_MULTIPLE * ROW_MULTIPLE if self._windows != [None] else 0
        return {"kv_len": high, "kv_from": low}

    def _prepare(self, positions: list[int], width: int, upto: int) -> None:
        for slot, position in enumerate(positions):
            self.cache.prepare(slot, position + width, upto)

    # -- steps -----------------------------------------------------------------------------------

    @torch.no_grad()
    def decode(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Run one decode step: logits ``[tokens, vocabulary]`` and their argmax ``[tokens]``."""
        step = _Step(batch, decode=True)
        width = batch.width or 1
        if self.varlen:
            ends = batch.position_ids.view(-1, width)[:, -1]
            step.lengths = (ends + 1).to(torch.int32)
        elif not self.slotted:
            for window in self._windows:
                step.masks[window] = decode_mask(
                    batch.position_ids, self._rows, width, window, self.dtype
                )
        with self._running(step):
            logits = self.model(**self._inputs(batch)).logits[0]
        return {"logits": logits, "tokens": logits.argmax(-1)}

    @torch.no_grad()
    def packed(self, batch: Batch) -> torch.Tensor:
        """Run one packed step up to the last hidden states, ``[tokens, hidden]``."""
        with self._running(_Step(batch, decode=False)):
            output = self.shape.body(**self._inputs(batch))
        return output.last_hidden_state[0]  # type: ignore[no-any-return]

    @torch.no_grad()
    def tail(self, hidden: torch.Tensor, batch: Batch) -> dict[str, torch.Tensor]:
        """Finish a packed step: what ``decode`` returns, for the last token of every request."""
        return self.head(hidden.index_select(0, batch.last_tokens))

    @torch.no_grad()
    def head(self, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
        """Apply the model's own head to hidden states ``[rows, hidden]``.

        The head is whatever the model's forward does after its base model (scaling, capping), so
        that forward runs with the base model standing in for these states.
        """
        output = self.shape.output_type(last_hidden_state=hidden[None])
        with standing_in(self.shape.body, output):
            ids = hidden.new_zeros((1, hidden.shape[0]), dtype=torch.int64)
            logits = self.model(input_ids=ids, use_cache=False).logits[0]
        return {"logits": logits, "tokens": logits.argmax(-1)}

    def _inputs(self, batch: Batch) -> dict[str, Any]:
        return {
            "input_ids": batch.input_ids[None],
            "position_ids": batch.position_ids[None],
            "past_key_values": self.cache,
            "use_cache": True,
        }

    @contextlib.contextmanager
    def _running(self, step: _Step) -> Iterator[None]:
        if self._step is not None:
            raise StateError("a step of this model is already running; an engine is one thread's")
        self._step = step
        self.cache.aim(step.batch.slot_mapping)
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(overridden(self._configs, **self._overrides))
                if self.fusion is not None:
                    stack.enter_context(self.fusion.active())
                yield
        finally:
            self.cache.aim(None)
            self._step = None

    # -- attention -------------------------------------------------------------------------------

    def _attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        scaling: float | None = None,
        softcap: float | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        step, layer = self._step, self.cache.take()
        if step is None:
            raise StateError("this attention function serves the steps of a device-graph engine")
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        if self.varlen:
            return self._attend_varlen(step, layer, query, scale), None
        shape = (1, query.shape[2], query.shape[1], layer.shape.value_dim)
        # Zeros: tokens that belong to no request must have results that do not change by chance.
        out = query.new_empty(shape) if step.decode else query.new_zeros(shape)
        keys, values, window = layer.keys_by_slot, layer.values_by_slot, layer.shape.window
        host = step.batch.host
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
            packed_exact(
                query,
                keys,
                values,
                self._ramps[window],
                out,
                scale,
                softcap,
                window,
                spans=host.spans,
            )
        elif self.bounded:
            decode_bounded(
                query,
                keys,
                values,
                step.masks[window],
                out,
                scale,
                softcap,
                window,
                kv_len=host.kv_len,
                kv_from=host.kv_from,
            )
        else:
            decode_whole(query, keys, values, step.masks[window], out, scale, softcap)
        return out, None

    def _attend_varlen(
        self, step: _Step, layer: CacheLayer, query: torch.Tensor, scale: float
    ) -> torch.Tensor:
        window, batch = layer.shape.window, step.batch
        if not step.decode:
            return varlen_packed(
                query, layer.keys, layer.values, batch, scale, window, self.max_len
            )
        assert step.lengths is not None
        requests = step.lengths.shape[0]
        width = query.shape[2] // requests
        return varlen_decode(
            query,
            layer.keys,
            layer.values,
            self._starts[: requests + 1] * width if width > 1 else self._starts[: requests + 1],
            self._row_starts[: requests + 1],
            step.lengths,
            scale,
            window,
            width,
            self.max_len,
        )

    def close(self) -> None:
        """Take what belongs to this adapter out of transformers and the model; idempotent."""
        self._finalizer()
        if self.fusion is not None:
            self.fusion.close()


def _weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    reference = weakref.WeakMethod(method)

    def call(*args: Any, **kwargs: Any) -> Any:
        live = reference()
        if live is None:
            raise StateError("the engine that this attention function belonged to is gone")
        return live(*args, **kwargs)

    return call


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _positions(shape: ModelShape, max_len: int | None) -> int:
    limit = shape.positions
    if max_len is None:
        max_len = min(limit or 2048, 2048)
    if max_len < 1:
        raise InputError(f"max_len must be at least 1, got {max_len}")
    if limit is not None and max_len > limit:
        raise InputError(
            f"max_len {max_len} is over the {limit} positions that the model has and its cache "
            f"keeps; use at most {limit}"
        )
    return max_len
