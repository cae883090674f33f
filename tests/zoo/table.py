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

Results of `devgraph.integrations.transformers` for every causal language model class of
transformers {version}: the classes that run, the refused ones, and the reasons.

Each class is built with a tiny random configuration and runs on the CPU reference. Five prompts of
1, 5, 17, 40 and 90 tokens join and leave one engine with two request slots. A class *runs* if they
get exactly the tokens of `model.generate` (greedy, float32) with each of the policies `full`,
`breakable` and `disabled` in each phase, fused and not fused. Generation rules in a model's
configuration (a forced last token) are off. `piecewise` is refused for all classes, because
torch.compile cannot trace the engine's attention.

If a model calls attention through the registry of transformers, the engine installs its own
kernels there. Every other model keeps its own attention: its code runs on whole request slots of
the cache, with a mask for the positions of the step, one prompt at a time, not fused. The engine
accepts such a model after it has reproduced the logits of the plain model. Its cost grows with
`max_len`.

Layers with recurrent state (linear attention, Mamba, short convolutions) keep it in one row for
each request slot. In a decode step they are part of the graph. In a packed step their own code runs
on the tokens of one request at a time, outside of the graph's segments, because it may read the
host or loop over tokens. If that code cannot carry its state through several tokens, all chunks of
a prompt except the first run one token at a time. These models must reproduce the logits of the
plain model too. Of the classes with such layers, 18 run on transformers 5.23 and 5.24, and 13 on
5.10.

Sixteen families ran on one H200 in bfloat16 and float32 (`tests/zoo/test_device.py`). Their graphs
gave the same tokens as the same engine without graphs, or the class was refused as listed here.
Falcon was refused by its first capture on the H200: its older attention indexes with a list, which
is copied from the host.

`python -m tests.zoo` writes this page. `make test` compares twelve families with it, and
`make test-all` all of them.
"""
_CLOSING = """\
## Encoder-decoder models

Whisper, T5, BART and other encoder-decoder models are refused as a whole; their decoders run where
transformers has a causal class of them (`WhisperForCausalLM`, `BartForCausalLM`). They would need:

- the encoder in an `EncoderRunner`, once for each request;
- cross-attention keys and values as a second kind of state of fixed size: a row a request slot with
  room for the longest encoder output and its length, written at admission, read under
  a mask of that length, and reset with the slot;
- a probe that separates writes of cross-attention from those of self-attention, as both go to one
  `EncoderDecoderCache`, and a seat for both of its halves;
- forced decoder tokens and, for T5, relative position biases by the positions of the step.
"""
_SECTIONS = {
    RUNS: "These classes generate the same tokens as the plain model.",
    REFUSED: "The constructor of the engine refuses these classes with `UnsupportedModelError`.",
    UNCAPTURED: "These classes run with the policy `disabled`. Captures raise `HostReadError`.",
    UNBUILT: (
        "transformers cannot build these classes with a tiny configuration, or they do not "
        "generate text without another model."
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
    return "\n".join([*parts, _CLOSING])


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
