"""The command line of the mode configuration, for any argparse parser.

Nothing here has a default: an option that was not given leaves no attribute behind, which is how a
choice is told from its absence. Options that the parser already has are left alone and read
through the attribute that they set, so an engine can keep its own definitions of the older flags.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from operator import attrgetter
from typing import Any

from devgraph.api.config.document import parse_mode, read_mode, read_section
from devgraph.api.config.merge import Level, Source
from devgraph.api.config.older_flags import DISABLE, MODE, OLDER_FLAGS, SHORTHANDS, Flag
from devgraph.api.config.phase import FLAG, KEYS, PHASES, DeviceGraphWarning
from devgraph.api.errors import ConfigTypeError

_FILE = "--device-graph-config"


def _key(phase: str, key: str, value: Any, name: str) -> Source:
    return parse_mode({phase: {key: value}}, name, Level.SHORTHAND)


def _phase(phase: str) -> Iterator[Flag]:
    """The flags of one phase: the one that switches it off, and one for each key that has one."""
    yield Flag(
        name=DISABLE[phase],
        shape="switch",
        help=f"run {phase} eagerly; gives way to {SHORTHANDS[phase, 'policy']}",
        read=lambda _, name: _key(phase, "policy", "disabled", name),
    )
    for key in KEYS.values():
        if key.flag is not None:
            yield Flag(
                name=SHORTHANDS[phase, key.name],
                shape=key.shape,
                metavar="N" if key.names is None else key.name.upper(),
                help=f"{phase}: {key.meaning} {key.accepts[0].upper()}{key.accepts[1:]}.",
                read=partial(_key, phase, key.name),
            )


FLAGS: tuple[Flag, ...] = (
    Flag(
        name=MODE,
        shape="text",
        metavar="JSON",
        help='policy per phase, for example \'{"decode": "full", "prefill": "breakable"}\'',
        read=lambda value, name: parse_mode(
            read_mode(value, name) if isinstance(value, str) else value, name
        ),
    ),
    Flag(
        name=_FILE,
        shape="text",
        metavar="FILE",
        help="JSON or YAML file with a device_graph section; weaker than every flag",
        read=lambda path, name: parse_mode(read_section(path), f"{name} {path}", Level.FILE),
    ),
    *(flag for phase in PHASES for flag in _phase(phase)),
    *OLDER_FLAGS,
)
"""Every flag, in the order of the help; of those of one level a later one is stronger."""


def add_cli_args(parser: argparse.ArgumentParser) -> None:
    """Add ``--device-graph-mode``, its shorthands and the accepted older flags to ``parser``.

    Options that the parser has already are skipped, so calling this twice, or for an engine with
    flags of its own, is safe. ``DeviceGraphConfig.from_args`` reads their values.
    """
    if not isinstance(parser, argparse._ActionsContainer):
        raise ConfigTypeError(f"expected an argparse parser, got {parser!r}")
    taken = parser._option_string_actions
    free = [
        (names, flag)
        for flag in FLAGS
        if (names := [one for one in (flag.name, flag.short) if one and not _taken(one, taken)])
    ]
    if not free:
        return
    group: argparse._ActionsContainer = parser
    if not isinstance(parser, argparse._ArgumentGroup):  # which holds no other
        group = parser.add_argument_group(
            "device graphs",
            f"{MODE} beats the flags per phase, which beat the graph flags of older engines "
            f"(accepted and not listed here), which beat {_FILE}; merged per key.",
        )
    for names, flag in free:
        options: dict[str, Any] = {"action": _Once, "metavar": flag.metavar}
        if flag.shape == "switch":
            options = {"action": "store_true"}
        elif flag.shape != "text":
            options |= {"type": int, "nargs": "+" if flag.shape == "integers" else None}
        default = argparse.SUPPRESS
        group.add_argument(*names, dest=flag.dest, help=flag.help, default=default, **options)


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


def _taken(name: str, taken: Mapping[str, argparse.Action]) -> bool:
    """Whether the parser has it, or an option whose meaning it would change: ``-cc`` does that to
    a ``-c`` with the value ``c``."""
    return name in taken or (not name.startswith("--") and name[:2] in taken)


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
    sources: list[Source] = []
    for flag in FLAGS:
        value = getattr(namespace, flag.dest, None)
        if value is None or value is False or (isinstance(value, (list, tuple)) and not value):
            continue
        if flag.shape == "switch":
            FLAG["read"](value, flag.name)  # an engine's own option may hold something else
        if parser is None or value != parser.get_default(flag.dest):
            sources.append(flag.read(value, flag.name))
    return sorted(sources, key=attrgetter("level"))
