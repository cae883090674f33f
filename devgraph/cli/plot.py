"""The chart of ``bench``; the only place that imports matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from devgraph.cli.tables import CommandError

if TYPE_CHECKING:
    from devgraph.cli.contenders import Row

__all__ = ["plot_rows"]


def plot_rows(rows: Sequence[Row], path: str, *, title: str) -> None:
    """Draw host and wall time of every row, with the spread of its repeats, into ``path``.

    Raises:
        CommandError: the file cannot be written, or its ending names no image format.
    """
    figure = Figure(figsize=(8, 1.5 + 0.6 * len(rows)), layout="constrained")
    axes = figure.subplots()
    places = range(len(rows))
    for offset, name in ((-0.2, "host"), (0.2, "wall")):
        middles = [getattr(row, name) * 1e6 for row in rows]
        spread = [
            [
                m - 1e6 * min(getattr(t, name) for t in row.repeats)
                for m, row in zip(middles, rows, strict=True)
            ],
            [
                1e6 * max(getattr(t, name) for t in row.repeats) - m
                for m, row in zip(middles, rows, strict=True)
            ],
        ]
        axes.barh(
            [place + offset for place in places],
            middles,
            height=0.38,
            xerr=spread,
            label=f"{name} time",
        )
    axes.set_yticks(list(places), [row.name for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("microseconds a step (median; bars: least and most)")
    axes.set_title(title)
    axes.legend()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise CommandError(f"cannot write the chart {path}: {error}") from error
