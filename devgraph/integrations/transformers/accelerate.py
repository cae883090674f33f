"""Device graphs under ``model.generate``: the model stays, its forwards of a generation change.

>>> from devgraph.integrations.transformers import accelerate
>>> model = accelerate(model, max_requests=8)                           # doctest: +SKIP
>>> model.generate(**inputs, max_new_tokens=64)                         # doctest: +SKIP

The loop of ``generate`` stays transformers' own, with its logits processors, stopping criteria,
streamers, scores and random numbers. Where it makes the cache of a request, the cache is seated in
an engine's slots; a forward that is handed a seated cache runs in that engine's runners. Whatever
those cannot do makes the cache leave, and the model's own forward goes on with it.
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

from devgraph.api.backend import Backend
from devgraph.api.config.model import DeviceGraphConfig
from devgraph.api.errors import InputError, StateError
from devgraph.integrations.engine.installation import Changes
from devgraph.integrations.transformers.engine import Engine, config_of
from devgraph.integrations.transformers.names import NAMES
from devgraph.integrations.transformers.probe import UnsupportedModelError, eos_of
from devgraph.integrations.transformers.requests import SamplingParams
from devgraph.integrations.transformers.seat import Seat, seat_of
from devgraph.runners.decode import DecodeRunner

logger = logging.getLogger(__name__)

_WIDTHS = (2, 4, 8, 12, 16)
"""Tokens of the steps that check proposed tokens; others run in the next, or eagerly."""

_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.ASSISTED_GENERATION)


class Fallback(str, enum.Enum):
    """Why a request ran transformers' own code, and what was asked for."""

    def __new__(cls, value: str, text: str) -> Fallback:
        made = str.__new__(cls, value)
        made._value_ = value
        made.text = text
        return made

    text: str

    MODE = "generation_mode", "beams, contrastive search and other modes than greedy and sampling"
    OUTPUTS = "outputs", "attentions or hidden states as outputs, or a tuple"
    CACHE = "cache", "no cache, or another than keys and values of this batch in a DynamicCache"
    INPUTS = "inputs", "inputs besides token ids, their mask and their positions"
    MASK = "mask", "a mask or positions that are not those of padding at the left"
    PADDING = "padding", "padding, for a model that attends by itself and may count it as positions"
    BATCH = "over_max_requests", "more rows than max_requests"
    LENGTH = "over_max_len", "more positions than max_len"
    LOGITS = "all_logits", "the logits of more tokens than a step checks, or of padding"
    NESTED = "nested", "a generation of the same model inside this one"
    MODEL = "model", "a model in training mode, with hooks, under autocast, or that no engine runs"
    CONFIG = "generation_config", "options of generate_batch that the engine has not"


@attrs.frozen(kw_only=True)
class GenerateStats:
    """What became of the requests since ``accelerate``."""

    requests: int
    """Calls of ``generate`` that began in graphs, and requests of ``generate_batch``."""
    fallbacks: dict[str, int]
    """By reason, those that ran or went on in transformers' own code."""
    engine: Engine = attrs.field(repr=False)
    """Whose runners the steps run in; ``engine.decode.stats()`` counts its graphs."""


class _Hook:
    """A method of ``model`` that goes to ``acceleration`` first.

    A copy of the model, or a pickle, has its own method in this place.
    """

    def __init__(self, model: PreTrainedModel, name: str, call: Callable[..., Any]) -> None:
        self.acceleration: _Acceleration = call.__self__  # type: ignore[attr-defined]
        self.own = getattr(model, name)
        self._model, self._name, self._call = model, name, call
        functools.update_wrapper(self, self.own)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __reduce__(self) -> Any:
        return getattr, (self._model, self._name)


class _Deferral:
    """Lets transformers read one step late whether a generation over slots has ended.

    Its loop waits for the device in every step to learn that, and the device then waits for the
    host. It has a check that does not, with one step too many that it takes back, and uses it on
    one device. Slots can take a step back, so while this is entered it is used for them too, unless
    random numbers are drawn: those of the step too many would be missing afterwards.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        # Versions without it wait in every step.
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
        if seat is not None and seat.deterministic and device.type != "cpu":
            # The criteria of an assistant remember what they were asked.
            return not kwargs.get("is_assistant")
        return bool(self._own.is_supported(device, cache, *args, **kwargs))


_deferral = _Deferral()


class _Acceleration:
    """The engine under one model, the hooks in it, and the cache that is seated."""

    def __init__(self, model: PreTrainedModel, make: Callable[[], Engine]) -> None:
        self.model = model
        self.requests = 0
        self.fallbacks: Counter[str] = Counter()
        self._make = make
        self.engine = make()
        self._made_of = _made_of(model)
        self._checking: DecodeRunner | None = None
        self._seat: Seat | None = None
        self._lock = threading.RLock()
        self._depth = 0
        calls: Mapping[str, Callable[..., Any]] = {
            "generate": self._generate,
            "generate_batch": self._generate_batch,
            "forward": self._forward,
            "_prepare_cache_for_generation": self._prepare_cache,
        }
        self._hooks = {name: _Hook(model, name, call) for name, call in calls.items()}
        self._changes = Changes("transformers")
        for name, hook in self._hooks.items():
            self._changes.change(model, name, hook)

    def remove(self) -> None:
        """Take the hooks out of the model and free the engine."""
        with self._lock:
            self._changes.undo()
            self._close()

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
        # One cache has the slots at a time, so a second thread waits.
        with self._lock, _deferral:
            self._depth += 1
            try:
                return self._hooks["generate"].own(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:
                    self._vacate()

    def _prepare_cache(self, *args: Any) -> Any:
        result = self._hooks["_prepare_cache_for_generation"].own(*args)
        config, inputs, mode, batch, *_ = args
        batch *= max(config.num_beams or 1, config.num_return_sequences or 1)
        reason = self._take(config, inputs, mode, batch)
        if reason is None:
            self.requests += 1
        else:
            self._fall_back(reason, NAMES.cache_in(inputs))
        return result

    def _take(
        self, config: GenerationConfig, inputs: dict[str, Any], mode: GenerationMode, batch: int
    ) -> Fallback | None:
        """Seat the cache of a request, or return why not."""
        if self._depth != 1:
            return Fallback.NESTED
        if mode not in _MODES:
            return Fallback.MODE
        if config.output_attentions or config.output_hidden_states:
            return Fallback.OUTPUTS
        if any(value is not None for name, value in inputs.items() if name not in _INPUTS):
            return Fallback.INPUTS
        if not self._usable():
            return Fallback.MODEL
        if batch > self.engine.model.max_requests:
            return Fallback.BATCH
        pads = _pads_of(inputs, batch)
        if pads is None:
            return Fallback.MASK
        if any(pads) and self.engine.model.own is not None:
            return Fallback.PADDING
        cache: Any = NAMES.cache_in(inputs)
        self._vacate()
        if not Seat.fits(self.engine, cache, batch):
            return Fallback.CACHE
        if cache.get_seq_length() - min(pads) > self.engine.model.positions:
            return Fallback.LENGTH
        self.engine.ready()
        self._seat = Seat(self.engine, cache, pads)
        self._seat.deterministic = not config.do_sample
        return None

    def _usable(self) -> bool:
        """Whether graphs can do what the model does now; they are made anew if it was changed."""
        if _aside(self.model) or torch.is_autocast_enabled(self.engine.model.device.type):
            return False
        if _made_of(self.model) != self._made_of or self.engine.closed:
            self._close()
            try:
                self.engine = self._make()
            except (UnsupportedModelError, InputError) as error:
                logger.warning("%s", error)
                return False
            self._made_of = _made_of(self.model)
        return True

    def _fall_back(self, reason: Fallback, cache: Any = None) -> None:
        """Count a request for transformers' own code; refuse it if the mode is strict."""
        seat = seat_of(cache)
        if seat is not None:
            seat.leave()
        what = f"{type(self.model).__name__}.generate: {reason.text}"
        if self.engine.config.decode.strict:
            raise InputError(
                f"{what}: no graph serves this, and the mode is strict. Change the request, or "
                f"leave strict out"
            )
        if not self.fallbacks[reason.value]:
            logger.warning("%s: such requests run transformers' own code without graphs", what)
        self.fallbacks[reason.value] += 1

    # -- forwards --------------------------------------------------------------------------------

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        cache = NAMES.cache_in(kwargs)
        seat = seat_of(cache)
        if seat is not None:
            reason, logits = self._run(seat, kwargs)
            if reason is None:
                return CausalLMOutputWithPast(logits=logits, **{NAMES.cache: cache})
            self._fall_back(reason, cache)
        with self._lock:  # A step of another thread has the model's modules changed.
            return self._hooks["forward"].own(*args, **kwargs)

    def _run(self, seat: Seat, inputs: dict[str, Any]) -> tuple[Fallback | None, Tensor | None]:
        """Run a forward over a seated cache: its logits, or why it cannot."""
        if (
            inputs.get("output_attentions")
            or inputs.get("output_hidden_states")
            or inputs.get("return_dict") is False
        ):
            return Fallback.OUTPUTS, None
        ids, keep = inputs.get("input_ids"), inputs.get("logits_to_keep", 0)
        others = inputs.keys() - _INPUTS - _ALWAYS
        if any(inputs[name] is not None for name in others) or ids is None or not ids.numel():
            return Fallback.INPUTS, None
        count = ids.shape[1]
        if seat.length + count - min(seat.pads) > self.engine.model.positions:
            return Fallback.LENGTH, None
        if any(seat.pads) and inputs.get("attention_mask") is None:
            return Fallback.MASK, None  # which shows what was padding
        # A row that only has padding yet has no token to decode.
        if count == 1 and seat.length >= max(seat.pads):
            return None, seat.decode(ids, self.engine.decode)
        if not seat.follow(inputs.get("position_ids"), count):
            return Fallback.MASK, None
        if keep == 1:
            return None, seat.packed(ids)
        keep = keep or count
        if len(seat.pads) > 1 or keep > _WIDTHS[-1] or seat.length + count - keep < seat.pads[0]:
            return Fallback.LOGITS, None
        if count > keep:
            seat.packed(ids[:, :-keep])
        return None, seat.decode(ids[:, -keep:], self._checker(), _WIDTHS)

    def _checker(self) -> DecodeRunner:
        """Return the runner of steps with several tokens of one request, made at the first."""
        if self._checking is None:
            phase = self.engine.config.decode
            capture = phase.capture if phase.strict else "lazy"  # few widths occur
            self._checking = self.engine.make_decode(
                attrs.evolve(phase, buckets=(1,), capture=capture),
                max_requests=1,
                variants=[{"width": width} for width in _WIDTHS],
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
            elif not self._usable():
                reason = Fallback.MODEL
            elif sampling is None or new is None or 0 in lengths or _chosen(config, kwargs):
                reason = Fallback.CONFIG
            elif max(lengths, default=0) + new > self.engine.model.positions:
                reason = Fallback.LENGTH
            if reason is not None:
                self._fall_back(reason)
                return self._hooks["generate_batch"].own(
                    inputs, generation_config=generation_config, **kwargs
                )
            self._vacate()
            self.requests += len(inputs)
            done = self.engine.generate(
                inputs, max_new_tokens=new, sampling=sampling, stop_token_ids=eos_of(config)
            )
            return {
                f"req_{i}": GenerationOutput(
                    request_id=f"req_{i}",
                    prompt_ids=[int(token) for token in row],
                    generated_tokens=list(one.token_ids),
                    status=RequestStatus.FINISHED,
                )
                for i, (row, one) in enumerate(zip(inputs, done, strict=True))
            }

    def _sampling_of(self, config: GenerationConfig) -> SamplingParams | None:
        """Return how the engine draws what transformers' processors of ``config`` would leave."""
        values: dict[str, Any] = {"temperature": 1.0 if config.do_sample else 0.0}
        for processor in self.model._get_logits_processor(config, input_ids_seq_length=1):
            name = _WARPERS.get(type(processor))
            if name is None or not config.do_sample:
                return None
            values[name] = getattr(processor, name)
        return SamplingParams(**values)


_INPUTS = frozenset(
    {
        "attention_mask",
        "input_ids",
        "logits_to_keep",
        "position_ids",
        NAMES.cache,
        *NAMES.old_caches,
    }
)
_ALWAYS = frozenset({"output_attentions", "output_hidden_states", "return_dict", "use_cache"})
"""What the loop says to every forward besides."""
_WARPERS = {
    TemperatureLogitsWarper: "temperature",
    TopKLogitsWarper: "top_k",
    TopPLogitsWarper: "top_p",
}
_OF_ANY_BATCH = frozenset({"max_new_tokens", "progress_bar", "warmup"})


def _chosen(config: GenerationConfig, kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of ``generate_batch`` asks for more than tokens."""
    return (
        (config.num_return_sequences or 1) > 1
        or bool(config.stop_strings)
        or any(value for name, value in kwargs.items() if name not in _OF_ANY_BATCH)
    )


_COLLECTING = "transformers.utils.output_capturing"
_OF_MODULES = vars(nn.Module()).keys() - {"training"}
_SIMPLE = (bool, int, float, str, type(None))


def _aside(model: PreTrainedModel) -> bool:
    """Whether forwards of ``model`` do what no graph holds: drop out at random, or call hooks,
    except those by which transformers collects outputs where a request asks for them."""
    for module in model.modules():
        if module.training:
            return True
        if module._forward_hooks or module._forward_pre_hooks:
            hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
            if any(getattr(hook, "__module__", None) != _COLLECTING for hook in hooks):
                return True
    return False


def _made_of(model: PreTrainedModel) -> list[Any]:
    """Return what a graph of ``model`` depends on: its modules, where their tensors are, and what
    their attributes say (an adapter is on or off by one). Equal lists mean the same computation."""
    found: list[Any] = []
    for module in model.modules():
        found.append(module)
        for tensors in (module._parameters, module._buffers):
            for tensor in tensors.values():
                if tensor is not None:
                    found += tensor.data_ptr(), tensor.dtype, tensor.shape
        if module is model:
            continue  # It has attributes of the loop, which come and go.
        for name, value in vars(module).items():
            if name in _OF_MODULES:
                continue
            if isinstance(value, _SIMPLE) or callable(value):
                found += name, value
            elif _is_simple(value):
                found += name, repr(value)  # as it is now: it may be written in place
    return found


def _is_simple(value: Any) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    return isinstance(value, _SIMPLE) or (
        isinstance(value, list | tuple) and all(map(_is_simple, value))
    )


def _pads_of(inputs: Mapping[str, Any], batch: int) -> list[int] | None:
    """Return the tokens of padding at the left of each row; None if that is not all there is."""
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
    """Make ``model.generate`` and ``model.generate_batch`` use device graphs; return the model.

    Tokens, scores, streams and random numbers are those of transformers' own loop, which still
    runs; only the forwards of a generation are other. The first request captures the graphs. A
    request that graphs cannot serve runs transformers' own code: it is counted by its reason
    (``generate_stats``), warned about once, and refused where the mode says ``strict`` for decode.

    ``generate_batch`` draws with random streams of its own, one a request. Threads that generate
    with one model wait for each other.

    Args:
        model: a causal language model in evaluation mode, on the device of ``backend``.
        mode: how each phase is captured, as a configuration, its dictionary or its JSON text.
        max_requests: rows of the largest batch, and requests of ``generate_batch`` at once.
        backend, max_len, max_step_tokens, fuse: as of ``Engine``.

    Raises:
        UnsupportedModelError: no request of this model could be served.
        InputError, ConfigError: as of ``Engine``.
        StateError: it is accelerated already.
    """
    if _of(model) is not None:
        raise StateError("this model is accelerated already; unaccelerate(model) first")
    make = functools.partial(
        Engine,
        model,
        config=config_of(mode),  # once: engines are made anew
        backend=backend,
        max_requests=max_requests,
        max_len=max_len,
        max_step_tokens=max_step_tokens,
        eos_token_ids=(),
        fuse=fuse,
    )
    _Acceleration(model, make)
    return model


def unaccelerate(model: PreTrainedModel) -> Any:
    """Give the model its own methods back, free the graphs and return it.

    Caches that were returned keep their contents. A model that is not accelerated stays as it is.
    """
    acceleration = _of(model)
    if acceleration is not None:
        acceleration.remove()
    return model


@contextlib.contextmanager
def accelerated(model: PreTrainedModel, **options: Any) -> Iterator[Any]:
    """``accelerate`` for the duration; takes its options."""
    try:
        yield accelerate(model, **options)
    finally:
        unaccelerate(model)


def generate_stats(model: PreTrainedModel) -> GenerateStats:
    """Return what became of the requests of an accelerated model.

    Raises:
        StateError: it is not accelerated.
    """
    found = _of(model)
    if found is None:
        raise StateError("this model is not accelerated; accelerate(model) first")
    return GenerateStats(
        requests=found.requests, fallbacks=dict(found.fallbacks), engine=found.engine
    )


def _of(model: PreTrainedModel) -> _Acceleration | None:
    hook = getattr(model, "__dict__", {}).get("generate")
    return hook.acceleration if isinstance(hook, _Hook) else None
