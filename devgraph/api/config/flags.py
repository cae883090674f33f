"""The command line of the mode configuration, for any argparse parser.

Nothing here has a default: an option that was not given leaves no attribute behind, which is how a
choice is told from its absence. Options that the parser already has are left alone and read
through the attribute that they set, so an engine can keep its own definitions of the older flags.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from devgraph.api.config.document import parse_mode, read_mode, read_section
from devgraph.api.config.merge import Level, Source
from devgraph.api.config.older_flags import OLDER_FLAGS, OlderFlag, Reading
from devgraph.api.config.phase import KEYS, PHASES, DeviceGraphWarning, Key, Setting
from devgraph.api.errors import ConfigError, ConfigTypeError

_MODE = "--device-graph-mode"
_FILE = "--device-graph-config"

_SHORTHANDS: Mapping[str, tuple[tuple[str, Key], ...]] = {
    phase: tuple((f"--{phase}-device-graph-{key.flag}", key) for key in KEYS.values() if key.flag)
    for phase in PHASES
}
"""The flags of one phase, each with the key that it sets."""


class _Text(str):
    """The text of an option, with what was read from it; elsewhere it is a plain string."""

    read: Any

    def __reduce__(self) -> Any:
        return str, (str(self),)


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
        type=_reading(_MODE, _read_mode),
        help='policy per phase, for example \'{"decode": "full", "prefill": "breakable"}\'',
    )
    add(
        _FILE,
        metavar="FILE",
        help="JSON or YAML file with a device_graph section; weaker than every flag",
    )
    for phase in PHASES:
        text = f"run {phase} eagerly; gives way to {_SHORTHANDS[phase][0][0]}"
        add(_disable(phase), action="store_true", help=text)
        for flag, key in _SHORTHANDS[phase]:
            text = f"{phase}: {key.meaning} {key.accepts[0].upper()}{key.accepts[1:]}."
            options = _options(flag, key.shape, key.read)
            if key.names is not None:
                options["metavar"] = key.name.upper()
            add(flag, help=text, **options)
    for older in OLDER_FLAGS:
        options = _options(older.name, older.shape, older.read)
        names = (older.name, older.short) if older.short else (older.name,)
        add(*names, dest=older.dest, help=argparse.SUPPRESS, **options)
    if not pending:
        return
    group = parser.add_argument_group(
        "device graphs",
        f"{_MODE} beats the flags per phase, which beat the graph flags of older engines (accepted "
        f"and not listed here), which beat {_FILE}; merged per key.",
    )
    for flags, options in pending:
        options.setdefault("action", _Once)
        group.add_argument(*flags, default=argparse.SUPPRESS, **options)


class _Once(argparse.Action):
    """Stores a value as argparse does, and tells of one that was there."""

    def __call__(
        self, parser: Any, namespace: Any, values: Any, option_string: str | None = None
    ) -> None:
        before = getattr(namespace, self.dest, values)
        if before != values:
            text = f"{option_string} is given twice: {values!r} overrides {before!r}"
            warnings.warn(text, DeviceGraphWarning, stacklevel=2)
        setattr(namespace, self.dest, values)


def _disable(phase: str) -> str:
    return f"--{phase}-disable-device-graph"


def _options(name: str, shape: str, read: Callable[[Any, str], object]) -> dict[str, Any]:
    """Return how argparse takes an option of that shape."""
    if shape == "switch":
        return {"action": "store_true"}
    if shape == "text":
        return {"metavar": "VALUE", "type": _reading(name, read)}
    return {"metavar": "N", "type": int, "nargs": "+" if shape == "integers" else None}


def _clashes(flag: str, taken: Mapping[str, argparse.Action]) -> bool:
    """``-cc`` would change the meaning of an existing ``-c`` with the value ``c``."""
    return not flag.startswith("--") and flag[:2] in taken


def _reading(name: str, read: Callable[[Any, str], object]) -> Callable[[str], str]:
    """Return an argparse type that reads a text once, and refuses what cannot be read."""

    def typed(value: str) -> str:
        text = _Text(value)
        try:
            text.read = read(value, name)
        except ConfigError as error:
            # argparse shows the text of this exception only, after the name of the option.
            raise argparse.ArgumentTypeError(str(error).removeprefix(f"{name}: ")) from error
        return text

    return typed


def _read_mode(value: Any, name: str) -> Source:
    return parse_mode(read_mode(value, name) if isinstance(value, str) else value, name)


def sources_of(
    namespace: argparse.Namespace, parser: argparse.ArgumentParser | None = None
) -> list[Source]:
    """Return what the arguments say, weakest first, with a note for each older flag.

    With ``parser``, values that equal its defaults count as not given. Raises ``ConfigError``.
    """
    if not hasattr(namespace, "__dict__") and not hasattr(namespace, "__slots__"):
        raise ConfigTypeError(
            f"expected parsed arguments, as parser.parse_args() returns them, got {namespace!r}"
        )

    def given(flag: str, dest: str | None = None) -> Any:
        name = dest or flag.lstrip("-").replace("-", "_")
        value = getattr(namespace, name, None)
        if parser is not None and value == parser.get_default(name):
            return None
        return None if value is False or value in ([], ()) else value

    sources: list[Source] = []
    path = given(_FILE)
    if path is not None:
        sources.append(parse_mode(read_section(path), f"{_FILE} {path}", Level.FILE))
    for older in OLDER_FLAGS:
        # Most are absent: those cost no call.
        value = given(older.name, older.dest) if hasattr(namespace, older.dest) else None
        if value is not None:
            sources.append(_older_source(older, value))
    for phase in PHASES:
        if given(_disable(phase)):
            document = {phase: "disabled"}
            sources.append(parse_mode(document, _disable(phase), Level.SHORTHAND))
        for flag, key in _SHORTHANDS[phase]:
            value = given(flag)
            if value is not None:
                sources.append(parse_mode({phase: {key.name: value}}, flag, Level.SHORTHAND))
    mode = given(_MODE)
    if mode is not None:
        sources.append(_read(mode, _MODE, _read_mode))
    return sources


def _read(value: Any, name: str, read: Callable[[Any, str], Any]) -> Any:
    return value.read if isinstance(value, _Text) else read(value, name)


def _older_source(flag: OlderFlag, value: Any) -> Source:
    name = flag.name
    reading: Reading = _read(value, name, flag.read)
    left = (
        f" Not for devgraph and left to the engine: {', '.join(reading.left_out)}."
        if reading.left_out
        else ""
    )
    note = ""
    if reading.settings:
        note = f"{name} is an older spelling; use {_new_spelling(reading.settings)}.{left}"
    elif left:
        note = f"{name} chooses no graph mode or size.{left}"
    return Source(
        level=Level.OLDER, name=name, settings=reading.settings, notes=(note,) if note else ()
    )


def _new_spelling(settings: Mapping[Setting, Any]) -> str:
    """Return the flags of today that say the same."""
    flags: list[str] = []
    rest: dict[str, dict[str, Any]] = {}
    for (_, phase, name), value in settings.items():
        flag = KEYS[name].flag
        if (name, value) == ("policy", "disabled"):
            flags.append(_disable(phase))
        elif flag is not None:
            words = value if isinstance(value, tuple) else (value,)
            flags.append(f"--{phase}-device-graph-{flag} {' '.join(map(str, words))}")
        else:
            rest.setdefault(phase, {})[name] = value
    if rest:
        flags.append(f"{_MODE} '{json.dumps(rest)}'")
    return " ".join(flags)
