"""``devgraph generate``: a language model through the runners, as text and as figures."""

from __future__ import annotations

import argparse
import secrets
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from devgraph.api.backend import Backend
from devgraph.api.cli_args import add_cli_args
from devgraph.api.config import DeviceGraphConfig, PhaseConfig
from devgraph.api.facts import EngineFacts
from devgraph.api.registry import get_backend, names
from devgraph.api.resolve import resolve
from devgraph.cli.dtypes import DTYPES, dtype_named
from devgraph.cli.models import load_model, require_transformers
from devgraph.cli.stream import OrderedText
from devgraph.cli.tables import (
    CommandError,
    number,
    percent,
    print_json,
    print_table,
    ratio,
    say,
    time_text,
    working,
)
from devgraph.runners.stats import format_bytes

if TYPE_CHECKING:
    from devgraph.cli.generating import Run, Task

__all__ = [
    "add_arguments",
    "add_engine_arguments",
    "check_engine_arguments",
    "generate",
    "run",
]

_MOST_REQUESTS = 8
_MOST_STEP_TOKENS = 512


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``generate`` and those of the mode configuration."""
    parser.add_argument(
        "--model",
        required=True,
        metavar="PATH",
        help="a folder, a .gguf file, or a name that transformers can find",
    )
    parser.add_argument("--gguf-file", metavar="NAME", help="GGUF file inside the folder --model")
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--prompt", action="append", metavar="TEXT", help="a prompt; several run side by side"
    )
    source.add_argument(
        "--prompts-file", metavar="FILE", help="a prompt a line ('-': standard input)"
    )
    add_engine_arguments(parser)


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that do not choose model or prompts."""
    add = parser.add_argument
    add("--max-new-tokens", type=int, default=64, metavar="N", help="a prompt (default: 64)")
    add("--backend", default="auto", help="(default: auto)")
    add("--dtype", choices=DTYPES, help="(default: float32 on the CPU, bfloat16 elsewhere)")
    add(
        "--max-requests",
        type=int,
        metavar="N",
        help="requests that run at once (default: as many "
        f"as there are prompts, at most {_MOST_REQUESTS})",
    )
    add(
        "--max-len",
        type=int,
        metavar="N",
        help="positions of a request (default: what prompts and new tokens need)",
    )
    add(
        "--max-step-tokens",
        type=int,
        metavar="N",
        help="tokens of a prefill step (default: what "
        f"the prompts need, at most {_MOST_STEP_TOKENS})",
    )
    add("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default)")
    add("--top-k", type=int, default=0, metavar="K", help="draw from the K best tokens")
    add(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="draw from the best tokens that together have probability P",
    )
    add("--seed", type=int, metavar="N", help="of the draws (default: chosen and printed)")
    add("--stop", action="append", default=[], metavar="TEXT", help="text that ends a request")
    add("--chat", action="store_true", help="put each prompt into the model's chat template")
    add(
        "--compare",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also run the same engine eagerly and compare tokens and speed (default: on)",
    )
    add(
        "--with-transformers",
        action="store_true",
        help="also time the model's own generate, greedily, one prompt after the other",
    )
    add(
        "--repeats",
        type=int,
        default=1,
        metavar="N",
        help="runs, of which the median time counts (default: 1)",
    )
    add("--threads", type=int, metavar="N", help="CPU threads of torch")
    add("--json", action="store_true", help="print JSON instead of text and tables")
    add_cli_args(parser)


def run(args: argparse.Namespace) -> int:
    """Generate and print; 1 when graphs and eager give different tokens."""
    check_engine_arguments(args)
    prompts = _prompts(args)
    return generate(args, prompts, model=args.model, gguf_file=args.gguf_file)


def generate(
    args: argparse.Namespace, prompts: Sequence[str], *, model: str, gguf_file: str | None = None
) -> int:
    """Run ``prompts`` as ``args`` of ``add_engine_arguments`` say; return the exit code."""
    require_transformers()
    if args.threads:
        torch.set_num_threads(args.threads)
    backend = get_backend(args.backend)
    config = DeviceGraphConfig.from_args(args, backends=names())
    facts = EngineFacts().on_backend(backend.name, backend.capabilities)
    config = resolve(config, facts).effective
    dtype = None if args.dtype is None else dtype_named(args.dtype)
    with working(f"loading {model}"):
        network, tokenizer = load_model(
            model, gguf_file=gguf_file, dtype=dtype, device=backend.device
        )
    task = _task(args, prompts, tokenizer)
    runs = _Runs(args, backend, config, network, tokenizer, task).run(prompts)
    if args.json:
        print_json(_report(backend, network, prompts, runs))
    else:
        _print(backend, runs, task)
    return 0 if _same(runs) is not False else 1


def check_engine_arguments(args: argparse.Namespace) -> None:
    """Raise CommandError for a count below one."""
    for name in (
        "max_new_tokens",
        "repeats",
        "max_requests",
        "max_len",
        "max_step_tokens",
        "threads",
    ):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise CommandError(f"--{name.replace('_', '-')} must be at least 1, got {value}")


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


def _task(args: argparse.Namespace, prompts: Sequence[str], tokenizer: Any) -> Task:
    from devgraph.cli.generating import Task
    from devgraph.runners.integrations.transformers.sampling import SamplingParams

    if args.temperature and args.seed is None:
        args.seed = secrets.randbelow(1 << 31)
    seeds = [None if args.seed is None else args.seed + index for index in range(len(prompts))]
    return Task(
        prompts=tuple(_ids(args, prompt, tokenizer) for prompt in prompts),
        max_new_tokens=args.max_new_tokens,
        sampling=tuple(
            SamplingParams(
                temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, seed=seed
            )
            for seed in seeds
        ),
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


