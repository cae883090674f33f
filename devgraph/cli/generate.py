"""``devgraph generate``, which generates text with a language model in graphs."""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import secrets
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from devgraph.api.config.facts import EngineFacts
from devgraph.api.config.model import DeviceGraphConfig
from devgraph.api.config.phase import PhaseConfig
from devgraph.api.config.resolve import resolve
from devgraph.api.errors import format_bytes
from devgraph.api.registry import get_backend
from devgraph.cli.arguments import MOST_REQUESTS, MOST_STEP_TOKENS, check_model
from devgraph.cli.tables import (
    CommandError,
    number,
    on_device,
    percent,
    print_json,
    print_table,
    ranges,
    ratio,
    say,
    time_text,
    working,
)
from devgraph.cli.timing import say_cautions
from devgraph.integrations.transformers import (
    Completion,
    Engine,
    EngineStats,
    SamplingParams,
    TokenEvent,
    load,
)


def run(args: argparse.Namespace) -> int:
    """Generate and print text; return 1 if the tokens of graphs and eager runs differ."""
    return generate(args, _prompts(args))


def generate(args: argparse.Namespace, prompts: Sequence[str]) -> int:
    """Generate text for ``prompts`` with the options in ``args``; return the exit code."""
    check_model(args.model)
    backend = get_backend(args.backend)
    # torch.compile cannot trace the model: the integration replaces parts of it in each step.
    facts = EngineFacts(traceable=False).on_backend(backend)
    resolution = resolve(DeviceGraphConfig.from_args(args), facts)
    dtype = None if args.dtype is None else getattr(torch, args.dtype)
    sampling = _sampling(args, len(prompts))  # Check the options before the slow load.
    # Import transformers only after the integration, which reports missing packages.
    from transformers.utils import logging

    logging.disable_progress_bar()
    with working(f"loading {args.model}"):
        network, tokenizer = load(args.model, dtype=dtype, device=backend.device)
    ids = [_encode(tokenizer, prompt, chat=args.chat) for prompt in prompts]
    config = resolution.effective
    sizes = _engine_sizes(args, config, [len(prompt) for prompt in ids])
    make = functools.partial(Engine, network, tokenizer, backend=backend, fuse=args.fuse, **sizes)
    ask = {"prompts": ids, "max_new_tokens": args.max_new_tokens, "sampling": sampling}
    gap = "\n" if args.chat else ""
    text = OrderedText([f"[{index + 1}] {prompt}{gap}" for index, prompt in enumerate(prompts)])
    runs = _run_all(make, config, ask, args, None if args.json else text.add)
    difference = _difference(*runs) if args.compare else None
    report = {
        "mode": resolution.to_dict(),
        "backend": backend.name,
        "device": backend.device_name,
        "dtype": str(network.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "prompts": list(prompts),
        "same_tokens": difference is None if args.compare else None,
        "runs": runs,
    }
    if args.json:
        print_json(report)
    else:
        _print(report, args, difference)
    return 1 if difference else 0


def _print(report: dict[str, Any], args: argparse.Namespace, difference: str | None) -> None:
    graphs = report["runs"][0]
    _print_phases(report)
    _print_speed(report["runs"])
    say(f"captured in {time_text(graphs['capture_seconds'])}, before the first token")
    if graphs["fused"] is not None:
        left = _counted(graphs["unfused"])
        say(f"fused: {_counted(graphs['fused'])}; not fused: {left}")
    if args.temperature:
        say(f"sampled with --seed {args.seed}")
    if difference:
        say(f"graphs and eager DIFFER, first in {difference}")
    elif args.compare:
        say("graphs and eager produced the same tokens")
    say_cautions({}, on_cpu=report["backend"] == "cpu")


def _prompts(args: argparse.Namespace) -> list[str]:
    if args.prompt:
        return list(args.prompt)
    file = args.prompts_file
    if file is None and (sys.stdin is None or sys.stdin.isatty()):
        ways = "pass --prompt TEXT or --prompts-file FILE, or pipe prompts, one per line"
        raise CommandError(f"there is no prompt: {ways}")
    name = "standard input" if file is None else file
    try:
        text = sys.stdin.read() if file is None else Path(file).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a zero byte
        why = getattr(error, "strerror", None) or error
        raise CommandError(f"cannot read {name}: {why}") from error
    prompts = [line for line in text.split("\n") if line.strip()]
    if not prompts:
        raise CommandError(f"there is no prompt in {name}; write one per line")
    return prompts


def _encode(tokenizer: Any, prompt: str, *, chat: bool) -> list[int]:
    """Return the token ids of a prompt; with ``chat``, apply the model's chat template."""
    if not chat:
        return list(tokenizer(prompt)["input_ids"])
    if not tokenizer.chat_template:
        raise CommandError("the model has no chat template; remove --chat, or add --no-chat")
    message = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _sampling(args: argparse.Namespace, prompts: int) -> list[SamplingParams]:
    if args.seed is not None and not args.temperature:
        raise CommandError("--seed has no effect on greedy requests; add --temperature T")
    if args.temperature and args.seed is None:
        args.seed = secrets.randbelow(1 << 31)
    seeds = [None if args.seed is None else args.seed + index for index in range(prompts)]
    return [SamplingParams(temperature=args.temperature, seed=seed) for seed in seeds]


class OrderedText:
    """A printer that streams the first unfinished text and buffers all later texts."""

    def __init__(self, headings: Sequence[str]) -> None:
        self._waiting = list(headings)
        self._finished = [False] * len(headings)
        self._current = 0

    def add(self, event: TokenEvent) -> None:
        """Add an event. Request ids start at 0, so the engine must be new."""
        last = event.finish_reason is not None
        self._waiting[event.request_id] += f"{event.text}\n\n" if last else event.text
        self._finished[event.request_id] = last
        while self._current < len(self._waiting):
            sys.stdout.write(self._waiting[self._current])
            self._waiting[self._current] = ""
            if not self._finished[self._current]:
                break
            self._current += 1
        sys.stdout.flush()


def _engine_sizes(
    args: argparse.Namespace, config: DeviceGraphConfig, lengths: Sequence[int]
) -> dict[str, Any]:
    """Return the smallest sizes of an engine for the prompts, so that few buckets are captured."""
    requests = args.max_requests or max(
        min(len(lengths), MOST_REQUESTS), *(config.decode.buckets or (1,))
    )
    whole = -(-sum(lengths) // 16) * 16
    step_tokens = args.max_step_tokens or max(
        min(whole, MOST_STEP_TOKENS), requests, *(config.prefill.buckets or (1,))
    )
    return {
        "max_requests": requests,
        "max_len": max(lengths) + args.max_new_tokens,
        "max_step_tokens": step_tokens,
        "steps_per_launch": min(args.steps_per_launch, args.max_new_tokens),
    }


_Repeat = tuple[list[Completion], EngineStats]


def _run_all(
    make: Callable[..., Engine],
    config: DeviceGraphConfig,
    ask: dict[str, Any],
    args: argparse.Namespace,
    on_event: Callable[[TokenEvent], None] | None,
) -> list[dict[str, Any]]:
    """Return JSON reports of runs in graphs and, with ``--compare``, alternating eager runs."""

    def run(engine: Engine, **more: Any) -> _Repeat:
        engine.reset_stats()
        return engine.generate(**ask, **more), engine.stats()

    with contextlib.ExitStack() as stack:
        engines = {"graphs": stack.enter_context(make(config=config))}
        engines["graphs"].capture()
        repeats = {"graphs": [run(engines["graphs"], on_event=on_event)]}
        status = stack.enter_context(working("running again"))
        if args.compare:
            off = PhaseConfig(policy="disabled")
            eager = stack.enter_context(make(config=DeviceGraphConfig(decode=off, prefill=off)))
            # Initialize libraries before the timing, as captures did for the other engine.
            eager.generate(ask["prompts"][:1], max_new_tokens=2)
            engines["eager"], repeats["eager"] = eager, []
        for number in range(1, args.repeats + 1):
            if number > 1:
                repeats["graphs"].append(run(engines["graphs"]))
            if args.compare:
                status.update(f"comparing with eager ({number} of {args.repeats})")
                repeats["eager"].append(run(engines["eager"]))
        runs = [_summary(name, engine, repeats[name]) for name, engine in engines.items()]
    runs[0]["capture_seconds"] = sum(phase["capture_seconds"] for phase in runs[0]["phases"])
    return runs


def _summary(name: str, engine: Engine, repeats: Sequence[_Repeat]) -> dict[str, Any]:
    """Return the report of one engine. Durations are medians over the repeats."""
    done, stats = repeats[0]
    seconds = statistics.median(stats.seconds for _, stats in repeats)
    decode_seconds = statistics.median(stats.decode_seconds for _, stats in repeats)
    generated = sum(len(completion.token_ids) for completion in done)
    fusion = engine.model.fusion
    return {
        "name": name,
        "tokens": [completion.token_ids for completion in done],
        "texts": [completion.text for completion in done],
        "finish": [completion.finish_reason.value for completion in done],
        "generated": generated,
        "seconds": seconds,
        "decode_seconds": decode_seconds,
        "tokens_per_second": generated / seconds,
        "decode_tokens_per_second": (decode_seconds and stats.decode_tokens / decode_seconds)
        or None,
        "fused": None if fusion is None else fusion.counts,
        "unfused": None if fusion is None else fusion.unfused,
        "phases": [runner.stats().to_dict() for runner in engine.runners],
    }


def _difference(graphs: dict[str, Any], eager: dict[str, Any]) -> str | None:
    """Describe the first difference between the tokens of two runs; return None if equal."""
    for prompt, pair in enumerate(zip(graphs["tokens"], eager["tokens"], strict=True)):
        for token, (mine, other) in enumerate(itertools.zip_longest(*pair, fillvalue="end")):
            if mine != other:
                return f"prompt {prompt + 1} at its token {token + 1}: {mine} and {other}"
    return None


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {noun}" for noun, count in counts.items() if count) or "none"


def _print_phases(report: dict[str, Any]) -> None:
    phases = report["runs"][0]["phases"]
    requested = report["mode"]["requested"]
    rows = {
        "requested": [requested[phase["phase"]]["policy"] for phase in phases],
        "effective": [phase["effective"] for phase in phases],
        "steps": [phase["steps"] for phase in phases],
        "steps in graphs": [f"{p['graph_steps']} ({percent(p['hit_ratio'])})" for p in phases],
        "eager steps": [phase["eager"] for phase in phases],
        "padding": [percent(phase["padding_ratio"]) for phase in phases],
        "buckets": [_buckets(phase) for phase in phases],
        "capture": [time_text(phase["capture_seconds"]) for phase in phases],
        "memory": [format_bytes(phase["graph_bytes"]) for phase in phases],
    }
    print_table(
        f"phases on {on_device(report['backend'], report['device'])}",
        ("", *(phase["name"] for phase in phases)),
        [(name, *cells) for name, cells in rows.items()],
    )


def _buckets(phase: dict[str, Any]) -> str | None:
    """Return the captured buckets of a phase as text, or None."""
    captured = [row for row in reversed(phase["buckets"]) if row["state"] == "captured"]
    sizes = [row["bucket"] for row in captured]
    unit = "token" if phase["phase"] == "prefill" else "request"
    return f"{ranges(sizes)} {unit}{'s' * (sizes != [1])}" if sizes else None


def _print_speed(runs: Sequence[dict[str, Any]]) -> None:
    eager = runs[-1]["tokens_per_second"]
    print_table(
        "speed",
        ("", "tokens", "time", "tokens/s", "vs eager", "decode tokens/s"),
        [
            (
                row["name"],
                row["generated"],
                time_text(row["seconds"]),
                number(row["tokens_per_second"]),
                None if len(runs) == 1 else ratio(row["tokens_per_second"] / eager),
                number(row["decode_tokens_per_second"]),
            )
            for row in runs
        ],
        numbers=("tokens", "time", "tokens/s", "vs eager", "decode tokens/s"),
    )
