"""The properties of an engine that the compatibility rules read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from devgraph.api.config.phase import (
    FLAG,
    KEYS,
    PHASES,
    as_object,
    check_names,
    choice,
    number,
    optional,
    shown,
    text,
)
from devgraph.api.errors import ConfigError, ConfigTypeError
from devgraph.api.policy import COMPILERS

ROLES = ("both", *reversed(PHASES))
ATTENTION = ("never", "single_token_decode", "uniform_batch", "always")
"""The values of ``EngineFacts.attention``, from the weakest to the strongest support."""


def _one_of(*values: str) -> Any:
    return attrs.field(default=values[0], metadata=choice("value", lambda: values))


def _flag(default: bool = False) -> Any:
    return attrs.field(default=default, metadata=FLAG)


def _count(default: int = 1) -> Any:
    """Declare an integer whose default is also its minimum."""
    return attrs.field(default=default, metadata=number(int, default))


def _compilers(value: object, path: str) -> tuple[str, ...]:
    if isinstance(value, (list, tuple)):
        return tuple(_COMPILER(name, f"{path}[{index}]") for index, name in enumerate(value))
    raise ConfigTypeError(f"{path}: expected a list of compilers, got {shown(value)}")


def _policies(value: object, path: str) -> Mapping[str, str]:
    policies = as_object(value, path)
    check_names(path, policies, PHASES, what="phase")
    return {phase: KEYS["policy"].read(name, f"{path}.{phase}") for phase, name in policies.items()}


_COMPILER = choice("compiler", lambda: COMPILERS)["read"]


@attrs.frozen(kw_only=True)
class EngineFacts:
    """The properties of an engine. The defaults describe a plain engine."""

    backend: str | None = attrs.field(
        default=None, metadata=optional(text("the name of a backend"))
    )
    """Name of the backend. Its part of the configuration is merged before the rules apply."""
    role: str = _one_of(*ROLES)
    """``prefill`` or ``decode`` on a node that runs only that phase (disaggregated serving)."""
    attention: str = _one_of(*reversed(ATTENTION))
    """The batches whose attention can be captured: all (``always``), batches whose requests have
    equal numbers of tokens (``uniform_batch``) or one token each (``single_token_decode``), or none
    (``never``). With several attention implementations, the weakest counts."""
    host_lengths: bool = _flag()
    """Attention takes lengths or plans from the host, as host arguments of regions."""
    recommended: Mapping[str, str] = attrs.field(
        factory=dict, metadata={"read": _policies}, hash=False
    )
    """Policies that the backend recommends for phases without a chosen policy."""
    region_update: bool = _flag(True)
    """The backend can update regions inside a graph."""
    piecewise: bool = _flag(True)
    """The backend can capture pieces that ``torch.compile`` compiled."""
    compilers: tuple[str, ...] = attrs.field(default=COMPILERS, metadata={"read": _compilers})
    """Compilers that policy ``piecewise`` may use on the backend."""
    collectives: bool = _flag()
    """The step contains device collectives (tensor or expert parallelism)."""
    collectives_capturable: bool = _flag(True)
    """The backend can capture collectives."""
    pipeline_parallel: int = _count()
    """Number of pipeline stages."""
    context_parallel: int = _count()
    """Number of ranks that share one prefill and exchange sizes that depend on the batch."""
    data_parallel_attention: bool = _flag()
    """Attention is replicated on every rank; the other layers are distributed over the ranks."""
    speculative_tokens: int = _count(0)
    """Draft tokens per request in a verify step; 0 without speculation."""
    lora: bool = _flag()
    """LoRA adapters may be active."""
    multimodal: str = _one_of("none", "slot", "outside")
    """Place where image or audio embeddings enter: ``slot`` (an input slot of the captured step) or
    ``outside`` (code outside the captured step)."""
    encoder_decoder: bool = _flag()
    """The first decoder step reads encoder outputs, but later steps do not."""
    two_batch_overlap: bool = _flag()
    """A batch is split into two halves whose execution is interleaved."""
    moe_host_counts: bool = _flag()
    """The exchange of tokens between experts reads token counts on the host."""
    traceable: bool = _flag(True)
    """``torch.compile`` can trace the model. False for quantized weights with opaque loaders, and
    for models that the engine compiles itself."""
    debug_hooks: bool = _flag()
    """Python hooks inside the model run in every step (tensor dumps, tracing)."""
    kv_layerwise: bool = _flag()
    """The host waits for KV pages before each layer."""
    gates: bool = _flag()
    """The model waits for the KV pages of a layer at a gate (``dg.wait``)."""
    weight_offload: bool = _flag()
    """Weights move between host and device memory during a step."""
    memory_saver: bool = _flag()
    """Device memory is released and mapped again between steps."""
    suspend_on_release: bool = _flag()
    """The engine calls ``suspend`` before it releases device memory, and ``resume`` afterwards."""

    def __attrs_post_init__(self) -> None:
        for field in _FIELDS:
            value = getattr(self, field.name)
            if value is not field.default:
                object.__setattr__(self, field.name, field.metadata["read"](value, field.name))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, path: str = "facts") -> EngineFacts:
        """Create facts from parsed JSON or YAML.

        Raises:
            ConfigError: a value is wrong; the message names its path.
        """
        check_names(path, as_object(values, path), [field.name for field in _FIELDS], what="fact")
        try:
            return cls(**values)
        except ConfigError as error:
            raise type(error)(f"{path}.{error}") from error

    def on_backend(self, backend: Any) -> EngineFacts:
        """Return these facts for a backend, or for its class.

        A capability is true if both the facts and the backend's ``Capabilities`` declare it.
        """
        capabilities = backend.capabilities
        return attrs.evolve(
            self,
            backend=backend.name,
            recommended={**backend.recommended_mode, **self.recommended},
            region_update=self.region_update and capabilities.region_update,
            piecewise=self.piecewise and capabilities.piecewise,
            gates=self.gates and capabilities.gates,
            compilers=tuple(name for name in capabilities.compilers if name in self.compilers),
            collectives_capturable=self.collectives_capturable and capabilities.collectives,
        )


_FIELDS = attrs.fields(EngineFacts)
