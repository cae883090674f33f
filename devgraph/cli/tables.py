"""Output of the commands: tables, figures, colours and streams."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.status import Status
from rich.table import Table
from rich.text import Text

from devgraph.api.errors import DeviceGraphError

_PIPE_WIDTH = 80

STYLES: Mapping[str, str] = {
    "error": "red",
    "place": "cyan",
    "FAILS": "bold red",
    "works": "green",
    "works, not declared": "yellow",
}
"""Colours by kind of text, and by the verdict in a cell of a table."""


class CommandError(DeviceGraphError):
    """A command cannot do what was asked; the message says what is missing."""


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Raise the current exception; rich would end the program with status 1."""
        raise


def _console(*, stderr: bool = False) -> Console:
    console = _Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    asked = os.environ.get("COLUMNS", "").isdecimal()
    if console.width < 1 or not (console.is_terminal or asked):
        console.width = _PIPE_WIDTH  # a file or a pipe has no width
    return console


def say(text: str = "", *, style: str = "") -> None:
    """Print a sentence of a result, wrapped at words; ``style`` is a key of ``STYLES``."""
    width = _console().width
    for line in text.splitlines() or [""]:
        indent = " " * (len(line) - len(line.lstrip()))
        wrapped = textwrap.wrap(
            line,
            width,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
        print_lines(*(wrapped or [""]), style=style)


def print_lines(*lines: str, style: str = "", stderr: bool = False) -> None:
    """Print lines as they are, however long they are."""
    console = _console(stderr=stderr)
    for line in lines:
        console.print(Text(line, style=STYLES.get(style, "")), soft_wrap=True)


def note(text: str) -> None:
    """Report progress on standard error."""
    print_lines(text, stderr=True)


def print_json(data: Any) -> None:
    """Print data as JSON, for programs."""
    print(json.dumps(data, indent=2, default=str), flush=True)  # noqa: T201 - closed, it is None


def write_file(path: str, text: str) -> None:
    """Write a result into a file.

    Raises:
        CommandError: the system refuses.
    """
    try:
        Path(path).write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:  # of a name with a zero, or a character of half a pair
        why = getattr(error, "strerror", error)
        raise CommandError(f"cannot write {path}: {why}") from error


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
    *,
    numbers: Sequence[str] = (),
) -> None:
    """Print a table with a title.

    Args:
        title: above the table.
        columns: headings.
        rows: one value a column; None shows as a dash, a boolean as yes or no.
        numbers: headings of the columns that are aligned to the right.
    """
    console = _console()
    cells = [[_text(value) for value in row] for row in rows]
    widths = _widths([*cells, [Text(name) for name in columns]], console.width)
    if widths is None:  # the words of a row do not fit beside each other
        say(title)
        for row in cells:
            say()
            for name, cell in zip(columns, row, strict=True):
                console.print(Text(f"  {name}: " if name else "  ") + cell)
        say()
        return
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for name, width in zip(columns, widths, strict=True):
        side: Literal["left", "right"] = "right" if name in numbers else "left"
        table.add_column(name, justify=side, width=width, header_style="")
    for row in cells:
        table.add_row(*row)
    console.print(table)


def _widths(rows: Sequence[Sequence[Text]], room: int) -> list[int] | None:
    """Return the width of each column without a broken word, or None if ``room`` is too narrow."""
    columns = list(zip(*rows, strict=True))
    least = [max(max(map(cell_len, text.plain.split()), default=0) for text in c) for c in columns]
    widths = [max(text.cell_len for text in column) for column in columns]
    room -= 3 * len(columns) + 1  # rules between them, and a space on both sides
    if sum(least) > room:
        return None
    while sum(widths) > room:
        _, widest = max((w, at) for at, w in enumerate(widths) if w > least[at])
        widths[widest] -= 1
    return widths


def _text(value: Any) -> Text:
    text = _cell(value)
    return Text(text, style=STYLES.get(text, ""))


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {count}" for name, count in value.items()) or "-"
    return str(value)


def time_text(seconds: float | None) -> str | None:
    """Return seconds for people: ``"3.2 ms"``."""
    if seconds is None:
        return None
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-6:.2f} us"


def number(value: float | None) -> str | None:
    """Return a number with three significant digits and without an exponent."""
    if value is None:
        return None
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def ratio(value: float | None) -> str | None:
    """Return a factor: ``"2.35x"``."""
    return None if value is None else f"{value:.2f}x"


def percent(part: float) -> str:
    """Return a share from 0 to 1 as ``"97 %"``."""
    return f"{100 * part:.0f} %"


def ranges(sizes: Sequence[int]) -> str:
    """Return ascending numbers for people: ``1 2 4..12 by 4 16..256 by 8``."""
    parts: list[str] = []
    at = 0
    while at < len(sizes):
        end = at + 1
        while end + 1 < len(sizes) and sizes[end + 1] - sizes[end] == sizes[at + 1] - sizes[at]:
            end += 1
        if end - at >= 3:
            parts.append(f"{sizes[at]}..{sizes[end]} by {sizes[at + 1] - sizes[at]}")
            at = end + 1
        else:
            parts.append(str(sizes[at]))
            at += 1
    return " ".join(parts)


def working(text: str) -> Status:
    """Return a context manager that shows activity on a terminal and nothing elsewhere."""
    return _console(stderr=True).status(Text(text))
