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

This page lists the results of `devgraph.integrations.transformers` for every causal language model
class of transformers {version}: the classes that run, the refused classes, and the reasons.

Each class is built with a tiny random configuration and runs on the CPU reference. Five prompts of
1, 5, 17, 40 and 90 tokens join and leave one engine with two request slots. A class *runs* if all
prompts get exactly the tokens of `model.generate` (greedy, float32) with each of the policies
`full`, `breakable` and `disabled` in each phase, with and without fusion. Generation rules in a
model's configuration (a forced last token) are disabled. `piecewise` is refused for all classes,
because `torch.compile` cannot trace the engine's attention.

If a model calls attention through the registry of transformers, the engine replaces it with its own
kernels. All other models use their own attention code. It runs on whole request slots of the cache,
with a mask for the positions of the step, one prompt at a time and without fusion. The engine
accepts such a model only if it reproduces the logits of the model without devgraph. Its cost
increases with `max_len`.

Recurrent layers (linear attention, Mamba, short convolutions) store their state in one row per
request slot. In a decode step these layers are part of the graph. In a packed step, their own code
runs on the tokens of one request at a time, between the graph's segments, because it may read data
on the host or loop over tokens. If that code cannot continue from an earlier state with several
tokens, all chunks of a prompt except the first run one token at a time. These models must also
reproduce the logits of the model without devgraph. Of the classes with recurrent layers, 18 run
with transformers 5.23 and 5.24, and 13 with 5.10.

In float16 and bfloat16, tokens can differ from those of `model.generate` where the best logits are
almost equal, because a chunk of a prompt rounds differently from the whole prompt. Mamba,
FalconMamba and Mamba2 with tiny random weights generated 24 tokens each for 240 requests in both
dtypes, and 9 requests differed. Where they did, the two tokens' logits were within 2% of the
standard deviation of all logits (`tests/integrations/transformers/test_parity.py`).

Sixteen families were tested on one H200 in bfloat16 and float32 (`tests/zoo/test_device.py`). Their
tokens with and without graphs were equal, or the class was refused as listed on this page. The
exception is Falcon, whose first capture on the H200 was refused: its older attention indexes with a
list, which is copied from the host.

`python -m tests.zoo` writes this page. `make test` checks twelve families, and `make test-all`
checks all of them.
"""
_CLOSING = """\
## Encoder-decoder models

Complete encoder-decoder models such as Whisper, T5 and BART are refused. Their decoders run if
transformers has a causal class for them (`WhisperForCausalLM`, `BartForCausalLM`). Support for the
complete models would require:

- running the encoder in an `EncoderRunner`, once per request
- storing the keys and values of cross-attention as a second kind of state of fixed size: one row
  per request slot for the longest encoder output and its length. Admission writes this state, steps
  read it with a mask of that length, and it is reset together with the slot
- a probe that separates writes of cross-attention from those of self-attention, because both go to
  one `EncoderDecoderCache`, and replacement layers for both parts of this cache
- forced decoder tokens and, for T5, relative position biases computed from the positions of the
  step
"""
_SECTIONS = {
    RUNS: "These classes generate the same tokens as without devgraph.",
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
