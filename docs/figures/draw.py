"""Draw the diagrams of the documents: ``python docs/figures/draw.py`` writes one SVG per text file.

The first line of a text file is the title. Each further line is a row: a label and boxes, separated
by ``|``. A box is a kind and a text, and may end in ``*N`` for N times the width. A line that
begins with ``>`` is a remark, and an empty line is a gap.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from xml.sax.saxutils import escape

FOLDER = Path(__file__).parent
WIDTH, LABEL, EDGE, BOX, GAP, LINE = 420, 78, 12, 30, 5, 19
KINDS = ("host", "device", "region", "eager", "pad", "free")
STYLE = """
svg { color-scheme: light dark }
.page { fill: #fff } text { fill: #1d2330; font: 13px system-ui, sans-serif }
.title { font-weight: 600; font-size: 14px } .remark { fill: #4a5266 }
.host { fill: #d9def2 } .device { fill: #a9c7f5 } .region { fill: #f7c98b }
.eager { fill: #f3e3a1 } .pad { fill: #fff; stroke: #8a93a6; stroke-dasharray: 3 3 }
@media (prefers-color-scheme: dark) {
  .page { fill: #1f2430 } text { fill: #e9ecf3 } .remark { fill: #b6bdcc }
  .host { fill: #3d4668 } .device { fill: #2f568f } .region { fill: #8a5a17 }
  .eager { fill: #6b5c17 } .pad { fill: #1f2430; stroke: #98a1b5 }
}
"""


def draw(source: str) -> str:
    """Return the SVG for the text ``source``."""
    title, *rows = source.rstrip().split("\n")
    parts: list[str] = []
    y = EDGE + 14
    parts.append(f'<text class="title" x="{EDGE}" y="{y}">{escape(title)}</text>')
    y += 10
    for row in rows:
        if not row.strip():
            y += GAP * 2
        elif row.startswith(">"):
            y += LINE
            text = escape(row[1:].strip())
            parts.append(f'<text class="remark" x="{EDGE}" y="{y - 5}">{text}</text>')
        else:
            label, *boxes = (cell.strip() for cell in row.split("|"))
            y += GAP
            parts.append(f'<text x="{EDGE}" y="{y + 20}">{escape(label)}</text>')
            parts += _boxes(boxes, y)
            y += BOX
    height = y + EDGE
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
    return "\n".join(
        [
            head + f'width="{WIDTH * 1.25:g}" height="{height * 1.25:g}">',
            f"<title>{escape(title)}</title>",
            f"<style>{STYLE}</style>",
            f'<rect class="page" width="{WIDTH}" height="{height}" rx="8"/>',
            *parts,
            "</svg>",
            "",
        ]
    )


def _boxes(boxes: list[str], y: int) -> list[str]:
    read = [re.fullmatch(r"(\w+) ?(.*?)(?: ?\*([\d.]+))?", box) for box in boxes]
    if not all(match is not None and match[1] in KINDS for match in read):
        raise ValueError(f"a box begins with one of {', '.join(KINDS)}: {boxes}")
    cells = [(match[1], match[2], float(match[3] or 1)) for match in read if match]
    room = WIDTH - LABEL - 2 * EDGE - 3 * (len(cells) - 1)
    unit = room / sum(weight for *_, weight in cells)
    x, parts = float(EDGE + LABEL), []
    for kind, text, weight in cells:
        width = unit * weight
        if kind != "free":
            parts.append(
                f'<rect class="{kind}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BOX}" '
                'rx="4"/>'
            )
        if text:
            middle = x + width / 2
            parts.append(
                f'<text x="{middle:.1f}" y="{y + 20}" text-anchor="middle">{escape(text)}</text>'
            )
        x += width + 3
    return parts


def main() -> int:
    """Write the SVG of each text file to the same folder."""
    for path in sorted(FOLDER.glob("*.txt")):
        path.with_suffix(".svg").write_text(
            draw(path.read_text(encoding="utf-8")), encoding="utf-8"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
