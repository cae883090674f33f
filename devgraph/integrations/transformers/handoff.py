"""The state of a request in a format that every backend can write and read.

A handoff consists of a header and the tensors of each layer. Because cache layouts differ between
backends, keys and values are sent as ``[tokens, kv_heads, head_dim]``. All tensors are views of one
buffer of bytes, which a transport sends as it is.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import math
import operator
import threading
import time
import typing
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor
from transformers import PreTrainedModel

from devgraph.api.errors import (
    GateError,
    GateTimeoutError,
    HandoffError,
    brief,
    counted,
    did_you_mean,
)
from devgraph.api.gates import Gates
from devgraph.integrations.transformers.model import CausalModel
from devgraph.integrations.transformers.requests import SamplingParams

VERSION = 2
"""Version of the header and of the buffer layout."""

_ALIGNMENT = 64
"""Alignment of the tensors in the buffer, in bytes."""

_SAMPLES = 16
"""Number of elements per weight in the digest."""

_VOLATILE = frozenset({"transformers_version", "dtype", "torch_dtype", "use_cache"})
"""Configuration keys that do not affect the computation of a model."""

_PARAMETERS = tuple(field.name for field in attrs.fields(SamplingParams))

Numbers = tuple[int | None, ...]
"""One number per layer; None for layers without attention."""

States = tuple[dict[str, tuple[str, tuple[int, ...]]], ...]
"""Dtypes and shapes of the recurrent states, by name, for each layer."""


class Progress:
    """The progress of a handoff, shared by the engine and the transport.

    Attributes:
        ended: reason why the tensors must no longer be read, or None.
        receiver: name of the process that fetches the handoff, for messages, or "".
        ready: number of leading layers whose tensors are complete.
        ready_at: times at which these layers were complete, in seconds (monotonic clock).
        deadline: time at which the export ends if it is not released, in seconds (monotonic clock).
        handoff: the complete handoff, or None until then.
    """

    def __init__(self, ready: int = 0, *, deadline: float = math.inf) -> None:
        self.deadline = deadline
        self.handoff: Handoff | None = None
        self.ended: str | None = None
        self.receiver = ""
        self.ready = ready
        self.ready_at: list[float] = []
        self.changed = threading.Condition()
        self._settled: Callable[[], bool] = lambda: True
        self._callbacks: list[Callable[[], None]] = []

    def advance(self, ready: int) -> None:
        """Report that the tensors of the first ``ready`` layers are complete."""
        with self.changed:
            self.ready_at += [time.monotonic()] * (ready - self.ready)
            self.ready = max(ready, self.ready)
            self.changed.notify_all()

    def complete(self, handoff: Handoff, settled: Callable[[], bool]) -> None:
        """Set the complete handoff. ``settled`` returns whether the device has written it."""
        self.handoff, self._settled = handoff, settled
        self.advance(handoff.layers)

    def end(self, reason: str) -> None:
        """End the handoff for a reason, such as "released". Later reasons are ignored."""
        with self.changed:
            callbacks, self._callbacks = self._callbacks, []
            self.ended = self.ended or reason
            self.changed.notify_all()
        for callback in callbacks:
            callback()

    def when_ended(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when the handoff ends, in the thread that ends it."""
        with self.changed:
            if self.ended is None:
                self._callbacks.append(callback)
                return
        callback()

    def wait(self, layers: int, timeout_s: float) -> int:
        """Wait until ``ready`` exceeds ``layers`` or the handoff ends; return ``ready``."""
        with self.changed:
            if not self.changed.wait_for(lambda: self.ready > layers or self.ended, timeout_s):
                raise HandoffError(f"layer {layers} is not ready after {timeout_s:g} s")
            ready = self.ready
        while not self._settled():  # The device is still writing the buffer.
            threading.Event().wait(1e-4)
        return ready


def _read(kind: Any, value: Any) -> Any:
    """Convert a JSON value to the type of a header field."""
    origin, kinds = typing.get_origin(kind), typing.get_args(kind)
    if kind is SamplingParams:
        if not isinstance(value, dict):
            raise TypeError(f"expected an object, got {brief(value)}")
        for name in value:
            if name not in _PARAMETERS:
                raise TypeError(f"there is no {name!r}. {did_you_mean(name, _PARAMETERS)}")
        return SamplingParams(**value)
    if origin is dict:
        return {name: _read(kinds[1], item) for name, item in value.items()}
    if origin is tuple:
        if not isinstance(value, list):
            raise TypeError("expected a list")
        kinds = kinds[:1] * len(value) if kinds[-1] is ... else kinds
        return tuple(_read(of, item) for of, item in zip(kinds, value, strict=True))
    if type(value) not in (kinds or (kind,)):
        raise TypeError(f"expected {getattr(kind, '__name__', kind)}, got {brief(value)}")
    return value


@attrs.frozen(kw_only=True, eq=False)
class Handoff:
    """The state of one request: a header, and the named tensors of each layer.

    The tensors of layer ``i`` are ``"i.k"`` and ``"i.v"`` as ``[tokens, kv_heads, head_dim]``, and
    ``"i.NAME"`` for each recurrent state.
    """

    version: int = VERSION
    id: str = attrs.field(factory=lambda: uuid.uuid4().hex)
    """Identifier, different for each export. An engine does not run a handoff twice at a time."""
    backend: str
    """Backend of the exporter."""
    model: str
    """Digest of the architecture and digest of the weights, joined by a hyphen."""
    dtype: str
    """Dtype of keys and values, such as "float32"."""
    layers: int
    kv_heads: Numbers
    head_dim: Numbers
    value_dim: Numbers
    """Size of a value head. It differs from ``head_dim`` only in models with latent attention."""
    windows: Numbers
    """Number of rows that a token attends to; None means all rows."""
    states: States
    cached: int
    """Number of leading tokens whose keys and values are in ``data``."""
    token_ids: tuple[int, ...]
    """Tokens of the prompt and of the continuation. The last token is not cached yet."""
    prompt_length: int
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    eos_token_ids: tuple[int, ...]
    sampling: SamplingParams
    draws: int
    """Number of tokens drawn from the random stream."""
    random_state: str = attrs.field(default="", repr=False)
    """State of the exporter's generator in hexadecimal; empty for greedy requests."""
    data: Tensor = attrs.field(repr=False)
    """The uint8 buffer of all tensors."""
    progress: Progress = attrs.field(repr=False)

    @progress.default
    def _complete(self) -> Progress:
        return Progress(self.layers)

    @property
    def nbytes(self) -> int:
        """Size of all tensors in bytes, including alignment."""
        return int(self.data.nbytes)

    @property
    def is_complete(self) -> bool:
        """Whether the header contains the first token, which a layer-wise handoff receives last."""
        return len(self.token_ids) > self.cached

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name, as views of ``data``."""
        layers = enumerate(self.by_layer(self.data))
        return {f"{index}.{name}": view for index, views in layers for name, view in views.items()}

    def by_layer(self, data: Tensor) -> list[dict[str, Tensor]]:
        """Return the tensors of each layer as views of ``data``, the buffer or a copy."""
        layers: list[dict[str, Tensor]] = [{} for _ in range(self.layers)]
        start = 0
        # One operation creates the views of consecutive equal tensors.
        for (size, dtype, shape), run in itertools.groupby(
            self._layout, key=operator.itemgetter(2, 3, 4)
        ):
            entries, flat, item = list(run), data.view(dtype), dtype.itemsize
            strides = [math.prod(shape[axis:]) for axis in range(1, len(shape) + 1)]
            rows = flat.as_strided(
                (len(entries), *shape),
                (size // item, *strides),
                flat.storage_offset() + start // item,
            )
            for (layer, name, *_), view in zip(entries, rows.unbind(0), strict=True):
                layers[layer][name] = view
            start += size * len(entries)
        return layers

    @property
    def layer_ends(self) -> list[int]:
        """Sizes in bytes of the first 0, 1, 2, ... layers."""
        sizes = [0] * self.layers
        for layer, _, size, *_ in self._layout:
            sizes[layer] += size
        return list(itertools.accumulate(sizes, initial=0))

    @functools.cached_property
    def _layout(self) -> list[tuple[int, str, int, torch.dtype, tuple[int, ...]]]:
        """Layer, name, aligned size, dtype and shape of each tensor, in the order of the buffer."""
        layout = []
        columns = (self.kv_heads, self.head_dim, self.value_dim, self.states)
        kinds = enumerate(zip(*columns, strict=True))
        for (heads, key_dim, value_dim, states), run in itertools.groupby(
            kinds, operator.itemgetter(1)
        ):
            named: dict[str, tuple[str, tuple[int, ...]]] = {}
            if heads is not None:
                for name, dim in (("k", key_dim), ("v", value_dim)):
                    named[name] = (self.dtype, (self.cached, heads, dim or 0))
            entries = []
            for name, (dtype_name, shape) in (named | states).items():
                dtype = getattr(torch, dtype_name, None)
                if not isinstance(dtype, torch.dtype):
                    raise HandoffError(f"the header of a handoff has an unknown dtype {dtype_name}")
                size = math.prod(shape) * dtype.itemsize
                entries.append((name, -(-size // _ALIGNMENT) * _ALIGNMENT, dtype, shape))
            layout += [(layer, *entry) for layer, _ in run for entry in entries]
        return layout

    @classmethod
    def allocated(cls, device: torch.device | str = "cpu", **header: Any) -> Handoff:
        """Return a handoff with an uninitialized buffer."""
        handoff = cls(**header, data=torch.empty(0, dtype=torch.uint8))
        size = handoff.layer_ends[-1]
        return attrs.evolve(handoff, data=torch.empty(size, dtype=torch.uint8, device=device))

    def to_json(self) -> str:
        return json.dumps({name: getattr(self, name) for name in _FIELDS}, default=attrs.asdict)

    @classmethod
    def from_json(cls, text: str | bytes, device: torch.device | str = "cpu") -> Handoff:
        """Parse a header, and allocate an empty buffer on ``device`` for a transport.

        Raises:
            HandoffError: the text is not a header of this version.
        """
        try:
            given = json.loads(text)
        except (TypeError, ValueError, RecursionError) as error:
            raise HandoffError(f"the header of a handoff is not readable: {error}") from error
        if not isinstance(given, dict):
            raise HandoffError(f"the header of a handoff is not an object: {brief(given)}")
        if given.get("version") != VERSION:
            raise HandoffError(
                f"version differs: {brief(given.get('version'))} in the handoff, {VERSION} here; "
                f"install the same version of devgraph on both sides",
                fields=("version",),
            )
        values, wrong = {}, {}
        for name, kind in _FIELDS.items():
            if name not in given:
                wrong[name] = "missing"
                continue
            try:
                values[name] = _read(kind, given[name])
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                wrong[name] = str(error)
        for name in GEOMETRY[2:]:
            if len(values.get(name, ())) != (layers := given.get("layers")) and name in values:
                wrong[name] = f"{counted(len(values[name]), 'entry')} for {brief(layers)} layers"
        if wrong:
            raise HandoffError(
                "the header of a handoff has wrong fields:"
                + "".join(f"\n  {name}: {reason}" for name, reason in wrong.items()),
                fields=tuple(wrong),
            )
        try:
            handoff = cls.allocated(device, **values)
            handoff._end.fill_(_UNSET)
            return handoff
        except (RuntimeError, TypeError) as error:  # A size is negative or too large.
            raise HandoffError(f"the buffer of a handoff cannot be allocated: {error}") from error

    @property
    def _end(self) -> Tensor:
        """The last bytes of the last floating-point tensor, on the host; empty if there is none."""
        first = end = stop = 0
        for _, _, size, dtype, shape in self._layout if self.data.is_cpu else ():
            if dtype.is_floating_point and 0 not in shape:
                first, end = stop, stop + math.prod(shape) * dtype.itemsize
            stop += size
        return self.data[max(first, end - 8) : end]

    def require_received(self) -> None:
        """Raise HandoffError if the tensors in ``data`` on the host were not received.

        Data on a device is not checked.
        """
        end = self._end
        if end.numel() and bool((end == _UNSET).all()):
            raise HandoffError(
                "the tensors of the handoff were not received, because the header does not contain "
                "them: copy the sender's handoff.data into this handoff's data, or use a transport"
            )

    def stream_for(self, backend: str) -> tuple[int, int, Tensor | None]:
        """Return the seed, number of draws and generator state to continue on ``backend``.

        The generator state is valid only on the exporter's backend. On other backends, a new stream
        starts from a seed that is derived from the exporter's seed and the number of draws.
        """
        if backend == self.backend:
            state = bytearray.fromhex(self.random_state)
            return self.sampling.seed or 0, self.draws, torch.frombuffer(state, dtype=torch.uint8)
        digest = hashlib.sha256(f"{self.sampling.seed}:{self.draws}".encode()).digest()
        return int.from_bytes(digest[:8], "little"), self.draws, None


_UNSET = 255
"""Value of the last bytes of a buffer before the tensors arrive: a NaN that no model computes."""

_HINTS = typing.get_type_hints(Handoff)
_FIELDS = {f.name: _HINTS[f.name] for f in attrs.fields(Handoff)[:-2]}
"""Types of the header fields, without ``data`` and ``progress``."""

GEOMETRY = ("dtype", "layers", "kv_heads", "head_dim", "value_dim", "windows", "states")


def geometry_of(model: CausalModel) -> dict[str, Any]:
    """Return the header fields that depend only on the model."""
    layers = len(model.cache.layers)
    columns: dict[str, list[Any]] = {name: [None] * layers for name in GEOMETRY[2:-1]}
    states: list[dict[str, Any]] = [{} for _ in range(layers)]
    for index, tensors in enumerate(model.slot_tensors(0, 0)):
        if tensors:
            columns["kv_heads"][index], columns["head_dim"][index] = tensors["k"].shape[1:]
            columns["value_dim"][index] = tensors["v"].shape[2]
            columns["windows"][index] = model.cache.layers[index].shape.window
    for index, named in model.states.named.items():
        states[index] = {name: (_name_of(slot.dtype), slot.shape) for name, slot in named.items()}
    return {
        "model": _digest(model.model),
        "dtype": _name_of(model.dtype),
        "layers": layers,
        **{name: tuple(column) for name, column in columns.items()},
        "states": tuple(states),
    }


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _digest(model: PreTrainedModel) -> str:
    """Return digests of the architecture and of sampled elements of the weights."""
    architecture, weights = hashlib.sha256(), hashlib.sha256()
    items = model.config.to_dict().items()
    config = {k: v for k, v in items if v and k not in _VOLATILE and k[0] != "_"}
    architecture.update(json.dumps([type(model).__name__, config], sort_keys=True).encode())
    for name, weight in sorted(model.state_dict().items()):
        architecture.update(f"{name} {tuple(weight.shape)}".encode())
        count, shape = min(_SAMPLES, weight.numel()), weight.shape or (1,)
        if count:
            at = torch.linspace(0, weight.numel() - 1, count, dtype=torch.float64).long()
            indices = torch.unravel_index(at.to(weight.device), shape)
            sample = weight.detach().view(shape)[indices].cpu().contiguous()
            weights.update(sample.view(torch.uint8).numpy().tobytes())
    return f"{architecture.hexdigest()[:16]}-{weights.hexdigest()[:16]}"


def check_fit(
    handoff: Handoff, geometry: Mapping[str, Any], *, positions: int, convert: bool
) -> None:
    """Raise HandoffError with one line per header field that differs from the receiver's.

    With ``convert``, the dtypes may differ; if they do, the digests of weights are not compared. A
    buffer whose size does not match the header is refused as well.
    """

    def comparable(name: str, value: Any, converts: bool) -> Any:
        if converts and name == "dtype":
            return None
        if converts and name == "model":
            return value.split("-")[0]
        if converts and name == "states":
            return [{state: shape for state, (_, shape) in layer.items()} for layer in value]
        return value

    def differing(converts: bool) -> dict[str, tuple[Any, Any]]:
        pairs = {name: (getattr(handoff, name), here) for name, here in geometry.items()}
        return {
            name: (there, here)
            for name, (there, here) in pairs.items()
            if comparable(name, there, converts) != comparable(name, here, converts)
        }

    can_convert = handoff.dtype != geometry["dtype"]
    found = differing(convert and can_convert)
    needed = handoff.prompt_length + handoff.max_new_tokens
    if needed > positions:
        found["max_len"] = (needed, positions)
    if found:
        can_convert = can_convert and not convert and not differing(True)
        advice = "; pass convert=True to convert the dtype" if can_convert else ""
        lines = [f"\n  {name}: {_differing(name, *pair)}" for name, pair in found.items()]
        raise HandoffError(
            f"the handoff does not fit this engine{advice}:{''.join(lines)}", fields=tuple(found)
        )
    size, data = handoff.layer_ends[-1], handoff.data
    is_buffer = isinstance(data, Tensor) and data.is_contiguous()
    if not is_buffer or (data.dtype, data.shape) != (torch.uint8, (size,)):
        raise HandoffError(
            f"the buffer of the handoff is {brief(data)}; its header describes {size} contiguous "
            f"bytes",
            fields=("data",),
        )


def _differing(name: str, there: Any, here: Any) -> str:
    """Describe two unequal values; if they are lists by layer, name the first unequal layer."""
    where = ""
    if name == "model":
        is_same = there.split("-")[0] == here.split("-")[0]
        where = f" ({'only the weights' if is_same else 'the configurations'} differ)"
    if isinstance(there, tuple) and len(there) == len(here):
        layers = [at for at, pair in enumerate(zip(there, here, strict=True)) if pair[0] != pair[1]]
        there, here = there[layers[0]], here[layers[0]]
        where = f" in layer {layers[0]}" + (f" and {len(layers) - 1} more" if layers[1:] else "")
    return f"{brief(there)} in the handoff, {brief(here)} here{where}"


class LayerStream:
    """A thread that fills handoffs layer by layer while a step runs.

    The thread waits for the signal ``kv.LAYER`` of each layer, and stops at the first layer with
    recurrent state. The last layer is copied after the step, with the first token. ``exports``
    contains each handoff with the tensors of its slot, by layer.
    """

    def __init__(
        self, gates: Gates, exports: Sequence[tuple[Handoff, Sequence[Mapping[str, Tensor]]]]
    ) -> None:
        self._gates, self._exports = gates, exports
        self._epoch = gates.epoch + 1
        self._stops = False
        self._thread = threading.Thread(target=self._run, name="devgraph-layers", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Wait for the copy of the current layer, and end the thread."""
        self._stops = True
        self._thread.join()

    def _run(self) -> None:
        first, device = self._exports[0][0], self._exports[0][0].data.device
        pairs = [(handoff.by_layer(handoff.data), layers) for handoff, layers in self._exports]
        # Use another stream, because the current stream is busy with the step.
        stream = torch.Stream(device=device) if device.type != "cpu" else None
        for layer in range(first.layers - 1):
            if first.states[layer] or first.kv_heads[layer] is None or not self._reached(layer):
                return
            with stream or contextlib.nullcontext():
                for target, source in pairs:
                    copy_layers(target[layer : layer + 1], source[layer : layer + 1])
            if stream is not None:
                stream.synchronize()
            for handoff, _ in self._exports:
                handoff.progress.advance(layer + 1)

    def _reached(self, layer: int) -> bool:
        """Wait for the signal of a layer; return False if the step ended without the signal."""
        while not self._stops:
            try:
                self._gates[f"kv.{layer}"].wait(0.1, epoch=self._epoch)
                return True
            except GateTimeoutError:
                continue
            except GateError:
                return False
        return False


def copy_layers(
    target: Sequence[Mapping[str, Tensor]], source: Sequence[Mapping[str, Tensor]]
) -> None:
    """Copy tensors by layer and name. ``source`` may contain additional names.

    Consecutive tensors at equal distances in memory are copied by one operation.
    """
    pairs = [
        (tensor, there[name])
        for here, there in zip(target, source, strict=True)
        for name, tensor in here.items()
    ]
    layouts = [[(t.untyped_storage()._cdata, t.shape, t.stride()) for t in pair] for pair in pairs]
    offsets = [[t.storage_offset() for t in pair] for pair in pairs]
    first = 0
    while first < len(pairs):
        last, steps = first, [0, 0]
        while last + 1 < len(pairs) and layouts[last + 1] == layouts[first]:
            ahead = list(map(operator.sub, offsets[last + 1], offsets[last]))
            if (last > first and ahead != steps) or min(ahead) < 0:
                break
            last, steps = last + 1, ahead
        here, there = (
            t.as_strided((1 + last - first, *t.shape), (step, *t.stride()))
            for t, step in zip(pairs[first], steps, strict=True)
        )
        here.copy_(there)
        first = last + 1
