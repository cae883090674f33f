"""One engine over given prompts: what came out, how long it took, what ran in graphs, as tables
for people and as data for programs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch

from devgraph.api.backend import Backend
from devgraph.api.config.model import DeviceGraphConfig
from devgraph.api.config.phase import PhaseConfig
from devgraph.api.config.resolve import Resolution
from devgraph.cli.arguments import MOST_REQUESTS, MOST_STEP_TOKENS
from devgraph.cli.tables import number, percent, print_table, ratio, say, time_text, working
from devgraph.integrations.transformers import (
    Completion,
    Engine,
    EngineStats,
    SamplingParams,
    TokenEvent,
)
from devgraph.runners.report import RunnerStats, format_bytes


@attrs.frozen(kw_only=True)
class Task:
    """What every engine is asked to do."""

    prompts: tuple[tuple[int, ...], ...]
    """Token ids."""
    max_new_tokens: int
    sampling: tuple[SamplingParams, ...]
    stop: tuple[str, ...]

    @property
    def greedy(self) -> bool:
        return all(params.greedy for params in self.sampling)


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
    generated: int
    decode_seconds: float | None = None
    decode_tokens: int | None = None
    capture_seconds: float | None = None
    phases: tuple[RunnerStats, ...] = ()
    fused: dict[str, int] | None = None
    """What was computed with fewer kernels, by kind; None with ``--no-fuse``."""
    unfused: dict[str, int] | None = None
    """How many of what was not, by the reason."""

    @property
    def rate(self) -> float:
        """Tokens a second, prompts' time included."""
        return self.generated / self.seconds if self.seconds else 0.0

    @property
    def decode_rate(self) -> float | None:
        """Tokens a second of the decode steps."""
        if not self.decode_seconds or not self.decode_tokens:
            return None
        return self.decode_tokens / self.decode_seconds

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON has it."""
        return {
            **attrs.asdict(self, filter=lambda field, _: field.name != "phases"),
            "tokens_per_second": self.rate,
            "decode_tokens_per_second": self.decode_rate,
            "phases": [stats.to_dict() for stats in self.phases],
        }


def run_engine(
    engine: Engine, task: Task, on_event: Callable[[TokenEvent], None] | None = None
) -> tuple[list[Completion], EngineStats]:
    """Run the task once through a captured engine and return what this run added."""
    engine.reset_stats()
    done = engine.generate(
        task.prompts,
        max_new_tokens=task.max_new_tokens,
        sampling=task.sampling,
        stop=task.stop,
        on_event=on_event,
    )
    return done, engine.stats()


def summarise(
    name: str,
    engine: Engine,
    repeats: Sequence[tuple[list[Completion], EngineStats]],
    capture_seconds: float | None,
) -> Run:
    """Return the run that ``repeats`` of one engine come to."""
    done, _ = repeats[0]
    stats = [one for _, one in repeats]
    decoded = [one for one in stats if one.decode_tokens]
    fusion = engine.model.fusion
    return Run(
        name=name,
        tokens=tuple(one.token_ids for one in done),
        texts=tuple(one.text for one in done),
        finish=tuple(str(one.finish_reason) for one in done),
        seconds=statistics.median(one.seconds for one in stats),
        generated=sum(len(one.token_ids) for one in done),
        decode_seconds=statistics.median(one.decode_seconds for one in decoded)
        if decoded
        else None,
        decode_tokens=decoded[0].decode_tokens if decoded else None,
        capture_seconds=capture_seconds,
        phases=tuple(runner.stats() for runner in engine.runners),
        fused=None if fusion is None else fusion.counts,
        unfused=None if fusion is None else fusion.unfused,
    )


@torch.no_grad()
def run_plain(model: Any, tokenizer: Any, task: Task, *, repeats: int) -> Run:
    """Run the task through the model's own ``generate``, greedily, one prompt after the other."""
    device = next(model.parameters()).device
    seconds = []
    for _ in range(repeats):
        tokens = []
        begin = time.perf_counter()
        for prompt in task.prompts:
            ids = torch.tensor([prompt], device=device)
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=task.max_new_tokens,
                do_sample=False,
                pad_token_id=0,
            )
            tokens.append(tuple(out[0, ids.shape[1] :].tolist()))  # waits for the device
        seconds.append(time.perf_counter() - begin)
    return Run(
        name="transformers generate",
        tokens=tuple(tokens),
        texts=tuple(tokenizer.decode(one, skip_special_tokens=True) for one in tokens),
        finish=tuple("length" if len(t) == task.max_new_tokens else "eos" for t in tokens),
        seconds=statistics.median(seconds),
        generated=sum(map(len, tokens)),
    )


def first_difference(left: Run, right: Run) -> tuple[int, int] | None:
    """Return the first (prompt, token) in which two runs differ, None where there is none."""
    for prompt, (a, b) in enumerate(zip(left.tokens, right.tokens, strict=True)):
        if a != b:
            same = next(
                (i for i, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]),
                min(len(a), len(b)),
            )
            return prompt, same
    return None


@attrs.frozen(kw_only=True)
class Setup:
    """What engines are made of; the sizes are None where the task decides."""

    backend: Backend
    config: DeviceGraphConfig
    network: Any
    tokenizer: Any
    max_requests: int | None
    max_len: int | None
    max_step_tokens: int | None
    steps_per_launch: int = 1
    """Decode steps of a launch."""
    fuse: bool = True
    """Compute with fewer kernels where that was seen to give the same."""
    few_buckets: bool = False
    """Capture few prefill buckets, unless the configuration says which."""

    def engine(self, task: Task, config: DeviceGraphConfig) -> Engine:
        """Return an engine that ``task`` fits in, no larger than needed: every bucket costs."""
        lengths = [len(ids) for ids in task.prompts]
        requests = self.max_requests or max(
            min(len(lengths), MOST_REQUESTS), *(self.config.decode.buckets or (1,))
        )
        step_tokens = self.max_step_tokens or max(
            min(_rounded(sum(lengths)), MOST_STEP_TOKENS),
            requests,
            *(self.config.prefill.buckets or (1,)),
        )
        if self.few_buckets and not config.prefill.explicit & {"buckets", "max_bs"}:
            few = attrs.evolve(config.prefill, buckets=_halvings(step_tokens))
            config = attrs.evolve(config, prefill=few)
        return Engine(
            self.network,
            self.tokenizer,
            config=config,
            backend=self.backend,
            max_requests=requests,
            max_len=self.max_len or max(lengths) + task.max_new_tokens,
            max_step_tokens=step_tokens,
            steps_per_launch=self.steps_per_launch,
            fuse=self.fuse,
        )


def run_all(
    setup: Setup,
    task: Task,
    *,
    repeats: int,
    compare: bool,
    plain: bool,
    on_event: Callable[[TokenEvent], None] | None = None,
) -> list[Run]:
    """Run the task with graphs, and if asked eagerly and through the model's own ``generate``.

    Graphs and eager take turns, so that a change of the machine's speed meets both. ``on_event``
    receives the events of the first run with graphs.
    """
    with setup.engine(task, setup.config) as graphs:
        begin = time.perf_counter()
        graphs.capture()
        setup.backend.synchronize()
        captured = time.perf_counter() - begin
        done = [run_engine(graphs, task, on_event)]
        runs = []
        if compare:
            with working("running eagerly"), _eager_engine(setup, task) as eager:
                compared = [run_engine(eager, task)]
                for _ in range(repeats - 1):
                    done.append(run_engine(graphs, task))
                    compared.append(run_engine(eager, task))
                runs.append(summarise("eager", eager, compared, None))
        else:
            done += [run_engine(graphs, task) for _ in range(repeats - 1)]
        runs.insert(0, summarise("graphs", graphs, done, captured))
    if plain:
        with working("running transformers' own generate"):
            runs.append(run_plain(setup.network, setup.tokenizer, task, repeats=repeats))
    return runs


def _eager_engine(setup: Setup, task: Task) -> Engine:
    off = PhaseConfig(policy="disabled")
    engine = setup.engine(task, DeviceGraphConfig(decode=off, prefill=off))
    # What a capture's warm-up runs have set up for the other engine is not part of its speed.
    engine.generate([task.prompts[0]], max_new_tokens=2)
    return engine


def _halvings(tokens: int) -> tuple[int, ...]:
    """Return ``tokens`` and its halves down to eight: no step is padded to over twice its size."""
    sizes = [tokens]
    while sizes[-1] >= 16:
        sizes.append(-(-sizes[-1] // 2))
    return tuple(sizes)


def _rounded(tokens: int) -> int:
    return -(-tokens // 16) * 16


MOST_BUCKETS = 8
"""Buckets of a phase that the summary lists."""


def same_tokens(runs: Sequence[Run]) -> bool | None:
    """Return whether graphs and eager gave the same tokens; None if eager did not run."""
    eager = next((one for one in runs if one.name == "eager"), None)
    return None if eager is None else first_difference(runs[0], eager) is None


def report(
    backend: Backend,
    resolution: Resolution,
    network: Any,
    prompts: Sequence[str],
    runs: Sequence[Run],
) -> dict[str, Any]:
    """Return everything as JSON has it."""
    return {
        "mode": resolution.to_dict(),
        "backend": backend.name,
        "device": backend.device_name,
        "dtype": str(next(network.parameters()).dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "prompts": list(prompts),
        "same_tokens": same_tokens(runs),
        "runs": [one.to_dict() for one in runs],
    }


def print_runs(backend: Backend, resolution: Resolution, task: Task, runs: Sequence[Run]) -> None:
    """Print what ran in graphs, how fast everything was, and whether tokens are the same."""
    graphs = runs[0]
    _print_phases(backend, resolution, graphs)
    _print_speed(runs)
    captured = "; ".join(_buckets(stats) for stats in graphs.phases)
    say(f"buckets: {captured}")
    if graphs.capture_seconds is not None:
        say(f"captured in {time_text(graphs.capture_seconds)}, before the first token")
    if graphs.fused is not None:
        say(f"fused: {_counted(graphs.fused)}; as the model wrote them: {_counted(graphs.unfused)}")
    if not task.greedy:
        say(f"drawn with --seed {task.sampling[0].seed}")
    eager = next((one for one in runs if one.name == "eager"), None)
    if eager is None:
        return
    difference = first_difference(graphs, eager)
    if difference is None:
        say("graphs and eager gave the same tokens")
        return
    prompt, token = difference
    mine, theirs = graphs.tokens[prompt][token:], eager.tokens[prompt][token:]
    say(
        f"graphs and eager DIFFER, first in prompt {prompt + 1} at its token {token + 1}: "
        f"{mine[0] if mine else 'end'} and {theirs[0] if theirs else 'end'}"
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
    """Return the captured buckets of a phase, the smallest first and all but a few of many."""
    keys = [bucket.key for bucket in reversed(stats.buckets) if bucket.state == "captured"]
    if len(keys) > MOST_BUCKETS:
        keys = [*keys[: MOST_BUCKETS - 1], "...", keys[-1]]
    unit = "tokens" if stats.phase == "prefill" else "requests"
    return f"{stats.name} {', '.join(keys)} {unit}" if keys else f"{stats.name} none"


def _print_speed(runs: Sequence[Run]) -> None:
    graphs = runs[0]
    eager = next((one for one in runs if one.name == "eager"), None)
    print_table(
        "speed",
        ("", "tokens", "time", "tokens/s", "decode tokens/s", "vs eager", "same tokens as graphs"),
        [
            (
                one.name,
                one.generated,
                time_text(one.seconds),
                number(one.rate),
                number(one.decode_rate),
                None if eager is None else ratio(one.rate / eager.rate),
                None if one is graphs else first_difference(graphs, one) is None,
            )
            for one in runs
        ],
        numbers=("tokens", "time", "tokens/s", "decode tokens/s", "vs eager"),
    )
