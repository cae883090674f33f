"""``DEVGRAPH_MODE`` for SGLang: which backend of each of its phases a mode configuration asks for.

SGLang has the same two phases, each with a backend, sizes and limits of its own. A phase that the
configuration does not name keeps what SGLang's own options say.
"""

from __future__ import annotations

from typing import Any

import attrs

from devgraph.api.config.model import DeviceGraphConfig
from devgraph.api.config.phase import PhaseConfig
from devgraph.api.errors import ConfigError
from devgraph.integrations.engine.installation import MODE_VARIABLE

_KEYS = {
    "policy": "backend",
    "buckets": "bs",
    "max_bs": "max_bs",
    "max_requests": "full_prefill_max_req",
    "max_seq_len": "max_seq_len",
}
"""The keys of a phase that SGLang's configuration can express, and its names for them."""

_POLICIES = ("full", "breakable", "disabled")


@attrs.frozen
class EngineMode:
    """A mode configuration in SGLang's terms: what each phase's keys of its configuration are."""

    text: str
    phases: dict[str, dict[str, Any]]
    limits: tuple[float, ...] = ()
    """What ``memory`` of each phase allows executables, which is devgraph's and not SGLang's."""

    def put_into(self, arguments: Any) -> None:
        """Write it into SGLang's ``ServerArgs``, before they are resolved.

        Raises:
            ConfigError: SGLang's own options ask for something else, or this SGLang lacks a key.
        """
        from sglang.srt.model_executor import cuda_graph_config as engine

        given = arguments.cuda_graph_config or {}
        merged = dict(given if isinstance(given, dict) else given.to_dict())
        for phase, values in self.phases.items():
            for key, value in values.items():
                if key not in engine.ALLOWED_KEYS_PER_PHASE[phase]:
                    raise ConfigError(
                        f"{MODE_VARIABLE}={self.text}: this SGLang has no {key} for {phase}; it "
                        f"has {', '.join(engine.ALLOWED_KEYS_PER_PHASE[phase])}."
                    )
                asked = merged.get(phase, {}).get(key)
                if asked is None:
                    asked = _option(arguments, phase, key)
                if asked is not None and asked != value:
                    raise ConfigError(
                        f"{MODE_VARIABLE}={self.text} asks for {phase} {key}={value} and SGLang's "
                        f"own options for {asked}. Give one of them."
                    )
            merged[phase] = {**merged.get(phase, {}), **values}
        arguments.cuda_graph_config = merged

    def check(self, arguments: Any) -> None:
        """Raise ConfigError if SGLang resolved another backend than it was asked for."""
        for phase, values in self.phases.items():
            got = getattr(_resolved(arguments), phase).backend
            if values.get("backend", got) != got:
                raise ConfigError(
                    f"{MODE_VARIABLE}={self.text} asks for {phase}={values['backend']}, and "
                    f"SGLang allows only {got} with the other options of this engine (its log has "
                    f"the reason). Choose that, or change what stands against it."
                )


def _option(arguments: Any, phase: str, key: str) -> Any:
    """Return what SGLang's flags of one phase say about a key; None if nothing."""
    value = getattr(arguments, f"cuda_graph_{key}_{phase}", None)
    off = ("disable_cuda_graph", f"disable_{phase}_cuda_graph")
    if value is None and key == "backend" and any(getattr(arguments, name, 0) for name in off):
        return "disabled"
    return value


def _resolved(arguments: Any) -> Any:
    try:
        from sglang.srt.arg_groups.model_override_base import resolved_view
    except ImportError:  # an SGLang that resolves in place
        return arguments.cuda_graph_config
    return resolved_view(arguments).cuda_graph_config


def engine_mode(text: str, backend: str) -> EngineMode:
    """Return what the mode configuration ``text`` (JSON, as for --device-graph-mode) means.

    Args:
        backend: lay the overlay of this backend over the rest.

    Raises:
        ConfigError: the text is wrong, or SGLang has nothing like it.
    """
    config = DeviceGraphConfig.from_json(text).for_backend(backend)
    phases = {"decode": config.decode, "prefill": config.prefill}
    limits = tuple(value.memory for value in phases.values() if value.memory is not None)
    return EngineMode(text, {name: _values(name, value) for name, value in phases.items()}, limits)


def _values(phase: str, config: PhaseConfig) -> dict[str, Any]:
    extra = sorted(config.explicit - {*_KEYS, "memory"})
    if extra:
        raise ConfigError(
            f"{MODE_VARIABLE}: SGLang has nothing like {', '.join(extra)} of {phase}; it can be "
            f"given {', '.join(_KEYS)} and memory. Use SGLang's own options for the rest."
        )
    if "policy" in config.explicit and config.policy not in _POLICIES:
        raise ConfigError(
            f"{MODE_VARIABLE}: SGLang has no {config.policy} for {phase} in which devgraph could "
            f"capture; it has {', '.join(_POLICIES)}."
        )
    values = {name: getattr(config, key) for key, name in _KEYS.items() if key in config.explicit}
    if values.get("bs") is not None:
        values["bs"] = list(values["bs"])
    return values
