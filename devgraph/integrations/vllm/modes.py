"""``DEVGRAPH_MODE`` for vLLM: which of its graph modes a mode configuration asks for.

vLLM has one mode for uniform decode and one for everything else. What that cannot express is an
error that lists what can be asked for.
"""

from __future__ import annotations

from typing import Any

import attrs

from devgraph.api.config.model import DeviceGraphConfig
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

_SEEN = "_devgraph_mode"


@attrs.frozen(kw_only=True)
class EngineMode:
    """A mode configuration in vLLM's terms."""

    name: str
    """Of vLLM's ``CUDAGraphMode``."""
    breakable: bool
    """Prefill runs in segments around attention, without torch.compile."""
    text: str
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
        wanted, given = CUDAGraphMode[self.name], config.cudagraph_mode
        if given not in (None, wanted):
            raise ConfigError(
                f"{MODE_VARIABLE}={self.text} asks for cudagraph_mode={wanted} and the compilation "
                f"configuration of vLLM for {given}. Give one of them."
            )
        config.cudagraph_mode = wanted

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
    for phase, value in (("decode", config.decode), ("prefill", config.prefill)):
        if extra := sorted(value.explicit - {"policy"}):
            raise ConfigError(
                f"{MODE_VARIABLE}: devgraph gives vLLM the policy of {phase} and not "
                f"{', '.join(extra)}. Use vLLM's own options for that, such as "
                f"--cudagraph-capture-sizes, which decode and prefill share."
            )
    wanted = (config.decode.policy, config.prefill.policy)
    if wanted not in _MODES:
        known = "; ".join(f"decode {decode}, prefill {prefill}" for decode, prefill in _MODES)
        raise ConfigError(
            f"{MODE_VARIABLE}={text}: vLLM cannot run decode {wanted[0]} with prefill {wanted[1]}. "
            f"It can run: {known}."
        )
    name, breakable = _MODES[wanted]
    return EngineMode(name=name, breakable=breakable, text=text)
