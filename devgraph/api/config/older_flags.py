"""The graph flags of older engines, and their equivalents.

The flags come from SGLang and from its proposal for per-phase modes
(https://github.com/sgl-project/sglang/issues/23004). If two flags set the same key, the later flag
in the table takes precedence, as in SGLang: a specific flag overrides a broad switch.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from devgraph.api.config.document import read_json
from devgraph.api.config.merge import Level, Source
from devgraph.api.config.phase import KEYS, PHASES, as_object, check_names

MODE = "--device-graph-mode"
DISABLE = {phase: f"--{phase}-disable-device-graph" for phase in PHASES}
SHORTHANDS = {
    (phase, key.name): f"--{phase}-device-graph-{key.flag}"
    for phase in PHASES
    for key in KEYS.values()
    if key.flag
}
"""The flags of devgraph that set one key of one phase."""


@attrs.frozen(kw_only=True)
class Flag:
    """A flag: its spelling, its attribute in the parsed arguments, its shape and its meaning."""

    name: str
    shape: str
    """``switch`` (no value), ``text``, ``integer`` or ``integers``."""
    read: Callable[[Any, str], Source]
    metavar: str = "VALUE"
    help: str = argparse.SUPPRESS
    dest: str = attrs.field(init=False)
    """The attribute in the parsed arguments, as argparse derives it from the name."""

    @dest.default
    def _derived(self) -> str:
        return self.name.lstrip("-").replace("-", "_")


_Values = Mapping[tuple[str, str], Any]  # values by phase and key


def _source(values: _Values, flag: str, *ignored: str) -> Source:
    """Check the values of an older flag, and note the equivalent flags of devgraph."""
    values = {(phase, key): KEYS[key].read(value, flag) for (phase, key), value in values.items()}
    note = f"{flag} is an older spelling; use {_new_spelling(values)}."
    if not values:
        note = f"{flag} sets no graph mode or size."
    if ignored:
        note += f" devgraph ignores {', '.join(ignored)}, which the engine may use."
    return Source(
        level=Level.OLDER,
        name=flag,
        settings={(None, *place): value for place, value in values.items()},
        notes=(note,) if values or ignored else (),
    )


def _new_spelling(values: _Values) -> str:
    flags: list[str] = []
    rest: dict[str, dict[str, Any]] = {}
    for (phase, key), value in values.items():
        if (key, value) == ("policy", "disabled"):
            flags.append(DISABLE[phase])
        elif (phase, key) in SHORTHANDS:
            words = value if isinstance(value, tuple) else (value,)
            flags.append(" ".join(map(str, (SHORTHANDS[phase, key], *words))))
        else:
            rest.setdefault(phase, {})[key] = value
    if rest:
        flags.append(f"{MODE} '{json.dumps(rest)}'")
    return " ".join(flags)


_JSON_KEYS: Mapping[str, str] = {
    "backend": "policy",
    "bs": "buckets",
    "max_bs": "max_bs",
    "tc_compiler": "compiler",
    "full_prefill_max_req": "max_requests",
}
# Limits of lengths and shapes, which devgraph does not need.
_JSON_IGNORED = ("full_prefill_prefix_chunk_tokens", "max_seq_len", "max_context_size")


def _phases_json(value: Any, flag: str) -> Source:
    """Read ``{"decode": "full", "prefill": {"backend": "tc_piecewise", "bs": [64]}}``."""
    document = as_object(read_json(value, flag) if isinstance(value, str) else value, flag)
    values: dict[tuple[str, str], Any] = {}
    ignored: list[str] = []
    check_names(flag, document, PHASES, what="phase")
    for phase, body in document.items():
        keys = body if isinstance(body, Mapping) else {"backend": body}
        check_names(f"{flag}: {phase}", keys, (*_JSON_KEYS, *_JSON_IGNORED), what="key")
        for key, item in keys.items():
            if key in _JSON_IGNORED:
                ignored.append(f"{phase}.{key}")
            elif item is not None:  # With null, the user chose nothing.
                name = _JSON_KEYS[key]
                values[phase, name] = KEYS[name].read(item, f"{flag}: {phase}.{key}")
    return _source(values, flag, *ignored)


def _flag(name: str, key: str, *phases: str, to: Any = None) -> Flag:
    """Return a flag whose value is set as ``key`` of ``phases``, or a switch that sets ``to``."""

    def read(value: Any, flag: str) -> Source:
        return _source({(phase, key): value if to is None else to for phase in phases}, flag)

    return Flag(name=name, shape=KEYS[key].shape if to is None else "switch", read=read)


OLDER_FLAGS: tuple[Flag, ...] = (
    _flag("--disable-cuda-graph", "policy", *PHASES, to="disabled"),
    _flag("--enable-breakable-cuda-graph", "policy", "prefill", to="breakable"),
    _flag("--disable-piecewise-cuda-graph", "policy", "prefill", to="disabled"),
    _flag("--cuda-graph-max-bs", "max_bs", "decode"),
    _flag("--cuda-graph-bs", "buckets", "decode"),
    *(_flag(f"--{phase}-disable-cuda-graph", "policy", phase, to="disabled") for phase in PHASES),
    *(_flag(f"--{phase}-cuda-graph-backend", "policy", phase) for phase in PHASES),
    *(_flag(f"--{phase}-cuda-graph-max-bs", "max_bs", phase) for phase in PHASES),
    *(_flag(f"--{phase}-cuda-graph-bs", "buckets", phase) for phase in PHASES),
    Flag(name="--cuda-graph-mode", shape="text", read=_phases_json),
    Flag(name="--cuda-graph-config", shape="text", read=_phases_json),
)


def _use(key: str, *phases: str) -> str:
    return "use " + " and ".join(SHORTHANDS[phase, key] for phase in phases)


def _in_mode(key: str) -> str:
    return f"use the key {key} of {MODE}"


_ANY_LENGTH = "graphs serve sequences of any length; limit it in the engine"

REMOVED_FLAGS: Mapping[str, str] = {
    "--enforce-eager": f"use {' '.join(DISABLE.values())}",
    "--enable-piecewise-cuda-graph": "use --prefill-device-graph-mode piecewise",
    "--enforce-piecewise-cuda-graph": "use --prefill-device-graph-mode piecewise",
    "--piecewise-cuda-graph-tokens": _use("buckets", "prefill"),
    "--piecewise-cuda-graph-max-tokens": _use("max_bs", "prefill"),
    "--piecewise-cuda-graph-compiler": _in_mode("compiler"),
    "--cuda-graph-tc-compiler": _in_mode("compiler"),
    "--cuda-graph-sizes": _use("buckets", *PHASES),
    "--cudagraph-capture-sizes": _use("buckets", *PHASES),
    "--max-cudagraph-capture-size": _use("max_bs", *PHASES),
    "--cudagraph-mode": f"use {MODE}",
    "--compilation-config": f"use {MODE}",
    "--optimization-level": f"use {MODE}",
    "--max-seq-len-to-capture": _ANY_LENGTH,
    "--max-context-len-to-capture": _ANY_LENGTH,
    "--cuda-graph-max-seq-len-prefill": _ANY_LENGTH,
    "--cuda-graph-prefill-max-context": _ANY_LENGTH,
    "--context-bucket": _ANY_LENGTH,
    "--disable-cuda-graph-padding": _in_mode("max_padding"),
    "--debug-cuda-graph": _in_mode("emulate"),
    "--disable-draft-cuda-graph": "a draft model has its own runner and mode",
    **{
        name.format(phase): replacement
        for phase in PHASES
        for name, replacement in {
            "--disable-{}-cuda-graph": f"use {DISABLE[phase]}",
            "--{}-cuda-graph-mode": _use("policy", phase),
            "--cuda-graph-backend-{}": _use("policy", phase),
            "--cuda-graph-bs-{}": _use("buckets", phase),
            "--cuda-graph-max-bs-{}": _use("max_bs", phase),
        }.items()
    },
}
"""Flags of other engines that devgraph does not accept, each with its replacement. Such a flag is
an error unless the engine's parser defines it."""
