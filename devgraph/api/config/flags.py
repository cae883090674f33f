"""The command line flags of the mode configuration, for any argparse parser.

Flags have no defaults: a flag that is not given sets no attribute, so only explicit choices are
read. A flag that the parser already defines is not added, but its attribute is read. An engine can
therefore keep its own definitions of older flags.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from devgraph.api.config.document import parse_mode, read_mode, read_pyproject, read_section
from devgraph.api.config.merge import Level, Source
from devgraph.api.config.older_flags import (
    DISABLE,
    MODE,
    OLDER_FLAGS,
    REMOVED_FLAGS,
    SHORTHANDS,
    Flag,
)
from devgraph.api.config.phase import FLAG, KEYS, PHASES
from devgraph.api.environment import MODE_VARIABLE, warn_unknown
from devgraph.api.errors import ConfigTypeError, brief
from devgraph.api.marks.source import warn

_FILE = "--device-graph-config"


def _key(phase: str, key: str, value: Any, name: str) -> Source:
    return parse_mode({phase: {key: value}}, name, Level.SHORTHAND)


def _phase(phase: str) -> Iterator[Flag]:
    """Yield the flags of one phase: a switch that disables its graphs, and one flag per key."""
    yield Flag(
        name=DISABLE[phase],
        shape="switch",
        help=f"run {phase} eagerly; {SHORTHANDS[phase, 'policy']} overrides it",
        read=lambda _, name: _key(phase, "policy", "disabled", name),
    )
    for key in KEYS.values():
        if key.flag is not None:
            yield Flag(
                name=SHORTHANDS[phase, key.name],
                shape=key.shape,
                metavar="N" if key.names is None else key.name.upper(),
                help=f"{key.meaning} {key.accepts[0].upper()}{key.accepts[1:]}.",
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
        help="JSON or YAML file with a device_graph section; flags override its values",
        read=lambda path, name: parse_mode(read_section(path), f"{name} {path}", Level.FILE),
    ),
    *(flag for phase in PHASES for flag in _phase(phase)),
    *OLDER_FLAGS,
)
"""All flags in the order of the help text. A later flag of the same level takes precedence."""


def add_cli_args(parser: argparse.ArgumentParser) -> None:
    """Add ``--device-graph-mode``, its shorthands and the accepted older flags to ``parser``.

    Flags that the parser already defines are skipped, so an engine may define some of them itself
    and may call this function twice. ``DeviceGraphConfig.from_args`` reads the values of all flags.
    """
    if not isinstance(parser, argparse._ActionsContainer):
        raise ConfigTypeError(f"expected an argparse parser, got {parser!r}")
    taken = parser._option_string_actions
    free = [flag for flag in FLAGS if flag.name not in taken]
    if not free:
        return
    group: argparse._ActionsContainer = parser
    if not isinstance(parser, argparse._ArgumentGroup):  # argparse does not nest groups
        group = parser.add_argument_group(
            "device graphs",
            f"In ascending precedence: [tool.devgraph] of pyproject.toml, {MODE_VARIABLE} of the "
            f"environment, {_FILE}, the graph flags of older engines (accepted, not listed here), "
            f"the flags per phase, {MODE}. All are merged per key.",
        )
    hidden = argparse.SUPPRESS
    for flag in free:
        options: dict[str, Any] = {"action": _Once, "metavar": flag.metavar}
        if flag.shape == "switch":
            options = {"action": "store_true"}
        elif flag.shape != "text":
            options |= {"type": _size, "nargs": "+" if flag.shape == "integers" else None}
        group.add_argument(flag.name, dest=flag.dest, help=flag.help, default=hidden, **options)
    for name in REMOVED_FLAGS:
        if name not in taken:
            group.add_argument(name, action=_Removed, nargs="*", help=hidden, default=hidden)


def _size(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        reason = f"expected integers separated by spaces, got {brief(text)}"
        raise argparse.ArgumentTypeError(reason) from None


class _Once(argparse.Action):
    """An action that stores a value and warns if it overrides an earlier value."""

    def __call__(
        self, parser: Any, namespace: Any, values: Any, option_string: str | None = None
    ) -> None:
        before = getattr(namespace, self.dest, values)
        if before != values:
            text = f"{option_string} is given twice: {values!r} overrides {before!r}"
            warn(text)
        setattr(namespace, self.dest, values)


class _Removed(argparse.Action):
    """An action that refuses a flag of earlier versions and names its replacement."""

    def __call__(
        self, parser: Any, namespace: Any, values: Any, option_string: str | None = None
    ) -> None:
        name = self.option_strings[0]
        parser.error(f"{name} was removed: {REMOVED_FLAGS[name]}")


def _ambient_sources() -> Iterator[Source]:
    """Yield the modes of ``pyproject.toml`` and of the environment."""
    warn_unknown()
    table = read_pyproject(Path.cwd())
    if table is not None:
        path, document = table
        yield parse_mode(document, f"[tool.devgraph] of {path}", Level.PYPROJECT)
    mode = os.environ.get(MODE_VARIABLE)
    if mode:
        yield parse_mode(read_mode(mode, MODE_VARIABLE), MODE_VARIABLE, Level.ENVIRONMENT)


def sources_of(
    namespace: argparse.Namespace, parser: argparse.ArgumentParser | None = None
) -> list[Source]:
    """Return the settings of pyproject.toml, environment and arguments, in ascending precedence."""
    if not hasattr(namespace, "__dict__") and not hasattr(namespace, "__slots__"):
        raise ConfigTypeError(
            f"expected parsed arguments, as parser.parse_args() returns them, got {namespace!r}"
        )
    sources = [*_ambient_sources()]
    for flag in FLAGS:
        value = getattr(namespace, flag.dest, None)
        if value is None or value is False or (isinstance(value, (list, tuple)) and not value):
            continue
        if flag.shape == "switch":
            FLAG["read"](value, flag.name)  # The engine's own option may have another type.
        if parser is None or value != parser.get_default(flag.dest):
            sources.append(flag.read(value, flag.name))
    return sorted(sources, key=attrgetter("level"))
