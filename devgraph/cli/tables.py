"""How results look: tables, figures and where they are printed."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from devgraph.api.errors import DeviceGraphError

__all__ = [
    "CommandError",
    "note",
    "number",
    "percent",
    "print_json",
    "print_table",
    "ratio",
    "say",
    "time_text",
    "working",
]

_PIPE_WIDTH = 140


class CommandError(DeviceGraphError):
    """A command cannot do what was asked; the message says what is missing."""


def _console(*, stderr: bool = False) -> Console:
    console = Console(stderr=stderr, highlight=False, markup=False)
    if not console.is_terminal:
        console.width = _PIPE_WIDTH  # a file or pipe has no width; 80 would break most tables
    return console


def say(text: str = "") -> None:
    """Print one line of a result."""
    _console().print(text, soft_wrap=True)


def note(text: str) -> None:
    """Tell the user what is going on, on standard error."""
    _console(stderr=True).print(text, soft_wrap=True)


def print_json(data: Any) -> None:
    """Print data as JSON, for programs."""
    sys.stdout.write(json.dumps(data, indent=2, default=str) + "\n")
    sys.stdout.flush()


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
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for name in columns:
        table.add_column(
            name, justify="right" if name in numbers else "left", overflow="fold", header_style=""
        )
    for row in rows:
        table.add_row(*(Text(_cell(value)) for value in row))
    _console().print(table)


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
    """Return a number with three digits that count, and no exponent."""
    if value is None:
        return None
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def ratio(value: float | None) -> str | None:
    """Return a factor: ``"2.35x"``."""
    return None if value is None else f"{value:.2f}x"


def percent(part: float) -> str:
    """Return a share from 0 to 1 as ``"97 %"``."""
    return f"{100 * part:.0f} %"


@contextlib.contextmanager
def working(text: str) -> Iterator[None]:
    """Show on a terminal's stderr that something is going on; print nothing elsewhere."""
    console = _console(stderr=True)
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        progress.add_task(text, total=None)
        yield
