"""The options of every command. Nothing here imports torch: help and typos answer at once."""

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from devgraph.api.config.flags import add_cli_args
from devgraph.api.config.model import DeviceGraphConfig
from devgraph.api.config.phase import DeviceGraphWarning
from devgraph.api.errors import brief
from devgraph.api.policy import COMPILERS, compiles, policies
from devgraph.cli.tables import CommandError
from devgraph.integrations.engine.installation import MODE_VARIABLE

DTYPES = ("float32", "bfloat16", "float16")

KINDS = ("host_sync", "host_value", "data_dependent_shape", "rng", "escaping_allocation", "refused")
"""Kinds of findings of ``check``."""

SIZES = {
    "layers": (8, "decoder layers"),
    "hidden": (256, "width of the model"),
    "heads": (4, "attention heads"),
    "vocabulary": (4096, "rows of the embedding and of the logits"),
    "batch": (1, "requests in the step"),
    "window": (512, "rows of the key and value cache of each request"),
}
"""Sizes of the step of ``bench``: each one's default and meaning."""

MOST_REQUESTS = 8
"""Requests that run at once unless somebody says more."""

MOST_STEP_TOKENS = 512
"""Tokens of a prefill step unless somebody says more."""


_MOST = (1 << 31) - 1


def _count(text: str) -> int:
    try:
        number = int(text)
    except ValueError:  # of thousands of digits, too
        raise argparse.ArgumentTypeError(f"expected a whole number, got {brief(text)}") from None
    if not 1 <= number <= _MOST:
        raise argparse.ArgumentTypeError(f"must be from 1 to {_MOST}, got {brief(text)}")
    return number


_ON: dict[str, Any] = {"action": argparse.BooleanOptionalAction, "default": True}
"""Of an option that is on and has a ``--no-`` form."""


class Options:
    """Adds the options of one command."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser

    def __call__(self, flag: str, text: str, **more: Any) -> None:
        """Add one that takes a value, if ``more`` says nothing else."""
        self.parser.add_argument(flag, help=text, **more)

    def number(self, flag: str, text: str, default: int | None = None) -> None:
        """Add one that takes a whole number; without a default, ``text`` tells it."""
        text = text if default is None else f"{text} (default: %(default)s)"
        self(flag, text, type=_count, default=default, metavar="N")

    def backend(self) -> None:
        """Add the backend's name."""
        self("--backend", "(default: %(default)s)", default="auto", metavar="NAME")

    def target(self) -> None:
        """Add what names a function, its arguments and its host arguments."""
        text = "the function; MODULE is importable from here, or the path of a .py file"
        self("target", text, metavar="MODULE:FUNCTION")
        self(
            "--inputs",
            "a function without arguments that returns the target's arguments: a tuple, a "
            "dictionary of keywords, or a pair of both (default: the target takes none). MODULE "
            "may be left out when it is the target's.",
            metavar="MODULE:FUNCTION",
        )
        text = "a host argument and its value at capture (a Python literal); may be repeated"
        self("--host-arg", text, action="append", default=[], metavar="NAME=VALUE")

    def engine(self) -> None:
        """Add what ``generate`` and ``demo`` take besides model and prompts."""
        self.number("--max-new-tokens", "a prompt", 64)
        self.backend()
        self("--dtype", "(default: float32 on the CPU, bfloat16 elsewhere)", choices=DTYPES)
        most = f"(default: as many as there are prompts, at most {MOST_REQUESTS})"
        self.number("--max-requests", f"requests that run at once {most}")
        most = f"(default: what the prompts need, at most {MOST_STEP_TOKENS})"
        self.number("--max-step-tokens", f"tokens of a prefill step {most}")
        self("--temperature", "0 is greedy (default)", type=float, default=0.0, metavar="T")
        self("--seed", "of the draws (default: chosen and printed)", type=int, metavar="N")
        text = "also run the same engine eagerly and compare tokens and speed (default: on)"
        self("--compare", text, **_ON)
        self.number("--steps-per-launch", "decode steps, while all requests are greedy", 1)
        text = "compute norms, rotary embeddings and neighbouring projections with fewer kernels"
        self("--fuse", f"{text} where that was seen to give the same (default: on)", **_ON)
        self.number("--repeats", "runs, of which the median time counts", 1)
        add_cli_args(self.parser)


def _doctor(add: Options) -> None:
    text = "probe this backend only (may be repeated; default: every available one)"
    add("--backend", text, action="append", metavar="NAME")
    text = "print what backends declare, installed here or not, as a table in Markdown"
    add("--capabilities", text, action="store_true")
    add("--no-probe", "list only; capture nothing", action="store_true")
    text = "check this machine against a plan: the output of `plan --cluster FILE --json`"
    add("--expect", text, metavar="PLAN.json")
    add("--group", "of --expect (default: the groups whose backend is usable here)", metavar="NAME")


def _plan(add: Options) -> None:
    add.backend()
    add("--cluster", "plan for every group of this cluster", metavar="FILE")
    text = "print the mode of each group of --cluster as flags or as environment variables"
    add("--emit", text, nargs="?", const="flags", choices=("flags", "env"))
    add.number("--max-requests", "capacity", 256)
    add.number("--max-tokens", "tokens of a step", 8192)
    text = "plan an encoder of these token budgets too, which is no phase of the mode"
    add("--encoder-budgets", text, type=_count, nargs="+", metavar="N")
    text = "a fact about the engine, with a JSON value: --fact lora=true; may be repeated"
    add("--fact", text, action="append", default=[], metavar="NAME=VALUE")
    text = "estimate for this model; its configuration is read, its weights are not"
    add("--model", text, metavar="PATH")
    add("--dtype", "of the model (default: bfloat16)", choices=DTYPES, default="bfloat16")
    add_cli_args(add.parser)


def _generate(add: Options) -> None:
    text = "a folder, a .gguf file, or a name that transformers can find"
    add("--model", text, required=True, metavar="PATH")
    source = add.parser.add_mutually_exclusive_group()
    text = "a prompt; several run side by side"
    source.add_argument("--prompt", action="append", metavar="TEXT", help=text)
    text = "a prompt a line (default: standard input)"
    source.add_argument("--prompts-file", metavar="FILE", help=text)
    add.engine()


def _demo(add: Options) -> None:
    add("--prompt", "instead of the demo's", action="append", metavar="TEXT")
    add.engine()
    add.parser.set_defaults(backend="cpu", max_new_tokens=32, repeats=3)


def _bench(add: Options) -> None:
    add.backend()
    for name, (size, meaning) in SIZES.items():
        add.number(f"--{name}", f"{meaning} (default: {size})")
    text = "of weights and caches (default: float32)"
    add("--dtype", text, choices=DTYPES, default="float32")
    add.number("--kv-len", "rows to attend over (default: half the window)")
    add.number("--steps", "steps a repeat", 50)
    add.number("--repeats", "repeats, of which the median counts", 5)
    text = "only this policy; may be repeated (default: all)"
    add("--policy", text, action="append", choices=policies())
    text = "piecewise with this compiler only; may be repeated (default: all of the backend)"
    add("--compiler", text, action="append", choices=COMPILERS)
    add("--plot", "write a chart", metavar="FILE.svg")


def _check(add: Options) -> None:
    add.target()
    text = f"leave out findings of this kind; may be repeated: {', '.join(KINDS)}"
    add("--ignore", text, action="append", default=[], metavar="KIND")
    add("--grad", "run with autograd on", action="store_true")


def _explain(add: Options) -> None:
    add.target()
    add("--policy", "(default: full)", choices=policies(), default="full")
    add.backend()
    add("--compiler", "of the pieces under policy piecewise", choices=COMPILERS)
    add("--grad", "capture with autograd on", action="store_true")
    add("--dot", "write the segments as a Graphviz graph", metavar="FILE")
    text = "write one timed replay for chrome://tracing or ui.perfetto.dev"
    add("--chrome-trace", text, metavar="FILE")
    add("--prove", "also replay against eager", action="store_true")


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
    "explain": ("capture a function and show its segments, regions, nodes and memory", _explain),
}
"""What each command does, and what declares its options."""


def check_compilers(args: argparse.Namespace, chosen: Sequence[str]) -> None:
    """Refuse ``--compiler``, which was given, where none of the chosen policies reads it."""
    if args.compiler is not None and not any(map(compiles, chosen)):
        names = " and ".join(filter(compiles, policies()))
        raise CommandError(f"--compiler is of the policy {names}: nothing else compiles")


def check_model(name: str) -> None:
    """Refuse a ``--model`` that is written as a path and does not exist.

    Raises:
        CommandError: there is no such folder or file.
    """
    is_path = name.startswith(("/", "./", "../", "~")) or name.endswith(".gguf")
    if is_path and not Path(name).expanduser().exists():
        raise CommandError(f"--model {name}: there is no such folder or file")


def by_name(flag: str, given: Sequence[str], example: str) -> dict[str, str]:
    """Return what a repeated NAME=VALUE says.

    Raises:
        CommandError: one has another form, or a name is there twice.
    """
    found: dict[str, str] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise CommandError(f"{flag} {text!r}: write NAME=VALUE, for example {example}")
        if name in found:
            raise CommandError(f"{flag} {text!r}: {name!r} is given twice; keep one of them")
        found[name] = value
    return found


def mode_of(args: argparse.Namespace) -> DeviceGraphConfig:
    """Return the mode configuration that the options of a command ask for."""
    config = DeviceGraphConfig.from_args(args)
    if MODE_VARIABLE in os.environ:
        warnings.warn(
            f"{MODE_VARIABLE} is set, and only engines read it: here it has no effect. Give it as "
            f'--device-graph-mode "${MODE_VARIABLE}"',
            DeviceGraphWarning,
            stacklevel=2,
        )
    return config
