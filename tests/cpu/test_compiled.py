"""Compiled pieces in a recording: results at fixed addresses, views of arguments stay views."""

from __future__ import annotations

import torch

from devgraph.cpu.compiled import CompiledPiece
from tests.support.cpu_capture import record, same


def test_piece_is_one_operation_and_returns_views_as_its_source_does() -> None:
    def source(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
        return (x * 2).t(), x[1:], 3

    piece = CompiledPiece(source, torch.fx.symbolic_trace(source))
    x = torch.randn(2, 3)
    piece(x)  # a warm-up run, which learns the shapes
    tape, (product, rest, number) = record(piece, x)
    assert len(tape) == 1 and number == 3
    assert rest.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    for _ in range(2):
        x.copy_(torch.randn(2, 3))
        tape.replay()
        assert same(product, (x * 2).t()) and same(rest, x[1:])
