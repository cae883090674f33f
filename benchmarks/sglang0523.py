"""SGLang 0.5.23 on its own graphs and on devgraph, in turns on one device.

    python benchmarks/sglang0523.py MODEL [--jobs own:default devgraph:default ...] [--rounds 5]

MODEL is a folder with a configuration and weights. A job is LAYER:MODE: the layer is own or
devgraph, the mode default (decode full, prefill breakable), full, breakable or eager. Every job is
SGLang's ModelRunner in a process of its own, through SGLang's benchmark.one_batch. They import
SGLang at the same time, start one after the other, so that captures and memory are each one's own,
stay, and then measure in turns: the least of all rounds counts. The last line of each job is how
fast its device goes from kernel to kernel of a graph, where that can change (docs/fast-replay.md).

With --dry-run a job captures nothing, on the CPU: it shows that SGLang starts and measures.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

# SGLang looks for vLLM, and a file beside this one has its name.
sys.path[:] = [path for path in sys.path if Path(path).resolve() != Path(__file__).resolve().parent]

MODES = {
    "default": {},
    "full": {"decode": {"backend": "full"}, "prefill": {"backend": "full"}},
    "breakable": {"decode": {"backend": "breakable"}, "prefill": {"backend": "breakable"}},
    "eager": {"decode": {"backend": "disabled"}, "prefill": {"backend": "disabled"}},
}
JOBS = ("own:default", "devgraph:default", "own:full", "devgraph:full")
DECODES = (1, 8, 64, 256)
PREFILLS = ((1, 500), (8, 60))
PROMPT, STEPS = 32, 64


class Worker:
    """One job: a model runner, and what is measured on it."""

    def __init__(self, model: str, layer: str, mode: str, dry: bool) -> None:
        from sglang.benchmark import one_batch
        from sglang.srt.server_args import PortArgs, ServerArgs

        options: dict[str, Any] = {"cuda_graph_config": MODES[mode]} if MODES[mode] else {}
        # All jobs share the device.
        options |= {"mem_fraction_static": 0.2, "max_total_tokens": 65536, "context_length": 4096}
        if dry:
            options = {"device": "cpu", "disable_cuda_graph": True, "max_total_tokens": 4096}
            options |= {"attention_backend": "torch_native", "sampling_backend": "pytorch"}
        if layer == "devgraph":
            from devgraph.integrations import sglang

            sglang.install()
        arguments = ServerArgs(model_path=model, grammar_backend="none", **options)
        arguments.resolve_once()
        one_batch.publish(
            arguments,
            role="scheduler",
            ranks=one_batch.SpawnRanks(
                world_rank=one_batch.spawn_world_rank(arguments, tp_rank=0, pp_rank=0), gpu_id=0
            ),
        )
        one_batch._init_process_global_configs()
        self.engine, self.dry, self.layer = one_batch, dry, layer
        self.facts: dict[str, float] = {}
        self._time_captures(one_batch.ModelRunner)
        ports = PortArgs.init_new(arguments)
        self.runner, _ = one_batch.load_model(arguments, ports, 0, 0)

    def _time_captures(self, kind: Any) -> None:
        captures = kind.init_cuda_graphs

        def init_cuda_graphs(runner: Any, *args: Any, **kwargs: Any) -> Any:
            before, started = self._free(), time.perf_counter()
            result = captures(runner, *args, **kwargs)
            self.facts["capture_s"] = time.perf_counter() - started
            self.facts["graph_gib"] = (before - self._free()) / 2**30
            return result

        kind.init_cuda_graphs = init_cuda_graphs

    def _free(self) -> int:
        return 0 if self.dry else torch.cuda.mem_get_info()[0]

    def _extend(self, requests: int, tokens: int) -> Any:
        self.runner.clear()
        words = [[(7 * row + place) % 500 for place in range(tokens)] for row in range(requests)]
        make = self.engine.prepare_synthetic_inputs_for_latency_test
        return self.runner.extend(make(requests, tokens, words))

    def decode(self, batch: int) -> tuple[float, list[int]]:
        """Return milliseconds a step without waiting for each, and the tokens of the last one."""
        tokens, _, state = self._extend(batch, PROMPT)
        steps = 4 if self.dry else STEPS
        self.runner.synchronize()
        started = time.perf_counter()
        for _ in range(steps):
            tokens, _ = self.runner.decode(tokens, state)
        self.runner.synchronize()
        return 1e3 * (time.perf_counter() - started) / steps, tokens.tolist()

    def prefill(self, requests: int, tokens: int) -> tuple[float, list[int]]:
        """Return milliseconds of one step, and its tokens."""
        self.runner.synchronize()
        started = time.perf_counter()
        found, _, _ = self._extend(requests, tokens)
        self.runner.synchronize()
        return 1e3 * (time.perf_counter() - started), found.tolist()

    def pace(self) -> str:
        """Say how fast graphs go now; needs devgraph's probe, in whichever layer."""
        import devgraph

        return str(devgraph.get_backend("auto").replay_pace())


def work(model: str, job: str, dry: bool) -> None:
    """Answer one line of JSON for each: a list of a method's name and its arguments."""
    answers = os.dup(1)
    os.dup2(2, 1)  # SGLang prints
    layer, mode = job.split(":")
    importlib.import_module("sglang.benchmark.one_batch")
    sys.stdin.readline()
    with torch.no_grad(), os.fdopen(answers, "w") as out:
        worker = Worker(model, layer, mode, dry)
        print(json.dumps(worker.facts), file=out, flush=True)
        for line in sys.stdin:
            name, *arguments = json.loads(line)
            print(json.dumps(getattr(worker, name)(*arguments)), file=out, flush=True)
    os._exit(0)  # without SGLang's own ends of processes, which differ between versions


class Job:
    """A worker's process, as its parent sees it."""

    def __init__(self, options: argparse.Namespace, name: str) -> None:
        command = [sys.executable, __file__, options.model, "--work", name]
        self.process = subprocess.Popen(
            [*command, *(["--dry-run"] if options.dry_run else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.facts: dict[str, float] = {}

    def start(self) -> None:
        """Load the model and capture."""
        self.facts = self.ask("start")

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"a job ended with {self.process.wait()}; its log is above")
        return json.loads(line)

    def ask(self, *call: Any) -> Any:
        assert self.process.stdin is not None
        print(json.dumps(call), file=self.process.stdin, flush=True)
        return self._answer()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--jobs", nargs="+", default=list(JOBS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.model, options.work, options.dry_run)
        return
    jobs = {name: Job(options, name) for name in options.jobs}
    for job in jobs.values():
        job.start()
    calls = [("decode", b) for b in DECODES] + [("prefill", *shape) for shape in PREFILLS]
    if options.dry_run:
        calls = [("decode", 1), ("prefill", 1, 50)]
    first = next(iter(jobs))
    print("| job | capture s | graph GiB |", *[f" {' '.join(map(str, call))} |" for call in calls])
    print("| --- |", "--- |" * (2 + len(calls)))
    least: dict[tuple[str, Any], float] = {}
    tokens: dict[tuple[str, Any], list[int]] = {}
    for _ in range(options.rounds):
        for call in calls:
            for name, job in jobs.items():
                taken, tokens[name, call] = job.ask(*call)
                least[name, call] = min(taken, least.get((name, call), taken))
    for name, job in jobs.items():
        facts = f"{job.facts['capture_s']:.1f} | {job.facts['graph_gib']:.2f}"
        print(f"| {name} | {facts} |", *[f"{least[name, call]:.3f} |" for call in calls])
    for name, job in jobs.items():
        same = sum(
            a == b for c in calls for a, b in zip(tokens[name, c], tokens[first, c], strict=True)
        )
        total = sum(len(tokens[name, call]) for call in calls)
        print(f"{name}: {same} of {total} tokens as {first}; pace {job.ask('pace')}")
        job.process.stdin.close()  # type: ignore[union-attr]
        job.process.wait(60)


if __name__ == "__main__":
    main()
