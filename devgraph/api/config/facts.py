"""What an engine says about itself, for the compatibility rules to read."""

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
"""What an attention implementation can have captured, from the least to the most."""


def _one_of(*known: str) -> Any:
    return attrs.field(default=known[0], metadata=choice("value", lambda: known))


def _flag(default: bool = False) -> Any:
    return attrs.field(default=default, metadata=FLAG)


def _compilers(value: object, path: str) -> tuple[str, ...]:
    if isinstance(value, (list, tuple)):
        return tuple(_COMPILER(name, f"{path}[{index}]") for index, name in enumerate(value))
    raise ConfigTypeError(f"{path}: expected a list of compilers, got {shown(value)}")


def _policies(value: object, path: str) -> Mapping[str, str]:
    policies = as_object(value, path)
    check_names(path, policies, PHASES, what="phase")
    return {phase: KEYS["policy"].read(name, f"{path}.{phase}") for phase, name in policies.items()}


_COMPILER = choice("compiler", lambda: COMPILERS)["read"]


def _count(default: int = 1) -> Any:
    """A number of at least its default."""
    return attrs.field(default=default, metadata=number(int, default))


@attrs.frozen(kw_only=True)
class EngineFacts:
    """What an engine says about itself; every default is the plain engine without the feature."""

    backend: str | None = attrs.field(
        default=None, metadata=optional(text("the name of a backend"))
    )
    """The backend this is resolved for; its part of the configuration is applied first."""
    role: str = _one_of(*ROLES)
    """``prefill`` or ``decode`` on a node that runs only that phase (disaggregated serving)."""
    attention: str = _one_of(*reversed(ATTENTION))
    """What the weakest attention implementation can have captured:
    ``always`` any batch, ``uniform_batch`` requests of one width, ``single_token_decode`` one
    token a request, ``never``."""
    host_lengths: bool = _flag()
    """Attention takes lengths or plans from the host: regions with host arguments."""
    recommended: Mapping[str, str] = attrs.field(
        factory=dict, metadata={"read": _policies}, hash=False
    )
    """Policies by phase that the backend recommends; a phase whose policy nobody chose takes
    them."""
    region_update: bool = _flag(True)
    """The backend can update regions inside a graph."""
    piecewise: bool = _flag(True)
    """The backend can capture ``torch.compile`` pieces."""
    compilers: tuple[str, ...] = attrs.field(default=COMPILERS, metadata={"read": _compilers})
    """The compilers that piecewise may use on the backend."""
    collectives: bool = _flag()
    """The body holds device collectives (tensor or expert parallelism)."""
    collectives_capturable: bool = _flag(True)
    """The backend can capture collectives."""
    pipeline_parallel: int = _count()
    """Pipeline stages."""
    context_parallel: int = _count()
    """Ranks that share one prefill."""
    context_parallel_static: bool = _flag()
    """Those ranks exchange sizes that depend on the bucket only."""
    decode_context_parallel: int = _count()
    """Ranks that share the KV cache of one request."""
    data_parallel_attention: bool = _flag()
    """Attention is replicated per rank while the other layers are shared."""
    speculative_tokens: int = _count(0)
    """Draft tokens that one verify step checks per request; 0 without speculation."""
    dynamic_speculation: bool = _flag()
    """The number of draft tokens changes while serving."""
    lora: bool = _flag()
    """Adapters may be active."""
    multimodal: str = _one_of("none", "slot", "outside")
    """Where image or audio embeddings join: ``slot`` through an input slot of the captured body,
    ``outside`` in code that the captured body skips."""
    encoder_decoder: bool = _flag()
    """The first decoder step reads encoder outputs, later ones do not."""
    pooling: bool = _flag()
    """The model returns embeddings or scores and never decodes."""
    two_batch_overlap: bool = _flag()
    """A batch is split in two halves that run interleaved."""
    moe_all_to_all: str = _one_of("none", "device", "host", "unproven")
    """How experts exchange tokens: ``device`` with counts on the device, ``host`` with counts
    read on the host, ``unproven`` where nobody has tried it under capture."""
    moe_all_to_all_align: int = _count()
    """Prefill sizes must be a multiple of this for that exchange."""
    host_recorder: bool = _flag()
    """A recorder of expert loads reads device data on the host while the model runs."""
    torch_compile: bool = _flag()
    """The engine compiles the whole model with ``torch.compile`` itself."""
    traceable: bool = _flag(True)
    """``torch.compile`` can trace the model (weights dequantised by opaque loaders cannot)."""
    deterministic: bool = _flag()
    """Results must not depend on the batch size."""
    symmetric_memory: bool = _flag()
    """Collectives use symmetric memory."""
    debug_hooks: bool = _flag()
    """Python hooks run inside the model (tensor dumps, tracing)."""
    kv_offload: bool = _flag()
    """KV pages move to host memory and back between steps."""
    kv_layerwise: bool = _flag()
    """The host waits for KV pages before each layer."""
    kv_sharding: bool = _flag()
    """The KV cache of one request is sharded by a plan made per request."""
    weight_offload: bool = _flag()
    """Weights move between host and device memory during a step."""
    memory_saver: bool = _flag()
    """Device memory is released and mapped again between steps."""
    suspend_on_release: bool = _flag()
    """The engine calls ``suspend`` and ``resume`` of its runners around such a release."""
    slower_prefill: bool = _flag()
    """A captured prefill has to use a slower attention kernel."""

    def __attrs_post_init__(self) -> None:
        for field in _FIELDS:
            value = getattr(self, field.name)
            if field.metadata and value is not field.default:
                object.__setattr__(self, field.name, field.metadata["read"](value, field.name))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, path: str = "facts") -> EngineFacts:
        """Build facts from JSON or YAML; ``ConfigError`` names the path of what is wrong."""
        check_names(path, as_object(values, path), [one.name for one in _FIELDS], what="fact")
        try:
            return cls(**values)
        except ConfigError as error:
            raise type(error)(f"{path}.{error}") from error

    def on_backend(self, backend: Any) -> EngineFacts:
        """Return these facts for a backend, or for its class.

        A capability holds if the facts and the backend's ``Capabilities`` both state it.
        """
        capabilities = backend.capabilities
        return attrs.evolve(
            self,
            backend=backend.name,
            recommended={**backend.recommended_mode, **self.recommended},
            region_update=self.region_update and capabilities.region_update,
            piecewise=self.piecewise and capabilities.piecewise,
            compilers=tuple(one for one in capabilities.compilers if one in self.compilers),
            collectives_capturable=self.collectives_capturable and capabilities.collectives,
        )


_FIELDS = attrs.fields(EngineFacts)
