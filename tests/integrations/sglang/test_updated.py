"""SGLang's full prefill over torch-native attention: one graph, updated for each batch."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

import devgraph as dg
from devgraph.integrations import sglang
from tests.support.sglang_steps import WIDTH, module, runner, sharing

TOKENS = 16


class Batch(types.SimpleNamespace):
    """What attention reads of SGLang's batch; can be referred to weakly, as that can."""


class Prefill:
    """A model of two layers over torch-native attention, and SGLang's runner around it."""

    def __init__(self, engine: Any, between: Callable[[torch.Tensor], torch.Tensor] | None = None):
        self.engine = engine
        sharing()  # skips where no prefill is updated
        sglang.install()
        native = module("attention.torch_native_backend", "sglang.srt.layers")
        radix = module("radix_attention", "sglang.srt.layers").RadixAttention
        self.x = torch.randn(TOKENS, WIDTH)
        self.weight = torch.randn(WIDTH, WIDTH)
        slots = torch.arange(4 * 64).view(4, 64)
        self.attention = native.TorchNativeAttnBackend(slots, torch.randn(256, WIDTH))
        self.layers = [radix(self.attention), radix(self.attention)]
        self.between = between or torch.Tensor.tanh
        self.runner = runner()
        vars(self.runner.model_runner).update(
            attn_backend=self.attention,
            model_config=types.SimpleNamespace(is_encoder_decoder=False),
            is_draft_worker=False,
            token_to_kv_pool=types.SimpleNamespace(layer_transfer_counter=None),
        )
        self.runner.layer_model = types.SimpleNamespace(forward=self.forward)

    def forward(self, size: int) -> torch.Tensor:
        hidden = self.x[:size] @ self.weight
        for layer in self.layers:
            hidden = self.between(layer(hidden))
        return hidden

    def batch(self, *requests: tuple[int, int, int]) -> Batch:
        """Return a batch of (slot, prefix, extend)."""
        slots, prefixes, extends = zip(*requests, strict=True)
        lengths = [prefix + extend for _, prefix, extend in requests]
        return Batch(
            req_pool_indices=torch.tensor(slots),
            seq_lens=torch.tensor(lengths),
            seq_lens_cpu=torch.tensor(lengths),
            extend_seq_lens=torch.tensor(extends),
            extend_prefix_lens=torch.tensor(prefixes),
            extend_seq_lens_cpu=list(extends),
            extend_prefix_lens_cpu=list(prefixes),
            global_num_token_non_padded_cpu=sum(extends),
        )

    def published(self, batch: Batch) -> Any:
        return module("runner_utils.forward_batch").set_forward_batch(batch)

    def captured(self) -> Any:
        full = module("runner_backend.utils").FullCudaGraphBackend
        backend = full(self.runner, reuse_output_buffer=True)
        dummy = self.batch((0, 0, TOKENS))

        def step() -> torch.Tensor:
            with self.published(dummy):
                return self.runner.layer_model.forward(TOKENS)

        with backend.capture_session(None):
            backend.capture_one(self.engine.ShapeKey(TOKENS), step)
        return backend

    def replayed(self, backend: Any) -> torch.Tensor:
        """Replay as SGLang's runner does, which puts the replay where the layers were."""
        layers, key = self.runner.layer_model, self.engine.ShapeKey(TOKENS)
        forward, layers.forward = layers.forward, lambda size: backend.replay(key, None)
        try:
            with backend.replay_session():
                return layers.forward(TOKENS)
        finally:
            layers.forward = forward

    def check(self, backend: Any, *requests: tuple[int, int, int]) -> None:
        self.x.copy_(torch.randn(TOKENS, WIDTH))
        batch = self.batch(*requests)
        with self.published(batch):
            out = self.replayed(backend).clone()
            assert torch.equal(out, self.forward(TOKENS))


def test_one_graph_follows_lengths_prefixes_and_slots(engine: Any) -> None:
    model = Prefill(engine)
    backend = model.captured()
    for extend in (16, 3, 9, 3):
        model.check(backend, (extend % 4, extend, extend))
    found = sglang.stats()["modes"]["full"]
    assert (found["captures"], found["segments"], found["regions"]) == (1, 1, 2)
    assert (found["replays"], found["updates"]["misses"], found["updates"]["hits"]) == (4, 3, 1)


def test_other_numbers_of_requests_get_copies_and_new_lengths_past_the_budget_run_broken(
    engine: Any,
) -> None:
    model = Prefill(engine)
    backend = model.captured()
    model.check(backend, (0, 0, 5), (1, 2, 6))
    model.check(backend, (2, 7, 5), (3, 0, 1), (1, 1, 1))
    for extend in range(1, 15):
        model.check(backend, (1, 20, extend))
    updates = sglang.stats()["modes"]["full"]["updates"]
    assert updates["copies"] == 2
    assert updates["misses"] == 8
    assert updates["broken_over_miss_budget"] == 8


def test_marked_code_other_than_attention_is_refused(engine: Any) -> None:
    model = Prefill(engine, between=engine.eager(torch.Tensor.tanh))
    with pytest.raises(dg.CapabilityError, match=r"more than attention.*Choose breakable"):
        model.captured()


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("window", "sliding windows"),
        ("encoder", "cross-attention"),
        ("draft", "draft model, which"),
    ],
)
def test_what_cannot_be_updated_is_refused(engine: Any, what: str, reason: str) -> None:
    model = Prefill(engine)
    model.attention.use_sliding_window_kv_pool = what == "window"
    model.runner.model_runner.model_config.is_encoder_decoder = what == "encoder"
    model.runner.model_runner.is_draft_worker = what == "draft"
    with pytest.raises(dg.CapabilityError, match=f"{reason}.*Choose breakable"):
        model.captured()


def test_other_attention_and_decode_keep_the_plain_graph(engine: Any) -> None:
    model = Prefill(engine)
    full = sglang.full_backend()
    assert isinstance(full(model.runner), full)
    model.runner.model_runner.attn_backend = types.SimpleNamespace(prefill_backend=model.attention)
    assert not isinstance(full(model.runner, reuse_output_buffer=True), full)

    class Changed(type(model.attention)):  # type: ignore[misc]
        def forward_extend(self, *args: Any) -> None:
            raise AssertionError

    model.runner.model_runner.attn_backend = Changed(None, None)
    assert isinstance(full(model.runner, reuse_output_buffer=True), full)


def test_replay_waits_for_layers_that_are_loaded_from_elsewhere(engine: Any) -> None:
    model = Prefill(engine)
    backend = model.captured()
    waited: list[int] = []
    model.runner.model_runner.token_to_kv_pool.layer_transfer_counter = types.SimpleNamespace(
        consumer_index=0, num_layers=2, wait_until=waited.append
    )
    model.check(backend, (0, 0, 4))
    assert waited == [1]
