"""What a model asks of attention and of its cache, found by running it once.

Rather than reading configurations of many families, the probe calls the model on three tokens with
an attention function and a mask function that only look: which layers write the cache and with
what shapes, which mask each of them is given, and which arguments it passes. Whatever this
integration could not honour raises here, before anything is built.

A model that has attention of its own, or hands the registry's function what this integration's
kernels do not know, is probed a second time as one that *attends by itself*: its own code runs on
whole slots of the cache, under a mask made of device positions.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from devgraph.api.errors import DeviceGraphError
from devgraph.integrations.transformers.attention import LayerShape
from devgraph.integrations.transformers.fusion import Seen, standing_in
from devgraph.integrations.transformers.names import NAMES

_TOKENS = 3
_OTHER_LENGTH = 5
"""Rows that the cache says it holds in a second run, to see what depends on that."""

# Arguments of an attention call that change nothing here: dropout is off, the mask decides what is
# causal and how wide the window is, positions were applied before.
_HARMLESS = frozenset(
    """
    cache_position dropout is_causal output_attentions output_hidden_states output_router_logits
    position_ids return_dict sliding_window use_cache
    """.split()
)
_HONOURED = frozenset({"scaling", "softcap"})

# Rotary embeddings that pick their frequencies by the longest position of a step, read on the host.
_HOST_ROPE = frozenset({"dynamic", "longrope"})

# Layers that keep keys and values; the last keeps nothing and reads what another has written.
_KEPT = frozenset({"DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer"})

_HOST_READ = "it reads device data on the host"
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
    own: str | None
    """Why it attends by itself; None where its attention is this integration's."""
    overrides: dict[str, Any]
    """What its configurations say while it runs here, but for the attention."""
    seen: Seen = attrs.field(repr=False)
    """What of it could be fused."""


def configs_of(model: PreTrainedModel) -> list[Any]:
    """Return every distinct configuration object that a module of ``model`` holds."""
    held = [getattr(module, "config", None) for module in model.modules()]  # the model is the first
    return list({id(c): c for c in held if hasattr(c, "_attn_implementation")}.values())


def overriding(model: PreTrainedModel, **values: Any) -> list[tuple[Any, str, Any]]:
    """Return the changes, for ``standing_in``, by which the configurations of ``model`` that have
    these attributes say ``values``."""
    configs = configs_of(model)
    return [(one, name, v) for one in configs for name, v in values.items() if hasattr(one, name)]


def eos_of(*configs: Any) -> list[int]:
    """Return the tokens that end a text, as the first of ``configs`` says that names any."""
    for config in configs:
        found = getattr(config, "eos_token_id", None)
        if found is not None:
            return [found] if isinstance(found, int) else list(found)
    return []


class _Refused(Exception):
    """Says what keeps a model from running here."""


def refusal(model: PreTrainedModel, what: object) -> UnsupportedModelError:
    """Return the error that says ``what`` keeps ``model`` from running here."""
    return UnsupportedModelError(
        f"{type(model).__name__} cannot run on device graphs here: {what}. Supported are causal "
        f"language models of transformers whose whole state is a cache of keys and values."
    )


def _check_static(model: PreTrainedModel) -> None:
    if model.training:
        raise _Refused("it is in training mode, where dropout is on; call model.eval()")
    if getattr(model.config, "is_encoder_decoder", False):
        raise _Refused("it is an encoder-decoder model")
    if getattr(model.get_output_embeddings(), "weight", None) is None:
        raise _Refused("it has no base model with a language-model head on top")
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
                    f"the rotary embedding {name!r} is of type {kind!r}, which reads the longest "
                    f"position of every step on the host"
                )


def _check_state(model: PreTrainedModel) -> list[DynamicLayer]:
    """Return the layers of the cache that ``model.generate`` makes; refuse other layers."""
    layers = DynamicCache(config=model.config).layers
    for index, layer in enumerate(layers):
        if type(layer).__name__ not in _KEPT:
            raise _Refused(
                f"layer {index} of its cache is a {type(layer).__name__}, not keys and values alone"
            )
    return layers  # type: ignore[no-any-return]


def _positions(
    model: PreTrainedModel,
    kept: list[DynamicLayer],
    shapes: tuple[LayerShape, ...],
    functions: list[Callable[..., Tensor]],
) -> int | None:
    """Return how long a request may become.

    Where the cache of ``generate`` keeps fewer rows than a mask shows (Moshi's has the window of
    its configuration, its mask none), a request that outgrows it depends on how its prompt was
    cut into steps, so it must end before.

    Args:
        functions: the masks of a model that attends by itself: which layer has which is not seen.
    """
    windows = set()
    for function in functions:
        with contextlib.suppress(Exception):  # One that reads more than positions is none.
            windows.add(_window_of(function))
    limits = [getattr(model.config.get_text_config(), "max_position_embeddings", None)]
    for layer, shape in zip(kept, shapes, strict=False):
        window = getattr(layer, "sliding_window", None) if layer.is_sliding else None
        if window is None or (shape.window is not None and shape.window <= window):
            continue
        if window not in windows:
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
        raise _Refused(f"its forward failed with {type(error).__name__}: {error}") from error
    finally:
        for hook in hooks:
            hook.remove()
    if not called or not {"input_ids", NAMES.cache} <= parameters_of(called[0]):
        raise _Refused("its forward does not begin with a base model that has a cache")
    return called[0]


def parameters_of(module: torch.nn.Module) -> set[str]:
    """Return the names of what the forward of ``module`` takes."""
    return set(inspect.signature(module.forward).parameters)


class _Probe(Cache):  # type: ignore[misc]
    """One run of a model over this cache, which stores nothing: what the model writes to it, and
    what it gives to an attention and a mask function that only look.

    Args:
        own: why the model attends by itself, if it does.
    """

    def __init__(self, model: PreTrainedModel, *, own: str | None) -> None:
        super().__init__(layers=[])
        self.model = model
        self.own = own
        self.length = 0
        self.asked = False
        self.written: tuple[int, Tensor, Tensor] | None = None
        self.functions: list[Callable[..., Tensor]] = []
        self.windows: list[int | None] = []
        self.found: dict[int, LayerShape] = {}
        self.attended: list[Tensor] = []
        self.output: Any = None

    def run(self, body: torch.nn.Module, overrides: dict[str, Any], *, length: int = 0) -> _Probe:
        """Run ``body`` of the model on three tokens, with a cache that says it holds ``length``
        rows, while its configurations say ``overrides``; return this."""
        model, own = self.model, self.own is not None
        self.length = length
        ids = torch.zeros(1, _TOKENS, dtype=torch.int64, device=model.device)
        inputs = {"input_ids": ids, NAMES.cache: self, "use_cache": True}
        if "position_ids" in parameters_of(body):
            inputs["position_ids"] = torch.arange(_TOKENS, device=model.device)[None]
        name = f"devgraph_probe_{id(self)}"
        register(name, attends_itself(model) if own else self.attention, self.mask)
        try:
            with (
                standing_in(overriding(model, _attn_implementation=name, **overrides)),
                torch.no_grad(),
                _NoLists(),
                _NoHostReads(),  # type: ignore[no-untyped-call]
            ):
                self.output = body(**inputs)
        except _Refused:
            raise
        except Exception as error:
            # Between writing to its cache and calling an attention function: it attends by itself,
            # and stumbles over the mask that stands in.
            alone = self.written is not None and not own
            failed = f"a first forward failed with {type(error).__name__}: {error}"
            raise _Refused(_OWN_ATTENTION if alone else failed) from error
        finally:
            unregister(name)
        return self

    def equals(self, other: _Probe) -> bool:
        """Whether another run computed the same."""
        pairs = zip(
            [*self.attended, self.output.last_hidden_state],
            [*other.attended, other.output.last_hidden_state],
            strict=True,
        )
        return self.windows == other.windows and all(torch.equal(a, b) for a, b in pairs)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.written = (layer_idx, key_states, value_states)
        shape = tuple(key_states.shape)
        if len(shape) != 4 or shape[2] != _TOKENS or shape[:3] != value_states.shape[:3]:
            raise ValueError(f"keys of shape {shape} for {_TOKENS} tokens")
        if self.own is not None:
            self._find(layer_idx, shape[1], key_states, value_states)
        return key_states, value_states

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        self.asked = True
        return self.length

    def _find(self, index: int, heads: int, key: Tensor, value: Tensor, **scoring: Any) -> None:
        self.found[index] = LayerShape(
            heads=heads,
            kv_heads=key.shape[1],
            key_dim=key.shape[3],
            value_dim=value.shape[3],
            **scoring,
        )

    def mask(self, *args: Any, **kwargs: Any) -> Tensor:
        """Note the window of a mask and return a stand-in that attention can recognise."""
        function = kwargs.get("mask_function")
        padded = kwargs.get("attention_mask") is not None
        if function is None or (padded and self.own is None):
            raise _Refused("it builds its attention mask in a way unknown here")
        if self.own is not None:
            self.functions.append(function)
            at = torch.arange(_TOKENS, device=self.model.device)
            return mask_of(function, at[None], at, self.model.dtype)
        with _disable_current_modes():
            self.windows.append(_window_of(function))
        # On the model's device, so that attention of its own meets it alike on every device.
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
                f"a layer of {name} attends to something else than what it just wrote to the cache"
            )
        self._check_call(name, query, attention_mask, kwargs)
        index = written[0]
        if index in self.found:
            raise _Refused(f"layer {index} calls attention more than once")
        assert attention_mask is not None
        self.attended += (query, key, value)
        with _disable_current_modes():
            window = self.windows[int(attention_mask.flatten()[0])]
        softcap = kwargs.get("softcap")
        self._find(index, query.shape[1], key, value, window=window, softcap=softcap)
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None

    def _check_call(
        self, name: str, query: Tensor, mask: Tensor | None, kwargs: dict[str, Any]
    ) -> None:
        unknown = [n for n, v in kwargs.items() if v is not None and n not in _HARMLESS | _HONOURED]
        if unknown:
            raise _Refused(f"{name} passes {', '.join(sorted(unknown))} to attention, unknown here")
        if mask is None or mask.dtype != torch.int64:
            raise _Refused(f"{name} is not given a mask of transformers' masking_utils")
        if query.shape[0] != 1 or query.shape[2] != _TOKENS:
            raise _Refused(f"{name} attends with queries of shape {tuple(query.shape)}")


def mask_of(
    function: Callable[..., Tensor], positions: Tensor, rows: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return the mask ``[requests, 1, width, rows]`` that a mask function of transformers means for
    tokens at ``positions``, ``[requests, width]``."""
    none = rows[:1] * 0
    shown = function(none, none, positions[:, None, :, None], rows)
    shown = shown.expand(positions.shape[0], 1, positions.shape[1], rows.shape[0])
    # The lowest number, as transformers has it: models test for it.
    hide = torch.finfo(dtype).min
    return torch.zeros((), dtype=dtype, device=rows.device).masked_fill(~shown, hide)


def _window_of(function: Callable[..., Tensor]) -> int | None:
    """Return the sliding window of a causal mask function, None when it has none.

    The function is evaluated, not recognised: at positions far apart it must allow exactly the
    last ``window`` rows, or all of them.
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
    """Return what gives a block torch's own default device, whatever that of the program is."""
    ordinary = torch.get_default_device().type == "cpu"
    return contextlib.nullcontext() if ordinary else torch.device("cpu")


def probe(model: PreTrainedModel) -> ModelShape:
    """Run ``model`` once on three tokens and return what it needs.

    Raises:
        UnsupportedModelError: it cannot run correctly here; the message says why.
    """
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModelError(
            f"expected a transformers model, got {type(model).__name__}; load one with "
            f"AutoModelForCausalLM.from_pretrained(...)"
        )
    try:
        with ordinary_device():
            _check_static(model)
            known = model, _check_state(model), _body_of(model), _overrides(model)
            try:
                return _probe(*known)
            except _Refused as error:
                own = str(error)
            try:
                return _probe(*known, own=own)
            except _Refused as error:
                if str(error) == own:
                    raise
                raise _Refused(f"{own}; and attending by itself, {error}") from error
    except _Refused as error:
        raise refusal(model, error) from error


def _overrides(model: PreTrainedModel) -> dict[str, Any]:
    # pad_token_id: some models look for padding among the ids, on the host, when it is set.
    overrides: dict[str, Any] = {"pad_token_id": None}
    if any(getattr(c, "_experts_implementation", None) is not None for c in configs_of(model)):
        # Grouped products read the group sizes on the host unless the device has the kernel.
        fused = model.device.type != "cpu" and model.dtype == torch.bfloat16
        overrides["_experts_implementation"] = "grouped_mm" if fused else "batched_mm"
    return overrides


def _probe(
    model: PreTrainedModel,
    kept: list[DynamicLayer],
    body: torch.nn.Module,
    overrides: dict[str, Any],
    own: str | None = None,
) -> ModelShape:
    if own is None and "position_ids" not in parameters_of(body):
        raise _Refused("its base model takes no position_ids")
    seen = Seen(body)
    with seen.noting():
        watch = _Probe(model, own=own).run(body, overrides)
    found = watch.found
    if not found:
        raise _Refused(_OWN_ATTENTION if own is None else "it keeps no keys and values")
    if sorted(found) != list(range(len(found))):
        raise _Refused(f"only layers {sorted(found)} attend")
    if own is None and watch.written is not None:
        raise _Refused(f"only layers {sorted(found)} attend through the registry")
    if own is None and watch.asked:
        # A cache here holds requests of different lengths, and has none.
        other = _Probe(model, own=own).run(body, overrides, length=_OTHER_LENGTH)
        if not watch.equals(other):
            raise _Refused("it computes with the length of its cache, not with position_ids")
    layers = tuple(found[i] for i in sorted(found))
    return ModelShape(
        body=body,
        layers=layers,
        positions=_positions(model, kept, layers, watch.functions),
        vocabulary=int(model.get_output_embeddings().weight.shape[0]),
        dtype=watch.output.last_hidden_state.dtype,
        device=model.device,
        output_type=type(watch.output),
        uses_length=watch.asked or own is not None,
        own=own,
        overrides=overrides,
        seen=seen,
    )


def register(
    name: str, attention: Callable[..., Any], mask: Callable[..., Any] | None = None
) -> None:
    """Make functions known to transformers as the attention implementation ``name``; without one
    for masks it makes none."""
    AttentionInterface.register(name, attention)
    if mask is not None:
        AttentionMaskInterface.register(name, mask)


def unregister(name: str) -> None:
    """Undo ``register``. Idempotent."""
    AttentionInterface._global_mapping.pop(name, None)
    AttentionMaskInterface._global_mapping.pop(name, None)


def attends_itself(model: PreTrainedModel) -> Callable[..., Any]:
    """Return the attention function that ``model`` has for masks: its own, or the one of torch."""
    plain = all(config._attn_implementation == "sdpa" for config in configs_of(model))

    def attention(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if plain:
            return AttentionInterface._global_mapping["sdpa"](module, *args, **kwargs)
        own = sys.modules[type(module).__module__].eager_attention_forward
        return own(module, *args, **kwargs)

    return attention


class _NoLists(TorchFunctionMode):
    """Refuses what reads tensors of the CPU without an operation."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in (Tensor.tolist, Tensor.numpy):
            raise _Refused(f"{_HOST_READ} ({func.__name__})")
        return func(*args, **(kwargs or {}))


class _NoHostReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses what no graph can hold: results whose shape or value the host must read."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        reads = torch.Tag.dynamic_output_shape in func.tags or func is _READ
        if reads and func.overloadpacket is torch.ops.aten.index:
            reads = any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
        if reads:
            raise _Refused(f"{_HOST_READ} ({func.overloadpacket.__name__})")
        return func(*args, **(kwargs or {}))


_READ = torch.ops.aten._local_scalar_dense.default
