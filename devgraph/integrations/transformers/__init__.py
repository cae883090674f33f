"""Causal language models of Hugging Face transformers on device graphs.

>>> from devgraph.integrations.transformers import Engine, load
>>> model, tokenizer = load("HuggingFaceTB/SmolLM2-135M-Instruct")      # doctest: +SKIP
>>> with Engine(model, tokenizer, backend="cpu") as engine:             # doctest: +SKIP
...     print(engine.generate(["The capital of France is"])[0].text)
 Paris.

A model runs unmodified if its whole state is a cache of keys and values, of recurrent state, or of
both. If a model calls attention through the attention-function registry of transformers, kernels of
this package compute it; other models keep their own attention. ``docs/models.md`` lists the
exceptions. ``Engine`` raises ``UnsupportedModelError`` for models that cannot run unmodified.
"""

from __future__ import annotations

import importlib.util

if importlib.util.find_spec("transformers") is None:
    raise ImportError(
        "this integration needs transformers, which is not installed: pip install transformers "
        "accelerate gguf sentencepiece"
    )

from devgraph.integrations.transformers.accelerate import (
    Fallback,
    GenerateStats,
    accelerate,
    accelerated,
    generate_stats,
    unaccelerate,
)
from devgraph.integrations.transformers.engine import Completion, Engine, EngineStats, TokenEvent
from devgraph.integrations.transformers.handoff import Handoff
from devgraph.integrations.transformers.loading import find_demo, load
from devgraph.integrations.transformers.probe import UnsupportedModelError
from devgraph.integrations.transformers.requests import FinishReason, SamplingParams
from devgraph.integrations.transformers.transport import TorchTransport, Transport

__all__ = [
    "Completion",
    "Engine",
    "EngineStats",
    "Fallback",
    "FinishReason",
    "GenerateStats",
    "Handoff",
    "SamplingParams",
    "TokenEvent",
    "TorchTransport",
    "Transport",
    "UnsupportedModelError",
    "accelerate",
    "accelerated",
    "find_demo",
    "generate_stats",
    "load",
    "unaccelerate",
]
