"""The command line of the mode configuration, for any argparse parser.

Nothing here has a default: an option that was not given leaves no attribute behind, which is how a
choice is told from its absence. Options that the parser already has are left alone and read
through the attribute that they set, so an engine can keep its own definitions of the older flags.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from typing import Any

from devgraph.api.config.document import parse_mode, read_mode, read_section
from devgraph.api.config.merge import Level, Source
from devgraph.api.config.older_flags import OLDER_FLAGS, OlderFlag
from devgraph.api.config.values import PHASES, POLICIES, Setting, check
from devgraph.api.errors import ConfigError, ConfigTypeError

__all__ = ["add_cli_args", "sources_of"]

_MODE = "--device-graph-mode"
_FILE = "--device-graph-config"


def add_cli_args(parser: argparse.ArgumentParser) -> None:
    """Add ``--device-graph-mode``, its shorthands and the accepted older flags to ``parser``.

    Options that the parser has already are skipped, so calling this twice, or for an engine with
    flags of its own, is safe. Broken values end the program through ``parser.error``; the meaning
    of all of them together is found by ``DeviceGraphConfig.from_args``.
    """
    if not isinstance(parser, argparse._ActionsContainer):
        raise ConfigTypeError(f"expected an argparse parser, got {parser!r}")
    taken = parser._option_string_actions
    pending: list[tuple[list[str], dict[str, Any]]] = []

    def add(*flags: str, **options: Any) -> None:
        free = [flag for flag in flags if flag not in taken and not _clashes(flag, taken)]
        if free:
            pending.append((free, options))

    add(
        _MODE,
        metavar="JSON",
        type=_checked(_MODE, lambda text: parse_mode(read_mode(text, _MODE), _MODE)),
        help='policy per phase, for example \'{"decode": "full", "prefill": "breakable"}\'',
    )
    add(
        _FILE,
        metavar="FILE",
        help="JSON or YAML file with a device_graph section; weaker than every flag",
    )
    for phase in PHASES:
        _add_shorthands(phase, add)
    for flag in OLDER_FLAGS:
        _add_older(flag, add)
    if not pending:
        return
    group = parser.add_argument_group(
        "device graphs",
        f"{_MODE} beats the flags per phase, which beat the graph flags of older engines (accepted "
        f"and not listed here), which beat {_FILE}; merged per key.",
    )
    for flags, options in pending:
        group.add_argument(*flags, default=argparse.SUPPRESS, **options)


def _add_shorthands(phase: str, add: Callable[..., None]) -> None:
    rows = "tokens" if phase == "prefill" else "requests"
    mode = f"--{phase}-device-graph-mode"
    add(
        mode,
        metavar="POLICY",
        type=_checked(mode, lambda text: check("policy", text, mode)),
        help=f"policy for {phase}: {', '.join(POLICIES)}",
    )
    add(
        f"--{phase}-disable-device-graph",
        action="store_true",
        help=f"run {phase} eagerly; gives way to {mode}",
    )
    add(
        f"--{phase}-device-graph-bs",
        metavar="N",
        nargs="+",
        type=int,
        help=f"sizes to capture for {phase}, in {rows}",
    )
    add(
        f"--{phase}-device-graph-max-bs",
        metavar="N",
        type=int,
        help=f"largest size to capture for {phase}, in {rows}",
    )


def _add_older(flag: OlderFlag, add: Callable[..., None]) -> None:
    options: dict[str, Any] = {"dest": flag.dest, "help": argparse.SUPPRESS}
    if flag.shape == "switch":
        options["action"] = "store_true"
    else:
        options["metavar"] = "N" if flag.shape.startswith("integer") else "VALUE"
        options["nargs"] = "+" if flag.shape == "integers" else None
        if flag.shape == "text":
            options["type"] = _checked(flag.name, lambda text: flag.read(text, flag.name))
        else:
            options["type"] = int
    add(flag.name, *([flag.short] if flag.short else []), **options)


def _clashes(flag: str, taken: Mapping[str, argparse.Action]) -> bool:
    """``-cc`` would change the meaning of an existing ``-c`` with the value ``c``."""
    return not flag.startswith("--") and flag[:2] in taken


def _checked(name: str, read: Callable[[str], object]) -> Callable[[str], str]:
    """Return an argparse type that keeps the text but refuses what cannot be read."""

    def text(value: str) -> str:
        try:
            read(value)
        except ConfigError as error:
            # argparse shows the text of this exception only, after the name of the option.
            raise argparse.ArgumentTypeError(str(error).removeprefix(f"{name}: ")) from error
        return value

    return text


def sources_of(
    namespace: argparse.Namespace, parser: argparse.ArgumentParser | None = None
) -> tuple[list[Source], list[str]]:
    """Return what the arguments say, weakest first, and a note for each older flag.

    With ``parser``, values that equal its defaults count as not given. Raises ``ConfigError``.
    """
    if not hasattr(namespace, "__dict__") and not hasattr(namespace, "__slots__"):
        raise ConfigTypeError(
            f"expected parsed arguments, as parser.parse_args() returns them, got {namespace!r}"
        )
    sources: list[Source] = []
    notes: list[str] = []

    def given(flag: str, dest: str | None = None) -> Any:
        name = dest or flag.lstrip("-").replace("-", "_")
        value = getattr(namespace, name, None)
        if parser is not None and value == parser.get_default(name):
            return None
        return None if value is False or value in ([], ()) else value

    path = given(_FILE)
    if path is not None:
        parsed = parse_mode(read_section(path), f"{_FILE} {path}")
        sources.append(_source(Level.FILE, f"{_FILE} {path}", parsed.settings))
        notes.extend(parsed.notes)
    for flag in OLDER_FLAGS:
        value = given(flag.name, flag.dest)
        if value is not None:
            sources.extend(_older_source(flag, value, notes))
    for phase in PHASES:
        for suffix, key in (
            ("disable-device-graph", "policy"),
            ("device-graph-mode", "policy"),
            ("device-graph-max-bs", "max_bs"),
            ("device-graph-bs", "buckets"),
        ):
            name = f"--{phase}-{suffix}"
            value = given(name)
            if value is not None:
                document = {phase: {key: "disabled" if value is True else value}}
                parsed = parse_mode(document, name)
                sources.append(_source(Level.SHORTHAND, name, parsed.settings))
                notes.extend(parsed.notes)
    mode = given(_MODE)
    if mode is not None:
        parsed = parse_mode(read_mode(mode, _MODE) if isinstance(mode, str) else mode, _MODE)
        sources.append(_source(Level.JSON, _MODE, parsed.settings))
        notes.extend(parsed.notes)
    return sources, notes


def _source(level: Level, name: str, settings: Mapping[Setting, Any]) -> Source:
    return Source(level=level, name=name, settings=settings)


def _older_source(flag: OlderFlag, value: Any, notes: list[str]) -> list[Source]:
    name = flag.name
    reading = flag.read(value, name)
    left = (
        f" Not for devgraph and left to the engine: {', '.join(reading.left_out)}."
        if reading.left_out
        else ""
    )
    if not reading.settings:
        if left:
            notes.append(f"{name} chooses no graph mode or size.{left}")
        return []
    notes.append(f"{name} is an older spelling; use {_new_spelling(reading.settings)}.{left}")
    return [_source(Level.OLDER, name, reading.settings)]


def _new_spelling(settings: Mapping[Setting, Any]) -> str:
    """Return the flags of today that say the same."""
    flags: list[str] = []
    rest: dict[str, dict[str, Any]] = {}
    for (_, phase, key), value in settings.items():
        if key == "policy":
            disabled = f"--{phase}-disable-device-graph"
            flags.append(
                disabled if value == "disabled" else f"--{phase}-device-graph-mode {value}"
            )
        elif key == "buckets":
            flags.append(f"--{phase}-device-graph-bs {' '.join(map(str, value))}")
        elif key == "max_bs":
            flags.append(f"--{phase}-device-graph-max-bs {value}")
        else:
            rest.setdefault(phase, {})[key] = value
    if rest:
        flags.append(f"{_MODE} '{json.dumps(rest)}'")
    return " ".join(flags)
