"""The requirements of a model, determined by a run on three tokens.

The probe does not interpret the configurations of model families. It calls the model with attention
and mask functions that only record the shapes that each layer writes to the cache, the mask that
the layer receives, and the arguments that the layer passes to attention. A model with a requirement
that this integration cannot meet is refused before an engine is created.

A model may compute attention in its own code, or pass arguments that the kernels here do not
support. Such a model is probed again as a model that *runs its own attention* on whole slots of the
cache, with a mask that is computed from positions on the device.

Layers with recurrent state are found by a run with a cache as created by ``generate``. The modules
that write state to this cache are the *mixers*. The filled layers are templates for the state rows.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from devgraph.api.errors import DeviceGraphError
from devgraph.api.modes import OwnMode
from devgraph.integrations.transformers.attention import LayerShape
from devgraph.integrations.transformers.fusion import (
    OperationTrace,
    in_this_thread,
    model_lock,
    replaced,
)
from devgraph.integrations.transformers.names import CACHES, cache_name
from devgraph.integrations.transformers.state import Mixer, state_tensors

_TOKENS = 3
_OTHER_LENGTH = 5
"""The length that the cache reports in a second run, whose results must equal the first run's."""

# Attention arguments that have no effect here: dropout is off, the mask determines causality and
# window, and positions are applied earlier.
_HARMLESS = frozenset(
    """
    cache_position dropout is_causal output_attentions output_hidden_states output_router_logits
    position_ids return_dict sliding_window use_cache
    """.split()
)
_HONOURED = frozenset({"scaling", "softcap"})

# Rotary embeddings whose frequencies depend on a step's largest position, read on the host.
_HOST_ROPE = frozenset({"dynamic", "longrope"})

# Supported kinds of cache layers, except for DummyLayer, which stores nothing.
_KEY_LAYERS = frozenset({"DynamicLayer", "DynamicSlidingWindowLayer"})
_MIXED_LAYERS = frozenset(
    {"LinearAttentionAndFullAttentionLayer", "LinearAttentionAndSlidingWindowAttentionLayer"}
)
_STATE_LAYERS = frozenset({"LinearAttentionLayer"}) | _MIXED_LAYERS

_HOST_READ = "it reads device data on the host"
_OWN_ATTENTION = "its attention does not go through the attention-function registry"


class UnsupportedModelError(DeviceGraphError, ValueError):
    """The model has a requirement that this integration does not support."""


@attrs.frozen(kw_only=True)
class ModelShape:
    """The requirements of a model."""

    layers: tuple[LayerShape | None, ...]
    """The attention shape of each cache layer, or None for layers without attention."""
    states: dict[int, Any]
    """Filled cache layers for all layers with recurrent state, by index."""
    mixers: tuple[Mixer, ...]
    """The modules that read and write recurrent state."""
    positions: int | None
    """Maximum length at which steps reproduce ``model.generate``, or None if there is no limit."""
    vocabulary: int
    dtype: torch.dtype
    """Dtype of keys and values, or of the weights of a model without attention."""
    device: torch.device
    body: torch.nn.Module
    """The module that computes hidden states: the base model or a part of it."""
    output_type: type[Any]
    """Type of the body's output, which can be created from just ``last_hidden_state``."""
    uses_length: bool
    """Whether the model may read the length of its cache, which does not affect the results."""
    own: str | None
    """Reason why the model runs its own attention, or None if it uses kernels of this package."""
    overrides: dict[str, Any]
    """Configuration values during steps, without the attention implementation."""
    trace: OperationTrace = attrs.field(repr=False)
    """The operations that may be fused."""

    @property
    def attention(self) -> list[LayerShape]:
        """Shapes of the layers with attention."""
        return [layer for layer in self.layers if layer is not None]


def configs_of(model: PreTrainedModel) -> list[Any]:
    """Return the distinct configurations of the modules of ``model``."""
    configs = [getattr(module, "config", None) for module in model.modules()]
    return list({id(c): c for c in configs if hasattr(c, "_attn_implementation")}.values())


def overriding(model: PreTrainedModel, **values: Any) -> list[tuple[Any, str, Any]]:
    """Return changes for ``replaced`` that set ``values`` in configurations that have them."""
    return [
        (config, name, value)
        for config in configs_of(model)
        for name, value in values.items()
        if hasattr(config, name)
    ]


def eos_of(*configs: Any) -> list[int]:
    """Return the end-of-sequence tokens of the first configuration that defines any."""
    for config in configs:
        tokens = getattr(config, "eos_token_id", None)
        if tokens is not None:
            return [tokens] if isinstance(tokens, int) else list(tokens)
    return []


class _Refused(Exception):
    """An error with the reason why a model cannot run here."""


class _Failed(_Refused):
    """The error of a failed trial run."""


def refusal(model: PreTrainedModel, reason: object) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{type(model).__name__} cannot run on device graphs here: {reason}. Use a causal language "
        f"model of transformers whose whole state is a cache of keys and values or of recurrent "
        f"state."
    )


def _check_static(model: PreTrainedModel) -> None:
    if getattr(model.config, "is_encoder_decoder", False):
        raise _Refused("it is an encoder-decoder model")
    if getattr(model.get_output_embeddings(), "weight", None) is None:
        raise _Refused("it has no base model with a language-model head on top")
    if model.training:
        name = type(model).__name__
        raise UnsupportedModelError(f"{name} is in training mode: call model.eval() first.")
    devices = {p.device for p in model.parameters()}
    if len(devices) != 1:
        raise _Refused(f"its parameters are on {len(devices)} devices: {sorted(map(str, devices))}")
    if next(iter(devices)).type == "meta":
        raise _Refused("its parameters are on the meta device and have no data")
    for name, module in model.named_modules():
        kinds = getattr(module, "rope_type", None)
        for kind in kinds.values() if isinstance(kinds, dict) else [kinds]:
            if kind in _HOST_ROPE:
                raise _Refused(
                    f"the rotary embedding {name!r} is of type {kind!r}, which reads the largest "
                    f"position of every step on the host"
                )


def new_cache(model: PreTrainedModel) -> DynamicCache:
    """Return an empty cache, as created by ``model.generate``."""
    return DynamicCache(config=model.config.get_text_config(decoder=True))


def _cache_layers(model: PreTrainedModel) -> list[Any]:
    """Return the layers of a cache as created by ``model.generate``; refuse unknown kinds."""
    layers: list[Any] = new_cache(model).layers
    for index, layer in enumerate(layers):
        kind = type(layer).__name__
        if kind not in _KEY_LAYERS | _STATE_LAYERS | {"DummyLayer"}:
            raise _Refused(
                f"layer {index} of its cache is a {kind}, not keys and values or recurrent state"
            )
    return layers


class _BodyFound(Exception):
    """An exception that ends a forward at the first call of a module."""


def _body_of(model: PreTrainedModel) -> torch.nn.Module:
    """Return the module that computes hidden states: the first module that the forward calls."""
    called: list[torch.nn.Module] = []

    def stop(module: torch.nn.Module, args: Any) -> None:
        called.append(module)
        raise _BodyFound

    try:
        with torch.no_grad(), contextlib.ExitStack() as hooks:
            for module in model.modules():
                if module is not model:
                    hooks.enter_context(module.register_forward_pre_hook(in_this_thread(stop)))
            model(input_ids=torch.zeros(1, _TOKENS, dtype=torch.int64, device=model.device))
    except _BodyFound:
        pass
    except Exception as error:
        raise _Refused(f"its forward failed with {type(error).__name__}: {error}") from error
    parameters = parameters_of(called[0]) if called else set()
    if "input_ids" not in parameters or cache_name(parameters) is None:
        raise _Refused("its forward does not begin with a base model that has a cache")
    return called[0]


def parameters_of(module: torch.nn.Module) -> set[str]:
    return set(inspect.signature(module.forward).parameters)


def body_inputs(
    body: torch.nn.Module, ids: Tensor, positions: Tensor, cache: Any
) -> dict[str, Any]:
    """Return the arguments for the body's forward with tokens ``[batch, width]``."""
    parameters = parameters_of(body)
    inputs = {
        "input_ids": ids,
        cache_name(parameters) or CACHES[0]: cache,
        "use_cache": True,
    }
    if "position_ids" in parameters:
        inputs["position_ids"] = positions
    return inputs


def _first_run(
    model: PreTrainedModel, body: torch.nn.Module, cache: Any, changes: list[tuple[Any, str, Any]]
) -> Any:
    """Run the body on a few tokens under ``changes``; return its output."""
    ids = torch.zeros(1, _TOKENS, dtype=torch.int64, device=model.device)
    positions = torch.arange(_TOKENS, device=model.device)[None]
    try:
        with torch.no_grad(), replaced(changes):
            return body(**body_inputs(body, ids, positions, cache))
    except _Refused:
        raise
    except Exception as error:
        raise _Failed(f"a trial run failed with {type(error).__name__}: {error}") from error


class _StateProbe(DynamicCache):  # type: ignore[misc]
    """A cache that records the modules that write recurrent state to it during one run."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(config=model.config.get_text_config(decoder=True))
        self._running: list[torch.nn.Module] = []
        self._writers: dict[torch.nn.Module, int] = {}
        self._outputs: dict[torch.nn.Module, Any] = {}

    def run(self, model: PreTrainedModel, body: torch.nn.Module) -> tuple[Mixer, ...]:
        enter, leave = in_this_thread(self._enter), in_this_thread(self._leave)
        with contextlib.ExitStack() as hooks:
            for module in body.modules():
                hooks.enter_context(module.register_forward_pre_hook(enter))
                hooks.enter_context(module.register_forward_hook(leave))
            _first_run(model, body, self, overriding(model, pad_token_id=None))
        return tuple(
            Mixer(module=m, layer=i, output=self._outputs[m], forward=m.forward)
            for m, i in self._writers.items()
        )

    def _enter(self, module: torch.nn.Module, args: Any) -> None:
        self._running.append(module)

    def _leave(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        self._running.pop()
        if module in self._writers:
            self._outputs[module] = output
            tensors = [t for t in pytree.tree_leaves(output) if isinstance(t, Tensor)]
            if not tensors or any(t.shape[:2] != (1, _TOKENS) for t in tensors):
                shapes = [tuple(t.shape) for t in tensors]
                raise _Refused(f"{type(module).__name__} has outputs of shape {shapes}")

    def _write(self, index: int) -> None:
        module = self._running[-1]
        if self._writers.setdefault(module, index) != index:
            raise _Refused(f"{type(module).__name__} writes the state of several layers")

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, *args: Any, **kw: Any) -> Any:
        self._write(layer_idx)
        return super().update_conv_state(conv_states, layer_idx, *args, **kw)

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, *args: Any, **kw: Any
    ) -> Any:
        self._write(layer_idx)
        return super().update_recurrent_state(recurrent_states, layer_idx, *args, **kw)

    def update(self, *args: Any, **kwargs: Any) -> Any:
        for module in self._running:
            if module in self._writers:
                raise _Refused(f"{type(module).__name__} mixes attention and recurrent state")
        return super().update(*args, **kwargs)


class _AttentionProbe(Cache):  # type: ignore[misc]
    """A cache that records the attention of one run, but stores nothing."""

    def __init__(
        self, model: PreTrainedModel, mixers: tuple[Mixer, ...], *, own: str | None
    ) -> None:
        super().__init__(layers=[])
        self.model = model
        self.mixers = mixers
        self.own = own
        self.dtype = model.dtype
        self.length = 0
        self.uses_length = False
        """Whether the model read the length of the cache."""
        self.written: tuple[int, Tensor, Tensor] | None = None
        """The layer, keys and values of the last write."""
        self.functions: list[Callable[..., Tensor]] = []
        """The mask functions of a model that runs its own attention."""
        self.windows: list[int | None] = []
        self.shapes: dict[int, LayerShape] = {}
        self.attended: list[Tensor] = []
        """The queries, keys and values of all attention calls."""
        self.output: Any = None

    def run(
        self, body: torch.nn.Module, overrides: dict[str, Any], *, length: int = 0
    ) -> _AttentionProbe:
        model, own = self.model, self.own is not None
        self.length = length
        name = f"devgraph_probe_{id(self)}"
        attention = own_attention(model) if own else self.attention
        changes = overriding(model, _attn_implementation=name, **overrides)
        changes += [
            (mixer.module, "forward", lambda *_, output=mixer.output, **__: output)
            for mixer in self.mixers
        ]
        try:
            with registered(name, attention, self.mask), _NoConversions(), _NoHostReads():
                self.output = _first_run(model, body, self, changes)
        except _Failed as error:
            # After a cache write without a call of ``attention``, the error comes from the model's
            # own attention, which received the placeholder mask.
            if self.written is None or own:
                raise
            raise _Refused(_OWN_ATTENTION) from error
        return self

    def equals(self, other: _AttentionProbe) -> bool:
        ours, theirs = ([*run.attended, run.output.last_hidden_state] for run in (self, other))
        return self.windows == other.windows and all(map(torch.equal, ours, theirs))

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.written = (layer_idx, key_states, value_states)
        shape = tuple(key_states.shape)
        if len(shape) != 4 or shape[2] != _TOKENS or shape[:3] != value_states.shape[:3]:
            raise ValueError(f"keys of shape {shape} for {_TOKENS} tokens")
        if self.own is not None:
            self._add(layer_idx, shape[1], key_states, value_states)
        return key_states, value_states

    def has_previous_state(self, *args: Any) -> bool:
        """Return True, so that models skip their padding masks as in the middle of a text."""
        return True

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        self.uses_length = True
        return self.length

    def _add(self, index: int, heads: int, key: Tensor, value: Tensor, **scoring: Any) -> None:
        sizes = {"kv_heads": key.shape[1], "key_dim": key.shape[3], "value_dim": value.shape[3]}
        self.shapes[index] = LayerShape(heads=heads, **sizes, **scoring)
        self.dtype = key.dtype

    def mask(self, *args: Any, **kwargs: Any) -> Tensor:
        """Record the window of a mask, and return a placeholder that ``attention`` recognizes."""
        function = kwargs.get("mask_function")
        padded = kwargs.get("attention_mask") is not None
        if function is None or (padded and self.own is None):
            raise _Refused("it builds its attention mask in an unknown way")
        if self.own is not None:
            self.functions.append(function)
            at = torch.arange(_TOKENS, device=self.model.device)
            return mask_of(function, at[None], at, self.model.dtype)
        with _disable_current_modes():
            self.windows.append(_window_of(function))
        # A mask on another device would cause other errors in the model's own attention.
        return torch.full((1, 1, 1, 1), len(self.windows) - 1, device=self.model.device)

    def attention(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        written, self.written = self.written, None
        name = type(module).__name__
        if written is None or written[1] is not key or written[2] is not value:
            raise _Refused(
                f"a layer of {name} attends to keys other than those it just wrote to the cache"
            )
        self._check_call(name, query, attention_mask, kwargs)
        index = written[0]
        if index in self.shapes:
            raise _Refused(f"layer {index} calls attention more than once")
        assert attention_mask is not None
        self.attended += (query, key, value)
        with _disable_current_modes():
            window = self.windows[int(attention_mask.flatten()[0])]
        softcap = kwargs.get("softcap")
        self._add(index, query.shape[1], key, value, window=window, softcap=softcap)
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None

    def _check_call(
        self, name: str, query: Tensor, mask: Tensor | None, kwargs: dict[str, Any]
    ) -> None:
        unknown = [n for n, v in kwargs.items() if v is not None and n not in _HARMLESS | _HONOURED]
        if unknown:
            raise _Refused(
                f"{name} passes {', '.join(sorted(unknown))} to attention, which is not supported"
            )
        if mask is None or mask.dtype != torch.int64:
            raise _Refused(f"{name} receives no mask from masking_utils of transformers")
        if query.shape[0] != 1 or query.shape[2] != _TOKENS:
            raise _Refused(f"{name} attends with queries of shape {tuple(query.shape)}")


def mask_of(
    function: Callable[..., Tensor], positions: Tensor, rows: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return the mask ``[requests, 1, width, rows]`` for a mask function of transformers."""
    none = rows[:1] * 0
    shown = function(none, none, positions[:, None, :, None], rows)
    shown = shown.expand(positions.shape[0], 1, positions.shape[1], rows.shape[0])
    # Use the lowest number instead of -inf, because some models compare masks with it.
    hide = torch.finfo(dtype).min
    return torch.zeros((), dtype=dtype, device=rows.device).masked_fill(~shown, hide)


def _window_of(function: Callable[..., Tensor]) -> int | None:
    """Return the sliding window of a causal mask function, or None if it has no window.

    The function is evaluated at near and distant positions. At each position, it must allow exactly
    the last ``window`` rows, or all rows.
    """
    cpu = torch.device("cpu")
    zero = torch.zeros((), dtype=torch.int64, device=cpu)

    def allowed(position: int, rows: Tensor) -> Tensor:
        at = torch.full((), position, dtype=torch.int64, device=cpu)
        return torch.as_tensor(function(zero, zero, at, rows)).expand(rows.shape)

    far = 1 << 20
    window = int(allowed(far, torch.arange(far + 1, device=cpu)).sum())
    limit = None if window == far + 1 else window
    for position in (0, 1, 2, 7, window - 1, window, window + 5, far):
        rows = torch.arange(max(0, position - window - 64), position + 64, device=cpu)
        want = rows <= position
        if limit is not None:
            want &= rows > position - limit
        if not torch.equal(allowed(position, rows), want):
            raise _Refused("its attention mask is neither causal nor a causal sliding window")
    return limit


def ordinary_device() -> AbstractContextManager[Any]:
    """Return a context manager under which torch's default device is the CPU."""
    ordinary = torch.get_default_device().type == "cpu"
    return contextlib.nullcontext() if ordinary else torch.device("cpu")


def require_model(model: object) -> None:
    """Raise UnsupportedModelError unless ``model`` is a transformers model."""
    if not isinstance(model, PreTrainedModel):
        way = "load one with AutoModelForCausalLM.from_pretrained(...)"
        if isinstance(getattr(model, "model", None), PreTrainedModel):
            way = "pass the model in its attribute 'model'"
        raise UnsupportedModelError(
            f"expected a transformers model, got {type(model).__name__}; {way}"
        )


class _Prober:
    """A model, and the results of its trial runs that do not depend on attention."""

    def __init__(self, model: PreTrainedModel) -> None:
        _check_static(model)
        self.model = model
        self.cache_layers = _cache_layers(model)
        self.body = _body_of(model)
        self.trace = OperationTrace(self.body)
        # Without a pad_token_id, no model searches the ids for padding on the host.
        self.overrides: dict[str, Any] = {"pad_token_id": None}
        if any(getattr(c, "_experts_implementation", None) for c in configs_of(model)):
            # Grouped products read group sizes on the host unless the device has a kernel for them.
            fused = model.device.type != "cpu" and model.dtype == torch.bfloat16
            self.overrides["_experts_implementation"] = "grouped_mm" if fused else "batched_mm"
        self.states: dict[int, Any] = {}
        self.mixers: tuple[Mixer, ...] = ()
        self._find_states()

    def _find_states(self) -> None:
        """Find the filled layers with recurrent state, and the mixers that write the state."""
        kinds = [type(layer).__name__ for layer in self.cache_layers]
        indices = [index for index, kind in enumerate(kinds) if kind in _STATE_LAYERS]
        if not indices:
            return
        cache = _StateProbe(self.model)
        with self.trace.recording():
            self.mixers = cache.run(self.model, self.body)
        written = {mixer.layer for mixer in self.mixers}
        # Some caches have a state layer where the model has none, for example at an MLP.
        self.states = {index: cache.layers[index] for index in indices if index in written}
        filled = [index for index in indices if state_tensors(cache.layers[index])]
        if not written or filled != list(self.states):
            raise _Refused("it keeps recurrent state outside of its cache")

    def shape(self, own: str | None = None) -> ModelShape:
        """Run the model to record its attention, and return the requirements of the model."""
        # The cache may have more layers than the model writes.
        kinds = [type(layer).__name__ for layer in self.cache_layers]
        keyed = [index for index, kind in enumerate(kinds) if kind in _KEY_LAYERS | _MIXED_LAYERS]
        if own is None and keyed and "position_ids" not in parameters_of(self.body):
            raise _Refused("its base model takes no position_ids")
        with contextlib.nullcontext() if self.states else self.trace.recording():
            probe = self._run(own)
        shapes = probe.shapes
        if not shapes and (keyed or not self.states):
            raise _Refused(_OWN_ATTENTION if own is None else "it keeps no keys and values")
        attending = sorted(shapes)
        # A model with recurrent state may leave layers unused. Its logits are verified later.
        expected = set(keyed) if self.states else set(range(len(shapes)))
        if not set(attending) <= expected:
            raise _Refused(f"only layers {attending} call attention")
        if own is None and probe.written is not None:
            raise _Refused(f"only layers {attending} call attention through the registry")
        if own is None and probe.uses_length and shapes:
            # Requests in an engine's cache have different lengths, so it has no single length.
            other = self._run(own, length=_OTHER_LENGTH)
            if not probe.equals(other):
                raise _Refused("it computes with the length of its cache, not with position_ids")
        count = len(self.cache_layers) if self.states else len(shapes)
        layers = tuple(shapes.get(index) for index in range(count))
        return ModelShape(
            body=self.body,
            layers=layers,
            states=self.states,
            mixers=self.mixers,
            positions=self._positions(layers, probe.functions),
            vocabulary=int(self.model.get_output_embeddings().weight.shape[0]),
            dtype=probe.dtype,
            device=self.model.device,
            output_type=type(probe.output),
            uses_length=probe.uses_length or own is not None,
            own=own,
            overrides=self.overrides,
            trace=self.trace,
        )

    def _run(self, own: str | None, *, length: int = 0) -> _AttentionProbe:
        probe = _AttentionProbe(self.model, self.mixers, own=own)
        return probe.run(self.body, self.overrides, length=length)

    def _positions(
        self, shapes: tuple[LayerShape | None, ...], functions: list[Callable[..., Tensor]]
    ) -> int | None:
        """Return the maximum length of a request.

        The cache of ``generate`` may keep fewer rows than the mask allows: Moshi's cache has a
        sliding window, but Moshi's mask has none. The results of a longer request would depend on
        the chunks of its prompt, so the window of the cache is the limit.
        """
        windows = set()
        for function in functions:
            with contextlib.suppress(Exception):  # Other masks have no window.
                windows.add(_window_of(function))
        limits = [getattr(self.model.config.get_text_config(), "max_position_embeddings", None)]
        for layer, shape in zip(self.cache_layers, shapes, strict=False):
            window = layer.sliding_window if getattr(layer, "is_sliding", False) else None
            if window and shape and window not in windows and window < (shape.window or math.inf):
                limits.append(window)
        return min((limit for limit in limits if limit is not None), default=None)


def probe(model: PreTrainedModel) -> ModelShape:
    """Run ``model`` on three tokens, and return its requirements."""
    require_model(model)
    try:
        with model_lock, ordinary_device():
            prober = _Prober(model)
            try:
                return prober.shape()
            except _Refused as error:
                own = str(error)
            try:
                return prober.shape(own)
            except _Refused as error:
                if str(error) == own:
                    raise
                raise _Refused(f"{own}; and with the attention of its own code, {error}") from error
    except _Refused as error:
        raise refusal(model, error) from error


@contextlib.contextmanager
def registered(
    name: str, attention: Callable[..., Any], mask: Callable[..., Any] | None
) -> Iterator[None]:
    """Register an attention function and its mask function with transformers inside the block."""
    AttentionInterface.register(name, attention)
    if mask is not None:
        AttentionMaskInterface.register(name, mask)
    try:
        yield
    finally:
        AttentionInterface._global_mapping.pop(name)
        AttentionMaskInterface._global_mapping.pop(name, None)


def own_attention(model: PreTrainedModel) -> Callable[..., Any]:
    """Return the model's own attention function, for calls with a mask."""
    plain = all(config._attn_implementation == "sdpa" for config in configs_of(model))

    def attention(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if plain:
            return AttentionInterface._global_mapping["sdpa"](module, *args, **kwargs)
        own = sys.modules[type(module).__module__].eager_attention_forward
        return own(module, *args, **kwargs)

    return attention


class _NoConversions(TorchFunctionMode):
    """A mode that refuses ``tolist`` and ``numpy``, which bypass the dispatcher."""

    is_devgraph_mode = True

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in (Tensor.tolist, Tensor.numpy):
            raise _Refused(f"{_HOST_READ} ({func.__name__})")
        return func(*args, **(kwargs or {}))


class _NoHostReads(OwnMode):
    """A mode that refuses operations that read device data on the host."""

    def take(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        reads = torch.Tag.dynamic_output_shape in func.tags
        reads |= func is torch.ops.aten._local_scalar_dense.default
        if reads and func.overloadpacket is torch.ops.aten.index:
            reads = any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
        if reads:
            raise _Refused(f"{_HOST_READ} ({func.overloadpacket.__name__})")
        return func(*args, **kwargs)
