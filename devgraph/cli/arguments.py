"""The options of every command. Nothing here imports torch: help and typos answer at once."""

from __future__ import annotations

import argparse
import os
import re
import warnings
from collections.abc import Mapping, Sequence
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

CACHE = Path(".cache") / "demo"
"""Where ``demo`` keeps its model."""

KINDS = ("host_sync", "host_value", "data_dependent_shape", "rng", "escaping_allocation", "refused")
"""Kinds of findings of ``check``."""

ENCODERS: Mapping[str, Mapping[str, Any]] = {
    "siglip-base": {
        "layers": 12,
        "hidden": 768,
        "heads": 12,
        "inner": 3072,
        "patch": 16,
        "grids": (7, 10, 14, 21, 28),
        "budgets": (256, 512, 1024),
    },
    "tiny": {
        "layers": 2,
        "hidden": 32,
        "heads": 2,
        "inner": 64,
        "patch": 4,
        "grids": (2, 3, 4, 6, 8),
        "budgets": (40, 64),
    },
}
"""Vision towers of ``bench --encoder`` by name: their sizes, the patches along each side of the
images (positions are for the middle one), and token budgets."""

IMAGES = 64
"""Images that ``bench --encoder`` encodes."""

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
    if not re.fullmatch(r"-?\d+", text):
        raise argparse.ArgumentTypeError(f"expected a whole number, got {brief(text)}")
    if not 1 <= float(text) <= _MOST:  # which takes any number of digits
        must = "at least 1" if float(text) < 1 else f"at most {_MOST}"
        raise argparse.ArgumentTypeError(f"must be {must}, got {brief(text)}")
    return int(text)


class Options:
    """Adds the options of one command, by what they take."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser

    def value(self, flag: str, text: str, **more: Any) -> None:
        """One that takes a value."""
        self.parser.add_argument(flag, help=text, **more)

    def switch(self, flag: str, text: str) -> None:
        """One that takes no value."""
        self.value(flag, text, action="store_true")

    def on_or_off(self, flag: str, text: str) -> None:
        """One that is on and has a ``--no-`` form."""
        on = {"action": argparse.BooleanOptionalAction, "default": True}
        self.value(flag, f"{text} (default: on)", **on)

    def number(self, flag: str, text: str, default: int | None = None) -> None:
        """One that takes a whole number of at least 1; without a default, ``text`` tells it."""
        text = text if default is None else f"{text} (default: %(default)s)"
        self.value(flag, text, type=_count, default=default, metavar="N")

    def repeated(self, flag: str, text: str, **more: Any) -> None:
        """One that may be given several times."""
        self.value(flag, text, action="append", **more)

    def backend(self) -> None:
        """The backend's name."""
        self.value("--backend", "(default: %(default)s)", default="auto", metavar="NAME")

    def model(self, text: str, *, required: bool) -> None:
        """What names a model on the disk."""
        self.value("--model", text, required=required, metavar="PATH")

    def target(self) -> None:
        """What names a function, its arguments and its host arguments."""
        self.value(
            "target",
            "the function; MODULE is importable from here, or the path of a .py file",
            metavar="MODULE:FUNCTION",
        )
        self.value(
            "--inputs",
            "a function without arguments that returns the target's arguments: a tuple, a "
            "dictionary of keywords, or a pair of both (default: the target takes none). MODULE "
            "may be left out when it is the target's.",
            metavar="MODULE:FUNCTION",
        )
        text = "a host argument and its value at capture (a Python literal); may be repeated"
        self.repeated("--host-arg", text, default=[], metavar="NAME=VALUE")

    def engine(self) -> None:
        """What ``generate`` and ``demo`` take besides model and prompts."""
        self.number("--max-new-tokens", "a prompt", 64)
        self.backend()
        self.value("--dtype", "(default: float32 on the CPU, bfloat16 elsewhere)", choices=DTYPES)
        most = f"(default: as many as there are prompts, at most {MOST_REQUESTS})"
        self.number("--max-requests", f"requests that run at once {most}")
        most = f"(default: what the prompts need, at most {MOST_STEP_TOKENS})"
        self.number("--max-step-tokens", f"tokens of a prefill step {most}")
        self.value("--temperature", "0 is greedy (default)", type=float, default=0.0, metavar="T")
        self.value("--top-k", "draw from the K best tokens", type=int, default=0, metavar="K")
        text = "draw from the best tokens that together have probability P"
        self.value("--top-p", text, type=float, default=1.0, metavar="P")
        self.value("--seed", "of the draws (default: chosen and printed)", type=int, metavar="N")
        self.on_or_off("--compare", "also run the same engine eagerly and compare tokens and speed")
        text = "take K decode steps in one launch, while all requests are greedy (default: 1)"
        self.value("--steps-per-launch", text, type=_count, default=1, metavar="K")
        self.on_or_off(
            "--fuse",
            "compute norms, rotary embeddings and neighbouring projections with fewer kernels "
            "where that was seen to give the same",
        )
        self.number("--repeats", "runs, of which the median time counts", 1)
        self.switch("--json", "print JSON instead of text and tables")
        add_cli_args(self.parser)


def _doctor(add: Options) -> None:
    text = "probe this backend only (may be repeated; default: every available one)"
    add.repeated("--backend", text, metavar="NAME")
    text = "print what backends declare, installed here or not, as a table in Markdown"
    add.switch("--capabilities", text)
    add.switch("--no-probe", "list only; capture nothing")
    add.switch("--json", "print JSON")


def _plan(add: Options) -> None:
    add.backend()
    add.value("--cluster", "plan for every group of this cluster", metavar="FILE")
    add.number("--max-requests", "capacity", 256)
    add.number("--max-tokens", "tokens of a step", 8192)
    text = "plan an encoder of these token budgets too, which is no phase of the mode"
    add.value("--encoder-budgets", text, type=_count, nargs="+", metavar="N")
    text = "a fact about the engine, with a JSON value: --fact lora=true; may be repeated"
    add.repeated("--fact", text, default=[], metavar="NAME=VALUE")
    text = "estimate for this model; its configuration is read, its weights are not"
    add.model(text, required=False)
    text = "of the model (default: bfloat16)"
    add.value("--dtype", text, choices=DTYPES, default="bfloat16")
    add.switch("--json", "print JSON")
    add_cli_args(add.parser)


def _generate(add: Options) -> None:
    add.model("a folder, a .gguf file, or a name that transformers can find", required=True)
    source = add.parser.add_mutually_exclusive_group()
    text = "a prompt; several run side by side"
    source.add_argument("--prompt", action="append", metavar="TEXT", help=text)
    text = "a prompt a line ('-': standard input)"
    source.add_argument("--prompts-file", metavar="FILE", help=text)
    add.engine()


def _demo(add: Options) -> None:
    add.repeated("--prompt", "instead of the demo's", metavar="TEXT")
    text = f"where the model is kept (default: {CACHE})"
    add.value("--cache", text, type=Path, default=CACHE, metavar="FOLDER")
    add.engine()
    add.parser.set_defaults(backend="cpu", max_new_tokens=32, repeats=3)


def _bench(add: Options) -> None:
    add.backend()
    for name, (size, meaning) in SIZES.items():
        add.number(f"--{name}", f"{meaning} (default: {size})")
    text = "instead, encode images of five sizes with a vision tower (default: siglip-base)"
    add.value("--encoder", text, nargs="?", const="siglip-base", choices=[*ENCODERS])
    add.number("--images", f"of --encoder (default: {IMAGES})")
    text = "of weights and caches (default: float32)"
    add.value("--dtype", text, choices=DTYPES, default="float32")
    add.number("--kv-len", "rows to attend over (default: half the window)")
    add.number("--steps", "steps a repeat", 50)
    add.number("--repeats", "repeats, of which the median counts", 5)
    text = "only this policy; may be repeated (default: all)"
    add.repeated("--policy", text, choices=policies())
    text = "piecewise with this compiler only; may be repeated (default: all of the backend)"
    add.repeated("--compiler", text, choices=COMPILERS)
    add.switch("--json", "print JSON")
    add.value("--plot", "write a chart", metavar="FILE.svg")


def _check(add: Options) -> None:
    add.target()
    text = f"leave out findings of this kind; may be repeated: {', '.join(KINDS)}"
    add.repeated("--ignore", text, default=[], metavar="KIND")
    add.switch("--grad", "run with autograd on")
    add.switch("--json", "print JSON")


def _explain(add: Options) -> None:
    add.target()
    add.value("--policy", "(default: full)", choices=policies(), default="full")
    add.backend()
    add.value("--compiler", "of the pieces under policy piecewise", choices=COMPILERS)
    add.switch("--grad", "capture with autograd on")
    add.value("--dot", "write the segments as a Graphviz graph", metavar="FILE")
    text = "write one timed replay for chrome://tracing or ui.perfetto.dev"
    add.value("--chrome-trace", text, metavar="FILE")
    add.switch("--prove", "also replay against eager")
    add.switch("--json", "print JSON")


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
