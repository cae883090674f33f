"""The tape: what a replay runs, the memory that it claims, and spans that are replaced."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from devgraph.api.errors import UpdateTopologyError
from devgraph.cpu.memory import BlockPool
from devgraph.cpu.recorder import Recorder
from devgraph.cpu.tape import check_topology
from tests.support.cpu_capture import METADATA, record, same, span

torch.set_num_threads(1)


def test_tape_keeps_tensors_from_outside_alive() -> None:
    weight = torch.randn(8, 8)
    expected = weight + 1
    tape, out = record(lambda w: w + 1, weight)
    del weight
    junk = [torch.zeros(8, 8) for _ in range(20)]
    tape.replay()
    assert same(out, expected) and len(junk) == 20


def test_pool_memory_is_kept_until_the_last_tape_closes() -> None:
    pool = BlockPool()
    x = torch.randn(64, 64)
    tapes = [record(lambda: (x @ x + 1).sum(), pool=pool)[0] for _ in range(2)]
    held = pool.reserved_bytes
    tapes[0].close()
    tapes[0].close()
    assert pool.reserved_bytes == held > 0
    tapes[1].replay()
    tapes[1].close()
    assert pool.reserved_bytes == 0 and len(tapes[1]) == 0


def test_replay_records_no_gradient_and_ignores_modes_of_the_caller() -> None:
    weight = torch.randn(4, 4, requires_grad=True)
    x = torch.randn(2, 4)
    with torch.no_grad():
        tape, out = record(lambda: x @ weight)
    with torch.enable_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        tape.replay()
    assert not out.requires_grad and same(out, x @ weight.detach())


def test_error_in_a_replay_names_the_operation_and_the_next_replay_works() -> None:
    table, index = torch.randn(4, 2), torch.tensor([1, 2])
    tape, out = record(lambda: table[index] * 2)
    index.copy_(torch.tensor([1, 9]))
    with pytest.raises(IndexError) as caught:
        tape.replay()
    if hasattr(caught.value, "__notes__"):
        assert "aten::index" in caught.value.__notes__[0] and __file__ in caught.value.__notes__[0]
    index.copy_(torch.tensor([0, 3]))
    tape.replay()
    assert same(out, table[index] * 2)


def test_span_is_replaced_and_writes_the_same_output() -> None:
    pool, regions = BlockPool(), BlockPool()
    x, out = torch.randn(8, 4), torch.zeros(4)

    def attend(length: int) -> None:
        out.copy_(x[:length].sum(0))

    with Recorder(pool, others=(regions,), metadata=METADATA) as recorder:
        before = x * 1
        with span(recorder, "attend") as first:
            attend(2)
        after = out * 2 + before[0]
    tape = recorder.tape()
    tape.replay()
    assert same(after, x[:2].sum(0) * 2 + x[0])
    own = first.entries
    for length in (5, 8, 1):
        again = Recorder(regions, others=(pool,), metadata=METADATA)
        with again, span(again, "attend") as new:
            attend(length)
        tape.replay()
        check_topology(first, new.entries)
        tape.replace({first: new.entries})
        tape.replay()
        assert same(after, x[:length].sum(0) * 2 + x[0])
        assert [op.name for op in tape.ops] == [
            "aten::mul.Tensor",
            "aten::sum.dim_IntList",
            "aten::copy_",
            "aten::mul.Tensor",
            "aten::add.Tensor",
        ]
    tape.replace({first: own})
    tape.replay()
    assert same(after, x[:2].sum(0) * 2 + x[0])


def test_other_operations_in_a_span_are_a_topology_change() -> None:
    x = torch.randn(8)

    def spans_of(fn: Any) -> Any:
        with (
            Recorder(BlockPool(), metadata=METADATA) as recorder,
            span(recorder, "region f") as s,
        ):
            fn()
        return s

    one = spans_of(lambda: x * 2)
    with pytest.raises(UpdateTopologyError, match=r"region f recorded 1 .* needs 2"):
        check_topology(one, spans_of(lambda: x * 2 + 1).entries)
    with pytest.raises(
        UpdateTopologyError, match=r"aten::mul\.Tensor at .* is now aten::div\.Tensor"
    ):
        check_topology(one, spans_of(lambda: x / 2).entries)
    check_topology(one, spans_of(lambda: x[:3] * 2).entries)
