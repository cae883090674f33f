"""The decode step that ``devgraph bench`` compares."""

from __future__ import annotations

import torch

from devgraph.cli.decoder import Decoder


def test_step_depends_on_token_row_and_length():
    model = Decoder(
        torch.device("cpu"), torch.float32,
        layers=1, hidden=8, heads=2, vocabulary=16, batch=2, window=8,
    )  # fmt: skip
    ids, row = torch.tensor([1, 2]), torch.tensor([3])
    with torch.inference_mode():
        base = model(ids, row, kv_len=4)
        assert torch.equal(model(ids, row, kv_len=4), base)
        assert not torch.equal(model(ids, row, kv_len=5), base)
        assert not torch.equal(model(ids + 1, row, kv_len=4), base)
        assert not torch.equal(model(ids, row + 1, kv_len=4), base)
