"""The options of every command. Nothing here imports torch: help and typos answer at once."""

from __future__ import annotations

import argparse
import os
import warnings
from pathlib import Path

from devgraph.api.config.flags import add_cli_args
from devgraph.api.config.model import DeviceGraphConfig
from devgraph.api.config.phase import DeviceGraphWarning
from devgraph.api.policy import COMPILERS, policies
from devgraph.api.registry import names
from devgraph.integrations.engine.installation import MODE_VARIABLE

DTYPES = ("float32", "bfloat16", "float16")

CACHE = Path(".cache") / "demo"
"""Where ``demo`` keeps its model."""

KINDS = (
    "host_sync",
    "host_value",
    "data_dependent_shape",
    "rng",
    "escaping_allocation",
    "refused",
)
"""Kinds of findings of ``check``."""

SIZES = {"layers": 8, "hidden": 256, "heads": 4, "vocabulary": 4096, "batch": 1, "window": 512}
_MEANING = {
    "layers": "decoder layers",
    "hidden": "width of the model",
    "heads": "attention heads",
    "vocabulary": "rows of the embedding and of the logits",
    "batch": "requests in the step",
    "window": "rows of the key and value cache of each request",
}


def _count(text: str) -> int:
    if not text.lstrip("-").isdecimal():
        raise argparse.ArgumentTypeError(f"expected a whole number, got {text!r}")
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return int(text)


def _target(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target",
        metavar="MODULE:FUNCTION",
        help="the function; MODULE is importable from here, or the path of a .py file",
    )
    parser.add_argument(
        "--inputs",
        metavar="MODULE:FUNCTION",
        help="a function without arguments that returns the target's arguments: a tuple, a "
        "dictionary of keywords, or a pair of both (default: the target takes none). MODULE may be "
        "left out when it is the target's.",
    )
    parser.add_argument(
        "--host-arg",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a host argument and its value at capture (a Python literal); may be repeated",
    )


def _doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--backend",
        action="append",
        metavar="NAME",
        help="probe this backend only (may be repeated; default: every available one)",
    )
    parser.add_argument(
        "--capabilities",
        action="store_true",
        help="print what backends declare, installed here or not, as a table in Markdown",
    )
    parser.add_argument("--no-probe", action="store_true", help="list only; capture nothing")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backend", default="auto", help="plan for this backend (default: auto)")
    parser.add_argument("--cluster", metavar="FILE", help="plan for every group of this cluster")
    parser.add_argument(
        "--max-requests", type=_count, default=256, metavar="N", help="capacity (default: 256)"
    )
    parser.add_argument(
        "--max-tokens",
        type=_count,
        default=8192,
        metavar="N",
        help="tokens of a step (default: 8192)",
    )
    parser.add_argument(
        "--fact",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a fact about the engine, with a JSON value: --fact lora=true; may be repeated",
    )
    parser.add_argument(
        "--model",
        metavar="PATH",
        help="estimate for this model; its configuration is read, its weights are not",
    )
    parser.add_argument("--gguf-file", metavar="NAME", help="GGUF file inside the folder --model")
    parser.add_argument(
        "--dtype", choices=DTYPES, default="bfloat16", help="of the model (default: bfloat16)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_cli_args(parser)


def _generate(parser: argparse.ArgumentParser) -> None:
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


def _demo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", action="append", metavar="TEXT", help="instead of the demo's")
    parser.add_argument(
        "--cache",
        type=Path,
        default=CACHE,
        metavar="FOLDER",
        help=f"where the model is kept (default: {CACHE})",
    )
    add_engine_arguments(parser)
    parser.set_defaults(backend="cpu", max_new_tokens=32, repeats=3)


def _bench(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backend", default="auto", metavar="NAME", help="(default: auto)")
    for name, size in SIZES.items():
        text = f"{_MEANING[name]} (default: {size})"
        parser.add_argument(f"--{name}", type=_count, default=size, metavar="N", help=text)
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default="float32",
        help="of weights and caches (default: float32)",
    )
    parser.add_argument(
        "--kv-len", type=_count, metavar="N", help="rows to attend over (default: half the window)"
    )
    parser.add_argument(
        "--steps", type=_count, default=50, metavar="N", help="steps a repeat (default: 50)"
    )
    parser.add_argument(
        "--repeats",
        type=_count,
        default=5,
        metavar="N",
        help="repeats, of which the median counts (default: 5)",
    )
    parser.add_argument(
        "--policy",
        action="append",
        choices=policies(),
        help="only this policy; may be repeated (default: all)",
    )
    parser.add_argument(
        "--compiler",
        action="append",
        choices=COMPILERS,
        help="piecewise with this compiler only; may be repeated (default: all of the backend)",
    )
    parser.add_argument("--threads", type=_count, metavar="N", help="CPU threads of torch")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--plot", metavar="FILE.svg", help="write a chart")
    parser.add_argument(
        "--results",
        metavar="FILE",
        help="measure nothing: draw the chart of what an earlier --json printed",
    )


def _check(parser: argparse.ArgumentParser) -> None:
    _target(parser)
    parser.add_argument(
        "--ignore",
        action="append",
        default=[],
        metavar="KIND",
        help=f"leave out findings of this kind; may be repeated: {', '.join(KINDS)}",
    )
    parser.add_argument("--grad", action="store_true", help="run with autograd on")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _explain(parser: argparse.ArgumentParser) -> None:
    _target(parser)
    parser.add_argument("--policy", default="full", choices=policies(), help="(default: full)")
    parser.add_argument("--backend", default="auto", metavar="NAME", help="(default: auto)")
    parser.add_argument("--compiler", help="compiler of the pieces under policy piecewise")
    parser.add_argument("--grad", action="store_true", help="capture with autograd on")
    parser.add_argument("--dot", metavar="FILE", help="write the segments as a Graphviz graph")
    parser.add_argument(
        "--chrome-trace",
        metavar="FILE",
        help="write one timed replay for chrome://tracing or ui.perfetto.dev",
    )
    parser.add_argument("--prove", action="store_true", help="also replay against eager")
    parser.add_argument("--json", action="store_true", help="print JSON")


COMMANDS = {
    "doctor": ("show devices, backends and what capture can do here", _doctor),
    "plan": ("show what a mode configuration comes to on this machine or in a cluster", _plan),
    "generate": (
        "generate text with a language model on device graphs, and compare with eager",
        _generate,
    ),
    "demo": ("generate with a small real model, downloaded on first use", _demo),
    "bench": ("time eager and every policy on the same work", _bench),
    "check": ("list what a device capture of a function would refuse or freeze", _check),
    "explain": (
        "capture a function and show its segments, regions, nodes and memory",
        _explain,
    ),
}
"""What each command does, and what adds its options to its parser."""


MOST_REQUESTS = 8
"""Requests that run at once unless somebody says more."""

MOST_STEP_TOKENS = 512
"""Tokens of a prefill step unless somebody says more."""


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that do not choose model or prompts."""
    add = parser.add_argument
    add("--max-new-tokens", type=_count, default=64, metavar="N", help="a prompt (default: 64)")
    add("--backend", default="auto", help="(default: auto)")
    add("--dtype", choices=DTYPES, help="(default: float32 on the CPU, bfloat16 elsewhere)")
    add(
        "--max-requests",
        type=_count,
        metavar="N",
        help="requests that run at once (default: as many "
        f"as there are prompts, at most {MOST_REQUESTS})",
    )
    add(
        "--max-len",
        type=_count,
        metavar="N",
        help="positions of a request (default: what prompts and new tokens need)",
    )
    add(
        "--max-step-tokens",
        type=_count,
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
        "--steps-per-launch",
        type=_count,
        default=1,
        metavar="K",
        help="take K decode steps in one launch, while all requests are greedy (default: 1)",
    )
    add(
        "--fuse",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compute norms, rotary embeddings and neighbouring projections with fewer kernels "
        "where that was seen to give the same (default: on)",
    )
    add(
        "--with-transformers",
        action="store_true",
        help="also time the model's own generate, greedily, one prompt after the other",
    )
    add(
        "--repeats",
        type=_count,
        default=1,
        metavar="N",
        help="runs, of which the median time counts (default: 1)",
    )
    add("--threads", type=_count, metavar="N", help="CPU threads of torch")
    add("--json", action="store_true", help="print JSON instead of text and tables")
    add_cli_args(parser)


def mode_of(args: argparse.Namespace) -> DeviceGraphConfig:
    """Return the mode configuration that the options of a command ask for."""
    config = DeviceGraphConfig.from_args(args, backends=names())
    if MODE_VARIABLE in os.environ:
        warnings.warn(
            f"{MODE_VARIABLE} is set, and only engines read it: here it has no effect. Give it as "
            f'--device-graph-mode "${MODE_VARIABLE}"',
            DeviceGraphWarning,
            stacklevel=2,
        )
    return config
