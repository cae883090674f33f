"""vLLM's own dispatcher chooses modes and descriptors; the wrappers capture and replay them all."""

from __future__ import annotations

import importlib
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from devgraph.integrations import vllm
from tests.support.vllm_engine import WIDTH, Engine, Step, engine_of

SIZES = [1, 2, 4, 8]


@pytest.fixture
def engine() -> Iterator[Engine]:
    with engine_of("installed", pytest.skip) as found, torch.inference_mode():
        yield found


def dispatcher_of(engine: Engine, lora: int = 0) -> tuple[Any, Any]:
    """The dispatcher for full decode and piecewise prefill, and its configuration."""
    config = engine.config(
        cudagraph_mode=engine.Mode.FULL_AND_PIECEWISE,
        cudagraph_capture_sizes=SIZES,
        max_cudagraph_capture_size=SIZES[-1],
        compile_sizes=[],
        cudagraph_specialize_lora=True,
        is_attention_compiled_piecewise=lambda: True,
    )
    if lora:
        config.lora_config = types.SimpleNamespace(max_loras=lora, specialize_active_lora=True)
    module = importlib.import_module("vllm.v1.cudagraph_dispatcher")
    dispatcher = module.CudagraphDispatcher(config)
    dispatcher.initialize_cudagraph_keys(engine.Mode.FULL_AND_PIECEWISE, 1)
    return dispatcher, config


class Model:
    """A whole step around one compiled piece, wrapped as the V1 runner wraps them."""

    def __init__(self, engine: Engine, config: Any) -> None:
        self.engine, self.config, self.step = engine, config, Step()
        piece = engine.Wrapper(self.step, config, engine.Mode.PIECEWISE)
        self.whole = engine.Wrapper(lambda x: piece(x) - 1, config, engine.Mode.FULL)
        self.buffer = torch.zeros(SIZES[-1], WIDTH)

    def run(self, mode: Any, descriptor: Any) -> torch.Tensor:
        with self.engine.step(self.config, mode, descriptor):
            return self.whole(self.buffer[: descriptor.num_tokens])

    def expected(self, rows: int) -> torch.Tensor:
        return (self.buffer[:rows] * self.step.factor + 1).relu() - 1


@pytest.mark.parametrize("lora", [0, 2])
def test_every_key_is_captured_once_and_every_batch_replays(engine: Engine, lora: int) -> None:
    dispatcher, config = dispatcher_of(engine, lora)
    model = Model(engine, config)
    keys = 0
    for mode, descriptors in dispatcher.get_capture_descs():
        for descriptor in descriptors:
            model.run(mode, descriptor)
            keys += 1
    runs = model.step.runs
    cases = 1 + len(dispatcher.captured_lora_counts)
    assert runs == keys == 2 * len(SIZES) * cases
    assert (cases > 1) is bool(lora)
    for tokens in (5, 1, 8, 3, 2):
        for uniform in (True, False):
            for active in range(lora + 1):
                mode, descriptor = dispatcher.dispatch(
                    tokens, uniform_decode=uniform, has_lora=active > 0, num_active_loras=active
                )
                assert (mode == engine.Mode.FULL) is uniform
                assert descriptor.num_tokens >= tokens
                model.buffer.copy_(torch.randn(SIZES[-1], WIDTH))
                assert torch.equal(model.run(mode, descriptor)[:tokens], model.expected(tokens))
    assert model.step.runs == runs
    modes = vllm.stats()["modes"]
    assert modes["full"]["captures"] + modes["piecewise"]["captures"] == keys


def test_batch_over_the_largest_size_runs_without_a_graph(engine: Engine) -> None:
    dispatcher, config = dispatcher_of(engine)
    model = Model(engine, config)
    mode, descriptor = dispatcher.dispatch(9)
    assert mode == engine.Mode.NONE
    model.buffer = torch.randn(9, WIDTH)
    assert torch.equal(model.run(mode, descriptor), model.expected(9))
    assert vllm.stats()["modes"]["full"]["eager"] == {"mode_none": 1}
