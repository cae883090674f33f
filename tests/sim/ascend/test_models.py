"""Attention with host lengths and a whole small model over the simulated driver equal the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.sim.ascend import Driver

pytest_plugins = ["tests.sim.ascend.plugin"]

HEADS, KEY_HEADS, SIZE, SCALE = 4, 2, 8, 0.3


def reference(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, causal: bool = False
) -> torch.Tensor:
    """Attention of one sequence: query [heads, rows, size], key and value [key heads, n, size]."""
    repeat = query.shape[0] // key.shape[0]
    key, value = (t.float().repeat_interleave(repeat, 0) for t in (key, value))
    scores = query.float() @ key.transpose(-1, -2) * SCALE
    if causal:
        rows, columns = scores.shape[-2:]
        hidden = torch.ones(rows, columns, dtype=torch.bool).triu(columns - rows + 1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return torch.softmax(scores, -1) @ value


def attend(version: int, query: Any, key: Any, value: Any, *, layout: str, **options: Any) -> Any:
    """Call one version of the fused attention with the arguments under that version's names."""
    import torch_npu

    common = {"input_layout": layout, "num_key_value_heads": KEY_HEADS}
    common |= {k: v for k, v in options.items() if k not in ("q", "kv", "mask")}
    if version == 1:
        names = {"q": "actual_seq_lengths", "kv": "actual_seq_lengths_kv", "mask": "atten_mask"}
        common |= {"num_heads": HEADS, "scale": SCALE}
        function = torch_npu.npu_fused_infer_attention_score
    else:
        names = {"q": "actual_seq_qlen", "kv": "actual_seq_kvlen", "mask": "atten_mask"}
        common |= {"num_query_heads": HEADS, "softmax_scale": SCALE}
        function = torch_npu.npu_fused_infer_attention_score_v2
    common |= {names[k]: options[k] for k in names if k in options}
    return function(query, key, value, **common)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))).half()


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("layout", ["BNSD", "BSND", "BSH"])
def test_fused_attention_reads_the_lengths_of_each_sequence(
    driver: Driver, version: int, layout: str
) -> None:
    query, key, value = random(2, HEADS, 1, SIZE), *(random(2, KEY_HEADS, 16, SIZE),) * 2
    lengths = [5, 11]

    def arrange(t: torch.Tensor) -> torch.Tensor:
        if layout == "BNSD":
            return t.npu()
        t = t.transpose(1, 2)
        return (t if layout == "BSND" else t.flatten(2)).contiguous().npu()

    out, _ = attend(version, *map(arrange, (query, key, value)), layout=layout, kv=lengths)
    out = out.cpu().reshape(2, HEADS, SIZE) if layout != "BNSD" else out.cpu()[:, :, 0]
    for item, length in enumerate(lengths):
        want = reference(query[item], key[item, :, :length], value[item, :, :length])[:, 0]
        torch.testing.assert_close(out[item].float(), want, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("version", [1, 2])
def test_packed_causal_attention_equals_the_reference_per_sequence(
    driver: Driver, version: int
) -> None:
    totals = [3, 8]  # two sequences of 3 and 5 tokens
    query, key, value = (
        random(8, HEADS, SIZE),
        random(8, KEY_HEADS, SIZE),
        random(8, KEY_HEADS, SIZE),
    )
    mask = torch.ones(2048, 2048, dtype=torch.bool).triu(1).npu()
    tensors = (query.npu(), key.npu(), value.npu())
    out, _ = attend(version, *tensors, layout="TND", q=totals, kv=totals, mask=mask, sparse_mode=3)
    begin = 0
    for end in totals:
        rows = [t[begin:end].transpose(0, 1) for t in (query, key, value)]
        want = reference(*rows, causal=True).transpose(0, 1)
        torch.testing.assert_close(out[begin:end].cpu().float(), want, rtol=2e-3, atol=2e-3)
        begin = end


@pytest.mark.parametrize("version", [1, 2])
def test_paged_attention_follows_the_block_table(driver: Driver, version: int) -> None:
    block, lengths = 4, [6, 3]
    table = torch.tensor([[3, 1, 9], [0, 9, 9]], dtype=torch.int32)
    cache = random(10, block, KEY_HEADS * SIZE)
    query = random(2, 1, HEADS * SIZE)
    out, _ = attend(
        version, query.npu(), cache.npu(), cache.npu(), layout="BSH", kv=lengths,
        block_table=table.npu(), block_size=block,
    )  # fmt: skip
    for item, length in enumerate(lengths):
        rows = cache[table[item].long()].reshape(-1, KEY_HEADS, SIZE)[:length].transpose(0, 1)
        want = reference(query[item].reshape(1, HEADS, SIZE).transpose(0, 1), rows, rows)
        got = out[item].cpu().float().reshape(HEADS, SIZE)
        torch.testing.assert_close(got, want[:, 0], rtol=2e-3, atol=2e-3)


def test_key_length_beyond_the_cache_is_a_device_error(driver: Driver) -> None:
    query, key = random(1, HEADS, 1, SIZE).npu(), random(1, KEY_HEADS, 16, SIZE).npu()
    attend(1, query, key, key, layout="BNSD", kv=[17])
    with pytest.raises(RuntimeError, match="key length 17 exceeds the 16"):
        torch.npu.synchronize()


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("update_first", [False, True])
def test_graph_update_changes_the_lengths_of_a_captured_attention(
    driver: Driver, version: int, update_first: bool
) -> None:
    query, key, value = (
        random(2, HEADS, 1, SIZE),
        random(2, KEY_HEADS, 16, SIZE),
        random(2, KEY_HEADS, 16, SIZE),
    )
    on_device = [t.npu() for t in (query, key, value)]
    name = "actual_seq_lengths_kv" if version == 1 else "actual_seq_kvlen"
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph, auto_dispatch_capture=True, stream=torch.npu.Stream()):
        out, _ = attend(version, *on_device, layout="BNSD", kv=[4, 4])
    with driver.counting() as moved:
        for lengths in ([4, 9], [16, 1], [2, 2]):
            if update_first:
                graph.update(cpu_update_input=[{name: lengths}])
            graph.replay()
            if not update_first:
                graph.update(cpu_update_input=[{name: lengths}])
            for item, n in enumerate(lengths):
                want = reference(query[item], key[item, :, :n], value[item, :, :n])
                torch.testing.assert_close(out[item].cpu().float(), want, rtol=2e-3, atol=2e-3)
    assert moved["task_updates"] == moved["replays"] == 3


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_small_llama_generates_what_the_cpu_generates(
    driver: Driver, attention: str, dtype: torch.dtype
) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        pad_token_id=0,
    )  # fmt: skip
    config._attn_implementation = attention
    model = transformers.LlamaForCausalLM(config).eval().to(dtype)
    tokens = torch.randint(1, 128, (2, 7))
    options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(tokens)}
    with torch.no_grad():
        want_logits = model(tokens).logits
        want = model.generate(tokens, **options)
        model = model.to("npu")
        got_logits = model(tokens.npu()).logits.cpu()
        options["attention_mask"] = options["attention_mask"].npu()
        got = model.generate(tokens.npu(), **options).cpu()
        sampled = model.generate(tokens.npu(), **{**options, "do_sample": True, "top_p": 0.9})
    if attention == "eager":
        assert torch.equal(got_logits, want_logits)
    torch.testing.assert_close(got_logits, want_logits, rtol=1e-2, atol=1e-2)
    assert torch.equal(got, want)
    assert sampled.shape == want.shape
    assert not [line for line in driver.report() if line.startswith(("stub", "missing"))]
