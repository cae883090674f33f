"""The options that ``generate`` and ``demo`` share."""

from __future__ import annotations

import argparse

from devgraph.api.config.flags import add_cli_args
from devgraph.cli.dtypes import DTYPES
from devgraph.cli.tables import CommandError

__all__ = ["MOST_REQUESTS", "MOST_STEP_TOKENS", "add_engine_arguments", "check_engine_arguments"]

MOST_REQUESTS = 8
"""Requests that run at once unless somebody says more."""

MOST_STEP_TOKENS = 512
"""Tokens of a prefill step unless somebody says more."""


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
        f"as there are prompts, at most {MOST_REQUESTS})",
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
        f"the prompts need, at most {MOST_STEP_TOKENS})",
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
