"""SGLang 0.5.23 on its own graphs and on devgraph, alternately on one device.

    python benchmarks/sglang0523.py [MODEL] [--jobs own:default devgraph:default ...] [--rounds 5]
                                    [--json FILE]

MODEL is a folder with a configuration and weights. Without MODEL, the benchmark creates a model
with the shape of Qwen3-0.6B and random weights.

A job is LAYER:MODE. LAYER is own, devgraph or devgraph+64 (with an executable budget of 64 MiB).
MODE is default (decode full, prefill breakable), full, breakable or eager. own:default#2 is another
job of the same kind. Every job runs SGLang's ModelRunner in its own process, through SGLang's
benchmark.one_batch. The jobs import SGLang at the same time and start one after another, so that
captures and memory are measured separately. Then they measure alternately. Results are minimums
over all rounds: milliseconds per step, and milliseconds of host time per step. Graph memory is
reported after the captures, and again after a trace that replays each graph. The last line of each
job has the time between two kernels of a graph, if that can change (docs/fast-replay.md).

With --engine, a job runs sglang.Engine with its processes. Results are medians over all rounds, in
milliseconds per token. devgraph must be installed, because SGLang loads its entry point.

With --ranks N, a job is tensor parallel over N devices, with one process for each rank. Results are
maximums over the ranks.

With --warm, a job of the first kind runs before the measurement, so that SGLang's kernels are
compiled in advance.

With --dry-run, jobs run on the CPU and capture nothing. This tests that SGLang starts and measures.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

# SGLang imports vLLM if it exists, and vllm.py in this folder has the same name.
sys.path[:] = [path for path in sys.path if Path(path).resolve() != Path(__file__).resolve().parent]

MODES = {
    "default": {},
    "full": {"decode": {"backend": "full"}, "prefill": {"backend": "full"}},
    "breakable": {"decode": {"backend": "breakable"}, "prefill": {"backend": "breakable"}},
    "eager": {"decode": {"backend": "disabled"}, "prefill": {"backend": "disabled"}},
}
PHASES = ("decode", "prefill")
FLAGS = ("dry_run", "engine")
JOBS = ("own:default", "devgraph:default", "own:full", "devgraph:full")
DECODES = (1, 8, 64, 256)
PREFILLS = ((1, 500), (8, 60))
PROMPT, STEPS = 32, 64

# All jobs share the device.
SHARE = {"mem_fraction_static": 0.3, "max_total_tokens": 65536, "context_length": 4096}
DRY = {
    "device": "cpu",
    "disable_cuda_graph": True,
    "max_total_tokens": 4096,
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
}


def options(mode: str, dry: bool) -> dict[str, Any]:
    """Return the options for SGLang."""
    chosen = {"cuda_graph_config": MODES[mode]} if MODES[mode] else {}
    return {"grammar_backend": "none", **chosen, **SHARE, **(DRY if dry else {})}


def prompts(requests: int, tokens: int) -> list[list[int]]:
    return [[(7 * row + place) % 500 for place in range(tokens)] for row in range(requests)]


class Engine:
    """One job with an engine, and its measurements."""

    def __init__(self, model: str, layer: str, mode: str, dry: bool) -> None:
        import sglang

        os.environ["DEVGRAPH_SGLANG"] = "strict" if layer == "devgraph" else "0"
        self.steps = 4 if dry else 2 * STEPS
        self.facts: dict[str, float] = {}
        started = time.perf_counter()
        self.engine = sglang.Engine(
            model_path=model,
            skip_tokenizer_init=True,
            disable_radix_cache=True,
            **options(mode, dry),
        )
        self.facts["start_s"] = time.perf_counter() - started

    def _generate(self, requests: int, prompt: int, steps: int) -> tuple[float, list[int]]:
        sampling = {"temperature": 0.0, "max_new_tokens": steps, "ignore_eos": True}
        started = time.perf_counter()
        found = self.engine.generate(input_ids=prompts(requests, prompt), sampling_params=sampling)
        taken = 1e3 * (time.perf_counter() - started)
        return taken, [token for output in found for token in output["output_ids"]]

    def decode(self, batch: int) -> tuple[float, None, list[int]]:
        """Return milliseconds per token after the first token of each request, and all tokens."""
        first = min(self._generate(batch, PROMPT, 1)[0] for _ in range(3))
        taken, tokens = self._generate(batch, PROMPT, 1 + self.steps)
        return (taken - first) / self.steps, None, tokens

    def prefill(self, requests: int, tokens: int) -> tuple[float, None, list[int]]:
        """Return milliseconds until the first tokens, and these tokens."""
        taken, found = min(self._generate(requests, tokens, 1) for _ in range(3))
        return taken, None, found


class Worker:
    """One job with a model runner, and its measurements."""

    def __init__(self, model: str, layer: str, mode: str, dry: bool) -> None:
        from sglang.benchmark import one_batch
        from sglang.srt.server_args import PortArgs, ServerArgs

        rank, size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
        parallel = {"tp_size": size, "nccl_port": int(os.environ["MASTER_PORT"])}
        name, _, memory = layer.partition("+")
        if name == "devgraph":
            from devgraph.integrations import sglang

            budget = {"executable_budget": int(memory) * 2**20} if memory else None
            sglang.install(mode=json.dumps(dict.fromkeys(PHASES, budget)) if budget else None)
        arguments = ServerArgs(model_path=model, **options(mode, dry), **parallel)
        arguments.resolve_once()
        one_batch.publish(
            arguments,
            role="scheduler",
            ranks=one_batch.SpawnRanks(
                world_rank=one_batch.spawn_world_rank(arguments, tp_rank=rank, pp_rank=0),
                gpu_id=rank,
            ),
        )
        one_batch._init_process_global_configs()
        self.engine, self.dry, self.layer = one_batch, dry, layer
        self.facts: dict[str, float] = {}
        self._time_captures(one_batch.ModelRunner)
        ports = PortArgs.init_new(arguments)
        self.runner, _ = one_batch.load_model(arguments, ports, rank, rank)

    def _time_captures(self, kind: Any) -> None:
        captures = kind.init_cuda_graphs

        def init_cuda_graphs(runner: Any, *args: Any, **kwargs: Any) -> Any:
            before, allocated = self._free(), self._allocated()
            started = time.perf_counter()
            result = captures(runner, *args, **kwargs)
            self.facts["capture_s"] = time.perf_counter() - started
            self.facts["graph_gib"] = (before - self._free()) / 2**30
            self.facts["allocator_gib"] = (self._allocated() - allocated) / 2**30
            return result

        kind.init_cuda_graphs = init_cuda_graphs

    def _allocated(self) -> int:
        return 0 if self.dry else torch.cuda.memory_reserved()

    def _free(self) -> int:
        """Return the free bytes of the device; memory cached by the allocator counts as free."""
        if self.dry:
            return 0
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]

    def trace(self) -> float:
        """Run every captured shape once; return the GiB that stayed allocated."""
        if self.dry:
            return 0.0
        self._extend(1, PROMPT)  # Afterwards, only graphs allocate memory.
        before, runner = self._free(), self.runner.torch_runner
        for tokens in getattr(runner.prefill_cuda_graph_runner, "capture_num_tokens", ()):
            requests = -(-tokens // 4000)
            self._extend(requests, tokens // requests)
        for batch in getattr(runner.decode_cuda_graph_runner, "capture_bs", ()):
            tokens, _, state = self._extend(batch, PROMPT)
            self.runner.decode(tokens, state)
        return (before - self._free()) / 2**30

    def _extend(self, requests: int, tokens: int) -> Any:
        self.runner.clear()
        make = self.engine.prepare_synthetic_inputs_for_latency_test
        return self.runner.extend(make(requests, tokens, prompts(requests, tokens)))

    def decode(self, batch: int) -> tuple[float, float, list[int]]:
        """Return wall and host milliseconds per step of consecutive steps, and the last tokens."""
        tokens, _, state = self._extend(batch, PROMPT)
        steps = 4 if self.dry else STEPS
        self.runner.synchronize()
        started = time.perf_counter()
        for _ in range(steps):
            tokens, _ = self.runner.decode(tokens, state)
        host = time.perf_counter() - started
        self.runner.synchronize()
        wall = time.perf_counter() - started
        return 1e3 * wall / steps, 1e3 * host / steps, tokens.tolist()

    def prefill(self, requests: int, tokens: int) -> tuple[float, float, list[int]]:
        """Return the minimum wall and host milliseconds of a step in five runs, and its tokens."""
        host, wall = [], []
        for _ in range(5):
            self.runner.synchronize()
            started = time.perf_counter()
            found, _, _ = self._extend(requests, tokens)
            host.append(1e3 * (time.perf_counter() - started))
            self.runner.synchronize()
            wall.append(1e3 * (time.perf_counter() - started))
        return min(wall), min(host), found.tolist()

    def pace(self) -> str:
        """Return the pace of graphs as text, measured by devgraph's probe for both layers."""
        import devgraph

        return str(devgraph.get_backend("auto").after_captures())


def random_model() -> str:
    """Create a folder with a model in the shape of Qwen3-0.6B and random weights."""
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

    shape = Qwen3Config(
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
    )
    folder = tempfile.mkdtemp(prefix="qwen3-0.6b-")
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    words = {"<unk>": 0, **{f"w{number}": number for number in range(1, 2000)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder)
    return folder


def work(model: str, job: str, dry: bool, engine: bool) -> None:
    """Answer requests: each is a line of JSON with the name and arguments of a method."""
    answers = os.dup(1)
    os.dup2(2, 1)  # SGLang prints to standard output.
    layer, mode = job.split("#")[0].split(":")
    importlib.import_module(
        f"sglang.{'srt.entrypoints.engine' if engine else 'benchmark.one_batch'}"
    )
    sys.stdin.readline()
    with torch.no_grad(), os.fdopen(answers, "w") as out:
        worker: Any = (Engine if engine else Worker)(model, layer, mode, dry)
        print(json.dumps(worker.facts), file=out, flush=True)
        for line in sys.stdin:
            name, *arguments = json.loads(line)
            print(json.dumps(getattr(worker, name)(*arguments)), file=out, flush=True)
        if engine:
            worker.engine.shutdown()
    os._exit(0)  # Skip SGLang's own shutdown, which differs between versions.


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port: int = server.getsockname()[1]
        return port


def merged(answers: list[Any]) -> Any:
    """Return the answer of the first rank with the maximum over all ranks of each number."""
    first = answers[0]
    if isinstance(first, dict):
        return {name: max(answer[name] for answer in answers) for name in first}
    if isinstance(first, list):
        wall, host = (max((a[part] or 0.0) for a in answers) for part in (0, 1))
        return [wall, host, first[2]]
    return max(answers) if isinstance(first, float) else first


class Job:
    """The worker processes of a job, on the side of their parent."""

    def __init__(self, options: argparse.Namespace, name: str) -> None:
        command = [sys.executable, __file__, options.model, "--work", name]
        flags = [f"--{name}".replace("_", "-") for name in FLAGS if getattr(options, name)]
        shared = {"WORLD_SIZE": str(options.ranks), "MASTER_PORT": str(free_port())}
        self.processes = [
            subprocess.Popen(
                [*command, *flags],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **shared, "RANK": str(rank)},
            )
            for rank in range(options.ranks)
        ]
        self.facts: dict[str, float] = {}

    def start(self) -> None:
        """Load the model and capture."""
        self.facts = self.ask("start")

    def end(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.stdin.close()  # type: ignore[union-attr]
        for process in self.processes:
            process.wait(60)

    def ask(self, *call: Any) -> Any:
        for process in self.processes:
            print(json.dumps(call), file=process.stdin, flush=True)
        lines = [process.stdout.readline() for process in self.processes]  # type: ignore[union-attr]
        if not all(lines):
            raise SystemExit("a process of a job ended; its log is above")
        return merged([json.loads(line) for line in lines])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--jobs", nargs="+", default=list(JOBS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=1, help="devices per job (default: 1)")
    parser.add_argument("--warm", action="store_true", help="run another job before")
    parser.add_argument("--json", type=Path, help="write the results of every round to this file")
    for flag in FLAGS:
        parser.add_argument(f"--{flag}".replace("_", "-"), action="store_true")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.model, options.work, options.dry_run, options.engine)
        return
    options.model = options.model or random_model()
    if options.warm:
        first = Job(options, options.jobs[0])
        first.start()
        first.end()
    jobs = {name: Job(options, name) for name in options.jobs}
    for job in jobs.values():
        job.start()
    calls = [("decode", b) for b in DECODES] + [("prefill", *shape) for shape in PREFILLS]
    if options.dry_run:
        calls = [("decode", 1), ("prefill", 1, 50)]
    if not options.engine:
        for job in jobs.values():
            job.facts["graph_gib_after"] = job.facts["graph_gib"] + job.ask("trace")
    found: dict[tuple[str, Any], list[Any]] = {}
    for _ in range(options.rounds):
        for call in calls:
            for name, job in jobs.items():
                found.setdefault((name, call), []).append(job.ask(*call))
    facts, first = list(jobs[options.jobs[0]].facts), options.jobs[0]
    kept = statistics.median if options.engine else min
    print("| job |", *[f"{name} |" for name in (*facts, *[" ".join(map(str, c)) for c in calls])])
    print("| --- |", "--- |" * (len(facts) + len(calls)))
    for name, job in jobs.items():
        for part, what in enumerate([name] if options.engine else [name, "... host"]):
            cells = [f"{job.facts[fact]:.2f}" if part == 0 else "" for fact in facts]
            cells += [f"{kept(r[part] for r in found[name, call]):.3f}" for call in calls]
            print(f"| {what} | {' | '.join(cells)} |")
    report: dict[str, Any] = {"torch": torch.__version__, "ranks": options.ranks, "jobs": {}}
    for name, job in jobs.items():
        pairs = [pair for c in calls for pair in zip(found[name, c], found[first, c], strict=True)]
        same = sum(a == b for one, two in pairs for a, b in zip(one[2], two[2], strict=True))
        total = sum(len(one[2]) for one, _ in pairs)
        pace = "" if options.engine else job.ask("pace")
        print(f"{name}: {same} of {total} tokens as {first}; pace {pace or 'not measured'}")
        report["jobs"][name] = {
            **job.facts,
            **{" ".join(map(str, c)): [taken[0] for taken in found[name, c]] for c in calls},
            "equal_tokens": same,
            "tokens": total,
            "pace": pace,
        }
        job.end()
    if options.json:
        options.json.write_text(json.dumps(report, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
