"""The lengths of slots, and the operators that get them."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

import devgraph as dg
from devgraph.npu.attention import FusedSlotAttention, fused_slot_attention, lengths_of


def test_lengths_follow_slots_and_end_with_the_padding():
    spans = (0, 5, 2, 3, 0, 4)  # slot, cached, new
    assert lengths_of(spans, slots=4, tokens=8) == ((2, 2, 2, 6, 8), (7, 0, 0, 4, 0))


def test_lengths_of_no_request_are_all_padding():
    assert lengths_of((), slots=2, tokens=3) == ((0, 0, 3), (0, 0, 0))


@pytest.mark.parametrize("spans", [(1, 0, 1, 0, 0, 1), (0, 0, 1, 0, 0, 1), (2, 0, 1)])
def test_slots_that_do_not_ascend_or_exist_are_refused(spans: tuple[int, ...]):
    with pytest.raises(dg.RegionError, match="must ascend and be below 2"):
        lengths_of(spans, slots=2, tokens=4)


def test_more_tokens_than_query_rows_are_refused():
    with pytest.raises(dg.RegionError, match="5 tokens for 4"):
        lengths_of((0, 0, 5), slots=1, tokens=4)


@pytest.mark.parametrize("version", [1, 2])
def test_operator_gets_lengths_under_the_names_of_its_version(
    monkeypatch: pytest.MonkeyPatch, version: int
):
    calls: list[tuple[str, dict[str, Any]]] = []

    class Operator:
        def __init__(self, name: str) -> None:
            self.name = name

        def out(self, query: torch.Tensor, *pages: torch.Tensor, **arguments: Any) -> None:
            assert [tuple(page.shape) for page in pages] == [(2, 128, 32)] * 2
            calls.append((self.name, arguments))

    class Package:
        def __getattr__(self, name: str) -> Any:
            if name.endswith("get_max_workspace"):
                return lambda *_, **__: torch.empty(7)
            return Operator(name)

    monkeypatch.setitem(sys.modules, "torch_npu", Package())
    attention = FusedSlotAttention(2, 128, version=version, device=torch.device("cpu"))
    query, cache = torch.empty(4, 4, 16), torch.empty(256, 2, 16)
    attention.attend(query, cache, cache, torch.empty(4, 4, 16), scale=0.5, spans=(1, 6, 3))
    [(name, given)] = calls
    lengths = ([0, 3, 4], [0, 9, 0])
    if version == 1:
        assert name == "npu_fused_infer_attention_score"
        assert (given["actual_seq_lengths"], given["actual_seq_lengths_kv"]) == lengths
        assert (given["num_heads"], given["scale"]) == (4, 0.5)
    else:
        assert name == "npu_fused_infer_attention_score_v2"
        assert (given["actual_seq_qlen"], given["actual_seq_kvlen"]) == lengths
        assert (given["num_query_heads"], given["softmax_scale"]) == (4, 0.5)
    assert given["block_table"].tolist() == [[0], [1], [0]]
    assert given["workspace"].numel() == 7
    assert fused_slot_attention.__devgraph_mark__.host_args == ("spans",)
