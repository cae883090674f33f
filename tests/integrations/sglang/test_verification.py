"""The check at start: graphs compared with eager, in batches that the runners load."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import devgraph as dg
from devgraph.integrations import sglang
from devgraph.integrations.sglang import verification
from devgraph.integrations.sglang.backends import shared
from devgraph.integrations.sglang.install import engine_mode
from tests.support.sglang_standin import MODEL
from tests.support.sglang_steps import WIDTH, module, runner, sharing

VOCABULARY = 50


def _build_layer_model_forward_kwargs(*_: Any) -> dict[str, Any]:
    return {}


class _Runner:
    """As much of SGLang's runners as the check uses; captures 8 and 4 rows."""

    def __init__(self, engine: Any) -> None:
        vars(self).update(vars(runner()))
        self.key = engine.ShapeKey
        self.ids = torch.zeros(8, dtype=torch.int64)
        self.embeddings = torch.randn(VOCABULARY, WIDTH)
        self.capture_bs = self.capture_num_tokens = [4, 8]
        slots = torch.zeros(16, 256, dtype=torch.int64)
        self.caches = [torch.zeros(512, WIDTH), torch.zeros(512, WIDTH)]
        pool = types.SimpleNamespace(
            k_buffer=self.caches[:1], v_buffer=self.caches[1:], layer_transfer_counter=None
        )
        self.read: list[list[int]] = []
        vars(self.model_runner).update(
            attn_backend=None,
            token_to_kv_pool=pool,
            req_to_token_pool=types.SimpleNamespace(req_to_token=slots),
            model_config=types.SimpleNamespace(
                vocab_size=VOCABULARY, context_len=256, is_encoder_decoder=False
            ),
            is_draft_worker=False,
            spec_algorithm=None,
        )
        self.backend = self.made()

    def made(self) -> Any:
        return sglang.full_backend()(self)

    def capture(self) -> None:
        with self.backend.capture_session(None):
            for size in (8, 4):
                self.backend.capture_one(self.key(size), self.step(size))

    def load(self, batch: Any) -> int:
        size = len(batch.input_ids)
        self.ids[:size].copy_(batch.input_ids)
        self.read.append(batch.seq_lens_cpu.tolist())
        return size

    def step(self, size: int) -> Callable[[], Any]:
        raise NotImplementedError


class DecodeCudaGraphRunner(_Runner):
    longest = 0

    def step(self, size: int) -> Callable[[], Any]:
        return lambda: self.after(self.embeddings[self.ids[:size]].tanh())

    def after(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def execute(self, batch: Any) -> Any:
        self.longest = max(batch.seq_lens_cpu.tolist())
        return self.backend.replay(self.key(self.load(batch)), batch)


class Unmarked(DecodeCudaGraphRunner):
    """A step that reads the longest length on the host, without a mark."""

    def after(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * (1 + self.longest)


Unmarked.__name__ = "DecodeCudaGraphRunner"


class PrefillCudaGraphRunner(_Runner):
    """Attention is that of the stand-in: each row gets the sum of what its request has seen."""

    def __init__(self, engine: Any) -> None:
        self.layer_model = types.SimpleNamespace(forward=self.forward)
        super().__init__(engine)

    def made(self) -> Any:
        native = module("attention.torch_native_backend", "sglang.srt.layers")
        slots = self.model_runner.req_to_token_pool.req_to_token
        attention = native.TorchNativeAttnBackend(slots, self.caches[0])
        self.attention = module("radix_attention", "sglang.srt.layers").RadixAttention(attention)
        self.model_runner.attn_backend = attention
        return module("runner_backend.utils").FullCudaGraphBackend(self, **sharing())

    def forward(self, ids: torch.Tensor, *_: Any) -> torch.Tensor:
        return self.attention(self.embeddings[ids]).tanh()

    def batch(self, news: int) -> Any:
        return module("forward_batch_info").ForwardBatch(
            req_pool_indices=torch.tensor([1]),
            seq_lens=torch.tensor([news]),
            seq_lens_cpu=torch.tensor([news]),
            extend_seq_lens=torch.tensor([news]),
            extend_prefix_lens=torch.tensor([0]),
            extend_seq_lens_cpu=[news],
            extend_prefix_lens_cpu=[0],
        )

    def step(self, size: int) -> Callable[[], Any]:
        batch = self.batch(size)

        def run() -> Any:
            with self.published(batch, size):
                return self.layer_model.forward(self.ids[:size], None, batch)

        return run

    def published(self, batch: Any, size: int) -> Any:
        batch.global_num_token_non_padded_cpu = size
        return module("runner_utils.forward_batch").set_forward_batch(batch)

    def _get_layer_model_positions(self, batch: Any) -> Any:
        return batch.positions

    def _pack_qwen_bcg_hc_output(self, output: Any) -> Any:
        return output

    def execute(self, batch: Any) -> Any:
        size = self.load(batch)
        self.prepare(size)
        forward = self.layer_model.forward
        self.layer_model.forward = lambda *_: self.backend.replay(self.key(size), batch)
        try:
            with self.published(batch, size):
                return self.layer_model.forward()
        finally:
            self.layer_model.forward = forward

    def prepare(self, size: int) -> None:
        pass


class Breakable(PrefillCudaGraphRunner):
    def made(self) -> Any:
        super().made()
        return sglang.breakable_backend()(self)


Breakable.__name__ = "PrefillCudaGraphRunner"


class Planned(PrefillCudaGraphRunner):
    """Full prefill whose shapes share one plan, with the rows of the shape as largest length."""

    def made(self) -> Any:
        self.plan = types.SimpleNamespace(largest=0, steady=True)
        self.model_runner.attn_backend = types.SimpleNamespace(forward_metadata=self.plan)
        return module("runner_backend.utils").FullCudaGraphBackend(self, **sharing())

    def forward(self, ids: torch.Tensor, *_: Any) -> torch.Tensor:
        return self.embeddings[ids] * self.plan.largest  # the choice of a kernel

    def step(self, size: int) -> Callable[[], Any]:
        self.plan.largest = size
        return super().step(size)


Planned.__name__ = "PrefillCudaGraphRunner"


@pytest.fixture
def engine(engine: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.delenv("DEVGRAPH_MODE", raising=False)
    monkeypatch.setenv("DEVGRAPH_VERIFY", "start")
    for kind in (DecodeCudaGraphRunner, PrefillCudaGraphRunner):
        made = types.SimpleNamespace(**{kind.__name__: kind})
        name = f"{kind.__name__[: -len('CudaGraphRunner')].lower()}_cuda_graph_runner"
        monkeypatch.setitem(sys.modules, f"{MODEL}.runner.{name}", made)
    yield engine


def counts() -> tuple[int, int]:
    found = sglang.stats()
    return found["checks"], found["failed_checks"]


def test_right_graphs_pass_and_nothing_remains(engine: Any) -> None:
    sglang.install()
    made = DecodeCudaGraphRunner(engine)
    made.capture()
    assert counts() == (4, 0)
    assert [len(lengths) for lengths in made.read] == [8, 8, 4, 4]
    assert not any(cache.any() for cache in made.caches)
    assert not made.model_runner.req_to_token_pool.req_to_token.any()
    assert "replay" not in vars(made.backend)
    made.capture()  # Requests may own the cache by now, so nothing is checked again.
    assert counts() == (4, 0)


def test_code_without_its_mark_is_found_and_its_steps_run_eagerly(
    engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    sglang.install(strict=False)
    made = Unmarked(engine)
    made.capture()
    assert counts() == (4, 2)
    assert "differs in" in caplog.text
    batch = types.SimpleNamespace(
        input_ids=torch.tensor([1, 2, 3, 4]), seq_lens_cpu=torch.tensor([7, 9, 1, 1])
    )
    want = made.embeddings[batch.input_ids].tanh() * 10
    assert torch.equal(made.execute(batch), want)
    assert sglang.stats()["modes"]["full"]["eager"] == {"verify_failed": 1}


@pytest.mark.parametrize("news", [None, [4, 1]], ids=["decode", "prefill"])
def test_batch_has_slots_of_its_own_for_each_request(engine: Any, news: list[int] | None) -> None:
    made = DecodeCudaGraphRunner(engine)
    batch = verification._batch(made, [2, 3], news)
    table = made.model_runner.req_to_token_pool.req_to_token
    added = news or [1, 1]
    ends = [2 + added[0], 3 + added[1]]
    rows = [table[1, : ends[0]].tolist(), table[2, : ends[1]].tolist()]
    assert [*rows[0], *rows[1]] == list(range(1, 1 + sum(ends)))
    assert not table[0].any() and not table[1, ends[0] :].any() and not table[2, ends[1] :].any()
    assert batch.out_cache_loc.tolist() == rows[0][2:] + rows[1][3:]
    assert batch.positions.tolist() == [*range(2, ends[0]), *range(3, ends[1])]
    assert batch.req_pool_indices.tolist() == [1, 2]
    assert batch.seq_lens.tolist() == batch.seq_lens_cpu.tolist() == ends
    assert batch.seq_lens_sum == sum(ends)
    assert batch.input_ids.shape == batch.positions.shape
    if news is not None:
        assert batch.extend_seq_lens.tolist() == news
        assert batch.extend_prefix_lens.tolist() == [2, 3]
        assert batch.extend_start_loc.tolist() == [0, 4]
        assert batch.extend_start_loc.dtype is torch.int32


def test_strict_refuses_to_start(engine: Any) -> None:
    sglang.install()
    with pytest.raises(dg.CaptureError, match=r"SGLang: 2 graphs failed the check at start"):
        Unmarked(engine).capture()


def test_updated_prefill_is_checked_without_its_budget(engine: Any) -> None:
    sglang.install()
    made = PrefillCudaGraphRunner(engine)
    made.capture()
    assert counts() == (4, 0)
    assert made.read == [[13], [31], [9], [27]]
    for new in range(1, 9):  # As many new lengths as the budget of misses allows.
        batch = made.batch(new)
        batch.input_ids = torch.arange(8)
        with made.published(batch, new):
            made.execute(batch)
    updates = sglang.stats()["modes"]["full"]["updates"]
    assert updates["broken_over_miss_budget"] == updates["copies"] == 0


def test_breakable_prefill_is_checked_with_several_requests(engine: Any) -> None:
    sglang.install()
    made = Breakable(engine)
    made.capture()
    assert counts() == (4, 0)
    assert made.read == [[13], [25, 48, 25, 48], [9], [24, 47, 24, 47]]


def test_full_prefill_runs_eagerly_with_the_lengths_of_its_shape(engine: Any) -> None:
    sglang.install()
    made = Planned(engine)
    made.capture()
    assert made.plan.largest == 4  # that of the last capture
    assert counts() == (4, 0)
    assert [len(lengths) for lengths in made.read] == [1, 4, 1, 4]


@pytest.mark.parametrize(("what", "reason"), [("ranks", "several ranks"), ("lora", "LoRA")])
def test_what_cannot_be_checked_is_said(
    engine: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    what: str,
    reason: str,
) -> None:
    sglang.install(strict=False)
    monkeypatch.setattr(verification, "several_ranks", lambda: what == "ranks")
    made = DecodeCudaGraphRunner(engine)
    made.model_runner.lora_manager = object() if what == "lora" else None
    made.capture()
    assert f"not possible with {reason}" in caplog.text
    assert counts() == (0, 0)
    shared().check.strict = True
    shared().checked.clear()
    with pytest.raises(dg.CapabilityError, match=reason):
        made.capture()


def test_the_mode_names_the_phases_that_are_checked(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DEVGRAPH_VERIFY")
    sglang.install(mode='{"prefill": {"policy": "full", "verify": "start"}}')
    assert shared().check.phases == {"prefill"}
    made = DecodeCudaGraphRunner(engine)
    made.capture()
    assert counts() == (0, 0)
    with pytest.raises(dg.ConfigError, match=r"checked only at start"):
        engine_mode('{"decode": {"verify": {"every": 9}}}', "cpu")
