"""Speed of greedy generation with ``accelerate``, with the engine, and with transformers alone.

    python benchmarks/generate.py [--models SHAPE_OR_PATH ...] [--backend auto] [--dtype NAME]
                                  [--batch 1 8 32] [--prompt-tokens 16] [--new-tokens 64]
                                  [--repeats 5] [--threads N] [--only NAME ...] [--json FILE]

accelerated  ``model.generate`` after ``accelerate(model)``
graphs       the engine with device graphs for decode and prefill
looped       the engine with device graphs and eight decode steps per launch
unfused      the engine with device graphs and without fusion
eager        the engine without graphs, with the same steps and kernels as ``graphs``
dynamic      ``model.generate`` with its default cache
static       ``model.generate`` with a static cache, which is compiled first on devices
batched      ``model.generate_batch`` after ``accelerate(model)``
own_batched  ``model.generate_batch``, the continuous batching of transformers

The contestants run one after another with the same prompts and threads. Each has its own process,
so that none reuses memory, compiled code or autotuning of another one. A turn generates one token
per prompt, and then all tokens; the difference is the decode time. Results are medians over turns:

wall         seconds of a generation, until the last token is on the host
decode       tokens per second after the first token, over all requests
cpu          CPU seconds of all threads per generation; on a device, this includes waiting
host_ms      milliseconds of host time of a decode launch in the runner, before any wait
setup        seconds for captures, or for the first call with its compilation
graph_share  share of decode steps that are replays, for accelerated models

A model is a folder, a .gguf file, or the name of a shape with random weights: smollm2-135m,
qwen3-0.6b, llama-1b, and qwen3.5-0.6b (linear attention in 30 of 40 layers). The report has one
entry for each model and batch size.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
)
from transformers.utils import logging as transformers_logging

import devgraph as dg
from devgraph.integrations.transformers import Engine, accelerate, generate_stats, load

CONTESTANTS = (
    "accelerated",
    "graphs",
    "looped",
    "unfused",
    "eager",
    "dynamic",
    "static",
    "batched",
    "own_batched",
)
ENGINES = CONTESTANTS[1:5]
DEFAULTS = ("accelerated", "graphs", "eager", "dynamic", "static")
PAIRS = (
    ("accelerated", "dynamic"),
    ("accelerated", "static"),
    ("graphs", "eager"),
    ("graphs", "dynamic"),
    ("graphs", "unfused"),
    ("looped", "graphs"),
    ("batched", "own_batched"),
)
"""Pairs of contestants; the report has the ratios of their speeds."""

SHAPES: dict[str, Callable[[], Any]] = {
    "smollm2-135m": lambda: LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rope_theta=100000.0,
        tie_word_embeddings=True,
    ),
    "qwen3-0.6b": lambda: Qwen3Config(
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        rope_theta=1000000.0,
        tie_word_embeddings=True,
    ),
    "llama-1b": lambda: LlamaConfig(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=131072,
        rope_theta=500000.0,
        tie_word_embeddings=True,
    ),
    # 30 layers of linear attention and 10 of full attention.
    "qwen3.5-0.6b": lambda: Qwen3_5TextConfig(
        vocab_size=65536,
        hidden_size=1024,
        intermediate_size=1280,
        num_hidden_layers=40,
        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 10,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=16,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        max_position_embeddings=40960,
        tie_word_embeddings=True,
    ),
}

Generate = Callable[[int], list[list[int]]]


@attrs.frozen(kw_only=True)
class Turn:
    """The times of a generation of one token per prompt, and of a generation of all tokens."""

    first: float
    wall: float
    cpu: float
    host: float | None


class Contestant:
    """A method of generation; ``generate(n)`` returns ``n`` new tokens of every prompt."""

    def __init__(self, name: str, generate: Generate, host: list[float] | None = None) -> None:
        self.name = name
        self.generate = generate
        self.host = host
        self.setup = 0.0
        self.tokens: list[list[int]] = []
        self.turns: list[Turn] = []

    def turn(self, new_tokens: int) -> None:
        """Generate twice and record the times."""
        begin = time.perf_counter()
        self.generate(1)
        first = time.perf_counter() - begin
        if self.host is not None:
            self.host.clear()
        cpu, begin = time.process_time(), time.perf_counter()
        self.tokens = self.generate(new_tokens)
        wall, cpu = time.perf_counter() - begin, time.process_time() - cpu
        host = statistics.median(self.host) if self.host else None
        self.turns.append(Turn(first=first, wall=wall, cpu=cpu, host=host))

    def report(self, new_tokens: int, batch: int) -> dict[str, Any]:
        """Return the medians of the turns."""

        def median(values: Iterator[float]) -> float:
            return statistics.median(values)

        hosts = [turn.host for turn in self.turns if turn.host is not None]
        steps = batch * (new_tokens - 1)
        return {
            "wall_s": median(turn.wall for turn in self.turns),
            "tokens_per_s": batch * new_tokens / median(turn.wall for turn in self.turns),
            "decode_tokens_per_s": steps / median(turn.wall - turn.first for turn in self.turns),
            "cpu_s": median(turn.cpu for turn in self.turns),
            "host_ms": 1e3 * statistics.median(hosts) if hosts else None,
            "setup_s": self.setup,
        }


def make_model(name: str, device: torch.device, dtype: torch.dtype) -> Any:
    """Return the model at a path, or a model with a known shape and random weights."""
    if name not in SHAPES:
        return load(name, dtype=dtype, device=device)[0]
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(SHAPES[name](), dtype=dtype).eval()


def graph_mode(batch: int, packed: int) -> dict[str, Any]:
    """Return a configuration with the graphs that the prompts need."""
    return {
        "decode": {"policy": "full", "buckets": [batch]},
        "prefill": {"policy": "breakable", "buckets": [packed]},
    }


def engine_of(
    model: Any, backend: Any, prompts: Sequence[list[int]], new_tokens: int, name: str
) -> tuple[Engine, Generate, list[float]]:
    """Return an engine for the prompts, its function ``generate``, and its host times."""
    batch, packed = len(prompts), sum(map(len, prompts))
    off = dict.fromkeys(("decode", "prefill"), "disabled")
    mode = off if name == "eager" else graph_mode(batch, packed)
    engine = Engine(
        model,
        config=dg.DeviceGraphConfig.from_dict(mode),
        backend=backend,
        max_requests=batch,
        max_len=max(map(len, prompts)) + new_tokens,
        max_step_tokens=packed,
        eos_token_ids=(),
        fuse=name != "unfused",
        steps_per_launch=8 if name == "looped" else 1,
    )
    host: list[float] = []
    run = engine.decode.run

    def timed(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        out = run(*args, **kwargs)
        host.append(time.perf_counter() - begin)
        return out

    engine.decode.run = timed  # type: ignore[method-assign]

    def generate(count: int) -> list[list[int]]:
        return [list(one.token_ids) for one in engine.generate(prompts, max_new_tokens=count)]

    return engine, generate, host


def own_generate(model: Any, prompts: Sequence[list[int]], cache: str | None) -> Generate:
    """Return a function that runs ``generate`` of transformers without end-of-sequence tokens."""
    ids = torch.tensor(prompts, device=next(model.parameters()).device)
    mask = torch.ones_like(ids)

    @torch.no_grad()
    def generate(count: int) -> list[list[int]]:
        config = GenerationConfig(
            max_new_tokens=count, do_sample=False, pad_token_id=0, cache_implementation=cache
        )
        out = model.generate(ids, attention_mask=mask, generation_config=config)
        tokens: list[list[int]] = out[:, ids.shape[1] :].tolist()
        return tokens

    return generate


def own_batches(model: Any, prompts: Sequence[list[int]]) -> Generate:
    """Return a function that runs ``generate_batch`` without end-of-sequence tokens."""

    @torch.no_grad()
    def generate(count: int) -> list[list[int]]:
        config = GenerationConfig(
            max_new_tokens=count, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        out = model.generate_batch(prompts, generation_config=config)
        return [out[f"req_{i}"].generated_tokens for i in range(len(prompts))]

    return generate


def make_prompts(batch: int, length: int, vocabulary: int) -> list[list[int]]:
    """Return different prompts of equal length."""
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randint(100, min(vocabulary, 20000), (batch, length), generator=generator)
    return [list(map(int, row)) for row in drawn]


def contestant(name: str, model: Any, backend: Any, prompts: list[list[int]], new: int) -> Any:
    """Return the contestant ``name``, which has not generated yet."""
    if name in ENGINES:
        engine, generate, host = engine_of(model, backend, prompts, new, name)
        engine.capture()
        return Contestant(name, generate, host)
    if name in ("accelerated", "batched"):
        batch, packed = len(prompts), sum(map(len, prompts))
        accelerate(
            model,
            mode=graph_mode(batch, packed),
            backend=backend,
            max_requests=batch,
            max_len=max(map(len, prompts)) + new,
            max_step_tokens=packed,
        )
    if name in ("batched", "own_batched"):
        return Contestant(name, own_batches(model, prompts))
    return Contestant(name, own_generate(model, prompts, "static" if name == "static" else None))


def run_one(args: argparse.Namespace) -> dict[str, Any]:
    """Run one contestant in this process and return its results."""
    if args.threads:
        torch.set_num_threads(args.threads)
    backend = dg.get_backend(args.backend)
    torch.backends.cuda.matmul.allow_tf32 = False
    dtype = args.dtype or ("float32" if backend.device.type == "cpu" else "bfloat16")
    model = make_model(args.models[0], backend.device, getattr(torch, dtype))
    model.generation_config.eos_token_id = None
    (batch,), (name,) = args.batch, args.only
    prompts = make_prompts(batch, args.prompt_tokens, model.config.vocab_size)
    begin = time.perf_counter()
    one = contestant(name, model, backend, prompts, args.new_tokens)
    # Use the lengths of the turns, because a static cache of another length would compile again.
    one.generate(args.new_tokens)
    one.generate(1)
    first = time.perf_counter() - begin
    begin = time.perf_counter()
    one.generate(args.new_tokens)
    one.generate(1)
    one.setup = first - (time.perf_counter() - begin)
    for _ in range(args.repeats):
        one.turn(args.new_tokens)
    figures = one.report(args.new_tokens, batch)
    if name in ("accelerated", "batched"):
        stats = generate_stats(model)
        decode = stats.engine.decode.stats()
        figures |= {"fallbacks": stats.fallbacks, "graph_share": decode.graph_steps / decode.steps}
    return {
        "device": backend.device_name,
        "backend": backend.name,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
        "dtype": dtype,
        "run": figures,
        "tokens": one.tokens,
    }


def run(args: argparse.Namespace, model: str, batch: int) -> dict[str, Any]:
    """Run every contestant on one model and batch size, each in its own process."""
    report: dict[str, Any] = {
        "model": model + (", random weights" if model in SHAPES else ""),
        "batch": batch,
        "prompt_tokens": args.prompt_tokens,
        "new_tokens": args.new_tokens,
        "repeats": args.repeats,
        "runs": {},
    }
    tokens: dict[str, list[list[int]]] = {}
    for name in args.only:
        command = [sys.executable, __file__, "--alone", "--only", name, "--models", model]
        command += ["--batch", str(batch), "--backend", args.backend]
        for flag in ("dtype", "prompt_tokens", "new_tokens", "repeats", "threads"):
            if (value := getattr(args, flag)) is not None:
                command += [f"--{flag.replace('_', '-')}", str(value)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            report["runs"][name] = {"failed": done.returncode}
            continue
        found = json.loads(done.stdout.splitlines()[-1])
        tokens[name] = found.pop("tokens")
        report["runs"][name] = found.pop("run")
        report |= found
    base = next(iter(tokens), None)
    for name, own in tokens.items():
        if name != base:
            report["runs"][name][f"same_tokens_as_{base}"] = own == tokens[base]
    for one, other in PAIRS:
        if one in tokens and other in tokens:
            # Each call of generate_batch includes a long set-up, so a difference would be noise.
            rate = "tokens_per_s" if one == "batched" else "decode_tokens_per_s"
            rates = [report["runs"][n][rate] for n in (one, other)]
            report[f"{one}_over_{other}"] = rates[0] / rates[1]
    return report


def main() -> None:
    """Run all contestants, print the report, and write it to ``--json``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["smollm2-135m"])
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--dtype", help="default: float32 on the CPU, bfloat16 elsewhere")
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--only", nargs="+", choices=CONTESTANTS, default=list(DEFAULTS))
    parser.add_argument("--json")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.new_tokens < 2:
        parser.error("--new-tokens must be at least 2: decode begins after the first token")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    if args.alone:
        print(json.dumps(run_one(args)))
        return
    reports = [run(args, model, batch) for model in args.models for batch in args.batch]
    print(json.dumps(reports, indent=2))
    if args.json:
        with open(args.json, "w") as file:
            json.dump(reports, file, indent=2)


if __name__ == "__main__":
    main()
