"""The flags with which engines chose graph modes and sizes before, and what they mean here.

Read from SGLang 0.4.6 to 0.5.23 and its proposal for per-phase modes
(https://github.com/sgl-project/sglang/issues/23004), and from vLLM 0.8 to 0.33. The table is in
order of application: where two older flags speak about the same key the later entry wins, which
reproduces what those engines do (a broad switch gives way to a specific one, except
``--enforce-eager``, which beats everything else there).
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from devgraph.api.config.document import read_json
from devgraph.api.config.merge import Level, Source
from devgraph.api.config.phase import FLAG, KEYS, PHASES, as_object, check_names, unknown_name
from devgraph.api.errors import ConfigError
from devgraph.api.policy import COMPILERS

MODE = "--device-graph-mode"
DISABLE = {phase: f"--{phase}-disable-device-graph" for phase in PHASES}
SHORTHANDS = {
    (phase, key.name): f"--{phase}-device-graph-{key.flag}"
    for phase in PHASES
    for key in KEYS.values()
    if key.flag
}
"""Today's flags that set one key of one phase."""


@attrs.frozen(kw_only=True)
class Flag:
    """One flag: its spelling, the attribute it sets, its shape and its meaning."""

    name: str
    shape: str
    """``switch`` (no value), ``text``, ``integer`` or ``integers``."""
    read: Callable[[Any, str], Source]
    short: str | None = None
    """A spelling with one dash for the same attribute."""
    metavar: str = "VALUE"
    help: str = argparse.SUPPRESS
    dest: str = attrs.field(init=False)
    """The attribute of the parsed arguments, as argparse derives it."""

    @dest.default
    def _derived(self) -> str:
        return self.name.lstrip("-").replace("-", "_").replace(".", "_")


_Values = Mapping[tuple[str, str], Any]
"""What a flag says, by phase and key."""


def _said(values: _Values, flag: str, *left_out: str) -> Source:
    """Return ``values``, checked, with a note that says them as today's flags do."""
    values = {(phase, key): KEYS[key].read(one, flag) for (phase, key), one in values.items()}
    note = f"{flag} chooses no graph mode or size."
    if values:
        note = f"{flag} is an older spelling; use {_new_spelling(values)}."
    if left_out:
        note += f" Not for devgraph and left to the engine: {', '.join(left_out)}."
    return Source(
        level=Level.OLDER,
        name=flag,
        settings={(None, *place): value for place, value in values.items()},
        notes=(note,) if values or left_out else (),
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


def _both(key: str, value: Any) -> _Values:
    return {(phase, key): value for phase in PHASES}


def _length(value: Any, flag: str) -> Source:
    """A prefill length, plain or with a suffix such as 32k (1000) or 32Ki (1024)."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?)(k|[KMGT]i|[MGT])?", str(value).strip())
    suffix = (match[2] or "") if match else ""
    if match is None or (suffix.endswith("i") and "." in match[1]):
        raise ConfigError(f"{flag}: expected a length such as 32768, 32k or 32Ki, got {value!r}")
    scale = (1024 if suffix.endswith("i") else 1000) ** " KMGT".index(suffix[:1].upper() or " ")
    return _said({("prefill", "max_seq_len"): round(float(match[1]) * scale)}, flag)


def _sizes_or_maximum(value: Any, flag: str) -> Source:
    """One number is the maximum, several are the list."""
    if isinstance(value, (list, tuple)) and len(value) == 1:
        return _said(_both("max_bs", value[0]), flag)
    return _said(_both("buckets", value), flag)


_JSON_KEYS: Mapping[str, str] = {
    "backend": "policy",
    "bs": "buckets",
    "max_bs": "max_bs",
    "tc_compiler": "compiler",
    "full_prefill_max_req": "max_requests",
    "max_seq_len": "max_seq_len",
    "max_context_size": "max_seq_len",
}
_JSON_LEFT_OUT = ("full_prefill_prefix_chunk_tokens",)  # shapes a variant, which engines name


def _phases_json(value: Any, flag: str) -> Source:
    """``{"decode": "full", "prefill": {"backend": "tc_piecewise", "bs": [64]}}``."""
    document = _document(value, flag)
    found: dict[tuple[str, str], Any] = {}
    left_out: list[str] = []
    check_names(flag, document, PHASES, what="phase")
    for phase, body in document.items():
        keys = body if isinstance(body, Mapping) else {"backend": body}
        check_names(f"{flag}: {phase}", keys, (*_JSON_KEYS, *_JSON_LEFT_OUT), what="key")
        for key, item in keys.items():
            if key in _JSON_LEFT_OUT:
                left_out.append(f"{phase}.{key}")
                continue
            if item is None:
                continue  # an engine's own "not chosen"
            name = _JSON_KEYS[key]
            checked = KEYS[name].read(item, f"{flag}: {phase}.{key}")
            earlier = found.get((phase, name))
            found[phase, name] = checked if earlier is None else min(earlier, checked)
    return _said(found, flag, *left_out)


_GRAPH_MODES: Mapping[str, tuple[str, str]] = {
    "NONE": ("disabled", "disabled"),
    "PIECEWISE": ("piecewise", "piecewise"),
    "FULL": ("full", "full"),
    "FULL_DECODE_ONLY": ("full", "disabled"),
    "FULL_AND_PIECEWISE": ("full", "piecewise"),
}
"""Mode names with the policies (decode, prefill); mixed batches are prefill here."""


def _policies(value: Any, flag: str) -> _Values:
    name = getattr(value, "name", value)  # an engine may hand over its enum member
    if not isinstance(name, str) or name.upper() not in _GRAPH_MODES:
        upper = name.upper() if isinstance(name, str) else name
        raise unknown_name(flag, upper, _GRAPH_MODES, what="mode")
    decode, prefill = _GRAPH_MODES[name.upper()]
    return {("decode", "policy"): decode, ("prefill", "policy"): prefill}


def _mode_name(value: Any, flag: str) -> Source:
    return _said(_policies(value, flag), flag)


_on = FLAG["read"]
_COMPILATION: Mapping[str, Callable[[Any, str], _Values]] = {
    "use_cudagraph": lambda value, flag: {} if _on(value, flag) else _both("policy", "disabled"),
    "full_cuda_graph": lambda value, flag: _both("policy", "full") if _on(value, flag) else {},
    "cudagraph_mode": _policies,
    "cudagraph_capture_sizes": lambda value, _: _both("buckets", value),
    "max_cudagraph_capture_size": lambda value, _: _both("max_bs", value),
    "cudagraph_num_of_warmups": lambda value, _: _both("warmup", value),
    "backend": lambda value, _: _both("compiler", value) if value in COMPILERS else {},
}
"""What the keys of a compilation configuration say; a later one, which is newer, wins."""


def _compilation(value: Any, flag: str) -> Source:
    """The graph settings inside a compilation configuration: JSON text, mapping or object."""
    if isinstance(value, str):
        value = read_json(value, flag)
    if isinstance(value, int) and not isinstance(value, bool):
        return _said({}, flag, f"level {value}")
    if isinstance(value, (Mapping, bool, list, str)):
        document = _document(value, flag)
    else:
        document = {key: getattr(value, key, None) for key in _COMPILATION}
        if not document["cudagraph_num_of_warmups"]:
            del document["cudagraph_num_of_warmups"]  # such an object is born with 0
    found: dict[tuple[str, str], Any] = {}
    for key, meaning in _COMPILATION.items():
        if document.get(key) is not None:
            found.update(meaning(document[key], f"{flag}: {key}"))
    return _said(found, flag, *(str(key) for key in document if key not in _COMPILATION))


_LEVELS: tuple[str, ...] = ("NONE", "PIECEWISE", "FULL_AND_PIECEWISE", "FULL_AND_PIECEWISE")
"""Graph mode of each optimization level of vLLM (its config/vllm.py, since 0.12)."""


def _level(value: Any, flag: str) -> Source:
    """An optimization level from 0 to 3; versions before read a compilation configuration here."""
    text = str(getattr(value, "value", value)).strip()
    if text.startswith("{"):
        return _compilation(text, flag)
    level = text.upper().removeprefix("O")
    if level not in ("0", "1", "2", "3"):
        raise ConfigError(f"{flag}: expected a level from 0 to 3, got {value!r}")
    mode = _policies(_LEVELS[int(level)], flag)
    return _said(mode, flag, f"compilation and kernels of level {level}")


def _document(value: Any, flag: str) -> dict[str, Any]:
    return dict(as_object(read_json(value, flag) if isinstance(value, str) else value, flag))


def _sets(key: str, phases: tuple[str, ...], *names: str, to: Any = None) -> list[Flag]:
    """Flags that set ``key`` to their value, or, without one, ``to`` what is given."""

    def read(value: Any, flag: str) -> Source:
        return _said({(phase, key): value if to is None else to for phase in phases}, flag)

    shape = KEYS[key].shape if to is None else "switch"
    return [Flag(name=name, shape=shape, read=read) for name in names]


def _texts(read: Callable[[Any, str], Source], *names: str, short: str | None = None) -> list[Flag]:
    """Flags with a language of their own."""
    return [Flag(name=name, shape="text", read=read, short=short) for name in names]


def _part(key: str) -> list[Flag]:
    """One key of the compilation configuration as a flag of its own; only a mode is no JSON."""

    def read(value: Any, flag: str) -> Source:
        if isinstance(value, str) and key != "cudagraph_mode":
            value = read_json(value, flag)
        return _said({} if value is None else _COMPILATION[key](value, flag), flag)

    return _texts(read, f"--compilation-config.{key}", short=f"-cc.{key}")


def _per_phase(phase: str) -> list[Flag]:
    disabled = (f"--disable-{phase}-cuda-graph", f"--{phase}-disable-cuda-graph")
    names = (f"--cuda-graph-backend-{phase}", f"--{phase}-cuda-graph-backend")
    return [
        *_sets("policy", (phase,), *disabled, to="disabled"),
        *_sets("policy", (phase,), *names, f"--{phase}-cuda-graph-mode"),
        *_sets("max_bs", (phase,), f"--cuda-graph-max-bs-{phase}", f"--{phase}-cuda-graph-max-bs"),
        *_sets("buckets", (phase,), f"--cuda-graph-bs-{phase}", f"--{phase}-cuda-graph-bs"),
    ]


_DECODE, _PREFILL = (("decode",), ("prefill",))

OLDER_FLAGS: tuple[Flag, ...] = (
    *_texts(_level, "--optimization-level", short="-O"),
    Flag(
        name="--disable-draft-cuda-graph",
        shape="switch",
        read=lambda _, flag: _said(
            {}, flag, "graphs of the draft model, whose runner has a mode of its own"
        ),
    ),
    *_sets("emulate", PHASES, "--debug-cuda-graph", to=True),
    *_sets("policy", PHASES, "--disable-cuda-graph", to="disabled"),
    *_sets("max_padding", _DECODE, "--disable-cuda-graph-padding", to=1.0),
    *_sets("policy", _PREFILL, "--enable-piecewise-cuda-graph", to="piecewise"),
    *_sets("policy", _PREFILL, "--enforce-piecewise-cuda-graph", to="piecewise"),
    *_sets("policy", _PREFILL, "--enable-breakable-cuda-graph", to="breakable"),
    *_sets("policy", _PREFILL, "--disable-piecewise-cuda-graph", to="disabled"),
    Flag(name="--cuda-graph-sizes", shape="integers", read=_sizes_or_maximum),
    *_sets("max_bs", PHASES, "--max-cudagraph-capture-size"),
    *_sets("buckets", PHASES, "--cudagraph-capture-sizes"),
    *_sets("max_seq_len", PHASES, "--max-seq-len-to-capture", "--max-context-len-to-capture"),
    *_sets("max_bs", _DECODE, "--cuda-graph-max-bs"),
    *_sets("buckets", _DECODE, "--cuda-graph-bs"),
    *_sets("max_bs", _PREFILL, "--piecewise-cuda-graph-max-tokens"),
    *_sets("buckets", _PREFILL, "--piecewise-cuda-graph-tokens"),
    *_sets("compiler", _PREFILL, "--piecewise-cuda-graph-compiler"),
    *_sets("compiler", PHASES, "--cuda-graph-tc-compiler"),
    *_texts(_length, "--cuda-graph-prefill-max-context", "--context-bucket"),
    *_sets("max_seq_len", _PREFILL, "--cuda-graph-max-seq-len-prefill"),
    *_per_phase("decode"),
    *_per_phase("prefill"),
    *_texts(_phases_json, "--cuda-graph-mode", "--cuda-graph-config"),
    *_texts(_compilation, "--compilation-config", short="-cc"),
    *_part("cudagraph_mode"),
    *_part("cudagraph_capture_sizes"),
    *_part("max_cudagraph_capture_size"),
    *_texts(_mode_name, "--cudagraph-mode"),
    *_sets("policy", PHASES, "--enforce-eager", to="disabled"),
)
