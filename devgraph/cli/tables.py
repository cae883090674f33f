"""The output of the commands: tables, text, numbers and colors."""

from __future__ import annotations

import json
import os
import re
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
    "location": "cyan",
    "title": "bold",
    "FAILS": "bold red",
    "works": "green",
    "works, not declared": "yellow",
}


class CommandError(DeviceGraphError):
    """A command cannot run as requested."""


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Re-raise the current exception. rich would end the program with status 1."""
        raise


def _console(*, stderr: bool = False) -> Console:
    # With NO_COLOR, rich would still print bold text unless there is no color system.
    colors: Literal["auto"] | None = None if os.environ.get("NO_COLOR") else "auto"
    console = _Console(
        color_system=colors, stderr=stderr, highlight=False, markup=False, emoji=False
    )
    asked = os.environ.get("COLUMNS", "").isdecimal()
    if console.width < 1 or not (console.is_terminal or asked):
        console.width = _PIPE_WIDTH  # Files and pipes have no width.
    return console


def on_device(backend: str, device: str) -> str:
    """Return the name of the backend, followed by the name of the device if both differ."""
    return backend if device == backend else f"{backend} ({device})"


def say(text: str = "", *, style: str = "", stderr: bool = False) -> None:
    """Print ``text`` wrapped at word boundaries; ``style`` is a key of ``STYLES``.

    Text on standard error wraps only on a terminal, because programs read it line by line.
    """
    console = _console(stderr=stderr)
    width = console.width if console.is_terminal or not stderr else len(text) + 1
    for line in text.splitlines() or [""]:
        marker = re.match(r" *([*-] )?", line)  # a list item
        indent = " " * (marker.end() if marker else 0)
        wrapped = textwrap.wrap(
            line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
        print_lines(*(wrapped or [""]), style=style, stderr=stderr)


def print_lines(*lines: str, style: str = "", stderr: bool = False) -> None:
    """Print lines unwrapped."""
    console = _console(stderr=stderr)
    for line in lines:
        console.print(Text(line, style=STYLES.get(style, "")), soft_wrap=True)


def errors_wrap() -> bool:
    """Whether text on standard error wraps: it does on a terminal."""
    return _console(stderr=True).is_terminal


def note(text: str, *, style: str = "") -> None:
    """Print progress or an error to standard error."""
    say(text, style=style, stderr=True)


def print_json(data: Any) -> None:
    print(json.dumps(data, indent=2, default=str), flush=True)  # noqa: T201 - works without stdout


def check_folder(path: str | None) -> None:
    """Refuse an output file in a missing folder, before any work is done."""
    if path is not None and not Path(path).absolute().parent.is_dir():
        raise CommandError(f"cannot write {path}: there is no such folder")


def write_file(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:  # The name may contain a zero byte or a lone surrogate.
        why = getattr(error, "strerror", error)
        raise CommandError(f"cannot write {path}: {why}") from error


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
    *,
    numbers: Sequence[str] = (),
) -> None:
    if not (rows := list(rows)):
        return
    console = _console()
    cells = [[_text(value) for value in row] for row in rows]
    widths = _widths([Text(name) for name in columns], cells, console.width)
    say(title, style="title")
    if widths is None:  # The terminal is too narrow for columns, so print a list.
        for row in cells:
            say()
            for name, cell in zip(columns, row, strict=True):
                console.print(Text(f"  {name}: " if name else "  ") + cell)
        say()
        return
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for name, width in zip(columns, widths, strict=True):
        side: Literal["left", "right"] = "right" if name in numbers else "left"
        table.add_column(name, justify=side, width=width, header_style="")
    for row in cells:
        table.add_row(*row)
    say()
    console.print(table)
    say()


def _widths(names: Sequence[Text], rows: Sequence[Sequence[Text]], room: int) -> list[int] | None:
    """Return column widths that break no word in a cell, or None if ``room`` is too small."""
    columns = list(zip(names, *rows, strict=True))
    least = [max(max(map(cell_len, text.plain.split()), default=0) for text in c) for c in columns]
    widths = [max(text.cell_len for text in column) for column in columns]
    room -= 2 * len(columns) - 1  # Subtract separators and padding.
    if sum(least) > room:
        return None
    if sum(widths) > room:
        bodies = [max((text.cell_len for text in column[1:]), default=0) for column in columns]
        widths = [max(low, body) for low, body in zip(least, bodies, strict=True)]
    while sum(widths) > room:
        _, widest = max((w, at) for at, w in enumerate(widths) if w > least[at])
        widths[widest] -= 1
    return widths


def _text(value: Any) -> Text:
    if isinstance(value, Mapping):
        value = ", ".join(f"{name} {count}" for name, count in value.items()) or None
    elif isinstance(value, bool):
        value = "yes" if value else "no"
    elif isinstance(value, int):
        value = f"{value:,}"
    text = "-" if value is None else str(value)
    return Text(text, style=STYLES.get(text, ""))


def time_text(seconds: float | None) -> str | None:
    """Format a duration in seconds, as in ``"3.2 ms"``."""
    if seconds is None:
        return None
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-6:.2f} us"


def number(value: float | None) -> str | None:
    """Format a number with three significant digits and without an exponent."""
    if value is None:
        return None
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def ratio(value: float | None) -> str | None:
    """Format a factor, as in ``"2.35x"``."""
    return None if value is None else f"{value:.2f}x"


def percent(part: float) -> str:
    """Format a share from 0 to 1, as in ``"97 %"``."""
    return f"{100 * part:.0f} %"


def ranges(sizes: Sequence[int]) -> str:
    """Format ascending numbers, as in ``1 2 4..12 by 4 16..256 by 8``."""
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
    """Return a context manager that shows a spinner on a terminal."""
    return _console(stderr=True).status(Text(text))


def progress(status: Status, text: str) -> None:
    """Show ``text`` at the spinner; without a terminal, print it to standard error."""
    status.update(Text(text))
    if not errors_wrap():
        note(f"devgraph: {text}")
