"""The options of all commands. This module does not import torch, so that help is fast."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from devgraph.api.config.flags import add_cli_args
from devgraph.api.errors import brief, did_you_mean
from devgraph.api.policy import COMPILERS, compiles, policies
from devgraph.cli.tables import CommandError

DTYPES = ("float32", "bfloat16", "float16")

KINDS = {
    "host_sync": "HostReadError",
    "host_value": "captures.md#arguments-and-containers",
    "data_dependent_shape": "HostReadError",
    "rng": "captures.md#random-numbers",
    "seeding": "captures.md#random-numbers",
    "escaping_allocation": "captures.md#reachable-state",
    "rebinding": "captures.md#reachable-state",
    "python_state": "captures.md#reachable-state",
    "thread": "captures.md#threads",
    "refused": "CaptureError",
}
"""Kinds of findings of ``check``, each with its section of ``troubleshoot`` or of another page."""

SIZES = {
    "layers": (8, "decoder layers"),
    "hidden": (256, "width of the model"),
    "heads": (4, "attention heads"),
    "vocabulary": (4096, "rows of the embedding and of the logits"),
    "batch": (1, "requests in the step"),
    "window": (512, "rows of the key and value cache of each request"),
}
"""Default and meaning of each size option of ``bench``."""

MOST_REQUESTS = 8
"""Default limit of concurrent requests."""

MOST_STEP_TOKENS = 512
"""Default limit of tokens in a prefill step."""


_MOST = (1 << 31) - 1


def _count(text: str) -> int:
    try:
        number = int(text)
    except ValueError:  # int() also rejects thousands of digits.
        raise argparse.ArgumentTypeError(f"expected a whole number, got {brief(text)}") from None
    if not 1 <= number <= _MOST:
        raise argparse.ArgumentTypeError(f"must be from 1 to {_MOST}, got {brief(text)}")
    return number


_ON: dict[str, Any] = {"action": argparse.BooleanOptionalAction, "default": True}
"""Keyword arguments for a switch that is on by default and has a ``--no-`` form."""


class Options:
    """A builder for the options of a command."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser

    def __call__(self, flag: str, text: str, **more: Any) -> None:
        """Add an option. Its value is a string unless ``more`` changes the type."""
        self.parser.add_argument(flag, help=text, **more)

    def common(self) -> None:
        """Add the common options, which may precede or follow the command."""
        unset: Any = {"default": argparse.SUPPRESS}
        self("--debug", "show the traceback of an error", action="store_true", **unset)
        text = "log progress; -vv logs details"
        self.parser.add_argument("-v", "--verbose", action="count", help=text, **unset)
        text = "colors of the output; auto follows the terminal and NO_COLOR"
        self("--color", text, choices=("auto", "always", "never"), **unset)
        self("--json", "print JSON, for programs", action="store_true", **unset)

    def number(self, flag: str, text: str, default: int | None = None) -> None:
        """Add a positive integer option; ``text`` must describe an omitted ``default``."""
        text = text if default is None else f"{text} (default: %(default)s)"
        self(flag, text, type=_count, default=default, metavar="N")

    def backend(self) -> None:
        text = "name of the backend (default: %(default)s)"
        self("--backend", text, default="auto", metavar="NAME")

    def target(self, **more: Any) -> None:
        """Add the options that name a function, its arguments and its host arguments."""
        text = "the function; MODULE is an importable module or the path of a .py file"
        self("target", text, metavar="MODULE:FUNCTION", **more)
        text = (
            "a function without parameters that returns the arguments of the target: a tuple, a "
            "dictionary of keyword arguments, or a pair of tuple and dictionary (default: no "
            "arguments). Without MODULE, the function is in the module of the target"
        )
        self("--inputs", text, metavar="MODULE:FUNCTION")
        text = "a host argument and its value at capture, a Python literal; may be repeated"
        self("--host-arg", text, action="append", default=[], metavar="NAME=VALUE")

    def engine(self) -> None:
        """Add the options of ``generate`` and ``demo`` except model and prompts."""
        self.number("--max-new-tokens", "tokens to generate per prompt", 64)
        self.backend()
        text = "dtype of the model (default: float32 on the CPU, bfloat16 elsewhere)"
        self("--dtype", text, choices=DTYPES)
        most = f"(default: the number of prompts, at most {MOST_REQUESTS})"
        self.number("--max-requests", f"maximum number of concurrent requests {most}")
        most = f"(default: enough for the prompts, at most {MOST_STEP_TOKENS})"
        self.number("--max-step-tokens", f"maximum number of tokens in a prefill step {most}")
        text = "sampling temperature; 0 is greedy (default)"
        self("--temperature", text, type=float, default=0.0, metavar="T")
        text = "seed of sampling (default: a random seed, which is printed)"
        self("--seed", text, type=int, metavar="N")
        text = "also run eagerly, and compare tokens and speed (default: on)"
        self("--compare", text, **_ON)
        self.number("--steps-per-launch", "decode steps per launch for greedy requests", 1)
        text = "fuse norms, rotary embeddings and projections, if the fused code gives equal values"
        self("--fuse", f"{text} (default: on)", **_ON)
        self.number("--repeats", "number of runs; times are medians", 1)
        text = "apply the chat template of the model to each prompt"
        self("--chat", text, action=argparse.BooleanOptionalAction, default=False)
        add_cli_args(self.parser)


def _doctor(add: Options) -> None:
    text = "probe only this backend (may be repeated; default: every available backend)"
    add("--backend", text, action="append", metavar="NAME")
    text = "print the declared capabilities of all backends"
    add("--capabilities", text, action="store_true")
    add("--no-probe", "list backends without captures", action="store_true")
    text = "compare this machine with a plan, the output of `plan --cluster FILE --json`"
    add("--expect", text, metavar="PLAN.json")
    text = "group of --expect (default: all groups whose backend is usable here)"
    add("--group", text, metavar="NAME")


def _plan(add: Options) -> None:
    add.backend()
    add("--cluster", "plan every group of this cluster", metavar="FILE")
    text = "print the mode of each group of --cluster as flags or as environment variables"
    add("--emit", text, nargs="?", const="flags", choices=("flags", "env"))
    add("--group", "plan only this group of --cluster", metavar="NAME")
    add.number("--max-requests", "capacity of a decode step in requests", 256)
    add.number("--max-tokens", "capacity of a prefill step in tokens", 8192)
    text = "also plan an encoder with these token budgets"
    add("--encoder-budgets", text, type=_count, nargs="+", metavar="N")
    text = "a fact of the engine with a JSON value, such as lora=true; may be repeated"
    add("--fact", text, action="append", default=[], metavar="NAME=VALUE")
    text = "estimate graphs and memory for this model; only its configuration is read"
    add("--model", text, metavar="PATH")
    add("--dtype", "dtype of the model (default: bfloat16)", choices=DTYPES, default="bfloat16")
    add_cli_args(add.parser)


def _generate(add: Options) -> None:
    text = "a folder, a .gguf file, or a model name for transformers"
    add("--model", text, required=True, metavar="PATH")
    source = add.parser.add_mutually_exclusive_group()
    text = "a prompt; may be repeated, and all prompts run together"
    source.add_argument("--prompt", action="append", metavar="TEXT", help=text)
    text = "a file with one prompt per line (default: standard input)"
    source.add_argument("--prompts-file", metavar="FILE", help=text)
    add.engine()


def _demo(add: Options) -> None:
    text = "a prompt to use instead of the demo's prompts; may be repeated"
    add("--prompt", text, action="append", metavar="TEXT")
    add.engine()
    add.parser.set_defaults(backend="cpu", max_new_tokens=32, max_step_tokens=32, chat=True)


def _bench(add: Options) -> None:
    add.backend()
    for name, (size, meaning) in SIZES.items():
        add.number(f"--{name}", f"{meaning} (default: {size})")
    text = "dtype of weights and caches (default: float32)"
    add("--dtype", text, choices=DTYPES, default="float32")
    add.number("--kv-len", "cache rows to attend over (default: half the window)")
    add.number("--steps", "steps per repeat", 50)
    add.number("--repeats", "number of repeats; times are medians", 5)
    text = "time only this policy; may be repeated (default: all)"
    add("--policy", text, action="append", choices=policies())
    text = "compiler of piecewise; may be repeated (default: all compilers of the backend)"
    add("--compiler", text, action="append", choices=COMPILERS)
    add("--plot", "write a chart to this file", metavar="FILE.svg")


def _check(add: Options) -> None:
    add.target(nargs="+")
    text = f"omit findings of this kind, one of {', '.join(KINDS)}; may be repeated"
    add("--ignore", text, action="append", default=[], metavar="KIND")
    add("--grad", "run with autograd", action="store_true")
    text = "text (default), GitHub Actions annotations, or SARIF"
    add("--output-format", text, choices=("text", "github", "sarif"), default="text")


def _completion(add: Options) -> None:
    add("shell", "the shell that reads the script", choices=("bash", "zsh", "fish"))


def _troubleshoot(add: Options) -> None:
    text = "an error class or another section (default: list all sections)"
    add("section", text, nargs="?", metavar="SECTION")


def _explain(add: Options) -> None:
    add.target()
    add("--policy", "capture policy (default: full)", choices=policies(), default="full")
    add.backend()
    add("--compiler", "compiler of the pieces of piecewise", choices=COMPILERS)
    add("--grad", "capture with autograd", action="store_true")
    add("--dot", "write the segments as a Graphviz graph", metavar="FILE")
    text = "write one timed replay for chrome://tracing or ui.perfetto.dev"
    add("--chrome-trace", text, metavar="FILE")
    text = "write segments, regions, nodes, memory and times as one HTML file"
    add("--html", text, metavar="FILE")


COMMANDS = {
    "doctor": ("show devices, backends and their capabilities, probed by captures", _doctor),
    "plan": ("show the effective mode on this machine or in a cluster", _plan),
    "generate": (
        "generate text with a language model in graphs, and compare with eager runs",
        _generate,
    ),
    "demo": ("generate text with a small real model, downloaded on first use", _demo),
    "bench": ("time eager and every policy on the same work", _bench),
    "check": ("list the operations that a device capture would refuse or freeze", _check),
    "explain": ("capture a function and show its segments, regions, nodes and memory", _explain),
    "completion": ("print a completion script for a shell", _completion),
    "troubleshoot": ("print the documentation of an error class", _troubleshoot),
}


def check_compilers(args: argparse.Namespace, chosen: Sequence[str]) -> None:
    """Refuse ``--compiler`` if none of the chosen policies compiles."""
    if args.compiler is not None and not any(map(compiles, chosen)):
        names = " and ".join(filter(compiles, policies()))
        raise CommandError(f"--compiler has an effect only with the policy {names}")


def check_model(name: str) -> None:
    """Refuse a ``--model`` that is a path to a missing file."""
    is_path = name.startswith(("/", "./", "../", "~")) or name.endswith(".gguf")
    if is_path and not Path(name).expanduser().exists():
        raise CommandError(f"--model {name}: there is no such folder or file")


def check_group(name: str | None, names: Sequence[str], file: str) -> None:
    """Refuse a ``--group`` that does not exist."""
    if name is not None and name not in names:
        raise CommandError(f"{file} has no group {name!r}. {did_you_mean(name, names)}")


def by_name(flag: str, given: Sequence[str], example: str) -> dict[str, str]:
    """Parse the values of a repeated option NAME=VALUE."""
    values: dict[str, str] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise CommandError(f"{flag} {text!r}: write NAME=VALUE, for example {example}")
        if name in values:
            raise CommandError(f"{flag} {text!r}: {name!r} is given twice; keep one of them")
        values[name] = value
    return values
