"""Timing: medians."""

from __future__ import annotations

from devgraph.cli.timing import Timing, median


def test_medians_are_taken_of_each_figure():
    assert median([Timing(1, 9), Timing(3, 7), Timing(2, 8)]) == Timing(2, 8)
