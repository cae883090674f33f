"""Timing: medians."""

from __future__ import annotations

import pytest

from devgraph.cli.timing import Timing, median, say_cautions


def test_medians_are_taken_of_each_figure():
    assert median([Timing(1, 9), Timing(3, 7), Timing(2, 8)]) == Timing(2, 8)


def test_times_of_a_busy_machine_and_of_the_cpu_carry_a_caution(
    capsys: pytest.CaptureFixture[str],
):
    say_cautions({"calm": [1.0, 1.1], "busy": [1e-3, 2e-3]}, on_cpu=False)
    assert "repeats of busy take between 1 ms and 2 ms" in capsys.readouterr().out
    say_cautions({}, on_cpu=True)
    assert "not the speed of a device" in " ".join(capsys.readouterr().out.split())
    say_cautions({"calm": [1.0, 1.1]}, on_cpu=False)
    assert capsys.readouterr().out == ""
