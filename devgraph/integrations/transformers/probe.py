"""What a model asks of attention and of its cache, found by running it once.

Rather than reading configurations of many families, the probe calls the model on three tokens with
an attention function and a mask function that only look: which layers write the cache and with
what shapes, which mask each of them is given, and which arguments it passes. Whatever this
integration could not honour raises here, before anything is built.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from devgraph.api.errors import DeviceGraphError
from devgraph.integrations.transformers.cache import LayerShape
from devgraph.integrations.transformers.fusion import Seen

_TOKENS = 3
_OTHER_LENGTH = 5
"""Rows that the cache says it holds in a second run, to see what depends on that."""

# Arguments of an attention call that change nothing here: dropout is off, the mask decides what is
# causal and how wide the window is, positions were applied before.
_HARMLESS = frozenset(
    {
        "cache_position",
        "dropout",
        "is_causal",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "sliding_window",
        "use_cache",
    }
)
_HONOURED = frozenset({"scaling", "softcap"})

# Rotary embeddings that pick their frequencies by the longest position of a step, read on the host.
_HOST_ROPE = frozenset({"dynamic", "longrope"})

_OWN_ATTENTION = "its attention does not go through the attention-function registry"


class UnsupportedModelError(DeviceGraphError, ValueError):
    """The model does something that this integration cannot run correctly; it says what."""


@attrs.frozen(kw_only=True)
class ModelShape:
    """What the probe found."""

    layers: tuple[LayerShape, ...]
    positions: int | None
    """Positions up to which a request is what ``model.generate`` makes of it; None is no limit."""
    vocabulary: int
    dtype: torch.dtype
    device: torch.device
    body: torch.nn.Module
    """What the model's forward calls for hidden states: its base model, or a part of that."""
    output_type: type[Any]
    """What that returns; it can be built from ``last_hidden_state`` alone."""
    uses_length: bool
    """Whether it asks its cache for a length, though nothing depends on the answer."""
    seen: Seen = attrs.field(repr=False)
    """What of it could be fused."""


@contextlib.contextmanager
def overridden(configs: list[Any], **values: Any) -> Iterator[None]:
    """Set attributes of ``configs`` for the duration, so that the model stays as it was.

    Past the checks of a configuration: some take no None for the token of padding.
    """
    saved = [(c, {n: getattr(c, n) for n in values if hasattr(c, n)}) for c in configs]
    try:
        for config, old in saved:
            for name in old:
                object.__setattr__(config, name, values[name])
        yield
    finally:
        for config, old in saved:
            for name, value in old.items():
                object.__setattr__(config, name, value)


@contextlib.contextmanager
def standing_in(module: torch.nn.Module, output: Any) -> Iterator[None]:
    """Make ``module`` return ``output`` instead of running."""
    own = module.__dict__.get("forward")
    module.forward = lambda *args, **kwargs: output
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


def configs_of(model: PreTrainedModel) -> list[Any]:
    """Return every distinct configuration object that a module of ``model`` holds."""
    found = {id(model.config): model.config}
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation"):
            found.setdefault(id(config), config)
    return list(found.values())


def eos_of(model: PreTrainedModel) -> list[int]:
    """Return the tokens with which ``model`` ends a text."""
    found = getattr(model.generation_config, "eos_token_id", None)
    if found is None:
        found = getattr(model.config, "eos_token_id", None)
    if found is None:
        return []
    return [found] if isinstance(found, int) else list(found)


def _refuse(model: PreTrainedModel, what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{type(model).__name__} cannot run on device graphs here: {what}. Supported are causal "
        f"language models of transformers whose attention goes through its attention-function "
        f"registry and whose whole state is a cache of keys and values."
    )


def _check_static(model: PreTrainedModel) -> None:
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModelError(
            f"expected a transformers model, got {type(model).__name__}; load one with "
            f"AutoModelForCausalLM.from_pretrained(...)"
        )
    if model.training:
        raise _refuse(model, "it is in training mode, where dropout is on; call model.eval()")
    if getattr(model.config, "is_encoder_decoder", False):
        raise _refuse(model, "it is an encoder-decoder model")
    if model.get_output_embeddings() is None or model.base_model is model:
        raise _refuse(model, "it has no base model with a language-model head on top")
    devices = {p.device for p in model.parameters()}
    if len(devices) != 1:
        raise _refuse(
            model, f"its parameters are on {len(devices)} devices: {sorted(map(str, devices))}"
        )
    if next(iter(devices)).type == "meta":
        raise _refuse(model, "its parameters are on the meta device and have no data")
    for name, module in model.named_modules():
        kinds = getattr(module, "rope_type", None)
        for kind in kinds.values() if isinstance(kinds, dict) else [kinds]:
            if kind in _HOST_ROPE:
                raise _refuse(
                    model,
                    f"the rotary embedding {name!r} is of type {kind!r}, which reads the longest "
                    f"position of every step on the host",
                )


def _check_state(model: PreTrainedModel) -> list[DynamicLayer]:
    """Return the layers of the cache that ``model.generate`` makes; refuse other layers."""
    layers = DynamicCache(config=model.config).layers
    for index, layer in enumerate(layers):
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise _refuse(
                model,
                f"layer {index} of its cache is a {type(layer).__name__}, not keys and values "
                f"alone",
            )
    return layers  # type: ignore[no-any-return]


def _positions(
    model: PreTrainedModel, kept: list[DynamicLayer], shapes: tuple[LayerShape, ...]
) -> int | None:
    """Return how long a request may become.

    Where the cache of ``generate`` keeps fewer rows than a mask shows (Moshi's has the window of
    its configuration, its mask none), a request that outgrows it depends on how its prompt was
    cut into steps, so it must end before.
    """
    limits = [getattr(model.config.get_text_config(), "max_position_embeddings", None)]
    for layer, shape in zip(kept, shapes, strict=False):
        window = layer.sliding_window if layer.is_sliding else None
        if window is not None and (shape.window is None or shape.window > window):
            limits.append(window)
    return min((limit for limit in limits if limit is not None), default=None)


class _Found(Exception):
    """Ends a forward at the first module that it calls."""


def _body_of(model: PreTrainedModel) -> torch.nn.Module:
    """Return what ``model``'s forward calls for hidden states: its base model, or a part of that
    (OPT's decoder)."""
    called: list[torch.nn.Module] = []

    def found(module: torch.nn.Module, args: Any) -> None:
        called.append(module)
        raise _Found

    hooks = [m.register_forward_pre_hook(found) for m in model.modules() if m is not model]
    try:
        with torch.no_grad():
            model(input_ids=torch.zeros(1, _TOKENS, dtype=torch.int64, device=model.device))
    except _Found:
        pass
    except Exception as error:
        raise _refuse(model, f"its forward failed with {type(error).__name__}: {error}") from error
    finally:
        for hook in hooks:
            hook.remove()
    if not called or called[0] not in (model.base_model, *model.base_model.modules()):
        raise _refuse(model, "its forward does not begin with its base model")
    if "position_ids" not in inspect.signature(called[0].forward).parameters:
        raise _refuse(model, "its base model takes no position_ids")
    return called[0]


class _Watcher(Cache):  # type: ignore[misc]
    """A cache that stores nothing and notes what is written to it."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.written: tuple[int, torch.Tensor, torch.Tensor] | None = None
        self.length = 0
        self.asked = False

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.written = (layer_idx, key_states, value_states)
        return key_states, value_states

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        self.asked = True
        return self.length


class _Probe:
    """The attention and mask functions of one probing run, and what they saw."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.cache = _Watcher()
        self.windows: list[int | None] = []
        self.layers: dict[int, LayerShape] = {}
        self.attended: list[torch.Tensor] = []

    def mask(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Note the window of a mask and return a stand-in that attention can recognise."""
        function = kwargs.get("mask_function")
        if function is None or kwargs.get("attention_mask") is not None:
            raise _refuse(self.model, "it builds its attention mask in a way unknown here")
        self.windows.append(_window_of(function, self.model))
        # On the model's device, so that attention of its own meets it alike on every device.
        return torch.full((1, 1, 1, 1), len(self.windows) - 1, device=self.model.device)

    def attention(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        written, self.cache.written = self.cache.written, None
        name = type(module).__name__
        if written is None or written[1] is not key or written[2] is not value:
            raise _refuse(
                self.model,
                f"a layer of {name} attends to something else than what it just wrote to the cache",
            )
        self._check_call(name, query, attention_mask, kwargs)
        index = written[0]
        if index in self.layers:
            raise _refuse(self.model, f"layer {index} calls attention more than once")
        assert attention_mask is not None
        self.attended += (query, key, value)
        self.layers[index] = LayerShape(
            heads=query.shape[1],
            kv_heads=key.shape[1],
            key_dim=key.shape[3],
            value_dim=value.shape[3],
            window=self.windows[int(attention_mask.flatten()[0])],
            softcap=kwargs.get("softcap"),
        )
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None

    def _check_call(
        self, name: str, query: torch.Tensor, mask: torch.Tensor | None, kwargs: dict[str, Any]
    ) -> None:
        unknown = [n for n, v in kwargs.items() if v is not None and n not in _HARMLESS | _HONOURED]
        if unknown:
            raise _refuse(
                self.model, f"{name} passes {', '.join(sorted(unknown))} to attention, unknown here"
            )
        if mask is None or mask.dtype != torch.int64:
            raise _refuse(self.model, f"{name} is not given a mask of transformers' masking_utils")
        if query.shape[0] != 1 or query.shape[2] != _TOKENS:
            raise _refuse(self.model, f"{name} attends with queries of shape {tuple(query.shape)}")


def _window_of(function: Callable[..., torch.Tensor], model: PreTrainedModel) -> int | None:
    """Return the sliding window of a causal mask function, None when it has none.

    The function is evaluated, not recognised: at positions far apart it must allow exactly the
    last ``window`` rows, or all of them.
    """
    zero = torch.zeros((), dtype=torch.int64)

    def allowed(position: int, rows: torch.Tensor) -> torch.Tensor:
        at = torch.full((), position, dtype=torch.int64)
        return torch.as_tensor(function(zero, zero, at, rows)).expand(rows.shape)

    far = 1 << 20
    window = int(allowed(far, torch.arange(far + 1)).sum())
    limit = None if window == far + 1 else window
    for position in (0, 1, 2, 7, window - 1, window, window + 5, far):
        rows = torch.arange(max(0, position - window - 64), position + 64)
        want = rows <= position
        if limit is not None:
            want &= rows > position - limit
        if not torch.equal(allowed(position, rows), want):
            raise _refuse(model, "its attention mask is neither causal nor a causal sliding window")
    return limit


def probe(model: PreTrainedModel) -> ModelShape:
    """Run ``model`` once on three tokens and return what it needs.

    Raises:
        UnsupportedModelError: it cannot run correctly here; the message says why.
    """
    _check_static(model)
    kept = _check_state(model)
    body = _body_of(model)
    seen = Seen(body)
    with seen.noting():
        watch, output = _run(model, body)
    if not watch.layers:
        raise _refuse(model, _OWN_ATTENTION)
    if sorted(watch.layers) != list(range(len(watch.layers))) or watch.cache.written is not None:
        raise _refuse(model, f"only layers {sorted(watch.layers)} attend through the registry")
    if watch.cache.asked:
        _check_length(model, body, watch, output)
    head = model.get_output_embeddings()
    layers = tuple(watch.layers[i] for i in sorted(watch.layers))
    return ModelShape(
        body=body,
        layers=layers,
        positions=_positions(model, kept, layers),
        vocabulary=int(head.weight.shape[0]),
        dtype=output.last_hidden_state.dtype,
        device=model.device,
        output_type=type(output),
        uses_length=watch.cache.asked,
        seen=seen,
    )


def _run(model: PreTrainedModel, body: torch.nn.Module, length: int = 0) -> tuple[_Probe, Any]:
    """Run ``body`` of ``model`` on three tokens with a cache that says it holds ``length``."""
    watch = _Probe(model)
    watch.cache.length = length
    ids = torch.zeros(1, _TOKENS, dtype=torch.int64, device=model.device)
    positions = torch.arange(_TOKENS, device=model.device)[None]
    name = f"devgraph_probe_{id(watch)}"
    AttentionInterface.register(name, watch.attention)
    AttentionMaskInterface.register(name, watch.mask)
    try:
        with overridden(configs_of(model), _attn_implementation=name), torch.no_grad():
            output = body(
                input_ids=ids, position_ids=positions, past_key_values=watch.cache, use_cache=True
            )
    except UnsupportedModelError:
        raise
    except Exception as error:
        # Between writing to its cache and calling an attention function: it attends by itself,
        # and stumbles over the mask that stands in.
        alone = watch.cache.written is not None
        failed = f"a first forward failed with {type(error).__name__}: {error}"
        raise _refuse(model, _OWN_ATTENTION if alone else failed) from error
    finally:
        AttentionInterface._global_mapping.pop(name, None)
        AttentionMaskInterface._global_mapping.pop(name, None)
    return watch, output


def _check_length(
    model: PreTrainedModel, body: torch.nn.Module, watch: _Probe, output: Any
) -> None:
    """Refuse a model in which anything depends on the length that its cache says it has.

    A cache here holds requests of different lengths, and has none.
    """
    again, other = _run(model, body, length=_OTHER_LENGTH)
    pairs = zip(
        [*watch.attended, output.last_hidden_state],
        [*again.attended, other.last_hidden_state],
        strict=True,
    )
    if again.windows != watch.windows or not all(torch.equal(a, b) for a, b in pairs):
        raise _refuse(model, "it computes with the length of its cache, not with position_ids")
