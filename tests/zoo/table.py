"""docs/models.md from what became of each family, and back."""

from __future__ import annotations

import re
import textwrap
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import transformers

from tests.zoo.running import REFUSED, RUNS, UNBUILT, UNCAPTURED, Result

DOCUMENT = Path(__file__).parents[2] / "docs" / "models.md"

_INTRODUCTION = """\
# Models

What `devgraph.integrations.transformers` does with every causal language model class of
transformers {version}: each is built with a tiny random configuration and runs on the CPU
reference. A class *runs* when five prompts of 1, 5, 17, 40 and 90 tokens, which join and leave one
engine with two slots, get exactly the tokens that `model.generate` gives them (greedy, float32),
with each of the policies `full`, `breakable` and `disabled` in each phase, fused and not. Rules of
`generate` that a configuration adds to the model (a forced last token) are off.
`piecewise` is refused for all of them: torch.compile cannot trace the engine's attention.

Where attention goes through the registry of transformers, the engine puts its own kernels there.
Every other model attends by itself: its own code runs on whole slots of the cache, under its own
mask for the positions of the step, one prompt at a time, unfused. Such a model is taken when it is
seen to give the logits that it gives alone. It costs more the longer `max_len` is.

On one H200 sixteen families (`tests/zoo/test_device.py`), in bfloat16 and float32, got from graphs
the tokens that the same engine gives without them, or were refused as here. Falcon was refused
there by its first capture: its older attention indexes with a list, which is copied from the host.

Written by `python -m tests.zoo`; `make test` compares twelve families with it,
`make test-all` all of them.
"""
_SECTIONS = {
    RUNS: "They generate what the model does.",
    REFUSED: "The engine refuses them when it is made, with `UnsupportedModelError`.",
    UNCAPTURED: "They run with the policy `disabled`; a capture is refused with `HostReadError`.",
    UNBUILT: (
        "transformers does not build them with a tiny configuration, or does not generate text "
        "with them alone."
    ),
}


def table(results: Mapping[str, Result]) -> str:
    """Return the document for ``results``."""
    parts = [_INTRODUCTION.format(version=transformers.__version__)]
    for verdict, meaning in _SECTIONS.items():
        reasons: dict[str, list[str]] = defaultdict(list)
        for name, result in sorted(results.items()):
            if result.verdict == verdict:
                reasons[result.reason].append(name)
        count = sum(map(len, reasons.values()))
        parts.append(f"## {verdict.capitalize()}: {count} of {len(results)}\n\n{meaning}\n")
        rows = sorted(reasons.items(), key=lambda row: (-len(row[1]), row[0]))
        if verdict == RUNS:
            parts += [textwrap.fill(", ".join(names), 100) + "\n" for _, names in rows]
        else:
            lines = [f"| {why} | {len(names)} | {', '.join(names)} |" for why, names in rows]
            parts.append("\n".join(["| reason | | classes |", "|---|---|---|", *lines]) + "\n")
    return "\n".join(parts)


def read(document: str) -> tuple[str, dict[str, Result]]:
    """Return the version of transformers that ``document`` is about, and what it says."""
    found = re.search(r"of\s+transformers (\d\S*):", document)
    assert found is not None
    results: dict[str, Result] = {}
    for section in document.split("\n## ")[1:]:
        verdict, _, body = section.partition(":")
        if verdict.lower() == RUNS:
            names = body.split("\n\n", 2)[2].replace("\n", " ").strip().split(", ")
            results |= dict.fromkeys(names, Result(RUNS))
        for why, names in re.findall(r"^\| (.+) \| \d+ \| (.+) \|$", body, re.MULTILINE):
            results |= dict.fromkeys(names.split(", "), Result(verdict.lower(), why))
    return found[1], results
