"""The step functions that runners call for a causal language model.

Inside a step, the configuration of the model selects the attention function of ``CausalModel`` and,
for mixtures of experts, an implementation without data-dependent shapes. Outside of steps, the
model runs its own code.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import math
import operator
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree
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
from devgraph.integrations.transformers.fusion import Fusion, model_lock, replaced
from devgraph.integrations.transformers.names import LENGTH
from devgraph.integrations.transformers.probe import (
    ModelShape,
    body_inputs,
    mask_of,
    new_cache,
    ordinary_device,
    overriding,
    own_attention,
    parameters_of,
    probe,
    refusal,
    registered,
)
from devgraph.integrations.transformers.requests import Piece
from devgraph.integrations.transformers.state import Mixer, RecurrentLayers, run_packed
from devgraph.runners.batch import Batch, StateViews
from devgraph.runners.buckets import round_up
from devgraph.runners.loop import Loop
from devgraph.runners.slots import InputSlot, Pad, Size

ROW_MULTIPLE = 64
"""Without slot attention, row counts of slots and ``kv_len`` are multiples of this number.

A sequence that grows by one token per step then changes ``kv_len``, and updates the graph, only
once in 64 steps.
"""


class _Step:
    """The data that attention and mixers read in one forward."""

    def __init__(self, batch: Batch, *, decode: bool, max_len: int) -> None:
        self.batch = batch
        self.decode = decode
        self.masks: dict[int | None, Tensor] = {}
        self.lengths: Tensor | None = None
        self.tokens = int(batch.input_ids.shape[0])
        self.width = (batch.width or 1) if decode else self.tokens
        # Padding writes the scratch row, so its slot is ``max_requests``.
        self.slots = batch.slot_mapping[:: self.width] // max_len


class CausalModel:
    """The steps of ``model`` over ``max_requests`` slots of at least ``max_len`` rows.

    A *decode* step runs ``width`` tokens per request, and request ``i`` has slot ``i``. A *packed*
    step runs any number of tokens per request, in any slot: whole prompts, chunks of prompts, and
    single tokens of decoding requests.

    A model with its own attention (``own`` is the reason) runs it on whole slots, with a mask that
    is computed on the device. Its steps need no host arguments, and a packed step contains the
    tokens of one request. Mixers keep recurrent state in the state slots of the runners (see
    ``state``). In both cases, the constructor compares logits of steps and of the unchanged model.

    For the other arguments and the errors, see ``Engine``.

    Args:
        updatable: whether graphs of the backend accept new host arguments
            (``capabilities.region_update``). Otherwise, decode attends to whole slots.
        slot_attention: the backend's extension ``slot_attention``, used if it supports the model.
        pin: a function that pins host memory for asynchronous copies; None copies synchronously.
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
        layerwise: bool = False,
    ) -> None:
        self.model = model
        self.layerwise = layerwise
        self._pin = pin
        self.shape = probe(model)
        self.positions = _positions(self.shape, max_len)
        self.max_requests = max_requests = whole("max_requests", max_requests, 1)
        self.device, self.dtype = self.shape.device, self.shape.dtype
        self.own = self.shape.own
        attention = self.shape.attention
        self.bounded = updatable and self.own is None and bool(attention)
        offered = slot_attention if self.bounded else None
        self.slotted = offered and self._choose_slotted(offered)
        # A backend with its own attention can neither update nor capture other attention.
        self.fused = offered is None
        self.bounded = self.bounded and (self.fused or self.slotted is not None)
        multiple = self.slotted.row_multiple if self.slotted else ROW_MULTIPLE
        self.max_len = round_up(self.positions, multiple)
        self.cache = KVCache(
            self.shape.layers,
            max_requests,
            max_len=self.max_len,
            rows_first=self.slotted is not None,
            dtype=self.dtype,
            device=self.device,
            answers=self.shape.uses_length,
        )
        self.states = RecurrentLayers(self.shape.states)
        self.varlen = self.slotted is None and self.own is None and self._has_varlen()
        self._step: _Step | None = None
        self._windows = sorted({layer.window for layer in attention}, key=str)
        self._rows = torch.arange(self.max_len, device=self.device)
        starts = torch.arange(max_requests + 1, dtype=torch.int32, device=self.device)
        self._starts, self._row_starts = starts, starts * self.max_len
        self.fusion = Fusion(self.shape.trace) if fuse and self.own is None else None
        self._name = f"devgraph_{id(self):x}"
        takes_positions = "position_ids" in parameters_of(self.shape.body)
        self._embeddings = [
            module
            for module in self.shape.body.modules()
            if not takes_positions and {"position_ids", LENGTH} <= parameters_of(module)
        ]
        overrides = self.shape.overrides | {"_attn_implementation": self._name}
        self._overriding = overriding(model, **overrides)
        self.ignores_padding = True
        """Whether left padding changes the results of the unchanged model at most by rounding."""
        if self.own is not None or self.states:
            with ordinary_device():
                self._verify()
                self.ignores_padding = self.own is None or self._ignores_padding()

    def _choose_slotted(self, offered: Callable[..., SlotAttention | None]) -> SlotAttention | None:
        shapes = set(self.shape.attention)
        if len(shapes) > 1:
            return None  # One object must fit all layers.
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
        kinds = {(layer.key_dim, layer.value_dim, layer.softcap) for layer in self.shape.attention}
        return bool(kinds) and all(
            key_dim == value_dim
            and softcap is None
            and has_varlen(key_dim, dtype=self.dtype, device=self.device)
            for key_dim, value_dim, softcap in kinds
        )

    # -- inputs of the runners -------------------------------------------------------------------

    def decode_inputs(self, steps: int = 1) -> list[InputSlot]:
        """Return the input slots for a decode step, or for a launch of several steps."""

        def numbers(high: int, low: int = 0) -> dict[str, Any]:
            draw = functools.partial(torch.randint, low, high)
            return {"pad": Pad.zero(), "sample": lambda shape, rng: draw(shape, generator=rng)}

        highest = max(1, min(ROW_MULTIPLE, self.positions) - steps + 1)
        scratch = Pad.fill(self.cache.scratch_row)
        slots = [
            InputSlot("input_ids", ("tokens",), torch.int64, **numbers(self.shape.vocabulary)),
            InputSlot("position_ids", ("tokens",), torch.int64, **numbers(highest)),
            # Without a sample, proofs write to the scratch row instead of live requests.
            InputSlot("slot_mapping", ("tokens",), torch.int64, pad=scratch),
        ]
        if steps > 1:
            left = numbers(steps + 1, steps)
            slots.append(InputSlot("left", ("requests",), torch.int64, **left))
        return slots

    def packed_inputs(self) -> list[InputSlot]:
        """Return the input slots for a packed step."""
        slots = self.decode_inputs()
        if self.varlen:
            slots += [
                InputSlot("query_starts", ("requests+1",), torch.int32, pad=Pad.last()),
                InputSlot("row_starts", ("requests+1",), torch.int32, pad=Pad.zero()),
                InputSlot("lengths", ("requests",), torch.int32, pad=Pad.zero()),
            ]
        return [*slots, InputSlot("last_tokens", ("requests",), torch.int64, pad=Pad.zero())]

    @property
    def decode_host_args(self) -> dict[str, Any]:
        """Host arguments of a decode step, with their values at capture."""
        if self.varlen or not self.bounded:
            return {}
        if self.slotted:
            return {"spans": ()}
        return {"kv_len": ROW_MULTIPLE, "kv_from": 0}

    @property
    def packed_host_args(self) -> dict[str, tuple[int, ...]]:
        """Host arguments of a packed step, with their values at capture."""
        exact = not self.varlen and self.own is None
        return {"spans": ()} if exact or self.states else {}

    def decode_host_values(
        self, positions: list[int], width: int = 1, *, longest: int | None = None
    ) -> dict[str, Any]:
        """Return the host arguments for a decode step, and clear the rows that become readable.

        ``kv_len`` and ``kv_from`` are rounded, so that few distinct values occur. ``positions``
        contains the position of each request's first new token. For a launch of several steps,
        ``longest`` is the length of the longest sequence after the launch.
        """
        if self.varlen:
            return {}
        if self.slotted:
            spans = ((slot, position, width) for slot, position in enumerate(positions))
            return {"spans": tuple(itertools.chain.from_iterable(spans))}
        longest = longest or max(positions) + width
        high = round_up(longest, ROW_MULTIPLE) if self.bounded else self.max_len
        for slot, position in enumerate(positions):
            self.cache.prepare(slot, position + width, high)
        if not self.bounded:
            return {}
        low = min(positions) // ROW_MULTIPLE * ROW_MULTIPLE if self._windows != [None] else 0
        return {"kv_len": high, "kv_from": low}

    def decode_data(
        self, pieces: Sequence[Piece], left: Sequence[int] | None = None, *, steps: int = 1
    ) -> dict[str, Any]:
        """Return the arguments of ``Runner.run`` for a decode step; piece ``i`` has slot ``i``.

        For a launch of ``steps``, ``left`` contains the number of tokens that each request may
        still generate.
        """
        positions = [piece.cached for piece in pieces]
        counts = [min(steps, count) for count in left or [1] * len(pieces)]
        longest = max(map(operator.add, positions, counts))
        inputs = {} if left is None else {"left": self.tensor(list(left))}
        return self._data(pieces, inputs, self.decode_host_values(positions, longest=longest))

    def packed_data(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """Return the arguments of ``Runner.run`` for a packed step."""
        ends = list(itertools.accumulate(piece.count for piece in pieces))
        lengths = [piece.cached + piece.count for piece in pieces]
        inputs = {"last_tokens": self.tensor([end - 1 for end in ends])}
        if self.varlen:
            rows = [piece.slot * self.max_len for piece in pieces]
            inputs["query_starts"] = self.tensor([0, *ends], torch.int32)
            inputs["row_starts"] = self.tensor([*rows, 0], torch.int32)
            inputs["lengths"] = self.tensor(lengths, torch.int32)
        elif self.own is not None:
            for piece, length in zip(pieces, lengths, strict=True):
                self.cache.prepare(piece.slot, length, self.max_len)
        spans = itertools.chain.from_iterable((p.slot, p.cached, p.count) for p in pieces)
        host_args = dict.fromkeys(self.packed_host_args, tuple(spans))
        return self._data(pieces, inputs, host_args)

    def _data(
        self, pieces: Sequence[Piece], inputs: dict[str, Tensor], host_args: Any
    ) -> dict[str, Any]:
        ids: list[int] = []
        positions: list[int] = []
        rows: list[int] = []
        for piece in pieces:
            first, last = piece.cached, piece.cached + piece.count
            start = piece.slot * self.max_len
            ids += piece.ids
            positions += range(first, last)
            rows += range(start + first, start + last)
        tensors = self.tensor([ids, positions, rows])  # Use one transfer.
        inputs |= zip(("input_ids", "position_ids", "slot_mapping"), tensors, strict=True)
        data = {"inputs": inputs, "host_args": host_args}
        return data | ({"state_slots": [piece.slot for piece in pieces]} if self.states else {})

    def slot_tensors(self, slot: int, length: int) -> list[dict[str, Tensor]]:
        """Return views of the first ``length`` keys and values of a slot, by layer."""
        first = slot * self.max_len
        rows = slice(first, first + length)
        return [
            {"k": layer.keys_by_row[rows], "v": layer.values_by_row[rows]} if layer else {}
            for layer in self.cache.layers
        ]

    def tensor(self, values: list[Any], dtype: torch.dtype = torch.int64) -> Tensor:
        """Return ``values`` as a tensor on the device."""
        tensor = torch.tensor(values, dtype=dtype, device="cpu")
        if self._pin is None or self.device.type == "cpu":
            return tensor.to(self.device)
        return self._pin(tensor).to(self.device, non_blocking=True)

    # -- steps -----------------------------------------------------------------------------------

    @torch.no_grad()
    def decode(self, batch: Batch) -> dict[str, Tensor]:
        """Run a decode step; return logits, ``[tokens, vocabulary]``, and tokens, ``[tokens]``."""
        step = _Step(batch, decode=True, max_len=self.max_len)
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
        """Return the loop for a launch of several greedy decode steps.

        A request stops at a token of ``ends``, or after ``left`` tokens.
        """
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
        """Run a packed step; return the last hidden states, ``[tokens, hidden]``."""
        step = _Step(batch, decode=False, max_len=self.max_len)
        with self._running(step):
            output = self.shape.body(**self._inputs(step))
        return output.last_hidden_state[0]  # type: ignore[no-any-return]

    @torch.no_grad()
    def tail(self, hidden: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return the outputs of ``decode`` for the last token of each request in a packed step.

        The whole forward of the model runs, because it may scale or cap the logits, but its body is
        replaced and returns ``hidden``, ``[tokens, hidden]``.
        """
        hidden = hidden.index_select(0, batch.last_tokens)
        output = self.shape.output_type(last_hidden_state=hidden[None])
        thread, body = threading.get_ident(), self.shape.body

        def computed(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == thread:
                return output
            with model_lock:  # Other threads wait, then run the original.
                return body(*args, **kwargs)

        with replaced([(body, "forward", computed)]):
            ids = hidden.new_zeros((1, hidden.shape[0]), dtype=torch.int64)
            logits = self.model(input_ids=ids, use_cache=False).logits[0]
        return {"logits": logits, "tokens": logits.argmax(-1)}

    def _inputs(self, step: _Step) -> dict[str, Any]:
        shape = (1, -1) if self.own is None else (-1, step.width)
        ids, positions = step.batch.input_ids.view(shape), step.batch.position_ids.view(shape)
        return body_inputs(self.shape.body, ids, positions, self.cache)

    @contextlib.contextmanager
    def _running(self, step: _Step) -> Iterator[None]:
        rows = step.batch.slot_mapping
        mixes = functools.partial(functools.partial, self._mix, step)
        fused = contextlib.nullcontext() if self.fusion is None else self.fusion.active()
        attention: tuple[Any, Any] = (self._attend, None)
        if self.own is not None:
            attention = (own_attention(self.model), self._mask)
        with (
            model_lock,
            registered(self._name, *attention),
            replaced(self._overriding),
            replaced([(m, "forward", _at_positions(m, step)) for m in self._embeddings]),
            replaced([(m.module, "forward", mixes(m)) for m in self.shape.mixers]),
            fused,
        ):
            if self._step is not None:
                raise StateError(
                    "a step of this model is already running; an engine belongs to one thread"
                )
            self._step = step
            self.cache.signals = self.layerwise and not step.decode
            if self.own is None:
                self.cache.aim(rows)
            else:
                slots: int | Tensor = rows.shape[0] // step.width
                if not step.decode:  # Padding uses the scratch row, which is in no slot.
                    slots = step.slots.clamp(max=self.max_requests - 1)
                self.cache.aim(rows, slots, width=step.width)
            try:
                yield
            finally:
                self.cache.aim(None)
                self.cache.signals = False
                self._step = None

    def _mix(self, step: _Step, mixer: Mixer, *args: Any, **kwargs: Any) -> Any:
        """Run a mixer in a step. In a decode step, the mixer receives one row per request."""
        if step.decode:
            rows = (step.tokens // step.width, step.width)
            layout = (1, step.tokens) if self.own is None else rows
            args, kwargs = _reshaped((args, kwargs), layout, rows)
            output = self.states.decode(mixer, step.batch, step.width, args, kwargs)
            return _reshaped(output, rows, layout)
        output = pytree.tree_map_only(
            Tensor, lambda leaf: leaf.new_zeros((1, step.tokens, *leaf.shape[2:])), mixer.output
        )
        tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
        weights = [*mixer.module.parameters(), *mixer.module.buffers()]
        state = self.states.rows(step.batch.state, mixer.layer)
        inputs, spans = (args, kwargs), step.batch.host.spans
        run_packed(self.states, mixer, state, weights, inputs, tensors, spans=spans)
        return output

    def _verify(self) -> None:
        """Refuse the model unless its steps reproduce the logits of the unchanged model.

        Each text runs in two packed steps, and all texts run in one decode step. Mixers that cannot
        continue a state with several tokens at once continue with one token at a time.
        """
        own = f"{self.own}; and its own attention" if self.own else "its code for recurrent layers"
        generator = torch.Generator().manual_seed(0)
        texts = [
            torch.randint(self.shape.vocabulary, (n,), generator=generator, device="cpu").tolist()
            for n in (7, 6)[: self.max_requests]
        ]
        exact = self.dtype == torch.float32
        cause: Exception | None = None
        differences = {True: math.inf, False: math.inf}
        for carries in (True, False) if self.states else (True,):
            self.states.carries = carries
            try:
                with torch.no_grad(), replaced(overriding(self.model, pad_token_id=None)):
                    alone = [self._alone(torch.tensor([t], device=self.device)) for t in texts]
                want = torch.stack([logits[at] for at in (0, 1) for logits in alone]).float()
                spread = (want - want.mean(-1, keepdim=True)).norm()
                differences[carries] = float((self._logits(texts) - want).norm() / spread)
                if exact and differences[carries] <= 1e-3:
                    return
                failure, cause = "gives different logits on whole slots", None
            except Exception as error:
                failure, cause = f"fails on whole slots ({error})", error
        # Half-precision rounding changes all logits of a deep model by a few percent. A mixer that
        # drops the state of a chunk changes the logits several times as much.
        self.states.carries = differences[True] <= 2 * differences[False]
        if exact or not differences[self.states.carries] <= 0.1:
            raise refusal(self.model, f"{own} {failure}") from cause

    @torch.no_grad()
    def _ignores_padding(self) -> bool:
        ids = torch.arange(2, 9, device=self.device)[None] % self.shape.vocabulary
        try:
            with replaced(overriding(self.model, pad_token_id=None)):
                want, padded = (self._alone(ids, pads=pads).float() for pads in (0, 3))
        except Exception:
            return False  # The model takes no mask.
        limit = max(1e-3, 4 * torch.finfo(self.dtype).eps)
        spread = (want - want.mean(-1, keepdim=True)).norm()
        return bool((padded - want).norm() <= limit * spread)

    def _alone(self, ids: Tensor, *, pads: int = 0) -> Tensor:
        """Return the logits that the unchanged model computes for the last two tokens of a text.

        With ``pads``, the text is padded on the left and run with the arguments of ``generate``.
        """
        positions = torch.arange(-pads, ids.shape[1], device=self.device)[None]
        ids, mask = F.pad(ids, (pads, 0)), (positions >= 0).long()
        positions = positions.clamp(min=0)
        if not self.states:
            given = {"attention_mask": mask, "position_ids": positions} if pads else {}
            given = {n: t for n, t in given.items() if n in parameters_of(self.model)}
            return self.model(input_ids=ids, use_cache=False, **given).logits[0, -2:]  # type: ignore[no-any-return]
        # A scan may round differently from a single-token step, so split the text as generate does.
        cache, logits = new_cache(self.model), []
        for part in (slice(-1), slice(-1, None)):
            inputs = body_inputs(self.model, ids[:, part], positions[:, part], cache)
            if pads:
                inputs["attention_mask"] = mask[:, : part.stop]
            logits.append(self.model(**inputs).logits[0, -1:])
        return torch.cat(logits)

    def _logits(self, texts: list[list[int]]) -> Tensor:
        """Return the logits that steps compute for the last two tokens of each text."""
        logits = []
        state = self.states.zeros(len(texts) + 1, self.device)
        for slot, text in enumerate(texts):
            self.cache.release(slot)
            for first, end in ((0, 3), (3, len(text) - 1)):
                piece = Piece(slot, first, text[first:end], completes=True)
                batch = self._batch(self.packed_data([piece]), 1, state, padding=2)
                last = self.tail(self.packed(batch), batch)["logits"][0]
            logits.append(last)
        ends = [Piece(slot, len(t) - 1, t[-1:], completes=True) for slot, t in enumerate(texts)]
        logits += self.decode(self._batch(self.decode_data(ends), len(ends), state))["logits"]
        for slot in range(len(texts)):
            self.cache.release(slot)
        return torch.stack(logits)

    def _batch(
        self, data: dict[str, Any], requests: int, state: StateViews, *, padding: int = 0
    ) -> Batch:
        inputs = dict(data["inputs"])
        pads = {"input_ids": 0, "position_ids": 0, "slot_mapping": self.cache.scratch_row}
        inputs |= {n: F.pad(inputs[n], (0, padding), value=value) for n, value in pads.items()}
        size = Size(requests, len(inputs["input_ids"]))
        if self.states:
            inputs["state_slots"] = self.tensor(data["state_slots"])
        return Batch(inputs, size, host=data["host_args"], variant={}, state=state)

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
        assert step is not None
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        window, host = layer.shape.window, step.batch.host
        if self.varlen:
            return self._attend_varlen(step, layer, query, scale), None
        shape = (1, query.shape[2], query.shape[1], layer.shape.value_dim)
        # Packed kernels do not write padded rows, which must not differ between runs.
        out = query.new_empty(shape) if step.decode else query.new_zeros(shape)
        scoring = (scale, softcap, window, self.fused)
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
        """Drop the fused replacements. Idempotent."""
        if self.fusion is not None:
            self.fusion.close()


def _reshaped(tree: Any, before: tuple[int, int], after: tuple[int, int]) -> Any:
    """Reshape the tensors in ``tree`` from ``[*before, ...]`` to ``[*after, ...]``."""

    def fitted(leaf: Tensor) -> Tensor:
        return leaf.reshape(*after, *leaf.shape[2:]) if leaf.shape[:2] == before else leaf

    return pytree.tree_map_only(Tensor, fitted, tree)


def _at_positions(module: torch.nn.Module, step: _Step) -> Callable[..., Tensor]:
    """Return a forward for an embedding that uses the positions of ``step``."""
    own = module.forward
    signature = inspect.signature(own)

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        bound = signature.bind(*args, **kwargs)
        bound.arguments["position_ids"] = step.batch.position_ids.clone()
        embedded: Tensor = own(*bound.args, **bound.kwargs)
        return embedded.reshape(-1, step.width, embedded.shape[-1])

    return forward


def _positions(shape: ModelShape, max_len: int | None) -> int:
    limit = shape.positions
    max_len = min(limit or 2048, 2048) if max_len is None else whole("max_len", max_len, 1)
    if limit is not None and max_len > limit:
        raise InputError(
            f"max_len {max_len} exceeds the {limit} positions of the model and its cache; use at "
            f"most {limit}"
        )
    return max_len
