"""What a proof says of the data that it had."""

from __future__ import annotations

import types

import torch

import devgraph as dg


def test_proof_without_bound_tensors_says_that_the_data_was_the_same():
    batch = types.SimpleNamespace(x=torch.ones(2))
    with dg.capture(lambda batch: batch.x * 2, batch, backend="cpu") as captured:
        report = captured.prove()
        assert report.varied == 0
        assert "on the same data: no argument is a tensor" in str(report)
    with dg.capture(lambda x: x * 2, batch.x, backend="cpu") as captured:
        report = captured.prove()
        assert report.varied == 1
        assert str(report) == "3 replays equal eager bit for bit"
