"""The chart of ``bench --plot``: bars in SVG, which a browser shows and no library has to draw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

from devgraph.cli.tables import time_text

_WIDTH, _LEFT, _RIGHT, _TOP, _BAR, _GAP = 820, 250, 90, 72, 18, 16
_KINDS = {
    "host": ("#4051b5", "host: until the call returns"),
    "wall": ("#f0a04b", "wall: until its work is done"),
}


def chart(title: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return an SVG picture of the host and wall time of each row of a report of ``bench``.

    A row has ``name`` and, in seconds, ``host``, ``wall`` or both, as all others have. It may have
    ``repeats`` with the same figures each: then a line goes from the least to the most of them.
    """
    kinds = [kind for kind in _KINDS if kind in rows[0]]
    timed = [one for row in rows for one in (row, *row.get("repeats", ()))]
    scale = (_WIDTH - _LEFT - _RIGHT) / max(one[kind] for one in timed for kind in kinds)
    step = len(kinds) * _BAR + _GAP
    height = _TOP + len(rows) * step
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        'font-family="system-ui, sans-serif" font-size="13" fill="#222">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{_WIDTH}" height="{height}" rx="8" fill="#fff"/>',
        f'<text x="20" y="28" font-size="16" font-weight="600">{escape(title)}</text>',
    ]
    for number, kind in enumerate(kinds):
        colour, meaning = _KINDS[kind]
        lines.append(
            f'<rect x="{20 + 230 * number}" y="42" width="12" height="12" fill="{colour}"/>'
            f'<text x="{38 + 230 * number}" y="53">{meaning}</text>'
        )
    for place, row in enumerate(rows):
        top = _TOP + place * step
        lines.append(
            f'<text x="{_LEFT - 12}" y="{top + len(kinds) * _BAR / 2 + 4:g}" text-anchor="end">'
            f"{escape(row['name'])}</text>"
        )
        for number, kind in enumerate(kinds):
            y, width = top + number * _BAR, row[kind] * scale
            spread = [one[kind] * scale for one in row.get("repeats", ())] or [width]
            lines += [
                f'<rect x="{_LEFT}" y="{y}" width="{width:.1f}" height="{_BAR - 2}" '
                f'fill="{_KINDS[kind][0]}"/>',
                f'<path d="M{_LEFT + min(spread):.1f} {y + 8}H{_LEFT + max(spread):.1f}" '
                'stroke="#222"/>',
                f'<text x="{_LEFT + max(width, *spread) + 6:.1f}" y="{y + 13}" font-size="12">'
                f"{time_text(row[kind])}</text>",
            ]
    return "\n".join([*lines, "</svg>", ""])
