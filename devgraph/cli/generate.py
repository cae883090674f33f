"""``devgraph generate``: a language model through the runners, as text, tables and data."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import secrets
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import attrs
import torch
from transformers.utils import logging as transformers_logging

from devgraph.api.backend import Backend
from devgraph.api.config.facts import EngineFacts
from devgraph.api.config.model import DeviceGraphConfig
from devgraph.api.config.phase import PhaseConfig
from devgraph.api.config.resolve import Resolution, resolve
from devgraph.api.registry import get_backend
from devgraph.cli.arguments import MOST_REQUESTS, MOST_STEP_TOKENS, mode_of
from devgraph.cli.tables import (
    CommandError,
    number,
    percent,
    print_json,
    print_table,
    ranges,
    ratio,
    say,
    time_text,
    working,
)
from devgraph.integrations.transformers import (
    Completion,
    Engine,
    EngineStats,
    SamplingParams,
    TokenEvent,
    load,
)
from devgraph.runners.report import RunnerStats, format_bytes


def run(args: argparse.Namespace) -> int:
    """Generate and print; 1 when graphs and eager give different tokens."""
    return generate(args, _prompts(args))


def generate(args: argparse.Namespace, prompts: Sequence[str]) -> int:
    """Run ``prompts`` as ``args`` say; return the exit code."""
    backend = get_backend(args.backend)
    # The integration swaps parts of the model in and out around each step.
    facts = EngineFacts(traceable=False).on_backend(backend.name, backend.capabilities)
    resolution = resolve(mode_of(args), facts)
    dtype = None if args.dtype is None else getattr(torch, args.dtype)
    sampling = _sampling(args, len(prompts))  # may refuse; the model takes its time
    transformers_logging.disable_progress_bar()
    with working(f"loading {args.model}"):
        network, tokenizer = load(args.model, dtype=dtype, device=backend.device)
    task = Task(
        args=args,
        backend=backend,
        config=resolution.effective,
        network=network,
        tokenizer=tokenizer,
        prompts=[list(tokenizer(prompt)["input_ids"]) for prompt in prompts],
        sampling=sampling,
    )
    runs = run_all(task, None if args.json else _shown(prompts))
    if args.json:
        print_json(report(task, resolution, prompts, runs))
    else:
        print_runs(task, resolution, runs)
    return 1 if same_tokens(runs) is False else 0


def _shown(prompts: Sequence[str]) -> Callable[[TokenEvent], None]:
    """Return what prints the events of a new engine, which numbers its requests from 0."""
    text = OrderedText([f"[{index + 1}] {prompt}" for index, prompt in enumerate(prompts)])

    def show(event: TokenEvent) -> None:
        text.add(event.request_id, event.text, last=event.finish_reason is not None)

    return show


def _prompts(args: argparse.Namespace) -> list[str]:
    if args.prompt:
        return list(args.prompt)
    file = args.prompts_file
    piped = file in (None, "-")
    if piped and (sys.stdin is None or (file is None and sys.stdin.isatty())):
        raise CommandError("no prompt: give --prompt TEXT, --prompts-file FILE, or pipe one a line")
    name = "standard input" if piped else file
    try:
        text = sys.stdin.read() if piped else Path(file).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:  # of text that is no UTF-8, and of a name with a zero
        raise CommandError(f"cannot read {name}: {error}") from error
    prompts = [line for line in text.split("\n") if line.strip()]
    if not prompts:
        raise CommandError(f"no prompt in {name}: one a line")
    return prompts


def _sampling(args: argparse.Namespace, prompts: int) -> list[SamplingParams]:
    drawn = {"--top-k": args.top_k, "--top-p": args.top_p != 1, "--seed": args.seed is not None}
    if idle := [flag for flag, given in drawn.items() if given and not args.temperature]:
        raise CommandError(f"{' and '.join(idle)}: greedy draws nothing; add --temperature T")
    if args.temperature and args.seed is None:
        args.seed = secrets.randbelow(1 << 31)
    return [
        SamplingParams(
            temperature=args.temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            seed=None if args.seed is None else args.seed + index,
        )
        for index in range(prompts)
    ]


class OrderedText:
    """Prints texts one after the other, each as it comes.

    Requests run at once, and a terminal has one cursor: the first unfinished text is printed live,
    the others wait in memory, and the next one catches up when it is its turn.

    Args:
        headings: printed before each text, without a line break in between.
        out: where to; standard output if None.
    """

    def __init__(self, headings: Sequence[str], out: TextIO | None = None) -> None:
        self._out = sys.stdout if out is None else out
        self._waiting = list(headings)
        self._finished = [False] * len(headings)
        self._current = 0

    def add(self, index: int, piece: str, *, last: bool = False) -> None:
        """Add a piece to text ``index``; ``last`` says that nothing more will come."""
        self._waiting[index] += f"{piece}\n\n" if last else piece
        self._finished[index] = last
        while self._current < len(self._waiting):
            self._out.write(self._waiting[self._current])
            self._waiting[self._current] = ""
            if not self._finished[self._current]:
                break
            self._current += 1
        self._out.flush()


@attrs.frozen(kw_only=True)
class Task:
    """What is asked of every engine, and what engines are made of."""

    args: argparse.Namespace
    """Of the command line; sizes are None there where the prompts decide."""
    backend: Backend
    config: DeviceGraphConfig
    network: Any
    tokenizer: Any
    prompts: list[list[int]]
    """Token ids."""
    sampling: list[SamplingParams]

    def engine(self, config: DeviceGraphConfig) -> Engine:
        """Return an engine that the task fits in, no larger than needed: every bucket costs."""
        args = self.args
        lengths = [len(ids) for ids in self.prompts]
        requests = args.max_requests or max(
            min(len(lengths), MOST_REQUESTS), *(self.config.decode.buckets or (1,))
        )
        whole = -(-sum(lengths) // 16) * 16
        step_tokens = args.max_step_tokens or max(
            min(whole, MOST_STEP_TOKENS), requests, *(self.config.prefill.buckets or (1,))
        )
        return Engine(
            self.network,
            self.tokenizer,
            config=config,
            backend=self.backend,
            max_requests=requests,
            max_len=max(lengths) + args.max_new_tokens,
            max_step_tokens=step_tokens,
            steps_per_launch=min(args.steps_per_launch, args.max_new_tokens),
            fuse=args.fuse,
        )


@attrs.frozen(kw_only=True)
class Run:
    """One way to run the task, with the medians of its repeats."""

    name: str
    tokens: tuple[tuple[int, ...], ...]
    """Generated ids of every prompt."""
    texts: tuple[str, ...]
    finish: tuple[str, ...]
    seconds: float
    """Time in steps, without printing."""
    decode_seconds: float
    decode_tokens: int
    capture_seconds: float | None = None
    phases: tuple[RunnerStats, ...]
    fused: dict[str, int] | None
    """What was computed with fewer kernels, by kind; None with ``--no-fuse``."""
    unfused: dict[str, int] | None
    """How many of what was not, by the reason."""

    @property
    def generated(self) -> int:
        """Tokens of all prompts."""
        return sum(map(len, self.tokens))

    @property
    def rate(self) -> float:
        """Tokens a second, prompts' time included."""
        return self.generated / self.seconds

    @property
    def decode_rate(self) -> float | None:
        """Tokens a second of the decode steps."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else None

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON has it."""
        return {
            **attrs.asdict(self, filter=lambda field, _: field.name != "phases"),
            "generated": self.generated,
            "tokens_per_second": self.rate,
            "decode_tokens_per_second": self.decode_rate,
            "phases": [stats.to_dict() for stats in self.phases],
        }


_Repeat = tuple[list[Completion], EngineStats]


def run_all(task: Task, on_event: Callable[[TokenEvent], None] | None = None) -> list[Run]:
    """Run the task with graphs, and if asked eagerly.

    Graphs and eager take turns, so that a change of the machine's speed meets both. ``on_event``
    receives the events of the first run with graphs.
    """
    with contextlib.ExitStack() as stack:
        graphs = stack.enter_context(task.engine(task.config))
        begin = time.perf_counter()
        graphs.capture()
        task.backend.synchronize()
        capture_seconds = time.perf_counter() - begin
        engines, repeats = {"graphs": graphs}, {"graphs": [run_engine(graphs, task, on_event)]}
        if task.args.compare:
            stack.enter_context(working("running eagerly"))
            engines["eager"] = stack.enter_context(_eager_engine(task))
            repeats["eager"] = [run_engine(engines["eager"], task)]
        for _ in range(task.args.repeats - 1):
            for name, engine in engines.items():
                repeats[name].append(run_engine(engine, task))
        runs = [_summary(name, engine, repeats[name]) for name, engine in engines.items()]
    runs[0] = attrs.evolve(runs[0], capture_seconds=capture_seconds)
    return runs


def _eager_engine(task: Task) -> Engine:
    off = PhaseConfig(policy="disabled")
    engine = task.engine(DeviceGraphConfig(decode=off, prefill=off))
    # What a capture's warm-up runs have set up for the other engine is not part of its speed.
    engine.generate([task.prompts[0]], max_new_tokens=2)
    return engine


def run_engine(
    engine: Engine, task: Task, on_event: Callable[[TokenEvent], None] | None = None
) -> _Repeat:
    """Run the task once through a captured engine and return what this run added."""
    engine.reset_stats()
    done = engine.generate(
        task.prompts,
        max_new_tokens=task.args.max_new_tokens,
        sampling=task.sampling,
        on_event=on_event,
    )
    return done, engine.stats()


def _summary(name: str, engine: Engine, repeats: Sequence[_Repeat]) -> Run:
    done, _ = repeats[0]
    stats = [one for _, one in repeats]
    fusion = engine.model.fusion
    return Run(
        name=name,
        tokens=tuple(one.token_ids for one in done),
        texts=tuple(one.text for one in done),
        finish=tuple(str(one.finish_reason) for one in done),
        seconds=statistics.median(one.seconds for one in stats),
        decode_seconds=statistics.median(one.decode_seconds for one in stats),
        decode_tokens=stats[0].decode_tokens,
        phases=tuple(runner.stats() for runner in engine.runners),
        fused=None if fusion is None else fusion.counts,
        unfused=None if fusion is None else fusion.unfused,
    )


def first_difference(left: Run, right: Run) -> tuple[int, int, int | None, int | None] | None:
    """Return where two runs first differ: the prompt, the token, and what each has there, None
    behind its end. None where they do not."""
    for prompt, pair in enumerate(zip(left.tokens, right.tokens, strict=True)):
        for token, (a, b) in enumerate(itertools.zip_longest(*pair)):
            if a != b:
                return prompt, token, a, b
    return None


def same_tokens(runs: Sequence[Run]) -> bool | None:
    """Return whether graphs and eager gave the same tokens; None if eager did not run."""
    return None if len(runs) == 1 else first_difference(*runs) is None


def report(
    task: Task, resolution: Resolution, prompts: Sequence[str], runs: Sequence[Run]
) -> dict[str, Any]:
    """Return everything as JSON has it."""
    return {
        "mode": resolution.to_dict(),
        "backend": task.backend.name,
        "device": task.backend.device_name,
        "dtype": str(task.network.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "prompts": list(prompts),
        "same_tokens": same_tokens(runs),
        "runs": [one.to_dict() for one in runs],
    }


def print_runs(task: Task, resolution: Resolution, runs: Sequence[Run]) -> None:
    """Print what ran in graphs, how fast everything was, and whether tokens are the same."""
    graphs = runs[0]
    _print_phases(task.backend, resolution, graphs)
    _print_speed(runs)
    say(f"buckets: {'; '.join(map(_buckets, graphs.phases))}")
    say(f"captured in {time_text(graphs.capture_seconds)}, before the first token")
    if graphs.fused is not None:
        say(f"fused: {_counted(graphs.fused)}; as the model wrote them: {_counted(graphs.unfused)}")
    if task.args.temperature:
        say(f"drawn with --seed {task.args.seed}")
    if len(runs) == 1:
        return
    difference = first_difference(*runs)
    if difference is None:
        say("graphs and eager gave the same tokens")
        return
    prompt, token, *both = difference
    mine, theirs = ("end" if one is None else one for one in both)
    say(
        f"graphs and eager DIFFER, first in prompt {prompt + 1} at its token {token + 1}: {mine} "
        f"and {theirs}"
    )


def _counted(counts: Mapping[str, int] | None) -> str:
    return ", ".join(f"{count} {what}" for what, count in (counts or {}).items() if count) or "none"


def _print_phases(backend: Backend, resolution: Resolution, graphs: Run) -> None:
    columns = {
        "phase": [stats.name for stats in graphs.phases],
        "requested": [resolution.requested.phase(stats.phase).policy for stats in graphs.phases],
        "effective": [stats.effective for stats in graphs.phases],
        "steps": [stats.steps for stats in graphs.phases],
        "in graphs": [stats.graph_steps for stats in graphs.phases],
        "hits": [percent(stats.hit_ratio) for stats in graphs.phases],
        "padding": [percent(stats.padding_ratio) for stats in graphs.phases],
        "eager, and why": [stats.eager for stats in graphs.phases],
        "graphs": [sum(b.state == "captured" for b in stats.buckets) for stats in graphs.phases],
        "capture": [time_text(stats.capture_seconds) for stats in graphs.phases],
        "memory": [format_bytes(stats.graph_bytes) for stats in graphs.phases],
    }
    print_table(
        f"what ran in graphs on {backend.name} ({backend.device_name})",
        list(columns),
        zip(*columns.values(), strict=True),
        numbers=("steps", "in graphs", "hits", "padding", "graphs", "capture", "memory"),
    )


def _buckets(stats: RunnerStats) -> str:
    """Return the captured buckets of a phase, the smallest first."""
    sizes = [int(bucket.key) for bucket in reversed(stats.buckets) if bucket.state == "captured"]
    unit = "tokens" if stats.phase == "prefill" else "requests"
    return f"{stats.name} {ranges(sizes)} {unit}" if sizes else f"{stats.name} none"


def _print_speed(runs: Sequence[Run]) -> None:
    print_table(
        "speed",
        ("", "tokens", "time", "tokens/s", "decode tokens/s", "vs eager"),
        [
            (
                one.name,
                one.generated,
                time_text(one.seconds),
                number(one.rate),
                number(one.decode_rate),
                None if len(runs) == 1 else ratio(one.rate / runs[1].rate),
            )
            for one in runs
        ],
        numbers=("tokens", "time", "tokens/s", "decode tokens/s", "vs eager"),
    )
