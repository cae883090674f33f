"""Readers of mode configurations in JSON text and in JSON or YAML files.

Errors name the line and column of a syntax error, or the JSON path of an unknown name, such as
``backends.acme.prefill.policy``. A key that appears twice in one object is an error, because one of
its values would be lost.
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
from devgraph.api.environment import MODE_VARIABLE
from devgraph.api.errors import ConfigError, ConfigTypeError, brief

SECTION = "device_graph"
"""Name of the section with the mode configuration in a larger file."""


def read_json(text: str, source: str) -> object:
    """Parse JSON; refuse duplicate keys, NaN and infinity."""

    def pairs(items: list[tuple[str, object]]) -> dict[str, object]:
        entries: dict[str, object] = {}
        for key, value in items:
            if key in entries:
                raise ConfigError(
                    f"{source}: the key {key!r} appears twice in one object; keep one of them"
                )
            entries[key] = value
        return entries

    def constant(name: str) -> object:
        raise ConfigError(f"{source}: {name} is not a JSON value")

    if not isinstance(text, str):
        raise ConfigTypeError(f"{source}: expected JSON text, got {type(text).__name__}")
    try:
        return json.loads(text, object_pairs_hook=pairs, parse_constant=constant)
    except ConfigError:
        raise
    except RecursionError:
        raise ConfigError(f"{source}: the text is nested too deeply") from None
    except json.JSONDecodeError as error:
        rest = error.doc[error.pos :].split("\n", 1)[0][:24]
        at = f"at {rest!r}" if rest else "at its end"
        raise ConfigError(
            f"{source}: invalid JSON in line {error.lineno}, column {error.colno} ({at}): "
            f"{error.msg}"
        ) from error
    except ValueError as error:  # Python refuses integers with thousands of digits.
        raise ConfigError(f"{source}: {error}") from error


def read_mode(text: str, source: str) -> object:
    """Parse the JSON text of a mode; the error for invalid JSON shows an example of a mode."""
    try:
        return read_json(text, source)
    except ConfigError as error:
        if not isinstance(error.__cause__, json.JSONDecodeError):
            raise
        raise ConfigError(
            f'{error}. A mode is JSON, such as \'{{"decode": "full"}}\'; '
            f"--decode-device-graph-mode and --prefill-device-graph-mode take a policy name, and "
            f"--device-graph-config a file"
        ) from error


def read_file(path: str | os.PathLike[str]) -> object:
    """Read a file as JSON if its name ends in ``.json``, and otherwise as YAML with PyYAML."""
    try:
        name = os.fspath(path)
        text = Path(name).read_text(encoding="utf-8-sig")  # skip a byte order mark
    except (OSError, ValueError, TypeError) as error:
        # ValueError: text that is not UTF-8, or a zero byte in the name. TypeError: not a path.
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot read the file {str(path)!r}: {why}") from error
    return (read_json if name.lower().endswith(".json") else _read_yaml)(text, name)


def read_section(path: str | os.PathLike[str]) -> object:
    """Return the ``device_graph`` section of a JSON or YAML file."""
    content = read_file(path)
    name = os.fspath(path)
    document = as_object(content, name, f"an object with a {SECTION!r} section")
    if SECTION not in document:
        raise ConfigError(
            f"{name}: there is no section {SECTION!r}, only {brief([*document])}. Put the mode "
            f"configuration under the key {SECTION!r}."
        )
    return document[SECTION]


def read_pyproject(folder: Path) -> tuple[str, object] | None:
    """Return the path and the ``[tool.devgraph]`` table of the nearest ``pyproject.toml``."""
    places = (parent / "pyproject.toml" for parent in (folder, *folder.parents))
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        return None
    try:
        text = path.read_text(encoding="utf-8")
        if "tool.devgraph" not in text:
            return None
        toml: Any = importlib.import_module("tomllib")  # new in Python 3.11
        table = toml.loads(text).get("tool", {}).get("devgraph")
    except ImportError as error:
        raise ConfigError(
            f"{path}: reading [tool.devgraph] needs Python 3.11 or newer. Remove the table, and "
            f"set {MODE_VARIABLE} or --device-graph-config instead"
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read [tool.devgraph] of {path}: {error}") from error
    return None if table is None else (str(path), table)


_PER_PHASE = 'an object with a policy per phase, such as {"decode": "full"}'


def parse_mode(document: object, source: str, level: Level = Level.JSON) -> Source:
    """Check ``{"decode": ..., "prefill": ..., "backends": {...}}`` and return its settings."""
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
    """Check the keys of one phase and return their values; add a note for each older name."""
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
        # Import by name, because PyYAML is optional and has no type annotations.
        yaml: Any = importlib.import_module("yaml")
    except ImportError as error:
        raise ConfigError(
            f"{name}: reading YAML needs PyYAML, which is not installed: pip install pyyaml, or "
            f"write the file as JSON with the suffix .json"
        ) from error

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """A loader that refuses repeated keys; PyYAML would keep only the last value."""

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            seen: list[Any] = []
            for key, _ in node.value:
                # YAML allows the merge key "<<" several times.
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
    except Exception as error:  # including ValueError for invalid dates and numbers
        mark, problem = (getattr(error, name, None) for name in ("problem_mark", "problem"))
        place = f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        if not mark:
            problem = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ConfigError(f"{name}: invalid YAML{place}: {problem}") from error
