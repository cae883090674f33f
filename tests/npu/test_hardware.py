"""What only an Ascend device can prove. Never run by the developers: they had none.

Each test says what it would prove beyond the simulated driver. On a host with a device and CANN:
``pytest -m npu tests/npu/test_hardware.py`` and the conformance suite with
``--devgraph-backend npu``.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import devgraph as dg
from tests.sim import ascend

pytestmark = [pytest.mark.npu, pytest.mark.npu_hardware]

SLOTS, ROWS, HEADS, KV_HEADS, SIZE = 4, 256, 8, 2, 128


@pytest.fixture
def backend() -> Iterator[Any]:
    if ascend.is_active() or "torch_npu" not in sys.modules:
        pytest.skip("needs an Ascend device; this session has the simulated driver or none")
    yield dg.get_backend("npu")


@pytest.fixture
def cache(backend: Any) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    keys, values = torch.randn(2, SLOTS * ROWS, KV_HEADS, SIZE, dtype=torch.float16).npu()
    return keys, values


def _step(backend: Any, version: int, cache: tuple[torch.Tensor, torch.Tensor]) -> Any:
    backend.attention_version = version
    attention = backend.extensions["slot_attention"](
        slots=SLOTS, rows=ROWS, heads=HEADS, kv_heads=KV_HEADS, head_dim=SIZE, dtype=torch.float16
    )

    def step(query: torch.Tensor, *, spans: Any) -> torch.Tensor:
        out = torch.zeros_like(query)
        attention.attend(query, *cache, out, scale=SIZE**-0.5, spans=spans)
        return out * 2

    return step


@pytest.mark.parametrize("version", [1, 2])
def test_updated_lengths_of_real_kernels_equal_eager(
    backend: Any, cache: tuple[torch.Tensor, torch.Tensor], version: int
) -> None:
    """Proves that CANN's tiling for other lengths fits the task group of capture."""
    query = torch.randn(SLOTS, HEADS, SIZE, dtype=torch.float16).npu()
    step = _step(backend, version, cache)
    draw = random.Random(1)
    with dg.capture(step, query, backend=backend, host_args={"spans": ()}) as captured:
        for _ in range(100):
            cached = [draw.randrange(ROWS - 1) for _ in range(SLOTS)]
            spans = tuple(n for slot in range(SLOTS) for n in (slot, cached[slot], 1))
            assert torch.equal(captured.replay(spans=spans), step(query, spans=spans))


@pytest.mark.parametrize("version", [1, 2])
def test_padding_queries_that_see_no_key_have_zeros(
    backend: Any, cache: tuple[torch.Tensor, torch.Tensor], version: int
) -> None:
    """Proves what the operator writes for a request without keys: devgraph counts on zeros."""
    query = torch.randn(6, HEADS, SIZE, dtype=torch.float16).npu()
    out = _step(backend, version, cache)(query, spans=(0, 3, 1, 2, 9, 1))
    assert torch.isfinite(out).all()
    assert not out[2:].any()


def test_update_overlaps_the_replay_on_a_device(
    backend: Any, cache: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """Proves that launching first is faster than updating first, and that no update overtakes."""
    query = torch.randn(SLOTS, HEADS, SIZE, dtype=torch.float16).npu()
    attend = _step(backend, 2, cache)

    def layers(query: torch.Tensor, *, spans: Any) -> torch.Tensor:
        for _ in range(32):
            query = attend(query, spans=spans)
        return query

    spans = [tuple(n for s in range(SLOTS) for n in (s, i, 1)) for i in range(200)]
    seconds = {}
    for first in (True, False):
        backend.replay_first = first
        with dg.capture(layers, query, backend=backend, host_args={"spans": ()}) as captured:
            captured.replay(spans=spans[0])
            backend.synchronize()
            begun = time.perf_counter()
            for one in spans[1:]:
                captured.replay(spans=one)
            backend.synchronize()
            seconds[first] = time.perf_counter() - begun
            assert torch.equal(captured.replay(spans=spans[7]), layers(query, spans=spans[7]))
    backend.replay_first = True
    assert seconds[True] < seconds[False], seconds


def test_graphs_until_the_driver_has_no_stream_left_fail_by_type(backend: Any) -> None:
    """Proves which code the driver gives, and that the graphs made before go on working."""
    x = torch.ones(4, device="npu")
    pool, kept = backend.make_pool(), []
    with pytest.raises(dg.ResourceError, match="stream"):
        while len(kept) < 4096:
            kept.append(dg.capture(lambda v: v + 1, x, backend=backend, pool=pool))
    assert kept[0].replay().tolist() == [2.0] * 4
