"""Tables in HTML, for notebooks and for ``devgraph explain --html``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

_STYLE = """
:root { color-scheme: light dark }
body { font: 15px system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem }
table { border-collapse: collapse; margin: 1rem 0 }
caption { font-weight: 600; text-align: left; white-space: nowrap }
th, td { border-bottom: 1px solid #8886; padding: .3rem .8rem .3rem 0; text-align: left }
td { font-variant-numeric: tabular-nums; vertical-align: top }
"""


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return an HTML table, with a dash for each None."""
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    body = "".join(
        f"<tr>{''.join(f'<td>{_cell(value)}</td>' for value in row)}</tr>\n" for row in rows
    )
    caption = f"<caption>{escape(title)}</caption>"
    return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table>\n"


def page(title: str, *parts: str) -> str:
    """Return a complete HTML document with ``parts``, which needs no other file."""
    name = escape(title)
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{name}</title>\n'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style>\n'
        f"<h1>{name}</h1>\n{''.join(parts)}</html>\n"
    )


def _cell(value: object) -> str:
    return "-" if value is None else escape(str(value))
