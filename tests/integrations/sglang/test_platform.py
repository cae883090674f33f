"""An out-of-tree platform of SGLang: its hooks, and a whole engine from prompt to text."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, Qwen3ForCausalLM

from devgraph.integrations import sglang
from devgraph.integrations.engine.ledger import PERIOD_S
from tests.support import sglang_platform
from tests.support.sglang_steps import module

ROOT = Path(__file__).parents[3]
MISSING = [name for name in ("sglang", "msgspec", "zmq") if importlib.util.find_spec(name) is None]


def test_platform_names_the_backend_and_the_runner_of_decode(engine: Any) -> None:
    platform = sglang.DeviceGraphPlatform()
    assert platform.is_out_of_tree()
    assert platform.capabilities.graph_capture
    platform.init_backend()
    choice = module("runner_backend.utils")
    assert choice.BreakableCudaGraphBackend is sglang.breakable_backend()
    assert platform.get_full_graph_backend_cls() is sglang.full_backend()
    assert platform.get_graph_runner_cls() is module("runner").DecodeCudaGraphRunner


def expected(folder: Path) -> list[list[str]]:
    """What transformers writes for the prompts, and once more with three words behind them."""
    model = Qwen3ForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = []
    for prompts in sglang_platform.rounds():
        texts.append([])
        for prompt in prompts:
            ids = tokenizer(prompt, return_tensors="pt").input_ids
            found = model.generate(ids, max_new_tokens=12, do_sample=False)
            texts[-1].append(tokenizer.decode(found[0, ids.shape[1] :]))
    return texts


GRAPHS = {
    "decode": {"backend": "full", "bs": [1, 2, 4]},
    "prefill": {"backend": "breakable", "bs": [8, 16, 32, 64]},
}
MODE = """
{"decode": {"policy": "full", "buckets": [1, 2, 4]},
 "prefill": {"policy": "full", "buckets": [8, 16, 32, 64]}}
"""


@pytest.mark.slow  # starts an engine; its quick siblings are above and in test_updated
@pytest.mark.timeout(600)
@pytest.mark.skipif(bool(MISSING), reason=f"needs SGLang with what it imports: no {MISSING}")
@pytest.mark.parametrize("prefill", ["breakable", "full"])
def test_engine_of_a_platform_writes_the_text_of_the_model_with_graphs(
    tmp_path: Path, prefill: str
) -> None:
    sglang_platform.make_model(tmp_path / "model")
    sglang_platform.make_plugins(tmp_path)
    # SGLang asks for its option of torch.compile before it captures on a CPU.
    options: dict[str, Any] = {"enable_torch_compile": True, "wait_s": PERIOD_S + 1}
    options["enable_mixed_chunk"] = prefill == "full"
    environment = {"DEVGRAPH_SGLANG": "strict", "DEVGRAPH_MODE": MODE}
    if prefill == "breakable":
        options |= {"cuda_graph_config": GRAPHS, "enable_memory_saver": True, "log_level": "info"}
        environment = {"SGLANG_MEMORY_SAVER_CUDA_GRAPH": "1"}
    path = [str(ROOT), str(tmp_path), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, sglang_platform.__file__, str(tmp_path), json.dumps(options)],
        env={
            **os.environ,
            **environment,
            "DEVGRAPH_VERIFY": "start",
            "PYTHONPATH": os.pathsep.join(path),
            "TORCHDYNAMO_DISABLE": "1",
            "DEVGRAPH_STATS_FILE": str(tmp_path / "stats.json"),
        },
        text=True,
        capture_output=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (texts,) = (line for line in done.stdout.splitlines() if line.startswith("[["))
    written = [[text.strip() for text in one] for one in json.loads(texts)]
    assert written == expected(tmp_path / "model")
    stats = json.loads((tmp_path / "stats.json").read_text())
    modes = stats["modes"]
    assert (stats["checks"], stats["failed_checks"]) == (14, 0)
    assert modes["full"]["replays"] > 10
    if prefill == "breakable":
        assert (modes["full"]["captures"], modes["breakable"]["captures"]) == (3, 4)
        assert modes["breakable"]["replays"] > 15
        assert re.search(r"released \d+ MiB of graph memory", done.stderr)
    else:
        assert (modes["full"]["captures"], modes["breakable"]["captures"]) == (7, 0)
        assert modes["full"]["updates"]["misses"] > 8
        assert modes["full"]["updates"]["broken_over_miss_budget"] > 4
