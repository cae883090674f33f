"""``devgraph generate``: a language model through the runners, as text and as figures."""

from __future__ import annotations

import argparse
import secrets
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import torch

from devgraph.api.config.facts import EngineFacts
from devgraph.api.config.resolve import resolve
from devgraph.api.registry import get_backend
from devgraph.cli.arguments import mode_of
from devgraph.cli.models import load_model, require_transformers
from devgraph.cli.tables import CommandError, print_json, working

if TYPE_CHECKING:
    from devgraph.cli.generating import Task
    from devgraph.integrations.transformers import SamplingParams, TokenEvent


def run(args: argparse.Namespace) -> int:
    """Generate and print; 1 when graphs and eager give different tokens."""
    prompts = _prompts(args)
    return generate(args, prompts, model=args.model, gguf_file=args.gguf_file)


def generate(
    args: argparse.Namespace,
    prompts: Sequence[str],
    *,
    model: str,
    gguf_file: str | None = None,
    few_buckets: bool = False,
) -> int:
    """Run ``prompts`` as ``args`` say; return the exit code.

    Args:
        few_buckets: capture few prefill buckets, unless ``args`` say which.
    """
    require_transformers()
    backend = get_backend(args.backend)
    asked = mode_of(args)
    from devgraph.cli.generating import Setup, print_runs, report, run_all, same_tokens

    if args.threads:
        torch.set_num_threads(args.threads)
    # The integration swaps parts of the model in and out around each step.
    facts = EngineFacts(traceable=False).on_backend(backend.name, backend.capabilities)
    resolution = resolve(asked, facts)
    dtype = None if args.dtype is None else getattr(torch, args.dtype)
    sampling = _sampling(args, len(prompts))  # may refuse; the model takes its time
    with working(f"loading {model}"):
        network, tokenizer = load_model(
            model, gguf_file=gguf_file, dtype=dtype, device=backend.device
        )
    task = _task(args, prompts, sampling, tokenizer)
    runs = run_all(
        Setup(
            backend=backend,
            config=resolution.effective,
            network=network,
            tokenizer=tokenizer,
            max_requests=args.max_requests,
            max_len=args.max_len,
            max_step_tokens=args.max_step_tokens,
            steps_per_launch=args.steps_per_launch,
            fuse=args.fuse,
            few_buckets=few_buckets,
        ),
        task,
        repeats=args.repeats,
        compare=args.compare,
        plain=args.with_transformers,
        on_event=None if args.json else _shown(prompts, chat=args.chat),
    )
    if args.json:
        print_json(report(backend, resolution, network, prompts, runs))
    else:
        print_runs(backend, resolution, task, runs)
    return 1 if same_tokens(runs) is False else 0


def _shown(prompts: Sequence[str], *, chat: bool) -> Callable[[TokenEvent], None]:
    """Return what prints the events of a new engine, which numbers its requests from 0."""
    end = "\n" if chat else ""  # an answer, and no continuation of the prompt
    text = OrderedText([f"[{index + 1}] {prompt}{end}" for index, prompt in enumerate(prompts)])

    def show(event: TokenEvent) -> None:
        text.add(event.request_id, event.text, last=event.finish_reason is not None)

    return show


def _prompts(args: argparse.Namespace) -> list[str]:
    if args.prompt:
        return list(args.prompt)
    if args.prompts_file and args.prompts_file != "-":
        try:
            text = Path(args.prompts_file).read_text(encoding="utf-8")
        except OSError as error:
            raise CommandError(f"cannot read {args.prompts_file}: {error.strerror}") from error
    elif args.prompts_file is None and sys.stdin.isatty():
        raise CommandError("no prompt: give --prompt TEXT, --prompts-file FILE, or pipe one a line")
    else:
        text = sys.stdin.read()
    prompts = [line for line in text.splitlines() if line.strip()]
    if not prompts:
        raise CommandError(f"no prompt in {args.prompts_file or 'standard input'}: one a line")
    return prompts


def _sampling(args: argparse.Namespace, prompts: int) -> tuple[SamplingParams, ...]:
    from devgraph.integrations.transformers import SamplingParams

    if args.temperature and args.seed is None:
        args.seed = secrets.randbelow(1 << 31)
    return tuple(
        SamplingParams(
            temperature=args.temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            seed=None if args.seed is None else args.seed + index,
        )
        for index in range(prompts)
    )


def _task(
    args: argparse.Namespace,
    prompts: Sequence[str],
    sampling: tuple[SamplingParams, ...],
    tokenizer: Any,
) -> Task:
    from devgraph.cli.generating import Task

    return Task(
        prompts=tuple(_ids(args, prompt, tokenizer) for prompt in prompts),
        max_new_tokens=args.max_new_tokens,
        sampling=sampling,
        stop=tuple(args.stop),
    )


def _ids(args: argparse.Namespace, prompt: str, tokenizer: Any) -> tuple[int, ...]:
    if args.chat:
        if not tokenizer.chat_template:
            raise CommandError("--chat: this model has no chat template; leave the flag out")
        message = [{"role": "user", "content": prompt}]
        prompt = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        return tuple(tokenizer(prompt, add_special_tokens=False)["input_ids"])
    return tuple(tokenizer(prompt)["input_ids"])


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
        self._headings = list(headings)
        self._waiting = [""] * len(headings)
        self._finished = [False] * len(headings)
        self._current = -1

    def add(self, index: int, piece: str, *, last: bool = False) -> None:
        """Add a piece to text ``index``; ``last`` says that nothing more will come."""
        if self._current < 0:
            self._next()
        self._waiting[index] += piece
        self._finished[index] = self._finished[index] or last
        while self._current < len(self._headings):
            self._out.write(self._waiting[self._current])
            self._waiting[self._current] = ""
            if not self._finished[self._current]:
                break
            self._out.write("\n\n")
            self._next()
        self._out.flush()

    def _next(self) -> None:
        self._current += 1
        if self._current < len(self._headings):
            self._out.write(self._headings[self._current])
