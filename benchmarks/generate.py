"""Greedy generation of one model: this engine with and without graphs, and transformers' own.

    python benchmarks/generate.py [--model PATH] [--backend auto] [--dtype NAME] [--batch 1]
                                  [--prompt-tokens 16] [--new-tokens 64] [--repeats 5]
                                  [--threads N] [--only graphs eager dynamic static] [--json FILE]

graphs     the engine, decode and prefill through device graphs
eager      the same engine without graphs: same steps, same kernels
dynamic    transformers' generate with its default cache
static     transformers' generate with a static cache, which compiles first on devices

All run in one process on the same prompts and threads and take turns, so that a change of the
machine's speed meets them all. Each turn generates one token (the prompt) and then all of them;
decode is the difference. Figures are medians over the turns:

wall       seconds of one generation, until the last token is on the host
decode     tokens a second after the first, over all requests
cpu        CPU seconds of the process a generation, all threads; on a device, waiting counts too
host_ms    milliseconds of host time inside the runner of a decode step, before any wait
setup      seconds before the first token can be fast: captures, or the first call (compilation)

Without ``--model`` the model is SmolLM2-135M's shape with random weights.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig
from transformers.utils import logging as transformers_logging

import devgraph as dg
from devgraph.integrations.transformers import Engine, load

CONTESTANTS = ("graphs", "eager", "dynamic", "static")

Generate = Callable[[int], list[list[int]]]


@attrs.frozen(kw_only=True)
class Turn:
    """One generation of one token a prompt, and one of all tokens."""

    first: float
    wall: float
    cpu: float
    host: float | None


class Contestant:
    """One way to generate; ``generate(n)`` returns ``n`` new tokens of every prompt."""

    def __init__(self, name: str, generate: Generate, host: list[float] | None = None) -> None:
        self.name = name
        self.generate = generate
        self.host = host
        self.setup = 0.0
        self.tokens: list[list[int]] = []
        self.turns: list[Turn] = []

    def turn(self, new_tokens: int) -> None:
        """Generate twice and note what it took."""
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


def make_model(args: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> Any:
    """Return the model that the arguments name, or SmolLM2-135M's shape with random weights."""
    if args.model:
        return load(args.model, dtype=dtype, device=device)[0]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rope_theta=100000.0,
        tie_word_embeddings=True,
    )
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def engine_of(
    model: Any, backend: Any, prompts: Sequence[list[int]], new_tokens: int, *, graphs: bool
) -> tuple[Engine, Generate, list[float]]:
    """Return an engine that fits the prompts, how it generates, and its host times a step."""
    batch, packed = len(prompts), sum(map(len, prompts))
    phases = {
        "decode": {"policy": "full", "buckets": [batch]},
        "prefill": {"policy": "breakable", "buckets": [packed]},
    }
    off = {"decode": "disabled", "prefill": "disabled"}
    engine = Engine(
        model,
        config=dg.DeviceGraphConfig.from_json(json.dumps(phases if graphs else off)),
        backend=backend,
        max_requests=batch,
        max_len=max(map(len, prompts)) + new_tokens,
        max_step_tokens=packed,
        eos_token_ids=(),
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
    """Return transformers' generate over the prompts, which never ends early."""
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


def make_prompts(batch: int, length: int, vocabulary: int) -> list[list[int]]:
    """Return different prompts of one length."""
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randint(100, min(vocabulary, 20000), (batch, length), generator=generator)
    return [list(map(int, row)) for row in drawn]


@contextlib.contextmanager
def contestants(
    args: argparse.Namespace, model: Any, backend: Any, prompts: list[list[int]]
) -> Iterator[list[Contestant]]:
    """Yield those that the arguments ask for, each after its first generation."""
    made = []
    with contextlib.ExitStack() as stack:
        for name in args.only:
            begin = time.perf_counter()
            if name in ("graphs", "eager"):
                engine, generate, host = engine_of(
                    model, backend, prompts, args.new_tokens, graphs=name == "graphs"
                )
                stack.enter_context(engine)
                engine.capture()
                one = Contestant(name, generate, host)
            else:
                cache = "static" if name == "static" else None
                one = Contestant(name, own_generate(model, prompts, cache))
            # The lengths that count: a static cache of another length would compile again.
            one.generate(args.new_tokens)
            one.generate(1)
            first = time.perf_counter() - begin
            begin = time.perf_counter()
            one.generate(args.new_tokens)
            one.generate(1)
            one.setup = first - (time.perf_counter() - begin)
            made.append(one)
        yield made


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Return the report of everything that was asked for."""
    if args.threads:
        torch.set_num_threads(args.threads)
    backend = dg.get_backend(args.backend)
    torch.backends.cuda.matmul.allow_tf32 = False
    name = args.dtype or ("float32" if backend.device.type == "cpu" else "bfloat16")
    model = make_model(args, backend.device, getattr(torch, name))
    model.generation_config.eos_token_id = None
    prompts = make_prompts(args.batch, args.prompt_tokens, model.config.vocab_size)
    with contestants(args, model, backend, prompts) as made:
        for _ in range(args.repeats):
            for one in made:
                one.turn(args.new_tokens)
    report: dict[str, Any] = {
        "device": backend.device_name,
        "backend": backend.name,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "dtype": name,
        "model": args.model or "SmolLM2-135M shape, random weights",
        "batch": args.batch,
        "prompt_tokens": args.prompt_tokens,
        "new_tokens": args.new_tokens,
        "repeats": args.repeats,
        "runs": {one.name: one.report(args.new_tokens, args.batch) for one in made},
    }
    base = made[0]
    rates = {one.name: report["runs"][one.name]["decode_tokens_per_s"] for one in made}
    for one in made[1:]:
        report["runs"][one.name][f"same_tokens_as_{base.name}"] = one.tokens == base.tokens
        report[f"{base.name}_over_{one.name}"] = rates[base.name] / rates[one.name]
    return report


def main() -> None:
    """Run, print, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder or .gguf file; default: random weights")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--dtype", help="default: float32 on the CPU, bfloat16 elsewhere")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--only", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    parser.add_argument("--json")
    args = parser.parse_args()
    if args.new_tokens < 2:
        parser.error("--new-tokens must be at least 2: decode is what follows the first token")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    report = run(args)
    print(json.dumps(report, indent=2))
    if args.json:
        with open(args.json, "w") as file:
            json.dump(report, file, indent=2)


if __name__ == "__main__":
    main()
