"""Reading mode configurations from JSON text and from JSON or YAML files.

Errors name the place: line, column and what stands there for text that does not parse, the JSON
path (``backends.acme.prefill.policy``) for text that parses but says something that does not exist.
Nothing is dropped on the way: a key that appears twice is an error, not a last-one-wins.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from devgraph.api.config.merge import Level, Source
from devgraph.api.config.phase import (
    KEYS,
    OLDER_POLICIES,
    PHASES,
    Setting,
    as_object,
    check_names,
    over_maximum,
    path_of,
)
from devgraph.api.errors import ConfigError, ConfigTypeError, brief

SECTION = "device_graph"
"""The name of the section that holds a mode configuration in a larger file."""


def read_json(text: str, source: str) -> object:
    """Parse JSON strictly: no duplicate keys, no NaN or infinity.

    Raises ``ConfigError`` that names ``source`` and, for broken text, line, column and the rest
    of the line from there.
    """

    def pairs(items: list[tuple[str, object]]) -> dict[str, object]:
        found: dict[str, object] = {}
        for key, value in items:
            if key in found:
                raise ConfigError(
                    f"{source}: the key {key!r} appears twice in one object; keep one of them"
                )
            found[key] = value
        return found

    def constant(name: str) -> object:
        raise ConfigError(f"{source}: {name} is not a value that JSON has")

    if not isinstance(text, str):
        raise ConfigTypeError(f"{source}: expected JSON text, got {type(text).__name__}")
    try:
        return json.loads(text, object_pairs_hook=pairs, parse_constant=constant)
    except ConfigError:
        raise
    except RecursionError:
        raise ConfigError(f"{source}: nested too deeply to be read") from None
    except json.JSONDecodeError as error:
        here = error.doc[error.pos :].split("\n", 1)[0][:24]
        at = f"at {here!r}" if here else "at its end"
        raise ConfigError(
            f"{source}: broken JSON in line {error.lineno}, column {error.colno} ({at}): "
            f"{error.msg}"
        ) from error
    except ValueError as error:  # Python reads no integer of thousands of digits
        raise ConfigError(f"{source}: {error}") from error


def read_mode(text: str, source: str) -> object:
    """Parse a mode as ``read_json`` does; what is no JSON is told how a mode is written."""
    try:
        return read_json(text, source)
    except ConfigError as error:
        if not isinstance(error.__cause__, json.JSONDecodeError):
            raise
        raise ConfigError(
            f'{error}. A mode is JSON, such as \'{{"decode": "full"}}\'; a policy alone is what '
            f"--decode-device-graph-mode and --prefill-device-graph-mode take"
        ) from error


def read_file(path: str | os.PathLike[str]) -> object:
    """Read a file: JSON where its name ends in ``.json``, else YAML, which needs PyYAML.

    Raises ``ConfigError`` for a file that cannot be read or does not parse.
    """
    try:
        name = os.fspath(path)
        text = Path(name).read_text(encoding="utf-8-sig")  # some editors begin files with a mark
    except (OSError, ValueError, TypeError) as error:  # no UTF-8, a zero in its name, or no name
        raise ConfigError(f"cannot read the configuration file {str(path)!r}: {error}") from error
    return (read_json if name.lower().endswith(".json") else _read_yaml)(text, name)


def read_section(path: str | os.PathLike[str]) -> object:
    """Return the ``device_graph`` section of a JSON or YAML file."""
    found = read_file(path)
    name = os.fspath(path)
    document = as_object(found, name, f"an object with a {SECTION!r} section")
    if SECTION not in document:
        raise ConfigError(
            f"{name}: there is no section {SECTION!r}, but {brief([*document])}. Put the mode "
            f"configuration under the key {SECTION!r}."
        )
    return document[SECTION]


_PER_PHASE = 'an object with a policy per phase, such as {"decode": "full"}'


def parse_mode(document: object, source: str, level: Level = Level.JSON) -> Source:
    """Check ``{"decode": ..., "prefill": ..., "backends": {...}}`` and return what it says."""
    general = dict(as_object(document, source, _PER_PHASE))
    overlays = as_object(
        general.pop("backends", {}), f"{source}: backends", "an object with one entry per backend"
    )
    settings: dict[Setting, Any] = {}
    notes: list[str] = []
    for name in overlays:
        if not isinstance(name, str) or not name:
            raise ConfigTypeError(f"{source}: backends: a backend name is a string, got {name!r}")
    for backend, phases in ((None, general), *overlays.items()):
        where = source if backend is None else f"{source}: backends.{backend}"
        known = (*PHASES, "backends") if backend is None else PHASES
        check_names(where, as_object(phases, where, _PER_PHASE), known, what="phase")
        for phase, value in phases.items():
            chosen = value if isinstance(value, (dict, Mapping)) else {"policy": value}
            place = f"{source}: {path_of((backend, phase, ''))[:-1]}"
            settings.update(_checked(chosen, backend, phase, place, notes))
    return Source(level=level, name=source, settings=settings, notes=tuple(notes))


def _checked(
    chosen: Mapping[Any, Any], backend: str | None, phase: str, where: str, notes: list[str]
) -> dict[Setting, Any]:
    """Return the keys of one phase, checked."""
    values: dict[str, Any] = {}
    check_names(where, chosen, KEYS, what="key")
    for key, item in chosen.items():
        values[key] = KEYS[key].read(item, f"{where}.{key}")
        if key == "policy" and item in OLDER_POLICIES:
            notes.append(
                f"{where}.{key}: {item!r} is the older name of the policy {values[key]!r}; write "
                f"{values[key]!r}"
            )
    problem = over_maximum(values.get("buckets"), values.get("max_bs"))
    if problem:
        raise ConfigError(f"{where}: {problem}")
    return {(backend, phase, key): value for key, value in values.items()}


def _read_yaml(text: str, name: str) -> object:
    try:
        # By name, because PyYAML is optional and brings no types of its own.
        yaml: Any = importlib.import_module("yaml")
    except ImportError as error:
        raise ConfigError(
            f"{name}: reading YAML needs PyYAML, which is not installed: pip install pyyaml, or "
            f"write the file as JSON with the suffix .json"
        ) from error

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """PyYAML keeps the last of two equal keys; a configuration must not lose the first."""

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            seen: list[Any] = []
            for key, _ in node.value:
                # "<<" is meant to be repeated and overridden.
                if key.value in seen and key.tag != "tag:yaml.org,2002:merge":
                    raise ConfigError(
                        f"{name}: the key {key.value!r} appears twice (line "
                        f"{key.start_mark.line + 1}); keep one of them"
                    )
                seen.append(key.value)
            return super().construct_mapping(node, deep=deep)

    try:
        return yaml.load(text, Loader=Loader)
    except ConfigError:
        raise
    except Exception as error:  # of a date or number that is none PyYAML lets Python's own out
        problem = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ConfigError(f"{name}: broken YAML: {problem}") from error
