"""vLLM 0.22 to 0.33 on its own graph layer and on devgraph, on one GPU.

    python benchmarks/vllm.py OUTDIR [--deadline 150] [--model 0.6b] [--jobs JOB ...]

A job is RUNNER:MODE, for example v2:default, v2:devgraph or v1:devgraph. Each job is an engine in
its own process; v2:devgraph#2 is another job of the same kind. The jobs import vLLM at the same
time and start one after another, so that start-up, first captures and memory are measured
separately. Then the jobs take turns to measure, so that clock rates and temperature affect all of
them equally. All jobs have the same random weights and the same prompts.

MODE is default or full_vllm (vLLM's own layer with its default mode or with cudagraph_mode FULL),
eager, devgraph (the modes of default), breakable or full (DEVGRAPH_MODE, see docs/vllm.md).

Captures are compared inside each engine of mode devgraph. Its graphs are freed and captured again,
alternately with vLLM's own code and with devgraph, each time into new memory. Capture times of
different processes are not comparable (docs/vllm.md, Alternating captures). With --within, the
engine also decodes after each of these captures, so that steps of both layers are measured in one
process.

With --sleep N, engines sleep and wake N times at level 1 and N times at level 2.

Engines that compile share a new cache folder, and all other engines share another one. Therefore
only the first engine of each kind has a cold start. With --own-caches, each engine has its own
folder and a cold start.

With --together, all engines start at the same time, each with its own caches and a KV cache of
8 GiB. They wait for each other and capture one after another, so that captures and their memory are
still measured separately, but start-up times are not meaningful.

At the end, each engine reports the device time of a forward of 8 requests: without preparation,
after launches that slow graphs down, and after the recovery of all streams (docs/fast-replay.md).

With --ranks N, each engine runs tensor parallel over N devices, with one process of this program
for each rank (vLLM's external launcher). Each result is the maximum over the ranks; captures are
not compared.

With --dry-run, no device is used: the child processes import vLLM, install devgraph and print the
replaced attributes.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import ctypes
import dataclasses
import gc
import itertools
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# This file has the name of the package that it imports.
sys.path[:] = [path for path in sys.path if Path(path).resolve() != Path(__file__).resolve().parent]

BATCHES = (1, 8, 64, 256)
NEW_TOKENS = 128
FIRST_STEPS = 12
PROMPT = 32
PREFILLS = 12
KV_CACHE = 8 * 2**30
CHECKS = (7, 33, 100, 200, 300, 450)
FACTS = ("start_s", "compile_s", "capture_s", "graph_gib", "pool_gib", "served_gib")
PHASES = (
    "init_device",
    "load_model",
    "determine_available_memory",
    "initialize_from_config",
    "compile_or_warm_up_model",
)
LAYERS = ("devgraph", "vllm")
RECAPTURE = (*(f"{name}_s" for name in LAYERS), "ratio")
UNCOMPILED = ("eager", "breakable")
SLEEPS = "BENCHMARK_SLEEPS"
"""Environment variable of child processes; if it is set, their engines can sleep."""
RANKS = {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "MASTER_ADDR": "127.0.0.1"}
"""Environment of engines with several ranks; they do not use NVLink multicast."""
JOBS = ("v2:default", "v2:devgraph", "v2:breakable", "v1:devgraph", "v1:default")

QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 40960,
    "model_type": "qwen3",
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
MODELS: dict[str, dict[str, Any]] = {
    "0.6b": {
        **QWEN3,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "max_window_layers": 28,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "tie_word_embeddings": True,
    },
    "8b": {
        **QWEN3,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "max_window_layers": 36,
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "tie_word_embeddings": False,
    },
}
ENGINE: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    "full_vllm": {"compilation_config": {"cudagraph_mode": "FULL"}},
}
INSTALL: dict[str, str | None] = {
    "devgraph": None,
    "breakable": '{"decode": "full", "prefill": "breakable"}',
    "full": '{"decode": "full", "prefill": "full"}',
}
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_DEEP_GEMM": "0",
    "TOKENIZERS_PARALLELISM": "false",
}


class Subject:
    """The engine of a child process, and its measurements."""

    def __init__(self, model: str, runner: str, mode: str, folder: str) -> None:
        self.model, self.runner_name, self.mode, self.folder = model, runner, mode, folder
        self.facts: dict[str, Any] = {}
        self.timing = ""
        self.wait: Callable[[], None] | None = None
        self.streams: dict[int, Any] = {}
        self.host: list[float] = []
        self.events: list[Any] = []
        self.ends: list[float] = []

    def load(self) -> None:
        """Import the modules of the engine without using a device."""
        import torch
        from vllm import LLM  # noqa: F401
        from vllm.model_executor.models import qwen3  # noqa: F401
        from vllm.v1.attention.backends import flash_attn  # noqa: F401
        from vllm.v1.worker import gpu_worker
        from vllm.v1.worker.gpu import cudagraph_utils
        from vllm.v1.worker.gpu.model_runner import GPUModelRunner as Second
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner as First

        self.torch = torch
        self.runner: Any = None
        self.managers = cudagraph_utils
        self.first = First
        self.layers = {"vllm": self._layer()}
        for cls in (First, Second):
            self._hook(cls)
        for name in PHASES:
            self._time_phase(gpu_worker.Worker, name)
        self._watch_streams()

    def _layer(self) -> list[tuple[Any, str, Any]]:
        """Return the attributes of vLLM that differ between the two graph layers."""
        places = (
            (self.managers, "torch"),
            (self.managers.CudaGraphManager, "capture"),
            (self.first, "_capture_cudagraphs"),
            (self.first, "_warmup_and_capture"),
        )
        return [(owner, name, getattr(owner, name)) for owner, name in places]

    def _hook(self, cls: Any) -> None:
        capture, load = cls.capture_model, cls.load_model

        def capture_model(runner: Any, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("profile_only"):
                return capture(runner, *args, **kwargs)
            if self.wait is not None:
                self.wait()
            self.torch.cuda.synchronize()
            reserved, started = self.torch.cuda.memory_reserved(), time.perf_counter()
            taken = capture(runner, *args, **kwargs)
            self.torch.cuda.synchronize()
            self.facts["capture_s"] = time.perf_counter() - started
            self.facts["graph_gib"] = taken / 2**30
            self.facts["pool_gib"] = (self.torch.cuda.memory_reserved() - reserved) / 2**30
            if self.wait is not None:
                self.wait()
            return taken

        def load_model(runner: Any, *args: Any, **kwargs: Any) -> Any:
            self.runner = runner
            return load(runner, *args, **kwargs)

        cls.capture_model, cls.load_model = capture_model, load_model

    def _time_phase(self, cls: Any, name: str) -> None:
        phase = getattr(cls, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = phase(*args, **kwargs)
            phases = self.facts.setdefault("phases_s", {})
            phases[name] = phases.get(name, 0.0) + time.perf_counter() - started
            return result

        setattr(cls, name, timed)

    def _watch_streams(self) -> None:
        """Record every stream that becomes current."""
        put = self.torch.cuda.set_stream

        def set_stream(stream: Any) -> None:
            if stream is not None:
                self.streams[stream.cuda_stream] = stream
            put(stream)

        self.torch.cuda.set_stream = set_stream

    def start(self, wait: Callable[[], None] | None = None) -> dict[str, Any]:
        """Build the engine and generate the first token.

        Args:
            wait: function to call before and after the captures. If it is given, the size of the KV
                cache is fixed.
        """
        from vllm import LLM

        self.wait = wait
        started = time.perf_counter()
        self.install()
        self.llm = LLM(
            model=self.folder,
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype="bfloat16",
            max_model_len=4096,
            gpu_memory_utilization=0.12 if self.model == "0.6b" else 0.25,
            enable_prefix_caching=False,
            seed=0,
            kv_cache_memory_bytes=None if wait is None else KV_CACHE,
            enable_sleep_mode=bool(os.environ.get(SLEEPS)),
            **ENGINE.get(self.mode, {}),
            **self._ranks(),
        )
        self.wait = None
        self.generate([self.prompt(random.Random(1), 8)], 1)
        config = self.llm.llm_engine.vllm_config.compilation_config
        self.facts.update(
            start_s=time.perf_counter() - started,
            compile_s=config.compilation_time,
            cudagraph_mode=str(config.cudagraph_mode),
            runner=type(self.runner).__module__,
            sizes=len(config.cudagraph_capture_sizes or []),
            served_gib=0.0,
        )
        self._fill_weights()
        self._watch_forward()
        self._watch_steps()
        return self.facts

    def _ranks(self) -> dict[str, Any]:
        """Return the options of an engine with several ranks."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        launcher = {"distributed_executor_backend": "external_launcher"}
        return {"tensor_parallel_size": size, **launcher} if size > 1 else {}

    def install(self) -> list[str]:
        """Install devgraph if the job's mode uses it; return the replaced attributes."""
        from devgraph.integrations import vllm

        if self.mode in INSTALL:
            vllm.install(mode=INSTALL[self.mode], strict=True)
            self.layers["devgraph"] = self._layer()
        places: list[str] = vllm.stats()["installed"]
        return places

    def _fill_weights(self) -> None:
        # Dummy loading sets norms near zero, so that all outputs would be equal.
        generator = self.torch.Generator(device="cuda")
        generator.manual_seed(1)
        with self.torch.inference_mode():
            for name, parameter in self.runner.get_model().named_parameters():
                if "norm" in name:
                    parameter.fill_(1.0)
                else:
                    parameter.normal_(0, 0.02, generator=generator)

    def _watch_forward(self) -> None:
        if self.runner_name == "v1":
            self.runner._model_forward = self._timed(self.runner._model_forward)
        elif self.mode != "eager":
            manager = self.runner.cudagraph_manager
            manager.run_fullgraph = self._timed(manager.run_fullgraph)

    def _watch_steps(self) -> None:
        step = self.llm.llm_engine.step

        def run() -> Any:
            result = step()
            self.ends.append(time.perf_counter())
            return result

        self.llm.llm_engine.step = run

    def recapture(self, count: int, seconds: float, within: bool) -> dict[str, list[Any]]:
        """Capture alternately with vLLM's own code and with devgraph; keep devgraph's graphs.

        A warm-up turn precedes up to ``count`` measured turns. After ``seconds``, no further turn
        begins. Return the seconds of every capture by layer. With ``within``, also return the
        results of ``decode`` for each turn under ``LAYER_steps``.
        """
        from vllm.compilation.cuda_graph import CUDAGraphWrapper
        from vllm.platforms import current_platform

        # Each entry has an object with graphs, its class in devgraph and the base class of vLLM.
        holders = [(w, type(w), CUDAGraphWrapper) for w in CUDAGraphWrapper._all_instances]
        manager = getattr(self.runner, "cudagraph_manager", None)
        found: dict[str, list[Any]] = {name: [] for name in LAYERS}

        def capture(layer: str) -> float:
            CUDAGraphWrapper.clear_all_graphs()
            handle = current_platform.graph_pool_handle()
            for holder, ours, theirs in holders:
                holder.__class__ = ours if layer == "devgraph" else theirs
                holder.graph_pool = handle
            if manager is not None:
                manager.graphs.clear()
                manager.pool = handle
            for owner, name, value in self.layers[layer]:
                setattr(owner, name, value)
            # Free memory of the other layer outside of the timing, and return free host memory to
            # the system, so that no layer reuses memory of the other layer.
            gc.collect()
            self.torch.cuda.synchronize()
            self.torch.cuda.empty_cache()
            ctypes.CDLL(None).malloc_trim(0)
            with self.torch.inference_mode():
                self.runner.capture_model()
            return float(self.facts["capture_s"])

        until = time.monotonic() + seconds
        for number in range(1 + count):
            for layer in LAYERS if number % 2 else LAYERS[::-1]:
                taken = capture(layer)
                steps = [self.decode(batch) for batch in BATCHES] if within else []
                if number:
                    found[layer].append(taken)
                    found.setdefault(f"{layer}_steps", []).append(steps)
            if number and time.monotonic() > until:
                break
        if layer != "devgraph":
            capture("devgraph")
        return found

    def _timed(self, forward: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            if self.timing == "host":
                started = time.perf_counter()
                result = forward(*args, **kwargs)
                self.host.append(time.perf_counter() - started)
                return result
            if self.timing == "device":
                before, after = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
                before.record()
                result = forward(*args, **kwargs)
                after.record()
                self.events.append((before, after))
                return result
            return forward(*args, **kwargs)

        return run

    def prompt(self, rng: random.Random, length: int) -> Any:
        from vllm.inputs import TokensPrompt

        return TokensPrompt(prompt_token_ids=[rng.randrange(1000, 150000) for _ in range(length)])

    def generate(self, prompts: list[Any], count: int, **options: Any) -> tuple[float, Any]:
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False, **options
        )
        self.torch.cuda.synchronize()
        started = time.perf_counter()
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        self.torch.cuda.synchronize()
        return time.perf_counter() - started, outputs

    def decode(self, batch: int) -> dict[str, float]:
        """Run one round of decoding, and return its times.

        The times are the median and mean step, the host and device time of a forward, and the
        minimum device time. With several ranks, the median device time includes the wait for the
        slower host.
        """
        rng = random.Random(batch)
        prompts = [self.prompt(rng, PROMPT) for _ in range(batch)]
        free = self.torch.cuda.mem_get_info()[0]
        self.host.clear()
        self.ends.clear()
        self.events.clear()
        self.timing = "host"
        self.generate(prompts, NEW_TOKENS)
        # The first steps are prefill, and refill caches that other engines have used.
        ends, host = self.ends[FIRST_STEPS:], self.host[FIRST_STEPS:]
        steps = [after - before for before, after in itertools.pairwise(ends)]
        self.timing = "device"
        self.generate(prompts, 3 * FIRST_STEPS)
        self.timing = ""
        device = [before.elapsed_time(after) for before, after in self.events[FIRST_STEPS:]]
        # Count executables that were created at first launch, and allocations of the engine.
        self.facts["served_gib"] += (free - self.torch.cuda.mem_get_info()[0]) / 2**30
        return {
            "step_ms": statistics.median(steps) * 1e3,
            "mean_step_ms": statistics.fmean(steps) * 1e3,
            "host_us": statistics.median(host) * 1e6 if host else float("nan"),
            "device_ms": statistics.median(device) if device else float("nan"),
            "least_device_ms": min(device, default=float("nan")),
        }

    def pace(self) -> dict[str, float]:
        """Return the device time of a forward of 8 requests in three states of the process.

        The process is measured unchanged, after launches on side streams, and after the recovery of
        the pace of every stream.
        """
        import devgraph as dg

        found = {"as_it_is_ms": self.decode(8)["device_ms"]}
        word, sides = self.torch.zeros(1, device="cuda"), []
        for _ in range(4):
            sides.append(self.torch.cuda.Stream())
            with self.torch.cuda.stream(sides[-1]):
                for _ in range(16):
                    word.add_(1)
        found["slowed_ms"] = self.decode(8)["device_ms"]
        for stream in (self.torch.cuda.default_stream(), *self.streams.values()):
            dg.get_backend("cuda").recover_pace(stream)
        return {**found, "recovered_ms": self.decode(8)["device_ms"]}

    def prefill(self, length: int, batch: int) -> dict[str, float]:
        """Run one round of prefill without decoding, and return its time."""
        rng = random.Random(length)
        prompts = [self.prompt(rng, length) for _ in range(batch)]
        times = [self.generate(prompts, 1)[0] for _ in range(PREFILLS)]
        return {"ms": statistics.median(times[2:]) * 1e3}

    def sleep(self, level: int) -> dict[str, float]:
        """Sleep and wake up once; return the released and the remaining GiB, and the times."""
        free, total = self.torch.cuda.mem_get_info()
        times = [time.perf_counter()]
        self.llm.sleep(level=level)
        self.torch.cuda.synchronize()
        times.append(time.perf_counter())
        asleep = self.torch.cuda.mem_get_info()[0]
        times.append(time.perf_counter())
        self.llm.wake_up()
        self.torch.cuda.synchronize()
        times.append(time.perf_counter())
        if level == 2:
            self._fill_weights()
        return {
            "back_gib": (asleep - free) / 2**30,
            "used_gib": (total - asleep) / 2**30,
            "sleep_s": times[1] - times[0],
            "wake_s": times[3] - times[2],
            "first_token_s": self.generate([self.prompt(random.Random(1), 8)], 1)[0],
        }

    def check(self) -> list[list[int]]:
        """Return greedy tokens of each prompt in a batch of one."""
        rng = random.Random(11)
        found = []
        for length in CHECKS:
            outputs = self.generate([self.prompt(rng, length)], 8)[1]
            found.append([int(token) for token in outputs[0].outputs[0].token_ids])
        return found

    def check_padded_eager(self) -> list[list[int]]:
        """Return the tokens of ``check`` without graphs, at the padded sizes of the graphs (V2)."""
        from vllm.config import CUDAGraphMode

        manager = self.runner.cudagraph_manager
        dispatch = manager.dispatch

        def eager(*args: Any, **kwargs: Any) -> Any:
            found = dispatch(*args, **kwargs)
            return dataclasses.replace(found, cg_mode=CUDAGraphMode.NONE)

        manager.dispatch = eager
        try:
            return self.check()
        finally:
            manager.dispatch = dispatch

    def stats(self) -> dict[str, Any]:
        """Return the counters of devgraph, and the versions of this run."""
        import vllm as engine

        from devgraph.integrations import vllm

        return {
            "gpu": self.torch.cuda.get_device_name(),
            "torch": self.torch.__version__,
            "served_gib": self.facts["served_gib"],
            "vllm": engine.__version__,
            "devgraph": vllm.stats() if self.mode in INSTALL else None,
        }


def runner_and_mode(job: str) -> tuple[str, str]:
    """Return the runner and the mode of a job."""
    runner, mode = job.split("#")[0].split(":")
    return runner, mode


def child(model: str, job: str, folder: str, log: str) -> None:
    """Answer commands of the parent with a JSON line each; write the engine's output to ``log``."""
    answers = os.fdopen(os.dup(1), "w")
    written = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(written, 1)
    os.dup2(written, 2)
    runner, mode = runner_and_mode(job)
    subject = Subject(model, runner, mode, folder)

    def answer(result: Any) -> None:
        answers.write(json.dumps(result) + "\n")
        answers.flush()

    def wait() -> None:
        answer("waits")
        sys.stdin.readline()

    subject.load()
    answer(True)
    # Iteration over stdin would read ahead and take the line that ``wait`` needs.
    while line := sys.stdin.readline():
        name, *arguments = json.loads(line)
        if name == "start_together":
            answer(subject.start(wait))
        else:
            answer(getattr(subject, name)(*arguments))


def slower(answers: list[Any]) -> Any:
    """Merge the answers of all ranks of an engine; of each number, keep the maximum."""
    first = answers[0]
    if isinstance(first, dict):
        names = [name for name in first if all(name in answer for answer in answers)]
        return {name: slower([answer[name] for answer in answers]) for name in names}
    return max(answers) if isinstance(first, (int, float)) else first


class Job:
    """The child processes of one engine, and their results."""

    def __init__(self, model: str, name: str, out: Path, cache: str, ranks: int = 1) -> None:
        self.name = name
        self.runner, self.mode = runner_and_mode(name)
        self.result: dict[str, Any] = {"ranks": ranks, "decode": {}, "prefill": {}}
        self.alive = True
        folder = out / "model"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(MODELS[model]))
        label = name.replace(":", "_").replace("#", "_")
        environment = {**os.environ, **ENVIRONMENT}
        environment["VLLM_USE_V2_MODEL_RUNNER"] = "1" if self.runner == "v2" else "0"
        environment["VLLM_CACHE_ROOT"] = cache
        environment["TORCHINDUCTOR_CACHE_DIR"] = f"{cache}/inductor"
        environment["TRITON_CACHE_DIR"] = f"{cache}/triton"
        command = [sys.executable, __file__, str(out), "--model", model, "--child", name]
        port = free_port() if ranks > 1 else 0
        self.processes = []
        for rank in range(ranks):
            if ranks > 1:
                environment |= {**RANKS, "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
                environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            log = out / f"{label}{f'_rank{rank}' if ranks > 1 else ''}.log"
            self.processes.append(
                subprocess.Popen(
                    [*command, "--folder", str(folder), "--log", str(log)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env=environment,
                )
            )

    def end(self) -> None:
        """Kill the processes."""
        for process in self.processes:
            process.kill()
            process.wait()

    def ask(self, *command: Any) -> Any:
        """Return the answer to ``command``, or None if the process has ended."""
        self.tell(*command)
        return self.answer(command[0])

    def tell(self, *command: Any) -> None:
        """Send ``command`` without waiting for the answer."""
        for process in self.processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(json.dumps(command) + "\n")
                process.stdin.flush()

    def answer(self, what: str) -> Any:
        """Wait for the next answer; return None if a process has ended."""
        if not self.alive:
            return None
        answers = []
        for process in self.processes:
            assert process.stdout is not None
            if not (line := process.stdout.readline()):
                self.alive = False
                self.result["failed"] = what
                print(f"{self.name}: ended at {what}; see its log", flush=True)
                return None
            answers.append(json.loads(line))
        if what == "check" and any(answer != answers[0] for answer in answers):
            print(f"{self.name}: the ranks have different tokens: {answers}", flush=True)
        return slower(answers)


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def start_together(jobs: list[Job]) -> None:
    """Start engines at the same time, and let them capture one after another."""
    for job in jobs:
        job.tell("start_together")
    waiting = []
    for job in jobs:
        found = job.answer("start")
        if found == "waits":
            waiting.append(job)
        else:  # An engine without graphs.
            job.result.update(found or {})
    waiting = [job for job in waiting if job.ask("capture") == "waits"]
    for job in waiting:
        job.tell("go on")
    for job in waiting:
        job.result.update(job.answer("start") or {})


def recapture(job: Job, count: int, seconds: float, within: bool) -> None:
    """Let one engine capture again with both layers; keep the medians of times and of ratios."""
    found = job.ask("recapture", count, seconds, within)
    if found is None:
        return

    def medians(own: list[float], other: list[float]) -> list[float]:
        ratios = [a / b for a, b in zip(own, other, strict=True)]
        return [statistics.median(values) for values in (own, other, ratios)]

    own, other = found["devgraph"], found["vllm"]
    compared = dict(zip(RECAPTURE, medians(own, other), strict=True))
    job.result["recapture"] = {**found, **compared}
    for index, batch in enumerate(BATCHES if within else ()):
        for key in ("step_ms", "mean_step_ms", "device_ms", "host_us"):
            turns = [[turn[index][key] for turn in found[f"{name}_steps"]] for name in LAYERS]
            values = ", ".join(f"{value:.3f}" for value in medians(*turns))
            print(f"{job.name} batch {batch} {key}: {values} ({'/'.join(LAYERS)})", flush=True)


def sleep(job: Job, cycles: int) -> None:
    """Let one engine sleep and wake up at both levels, and compare its tokens after each level."""
    for level in (1, 2):
        turns = [found for _ in range(cycles) if (found := job.ask("sleep", level))]
        tokens = job.ask("check")
        equal = sum(a == b for a, b in zip(tokens or (), job.result["tokens"], strict=False))
        job.result[f"sleep_{level}"] = {"turns": turns, "equal_tokens": equal}
        for turn in turns:
            text = " ".join(f"{key}={value:.3f}" for key, value in turn.items())
            print(f"{job.name} sleep level {level}: {text}", flush=True)
        print(f"{job.name} tokens as before level {level}: {equal}/{len(CHECKS)}", flush=True)


def measure(
    jobs: list[Job], repeats: int, late: Callable[[], bool], save: Callable[[], None]
) -> None:
    """Let all started jobs measure alternately, and keep medians."""
    tasks: list[tuple[str, str, tuple[Any, ...]]] = [
        ("decode", str(batch), ("decode", batch)) for batch in BATCHES
    ]
    tasks += [("prefill", "1x500", ("prefill", 500, 1)), ("prefill", "8x60", ("prefill", 60, 8))]
    for kind, label, command in tasks:
        rounds: dict[str, list[dict[str, float]]] = {job.name: [] for job in jobs}
        for number in range(repeats + 1):
            if late():
                break
            for job in jobs if number % 2 else jobs[::-1]:
                found = job.ask(*command)
                if found is not None and number:  # The first round is a warm-up.
                    rounds[job.name].append(found)
        for job in jobs:
            values = rounds[job.name]
            if values:
                job.result[kind][label] = {
                    key: statistics.median(value[key] for value in values) for key in values[0]
                }
                job.result.setdefault("turns", {})[label] = values
        save()


def report(jobs: list[Job]) -> str:
    """Return one line per job."""
    lines = []
    references = {job.runner: job.result.get("tokens") for job in jobs if job.mode == "default"}
    for job in jobs:
        reference = references.get(job.runner)
        found = job.result
        tokens, padded = found.get("tokens"), found.get("tokens_padded_eager")
        times = " ".join(f"{key}={found.get(key, 0):.3f}" for key in FACTS)
        parts = [f"{job.name} {times}"]
        if "recapture" in found:
            parts += [f"re_{key}={found['recapture'][key]:.3f}" for key in RECAPTURE]
        for batch, value in found["decode"].items():
            parts.append(
                f"b{batch}={value['step_ms']:.3f}ms,{value['host_us']:.1f}us,"
                f"{value['device_ms']:.3f}ms"
            )
        if found.get("pace"):
            parts += [f"{key}={value:.3f}" for key, value in found["pace"].items()]
        for label, value in found["prefill"].items():
            parts.append(f"{label}={value['ms']:.2f}ms")
        for name, count in ((found.get("devgraph") or {}).get("modes") or {}).items():
            if count["captures"]:
                parts.append(f"{name}_eager={json.dumps(count['eager'])}")
        for name, other in (("default", reference), ("padded_eager", padded)):
            if tokens and other:
                equal = [a == b for a, b in zip(tokens, other, strict=True)]
                parts.append(f"equal_to_{name}={sum(equal)}/{len(equal)}")
        lines.append(" ".join(parts))
    return "\n".join(lines)


def main() -> None:
    """Run the jobs that fit before the deadline; update OUTDIR/results.json after each part."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--jobs", nargs="+", default=JOBS, metavar="RUNNER:MODE")
    parser.add_argument("--model", default="0.6b", choices=sorted(MODELS))
    parser.add_argument("--deadline", type=float, default=600.0, help="limit of the run in seconds")
    parser.add_argument(
        "--repeats", type=int, default=3, help="rounds; 0 only captures and compares tokens"
    )
    parser.add_argument(
        "--captures", type=int, default=8, help="turns of captures (default: 8; 0: none)"
    )
    parser.add_argument(
        "--own-caches",
        action="store_true",
        help="one cache folder per engine, so that all start cold",
    )
    parser.add_argument(
        "--together",
        action="store_true",
        help="start all engines at the same time; they still capture one after another",
    )
    parser.add_argument(
        "--within", action="store_true", help="also decode after each capture of both layers"
    )
    parser.add_argument("--sleep", type=int, default=0, help="cycles of sleep at each level")
    parser.add_argument("--ranks", type=int, default=1, help="devices per engine (default: 1)")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--dry-run", action="store_true", help="measure nothing")
    parser.add_argument("--child")
    parser.add_argument("--folder")
    parser.add_argument("--log")
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.model, arguments.child, arguments.folder, arguments.log)
        return
    os.environ[SLEEPS] = "1" if arguments.sleep else ""
    began = time.monotonic()
    captures = arguments.captures if arguments.ranks == 1 else 0
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    caches = collections.defaultdict(lambda: tempfile.mkdtemp(prefix="vllm-"))

    def cache_of(name: str) -> str:
        own = arguments.own_caches or arguments.together
        return caches[name if own else runner_and_mode(name)[1] in UNCOMPILED]

    jobs = [
        Job(arguments.model, name, out, cache_of(name), arguments.ranks) for name in arguments.jobs
    ]
    for job in jobs:
        job.answer("import")  # No job starts while another job still imports.
    if arguments.dry_run:
        for job in jobs:
            print(f"{job.name}: {job.ask('install')}")
            job.end()
        return

    def late() -> bool:
        return time.monotonic() - began > arguments.deadline

    def save() -> None:
        results = {job.name: job.result for job in jobs}
        for path in (out / "results.json", *([arguments.json] if arguments.json else ())):
            path.write_text(json.dumps(results, indent=1))

    def group(members: list[Job]) -> None:
        if arguments.together:
            start_together(members)
        for job in members:
            if not arguments.together and not late():
                job.result.update(job.ask("start") or {})
        for job in members:
            if job.mode == "devgraph" and "start_s" in job.result and captures:
                left = arguments.deadline - (time.monotonic() - began)
                recapture(job, captures, left / 2, arguments.within)
        for job in members:
            if "start_s" in job.result:
                job.result["tokens"] = job.ask("check")
                save()
        started = [job for job in members if job.result.get("tokens")]
        for job in started:
            if job.name.startswith("v2:breakable"):
                job.result["tokens_padded_eager"] = job.ask("check_padded_eager")
        for job in started:
            if arguments.sleep:
                sleep(job, arguments.sleep)
                save()
        if arguments.repeats:
            measure(started, arguments.repeats, late, save)
        for job in started:
            job.result.update(job.ask("stats") or {})
            if arguments.repeats and not late():
                job.result["pace"] = job.ask("pace")
        save()
        print(report(started), flush=True)
        for job in members:
            job.end()  # Free the memory for the next jobs.

    if arguments.together:
        group(jobs)
        return
    for runner in dict.fromkeys(job.runner for job in jobs):
        group([job for job in jobs if job.runner == runner])


if __name__ == "__main__":
    main()
