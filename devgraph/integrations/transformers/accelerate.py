"""Device graphs under ``model.generate``.

>>> from devgraph.integrations.transformers import accelerate
>>> model = accelerate(model, max_requests=8)                           # doctest: +SKIP
>>> model.generate(**inputs, max_new_tokens=64)                         # doctest: +SKIP

transformers' own loop of ``generate`` still runs, with its logits processors, stopping criteria,
streamers, scores and random numbers. When the loop creates the cache of a request, the cache is
seated in the slots of an engine (see ``seat``). Forwards with a seated cache run in the engine's
runners. If the runners do not support a forward, the cache leaves its slots, and the model's own
forward continues.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import utils
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus
from transformers.generation.logits_process import (
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.mamba.modeling_mamba import MambaCausalLMOutput

from devgraph.api.backend import Backend
from devgraph.api.config.facts import EngineFacts
from devgraph.api.config.model import DeviceGraphConfig
from devgraph.api.errors import InputError, StateError
from devgraph.integrations.engine.installation import Changes
from devgraph.integrations.transformers.engine import Engine, config_of, has_hooks
from devgraph.integrations.transformers.fusion import model_lock
from devgraph.integrations.transformers.names import CACHES, cache_in, cache_name
from devgraph.integrations.transformers.probe import (
    UnsupportedModelError,
    eos_of,
    parameters_of,
    require_model,
)
from devgraph.integrations.transformers.requests import SamplingParams
from devgraph.integrations.transformers.seat import Seat, length_of, seat_of
from devgraph.runners.decode import DecodeRunner

logger = logging.getLogger(__name__)

_WIDTHS = (1, 2, 4, 8, 12, 16)
"""Numbers of tokens for which there are graphs that check proposed tokens.

Numbers in between are padded to the next one. Larger numbers run transformers' own code."""

_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.ASSISTED_GENERATION)


class Fallback(str, enum.Enum):
    """Reasons why a request ran transformers' own code."""

    def __new__(cls, value: str, text: str) -> Fallback:
        member = str.__new__(cls, value)
        member._value_ = value
        member.text = text
        return member

    text: str
    """The property of the request that graphs do not support, for messages."""

    MODE = "generation_mode", "a mode other than greedy and sampling, such as beam search"
    OUTPUTS = "outputs", "attentions or hidden states as outputs, or a tuple"
    CACHE = "cache", "no cache, or a cache other than a DynamicCache of this batch"
    INPUTS = "inputs", "inputs other than token ids, their mask and their positions"
    MASK = "mask", "a mask or positions that do not describe left padding"
    PADDING = "padding", "padding, counted as positions by a model that runs its own attention"
    BATCH = "over_max_requests", "more rows than max_requests"
    LENGTH = "over_max_len", "more positions than max_len"
    LOGITS = "all_logits", "logits of padding, or of more tokens than one checking step returns"
    NESTED = "nested", "a generation inside another generation of the same model"
    MODEL = "model", "a model that the engine cannot run"
    CONFIG = "generation_config", "options of generate_batch that the engine does not support"


@attrs.frozen(kw_only=True)
class GenerateStats:
    """Counters of an accelerated model since ``accelerate``."""

    requests: int
    """Number of ``generate`` calls that started in the engine, plus ``generate_batch`` requests."""
    fallbacks: dict[str, int]
    """Number of requests that ran or continued in transformers' own code, by reason."""
    engine: Engine = attrs.field(repr=False)
    """The engine of the model; ``engine.decode.stats()`` counts its graphs."""


class _Hook:
    """A replacement for a method. Copies and pickles of the module have the original method."""

    def __init__(self, module: nn.Module, name: str, call: Callable[..., Any]) -> None:
        self.acceleration: _Acceleration = call.__self__  # type: ignore[attr-defined]
        self.own = getattr(module, name)
        self._module, self._name, self._call = module, name, call
        functools.update_wrapper(self, self.own)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __reduce__(self) -> Any:
        return getattr, (self._module, self._name)


class _Deferral:
    """A patch that enables transformers' deferred stop check for seated caches.

    Normally, the loop of ``generate`` checks in every step whether to stop, so that host and device
    wait for each other. The deferred check runs one step later, and the loop undoes the extra step.
    transformers supports deferral only on one type of device. The patch enables it on every device
    but the CPU, unless the extra step would draw random numbers or change recurrent state.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        # None in older versions of transformers, which have no deferred check.
        self._own: Any = getattr(utils, "DeferredStopCheck", None)

    def __enter__(self) -> None:
        with self._lock:
            self._users += 1
            if self._own is not None and self._users == 1:
                supported = staticmethod(self._supported)
                utils.DeferredStopCheck = type(
                    "DeferredStopCheck", (self._own,), {"is_supported": supported}
                )

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if self._own is not None and not self._users:
                utils.DeferredStopCheck = self._own

    def _supported(self, device: torch.device, cache: Any, *args: Any, **kwargs: Any) -> bool:
        seat = seat_of(cache)
        if seat is not None and seat.can_defer and device.type != "cpu":
            # A deferred check would change the state of an assistant's stopping criteria.
            return not kwargs.get("is_assistant")
        return bool(self._own.is_supported(device, cache, *args, **kwargs))


_deferral = _Deferral()


class _Acceleration:
    """The engine of a model, the hooks in the model, and the seated cache."""

    def __init__(self, model: PreTrainedModel, make: Callable[[], Engine]) -> None:
        self.model = model
        self.requests = 0
        self.fallbacks: Counter[str] = Counter()
        self._logged: set[str] = set()
        self._obstacle = ""
        self._make = make
        self.engine = make()
        self._checking: DecodeRunner | None = None
        self._seat: Seat | None = None
        self._lock = threading.RLock()
        self._depth = 0
        self._changes = Changes("transformers")
        self._generate_hook = self._hook(model, "generate", self._generate)
        self._generate_batch_hook = self._hook(model, "generate_batch", self._generate_batch)
        self._forward_hook = self._hook(model, "forward", self._forward)
        self._prepare_hook = self._hook(model, "_prepare_cache_for_generation", self._prepare_cache)
        body = self.engine.model.shape.body
        self._body_hook = self._hook(body, "forward", self._body_forward)
        self._is_stateful: bool = getattr(model, "_is_stateful", False)
        if self.engine.model.states and CACHES[0] in parameters_of(body):
            # transformers cannot undo rejected tokens in recurrent state, but state slots can. The
            # loop of transformers finds a cache only under the first name in ``CACHES``.
            self._changes.change(model, "_is_stateful", False)
        self._fingerprint = _fingerprint(model)

    def remove(self) -> None:
        with self._lock:
            self._changes.undo()
            self._close()

    def _hook(self, module: nn.Module, name: str, call: Callable[..., Any]) -> _Hook:
        hook = _Hook(module, name, call)
        self._changes.change(module, name, hook)
        return hook

    def _close(self) -> None:
        self._vacate()
        self._checking = None
        self.engine.close()

    def _vacate(self) -> None:
        if self._seat is not None:
            self._seat.leave()
            self._seat = None

    # -- requests --------------------------------------------------------------------------------

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        # Only one cache is seated at a time, so a second thread waits.
        with self._lock, _deferral:
            self._depth += 1
            try:
                return self._generate_hook.own(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:
                    self._vacate()

    def _prepare_cache(self, *args: Any) -> Any:
        result = self._prepare_hook.own(*args)
        config, inputs, mode, batch, *_ = args
        batch *= max(config.num_beams or 1, config.num_return_sequences or 1)
        reason = self._enter(config, inputs, mode, batch)
        if reason is None:
            self.requests += 1
        else:
            self._fall_back(
                reason, cache_in(inputs), assisted=mode is GenerationMode.ASSISTED_GENERATION
            )
        return result

    def _enter(
        self, config: GenerationConfig, inputs: dict[str, Any], mode: GenerationMode, batch: int
    ) -> Fallback | None:
        """Seat the cache of a request, or return the reason for a fallback."""
        if self._depth != 1:
            return Fallback.NESTED
        if mode not in _MODES:
            return Fallback.MODE
        if config.output_attentions or config.output_hidden_states:
            return Fallback.OUTPUTS
        if any(value is not None for name, value in inputs.items() if name not in _INPUTS):
            return Fallback.INPUTS
        self._obstacle = self._find_obstacle()
        if self._obstacle:
            return Fallback.MODEL
        if batch > self.engine.model.max_requests:
            return Fallback.BATCH
        pads = _pads_of(inputs, batch)
        if pads is None:
            return Fallback.MASK
        if any(pads) and not self.engine.model.ignores_padding:
            return Fallback.PADDING
        cache: Any = cache_in(inputs)
        self._vacate()
        if not Seat.fits(self.engine, cache, batch):
            return Fallback.CACHE
        if (length_of(cache) or 0) - min(pads) > self.engine.model.positions:
            return Fallback.LENGTH
        self.engine.ready()
        self._seat = Seat(self.engine, cache, pads)
        self._seat.can_defer = not config.do_sample and not self.engine.model.states
        self._seat.assisted = mode is GenerationMode.ASSISTED_GENERATION
        return None

    def _find_obstacle(self) -> str:
        """Return why graphs cannot run the model, or ""; rebuild the engine of a changed model."""
        if any(module.training for module in self.model.modules()):
            return "a model with modules in training mode"
        if has_hooks(self.model):
            return "a model with hooks"
        if torch.is_autocast_enabled(self.engine.model.device.type):
            return "a model under autocast"
        if _fingerprint(self.model) != self._fingerprint or self.engine.closed:
            self._close()
            try:
                self.engine = self._make()
            except (UnsupportedModelError, InputError) as error:
                return f"a changed model ({error})"
            self._fingerprint = _fingerprint(self.model)
        return ""

    def _fall_back(self, reason: Fallback, cache: Any = None, *, assisted: bool = False) -> None:
        """Count a request that falls back to transformers' own code; refuse it under strict."""
        seat = seat_of(cache)
        if seat is not None:
            assisted |= seat.assisted
            seat.leave()
        text = self._obstacle if reason is Fallback.MODEL else reason.text
        request = f"{type(self.model).__name__}.generate: {text}"
        if self.engine.config.decode.strict:
            raise InputError(
                f"{request}: graphs do not support this, and the mode is strict. Change the "
                f"request, or use a mode without strict"
            )
        if assisted and self._is_stateful:
            raise InputError(
                f"{request}: graphs do not support this, and transformers cannot check proposed "
                f"tokens for a model with recurrent state. Change the request, or do not propose "
                f"tokens"
            )
        if text not in self._logged:
            self._logged.add(text)
            logger.warning("%s: such requests run transformers' own code without graphs", request)
        self.fallbacks[reason.value] += 1

    # -- forwards --------------------------------------------------------------------------------

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        cache = cache_in(kwargs)
        seat = seat_of(cache)
        if seat is not None:
            reason, logits = self._run(seat, kwargs)
            if reason is None:
                if cache_name(kwargs) == "cache_params":
                    return MambaCausalLMOutput(logits=logits, **{CACHES[-1]: cache})
                return CausalLMOutputWithPast(logits=logits, **{CACHES[0]: cache})
            self._fall_back(reason, cache)
        # Steps on other threads replace attributes of the model under this lock.
        with model_lock:
            return self._forward_hook.own(*args, **kwargs)

    def _body_forward(self, *args: Any, **kwargs: Any) -> Any:
        with model_lock:
            return self._body_hook.own(*args, **kwargs)

    def _run(self, seat: Seat, inputs: dict[str, Any]) -> tuple[Fallback | None, Tensor | None]:
        """Run a forward on a seated cache; return the reason for a fallback, or the logits."""
        if (
            inputs.get("output_attentions")
            or inputs.get("output_hidden_states")
            or inputs.get("return_dict") is False
        ):
            return Fallback.OUTPUTS, None
        ids, keep = inputs.get("input_ids"), inputs.get("logits_to_keep", 0)
        others = inputs.keys() - _INPUTS - _LOOP_ARGS
        if any(inputs[name] is not None for name in others) or ids is None or not ids.numel():
            return Fallback.INPUTS, None
        if ids.is_floating_point():  # A static buffer would round them.
            return Fallback.INPUTS, None
        count = ids.shape[1]
        if seat.length + count - min(seat.pads) > self.engine.model.positions:
            return Fallback.LENGTH, None
        # Without a mask, attention reads padding in every step, but recurrent layers read padding
        # only in steps that run it.
        sees = self.engine.model.shape.attention or seat.length < max(seat.pads)
        if any(seat.pads) and inputs.get("attention_mask") is None and sees:
            return Fallback.MASK, None
        # Rejected tokens can be undone only in the checking runner, which keeps state versions.
        checks = count == 1 and seat.assisted and bool(self.engine.model.states)
        # A row that contains only padding so far has no token to decode.
        if count == 1 and seat.length >= max(seat.pads) and not checks:
            return None, seat.decode(ids, self.engine.decode)
        if not seat.are_next(inputs.get("position_ids"), count):
            return Fallback.MASK, None
        if keep == 1 and not checks:
            return None, seat.packed(ids)
        keep = keep or count
        if len(seat.pads) > 1 or keep > _WIDTHS[-1] or seat.length + count - keep < seat.pads[0]:
            return Fallback.LOGITS, None
        if count > keep:
            seat.packed(ids[:, :-keep])
        return None, seat.decode(ids[:, -keep:], self._checker(), _WIDTHS)

    def _checker(self) -> DecodeRunner:
        """Return the runner for steps that check several proposed tokens of one request."""
        if self._checking is None:
            phase = self.engine.config.decode
            # Capture lazily, because requests use few of the widths.
            capture = phase.capture if phase.strict else "lazy"
            self._checking = self.engine.make_decode(
                attrs.evolve(phase, buckets=(1,), capture=capture),
                max_requests=1,
                variants=[{"width": width} if width > 1 else {} for width in _WIDTHS],
                name="checking",
            )
            self.engine.runners.append(self._checking)
            if self._checking.captures_first:
                self._checking.capture()
        return self._checking

    # -- continuous batching ---------------------------------------------------------------------

    def _generate_batch(
        self,
        inputs: Sequence[Sequence[int]],
        generation_config: GenerationConfig | None = None,
        **kwargs: Any,
    ) -> Any:
        with self._lock:
            config = generation_config or self.model.generation_config
            new = kwargs.get("max_new_tokens") or config.max_new_tokens
            sampling = self._sampling_of(config)
            lengths = list(map(len, inputs))
            reason = None
            if self._depth:
                reason = Fallback.NESTED
            elif obstacle := self._find_obstacle():
                self._obstacle = obstacle
                reason = Fallback.MODEL
            elif (
                sampling is None
                or (config.num_return_sequences or 1) > 1
                or config.stop_strings
                or any(value for name, value in kwargs.items() if name not in _BATCH_OPTIONS)
                or new is None
                or 0 in lengths
            ):
                reason = Fallback.CONFIG
            elif max(lengths, default=0) + new > self.engine.model.positions:
                reason = Fallback.LENGTH
            if reason is not None:
                self._fall_back(reason)
                kwargs["generation_config"] = generation_config
                return self._generate_batch_hook.own(inputs, **kwargs)
            self._vacate()
            self.requests += len(inputs)
            completions = self.engine.generate(
                inputs, max_new_tokens=new, sampling=sampling, stop_token_ids=eos_of(config)
            )
            return {
                f"req_{i}": GenerationOutput(
                    request_id=f"req_{i}",
                    prompt_ids=[int(token) for token in row],
                    generated_tokens=list(completion.token_ids),
                    status=RequestStatus.FINISHED,
                )
                for i, (row, completion) in enumerate(zip(inputs, completions, strict=True))
            }

    def _sampling_of(self, config: GenerationConfig) -> SamplingParams | None:
        """Return sampling parameters that equal transformers' logits processors, or None."""
        values: dict[str, Any] = {"temperature": 1.0 if config.do_sample else 0.0}
        for processor in self.model._get_logits_processor(config, input_ids_seq_length=1):
            name = _WARPERS.get(type(processor))
            if name is None or not config.do_sample:
                return None
            values[name] = getattr(processor, name)
        return SamplingParams(**values)


_INPUTS = frozenset({"attention_mask", "input_ids", "logits_to_keep", "position_ids"})
_INPUTS |= frozenset(CACHES)
_LOOP_ARGS = frozenset({"output_attentions", "output_hidden_states", "return_dict", "use_cache"})
"""Additional arguments that the loop passes to every forward."""
_WARPERS = {
    TemperatureLogitsWarper: "temperature",
    TopKLogitsWarper: "top_k",
    TopPLogitsWarper: "top_p",
}
_BATCH_OPTIONS = frozenset({"max_new_tokens", "progress_bar", "warmup"})
_MODULE_ATTRIBUTES = vars(nn.Module()).keys() - {"training"}
_SIMPLE = (bool, int, float, str, type(None))


def _fingerprint(model: PreTrainedModel) -> list[Any]:
    """Return a list that stays equal as long as the graphs of ``model`` are valid.

    The list contains the modules, the addresses of their tensors, and their attributes, because an
    attribute may switch an adapter on or off.
    """
    items: list[Any] = []
    for module in model.modules():
        items.append(module)
        for tensors in (module._parameters, module._buffers):
            for tensor in tensors.values():
                if tensor is not None:
                    items += tensor.data_ptr(), tensor.dtype, tensor.shape
        if module is model:
            continue  # The loop changes the model's attributes.
        for name, value in vars(module).items():
            if name in _MODULE_ATTRIBUTES:
                continue
            if isinstance(value, _SIMPLE) or callable(value):
                items += name, value
            elif _is_simple(value):
                items += name, repr(value)  # Values may change in place.
    return items


def _is_simple(value: Any) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    return isinstance(value, _SIMPLE) or (
        isinstance(value, list | tuple) and all(map(_is_simple, value))
    )


def _pads_of(inputs: Mapping[str, Any], batch: int) -> list[int] | None:
    """Return the number of left padding tokens per row, or None if the mask is not left padding."""
    mask, positions = inputs.get("attention_mask"), inputs.get("position_ids")
    pads = [0] * batch
    if mask is not None:
        if mask.dim() != 2 or mask.shape[0] != batch:
            return None
        length = mask.shape[1]
        mask = mask.bool()
        hidden = length - mask.sum(1)
        ramp = torch.arange(length, device=mask.device)
        pads = hidden.tolist()
        if max(pads) == length or not torch.equal(mask, ramp >= hidden[:, None]):
            return None
    if positions is not None:
        begins = torch.tensor(pads, device=positions.device)[:, None]
        want = (torch.arange(positions.shape[-1], device=positions.device) - begins).clamp(min=0)
        if positions.dim() != 2 or not torch.equal(positions.clamp(min=0) * (want > 0), want):
            return None
    return pads


def accelerate(
    model: PreTrainedModel,
    *,
    mode: DeviceGraphConfig | Mapping[str, Any] | str | None = None,
    backend: Backend | str = "auto",
    max_requests: int = 8,
    max_len: int | None = None,
    max_step_tokens: int = 512,
    fuse: bool = True,
) -> Any:
    """Make ``model.generate`` and ``model.generate_batch`` run in device graphs; return the model.

    By default (``fuse=True``), the model is changed: weights of layers that receive the same tensor
    become views of one larger matrix, and remain views after ``unaccelerate``. The values of the
    weights do not change. However, one large product rounds differently from several small
    products, so the last bits of the logits may differ, and a token whose two best candidates are
    nearly equal may change. ``fuse=False`` leaves the weights in place.

    transformers' own loop still runs, with its scores, streams and random numbers. Only the
    forwards of a generation are replaced. By default, a graph is captured when a second step needs
    it. A request that graphs cannot serve runs transformers' own code. ``generate_stats`` counts it
    by reason, the first request per reason logs a warning, and a decode mode with ``strict``
    refuses such requests. In a returned cache, padded rows are zero, whereas transformers stores
    keys there and hides them with its masks.

    ``generate_batch`` uses a separate random stream for each request. Threads that run the same
    model, or models that share layers, wait for each other.

    Args:
        model: a causal language model in evaluation mode, on the device of ``backend``.
        mode: the mode of each phase, as for ``config`` of ``Engine``.
        backend: as for ``Engine``.
        max_requests: number of rows in the largest batch, and maximum number of running requests in
            ``generate_batch``.
        max_len: as for ``Engine``.
        max_step_tokens: as for ``Engine``.
        fuse: whether to replace operations with fewer, larger kernels (see ``fusion``).

    Raises:
        UnsupportedModelError: the engine does not support this model.
        InputError, ConfigError: as for ``Engine``.
        StateError: the model is already accelerated.
    """
    if _acceleration_of(model) is not None:
        raise StateError("this model is already accelerated; call unaccelerate(model) first")
    make = functools.partial(
        Engine,
        model,
        config=config_of(mode),
        backend=backend,
        max_requests=max_requests,
        max_len=max_len,
        max_step_tokens=max_step_tokens,
        eos_token_ids=(),
        fuse=fuse,
        facts=EngineFacts(),  # Each request checks for hooks.
    )
    _Acceleration(model, make)
    return model


def unaccelerate(model: PreTrainedModel) -> Any:
    """Restore the methods of the model, free the graphs, and return the model.

    Returned caches keep their contents. A model that is not accelerated is returned unchanged.

    Raises:
        UnsupportedModelError: ``model`` is not a transformers model, for example a pipeline.
    """
    acceleration = _acceleration_of(model)
    if acceleration is not None:
        acceleration.remove()
    return model


@contextlib.contextmanager
def accelerated(model: PreTrainedModel, **options: Any) -> Iterator[Any]:
    """Accelerate the model inside the block, with the options of ``accelerate``."""
    try:
        yield accelerate(model, **options)
    finally:
        unaccelerate(model)


def generate_stats(model: PreTrainedModel) -> GenerateStats:
    """Return the counters of an accelerated model.

    Raises:
        StateError: the model is not accelerated.
    """
    acceleration = _acceleration_of(model)
    if acceleration is None:
        raise StateError("this model is not accelerated; call accelerate(model) first")
    return GenerateStats(
        requests=acceleration.requests,
        fallbacks=dict(acceleration.fallbacks),
        engine=acceleration.engine,
    )


def _acceleration_of(model: PreTrainedModel) -> _Acceleration | None:
    require_model(model)
    hook = getattr(model, "__dict__", {}).get("generate")
    return hook.acceleration if isinstance(hook, _Hook) else None
