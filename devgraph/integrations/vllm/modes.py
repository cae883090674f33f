"""``DEVGRAPH_MODE`` for vLLM: which of its graph modes a mode configuration asks for.

vLLM has one set of captured sizes, one mode for uniform decode and one for everything else. What
that cannot express is an error that lists what can be asked for.
"""

from __future__ import annotations

from typing import Any

import attrs

from devgraph.api.config.model import DeviceGraphConfig
from devgraph.api.config.phase import PhaseConfig
from devgraph.api.errors import ConfigError
from devgraph.integrations.engine.installation import MODE_VARIABLE

# (decode policy, prefill policy) -> vLLM's CUDAGraphMode and whether prefill breaks at attention.
_MODES = {
    ("full", "piecewise"): ("FULL_AND_PIECEWISE", False),
    ("full", "breakable"): ("FULL_AND_PIECEWISE", True),
    ("full", "full"): ("FULL", False),
    ("full", "disabled"): ("FULL_DECODE_ONLY", False),
    ("piecewise", "piecewise"): ("PIECEWISE", False),
    ("breakable", "breakable"): ("PIECEWISE", True),
    ("disabled", "disabled"): ("NONE", False),
}

_MAPPED = frozenset({"policy", "buckets", "max_bs"})
"""The keys of a phase that vLLM's configuration can express."""

_SEEN = "_devgraph_mode"


@attrs.frozen(kw_only=True)
class EngineMode:
    """A mode configuration in vLLM's terms."""

    name: str
    """Of vLLM's ``CUDAGraphMode``."""
    breakable: bool
    """Prefill runs in segments around attention, without torch.compile."""
    sizes: tuple[int, ...] | None = None
    """The sizes to capture, in tokens; None for vLLM's own."""
    max_size: int | None = None
    """The largest size to capture; None for vLLM's own."""
    text: str = ""
    """The configuration that it came from, for messages."""

    def put_into(self, config: Any) -> None:
        """Write it into vLLM's ``CompilationConfig``, before that is resolved.

        Raises:
            ConfigError: vLLM's own options ask for something else.
        """
        from vllm.config import CUDAGraphMode

        if vars(config).get(_SEEN) == self:
            return  # vLLM builds a configuration again when it changes a part of it.
        setattr(config, _SEEN, self)
        fields = {
            "cudagraph_mode": CUDAGraphMode[self.name],
            "cudagraph_capture_sizes": None if self.sizes is None else list(self.sizes),
            "max_cudagraph_capture_size": self.max_size,
        }
        for field, value in fields.items():
            if value is None:
                continue
            given = getattr(config, field)
            if given is not None and given != value:
                raise ConfigError(
                    f"{MODE_VARIABLE}={self.text} asks for {field}={value} and the compilation "
                    f"configuration of vLLM for {given}. Give one of them."
                )
            setattr(config, field, value)

    def check(self, config: Any, who: str) -> None:
        """Raise ConfigError if vLLM resolved another graph mode than it was asked for."""
        got = config.cudagraph_mode
        if got.name != self.name:
            raise ConfigError(
                f"{MODE_VARIABLE}={self.text} asks for vLLM's graph mode {self.name}, and {who} "
                f"allows only {got.name} (vLLM's log has the reason: enforce_eager, the "
                f"compilation mode, or what the attention backend can capture). Choose a mode that "
                f"it allows."
            )


def engine_mode(text: str, backend: str | None = None) -> EngineMode:
    """Return what the mode configuration ``text`` (JSON, as for --device-graph-mode) means.

    Args:
        backend: lay the overlay of this backend over the rest.

    Raises:
        ConfigError: the text is wrong, or vLLM has nothing like it.
    """
    config = DeviceGraphConfig.from_json(text)
    if backend is not None:
        config = config.for_backend(backend)
    phases = {"decode": config.decode, "prefill": config.prefill}
    for phase, value in phases.items():
        _refuse_unmapped(phase, value)
    wanted = (config.decode.policy, config.prefill.policy)
    if wanted not in _MODES:
        known = "; ".join(f"decode {decode}, prefill {prefill}" for decode, prefill in _MODES)
        raise ConfigError(
            f"{MODE_VARIABLE}={text}: vLLM cannot run decode {wanted[0]} with prefill {wanted[1]}. "
            f"It can run: {known}."
        )
    name, breakable = _MODES[wanted]
    return EngineMode(
        name=name,
        breakable=breakable,
        sizes=_common(text, "buckets", phases),
        max_size=_common(text, "max_bs", phases),
        text=text,
    )


def _refuse_unmapped(phase: str, value: PhaseConfig) -> None:
    extra = sorted(value.explicit - _MAPPED)
    if extra == ["compiler"] and (value.policy, value.compiler) == ("piecewise", "inductor"):
        return  # That is what vLLM compiles pieces with.
    if extra:
        raise ConfigError(
            f"{MODE_VARIABLE}: vLLM has nothing like {', '.join(extra)} of {phase}; it can be "
            f"given {', '.join(sorted(_MAPPED))}. Use vLLM's own options for the rest."
        )


def _common(text: str, key: str, phases: dict[str, PhaseConfig]) -> Any:
    values = {
        value
        for phase in phases.values()
        if phase.policy != "disabled" and (value := getattr(phase, key)) is not None
    }
    if len(values) > 1:
        raise ConfigError(
            f"{MODE_VARIABLE}={text}: vLLM captures decode and prefill at the same sizes, and "
            f"{key} differs between them. Give it to one phase, or the same to both."
        )
    return values.pop() if values else None
