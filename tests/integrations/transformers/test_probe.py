"""What the probe finds, and what it refuses at construction."""

# ruff: noqa: E402  (imports follow the skip where transformers is missing)

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", reason="the transformers integration")

from transformers import masking_utils, modeling_utils
from transformers.masking_utils import causal_mask_function

from devgraph.api.errors import InputError
from devgraph.integrations.transformers import model as adapter
from devgraph.integrations.transformers.engine import has_hooks
from devgraph.integrations.transformers.model import CausalModel
from devgraph.integrations.transformers.probe import (
    UnsupportedModelError,
    _AttentionProbe,
    probe,
)
from tests.support.transformers_models import CACHE, FAMILIES, make_model
from tests.zoo.families import build


def test_shapes_windows_and_caps_are_found() -> None:
    shape = probe(make_model("gemma2"))
    assert [layer.window for layer in shape.layers] == [8, None, 8, None]
    assert {layer.softcap for layer in shape.layers} == {4.0}
    assert {(s.heads, s.kv_heads, s.key_dim, s.value_dim) for s in shape.layers} == {(4, 2, 16, 16)}
    assert (shape.vocabulary, shape.dtype) == (211, torch.float32)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_probing_leaves_model_and_registries_as_they_were(family: str) -> None:
    model = make_model(family)
    before = model.config.to_dict(), model.config._attn_implementation
    names = (
        set(modeling_utils.ALL_ATTENTION_FUNCTIONS),
        set(masking_utils.ALL_MASK_ATTENTION_FUNCTIONS),
    )
    probe(model)
    assert (model.config.to_dict(), model.config._attn_implementation) == before
    assert names == (
        set(modeling_utils.ALL_ATTENTION_FUNCTIONS),
        set(masking_utils.ALL_MASK_ATTENTION_FUNCTIONS),
    )


def small(config: type[Any], **values: Any) -> Callable[[], Any]:
    def make() -> Any:
        return transformers.AutoModelForCausalLM.from_config(config(**values)).eval()

    return make


_TINY: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
_LLAMA = {k: v for k, v in _TINY.items() if k != "max_position_embeddings"}

REFUSED = {
    "recurrent state outside of the cache": (
        lambda: build("RecurrentGemmaForCausalLM"),
        "recurrent state outside of its cache|a trial run failed",  # 5.10: without its cache
    ),
    "recurrent state in a cache of its own": (
        lambda: build("MiniMaxForCausalLM"),
        "MiniMax uses cache of its own",
    ),
    "sparse attention by an index of its own": (
        lambda: build("DeepseekV32ForCausalLM"),
        "layer 0 of its cache is a DynamicIndexedLayer",
    ),
    "host reads": (
        small(transformers.XmodConfig, **_TINY, is_decoder=True, default_language="en_XX"),
        r"reads device data on the host \(index\)",
    ),
    "host rotary embedding": (
        small(
            transformers.LlamaConfig,
            **_LLAMA,
            max_position_embeddings=64,
            rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
        ),
        "dynamic",
    ),
    "training mode": (lambda: make_model("llama").train(), "eval"),
    "no head": (lambda: make_model("llama").model, "head"),
    "a head for each codebook": (lambda: build("MusicgenForCausalLM"), "a language-model head"),
    "meta weights": (lambda: make_model("llama").to("meta"), "meta"),
    "bidirectional": (
        small(
            transformers.Gemma3TextConfig,
            **_TINY,
            head_dim=8,
            sliding_window=4,
            use_bidirectional_attention=True,
        ),
        "neither causal",
    ),
}


@pytest.mark.parametrize("case", sorted(REFUSED))
def test_what_cannot_run_correctly_is_refused_at_construction(case: str) -> None:
    make, says = REFUSED[case]
    try:
        model = make()
    except AttributeError as error:
        pytest.skip(f"transformers {transformers.__version__}: {error}")
    with pytest.raises(UnsupportedModelError, match=says) as error:
        CausalModel(model)
    assert isinstance(error.value, ValueError)


ATTENDS_ITSELF = {
    "biases of positions": (
        small(transformers.BloomConfig, vocab_size=50, hidden_size=32, n_layer=2, n_head=2),
        "takes no position_ids",
    ),
    "positions of its cache": (
        small(
            transformers.PegasusConfig,
            vocab_size=50,
            d_model=32,
            decoder_layers=2,
            decoder_attention_heads=2,
            decoder_ffn_dim=32,
            max_position_embeddings=64,
            is_decoder=True,
            is_encoder_decoder=False,
        ),
        "takes no position_ids",
    ),
    "sinks": (
        small(
            transformers.GptOssConfig,
            **_TINY,
            head_dim=8,
            num_local_experts=2,
            num_experts_per_tok=1,
        ),
        "passes s_aux to attention",
    ),
    "outside the registry": (
        small(
            transformers.FalconConfig,
            vocab_size=50,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
        ),
        "registry",
    ),
}


@pytest.mark.parametrize("case", sorted(ATTENDS_ITSELF))
def test_model_that_attends_itself_says_why_and_gives_its_own_logits(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, says = ATTENDS_ITSELF[case]
    model = make()
    before = set(masking_utils.ALL_MASK_ATTENTION_FUNCTIONS)
    with contextlib.closing(CausalModel(model, max_requests=2, max_len=32)) as steps:
        assert steps.own is not None and says in steps.own
        assert not steps.packed_host_args and not steps.decode_host_args
    assert set(masking_utils.ALL_MASK_ATTENTION_FUNCTIONS) == before

    def shown(function: Any, positions: Any, rows: Any, dtype: Any) -> torch.Tensor:
        return torch.zeros(positions.shape[0], 1, positions.shape[1], rows.shape[0])

    monkeypatch.setattr(adapter, "mask_of", shown)
    with pytest.raises(UnsupportedModelError, match="gives different logits on whole slots"):
        CausalModel(model, max_requests=2, max_len=32)


def test_encoder_decoder_is_refused() -> None:
    config = transformers.T5Config(
        vocab_size=50, d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8
    )
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        probe(transformers.T5ForConditionalGeneration(config).eval())


def test_something_that_is_no_model_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="Linear"):
        probe(torch.nn.Linear(2, 2))


def test_layer_that_attends_to_another_layers_cache_is_refused() -> None:
    model = make_model("llama", num_hidden_layers=3)
    second = model.model.layers[1].self_attn
    forward = second.forward

    def shares(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs | {CACHE: None})

    second.forward = shares
    with pytest.raises(UnsupportedModelError, match="keys other than those it just wrote"):
        probe(model)


def test_model_of_a_chunked_attention_mask_attends_itself() -> None:
    model = make_model("llama")
    module = transformers.models.llama.modeling_llama
    original = module.create_causal_mask

    def chunked(**kwargs: Any) -> Any:
        kwargs["and_mask_function"] = lambda b, h, q, k: q // 16 == k // 16
        return original(**kwargs)

    module.create_causal_mask = chunked
    try:
        own = CausalModel(model, max_requests=1).own
        assert own is not None and "neither causal" in own
    finally:
        module.create_causal_mask = original


def test_model_that_counts_on_the_length_of_its_cache_is_refused() -> None:
    model = make_model("opt")
    positions = model.model.decoder.embed_positions
    forward = positions.forward

    def counted(mask: Any, length: int = 0, position_ids: Any = None) -> Any:
        return forward(mask, length, position_ids=position_ids + length)

    positions.forward = counted
    says = "(length of its cache|its own attention fails).* on whole slots"
    with pytest.raises(UnsupportedModelError, match=says):
        CausalModel(model)


def test_cache_that_keeps_fewer_rows_than_the_mask_shows_limits_positions() -> None:
    """Past its window, Moshi's tokens depend on how the prompt was cut into steps."""
    model = small(transformers.MoshiConfig, **{**_TINY, "num_key_value_heads": 4}, head_dim=8)
    assert probe(model()).positions == 64
    shorter = model()
    shorter.config.sliding_window = 16
    assert probe(shorter).positions == 16
    assert [layer.window for layer in probe(shorter).layers] == [None, None]
    with pytest.raises(InputError, match="exceeds the 16 positions"):
        CausalModel(shorter, max_len=17)


def test_cache_that_keeps_what_the_mask_shows_limits_nothing() -> None:
    assert probe(make_model("mistral")).positions == 256


def test_stand_in_for_a_mask_is_where_the_model_is() -> None:
    """Attention of a model's own fails alike, or not, on every device."""
    watch = _AttentionProbe(make_model("llama").to("meta"), (), own=None)
    assert watch.mask(mask_function=causal_mask_function).device.type == "meta"


def test_other_thread_runs_shared_layers_during_a_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    model, other = make_model("llama"), make_model("llama", seed=1)
    other.model.layers = model.model.layers
    ids = torch.tensor([[3, 5, 7]])
    want, got = other(ids).logits, []
    own = model.forward

    def beside(*args: Any, **kwargs: Any) -> Any:
        thread = threading.Thread(target=lambda: got.append((other(ids).logits, has_hooks(other))))
        thread.start()
        thread.join()
        return own(*args, **kwargs)

    monkeypatch.setattr(model, "forward", beside)
    probe(model)
    assert got
    assert all(torch.equal(logits, want) and not hooked for logits, hooked in got)
