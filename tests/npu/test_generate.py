"""A language model on NPUGraphs with the vendor's attention, over the simulated driver."""

# ruff: noqa: E402  (imports follow the skip where transformers is missing)

from __future__ import annotations

import json
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="the transformers integration")

from transformers import Lfm2Config, Lfm2ForCausalLM, LlamaConfig, LlamaForCausalLM

import devgraph as dg
from devgraph.api.errors import InputError
from devgraph.integrations.transformers import Engine
from devgraph.integrations.transformers.loading import find_demo
from tests.sim.ascend import Driver
from tests.support.cli_programs import run_cli

pytest_plugins = ["tests.sim.ascend.plugin"]

LAYERS, STEPS = 2, 16
PROMPTS = [[5, 6, 7, 8, 9], [3, 4, 5]]


def engine(model: Any, backend: Any, prefill: str, **sizes: int) -> Engine:
    config = dg.DeviceGraphConfig.from_json(json.dumps({"decode": "full", "prefill": prefill}))
    sizes = {"max_requests": 2, "max_len": 128, "max_step_tokens": 16, **sizes}
    return Engine(model, config=config, backend=backend, eos_token_ids=(), **sizes)


def small_llama() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval().to(torch.float16)


@pytest.mark.filterwarnings("ignore:.*'full' is preferable")
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("prefill", ["breakable", "full"])
def test_every_decode_step_is_a_replay_with_updated_lengths(
    driver: Driver, backend: Any, version: int, prefill: str
) -> None:
    backend.attention_version = version
    model = small_llama()
    with engine(model, "cpu", "breakable") as on_cpu:
        want = [done.token_ids for done in on_cpu.generate(PROMPTS, max_new_tokens=STEPS)]
    with engine(model.to("npu"), backend, prefill) as on_npu:
        on_npu.capture()
        with driver.counting() as moved:
            got = [done.token_ids for done in on_npu.generate(PROMPTS, max_new_tokens=STEPS)]
            backend.synchronize()
        decode, packed = on_npu.decode.stats(), on_npu.prefill.stats()
    assert got == want
    assert decode.steps == decode.graph_steps == STEPS - 1  # the first token is prefill's
    assert decode.updates["misses"] == STEPS - 1
    assert packed.graph_steps == 1
    # Each step renews the lengths of each layer's task group; a full prefill does as well.
    in_graphs = STEPS - 1 + (prefill == "full")
    assert moved["group_updates"] == moved["task_updates"] == in_graphs * LAYERS
    segments = LAYERS + 1 if prefill == "breakable" else 1
    assert moved["replays"] == STEPS - 1 + segments


def test_requests_that_join_and_leave_keep_their_tokens(driver: Driver, backend: Any) -> None:
    model = small_llama()
    prompts = [[i + 1] * (3 + 5 * i % 11) for i in range(6)]
    with engine(model, "cpu", "breakable", max_requests=3) as on_cpu:
        want = [done.token_ids for done in on_cpu.generate(prompts, max_new_tokens=7)]
    with engine(model.to("npu"), backend, "full", max_requests=3) as on_npu:
        got = [done.token_ids for done in on_npu.generate(prompts, max_new_tokens=7)]
    assert got == want


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("version", "prefill"), [(1, "breakable"), (2, "breakable"), (1, "full"), (2, "full")]
)
def test_generate_command_with_the_real_model_says_what_the_cpu_says(
    driver: Driver,
    backend: Any,
    capsys: pytest.CaptureFixture[str],
    version: int,
    prefill: str,
) -> None:
    pytest.importorskip("accelerate", reason="transformers needs it to read a GGUF file")
    try:
        weights = find_demo()
    except InputError as error:
        pytest.skip(f"the demo model is not here: {error}")
    backend.attention_version = version
    said = {}
    for name in ("cpu", "npu"):
        mode = json.dumps({"decode": "full", "prefill": prefill if name == "npu" else "breakable"})
        with driver.counting() as moved:
            result = run_cli(
                capsys, "generate", "--backend", name, "--model", weights, "--json",
                "--dtype", "bfloat16", "--no-compare", "--max-new-tokens", 16,
                "--prompt", "The capital of France is", "--prompt", "Once upon a time",
                "--device-graph-mode", mode,
            )  # fmt: skip
        assert result.code == 0, result.err
        said[name] = json.loads(result.out)
    texts = {name: out["runs"][0]["texts"] for name, out in said.items()}
    assert texts["npu"] == texts["cpu"]
    assert moved["group_updates"] == 30 * (15 + (prefill == "full"))


def depthwise(x: Any, weight: Any, bias: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Convolve each channel by itself, without the operator that the simulator does not have."""
    names = ("stride", "padding", "dilation", "groups")
    padding = dict(zip(names, args, strict=False), **kwargs)["padding"]
    around = padding if isinstance(padding, int) else padding[0]
    x, width = torch.nn.functional.pad(x, (around, around)), weight.shape[-1]
    length = x.shape[-1] - width + 1
    out = sum(x[..., i : i + length] * weight[:, 0, i, None] for i in range(width))
    return out if bias is None else out + bias[:, None]


@pytest.mark.filterwarnings("ignore:.*'full' is preferable")
@pytest.mark.parametrize("prefill", ["breakable", "full"])
def test_recurrent_layers_keep_their_state_in_graphs(
    driver: Driver, backend: Any, prefill: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests outnumber the slots, and the state of the scratch row and free slots is poisoned."""
    monkeypatch.setattr(torch.nn.functional, "conv1d", depthwise)
    torch.manual_seed(0)
    config = Lfm2Config(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, pad_token_id=0,
        layer_types=["conv", "full_attention"] * 2,
    )  # fmt: skip
    model = Lfm2ForCausalLM(config).eval().half()
    prompts = [[i + 1] * (3 + 5 * i % 11) for i in range(5)]
    with engine(model, "cpu", "breakable") as on_cpu:
        want = [done.token_ids for done in on_cpu.generate(prompts, max_new_tokens=6)]
    with engine(model.to("npu"), backend, prefill) as on_npu:
        on_npu.capture()
        for buffer in on_npu.decode.state.buffers.values():
            buffer.fill_(float("nan"))
        got = [done.token_ids for done in on_npu.generate(prompts, max_new_tokens=6)]
        assert on_npu.decode.stats().eager_steps == 0
    assert got == want
