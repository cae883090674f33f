"""Models on the command line: reading them, with errors that a user can act on."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch

from devgraph.api.errors import DeviceGraphError
from devgraph.cli.tables import CommandError


def require_transformers() -> None:
    """Raise CommandError unless transformers is installed."""
    if importlib.util.find_spec("transformers") is None:
        raise CommandError(
            "this needs transformers, which is not installed: pip install transformers accelerate "
            "gguf sentencepiece"
        )


def read_config(source: str, gguf_file: str | None) -> Any:
    """Return the transformers configuration of a model without loading its weights."""
    require_transformers()
    from transformers import AutoConfig

    path = Path(source)
    if gguf_file is None and path.suffix == ".gguf":
        source, gguf_file = str(path.parent), path.name
    extra = {} if gguf_file is None else {"gguf_file": gguf_file}
    try:
        return AutoConfig.from_pretrained(source, **extra)
    except (OSError, ValueError) as error:
        raise _unreadable(source, error) from error


def load_model(
    source: str, *, gguf_file: str | None, dtype: torch.dtype | None, device: torch.device
) -> tuple[Any, Any]:
    """Return a causal language model and its tokenizer; see the transformers integration."""
    require_transformers()
    from transformers.utils import logging as transformers_logging

    from devgraph.integrations.transformers.loading import load

    transformers_logging.disable_progress_bar()
    try:
        return load(source, gguf_file=gguf_file, dtype=dtype, device=device)
    except DeviceGraphError:
        raise
    except (OSError, ValueError) as error:
        raise _unreadable(source, error) from error


def _unreadable(source: str, error: Exception) -> CommandError:
    text = str(error).strip().splitlines() or [type(error).__name__]
    why = text[0].rstrip(" .:")
    return CommandError(
        f"cannot read a model from {source!r}: {why}. Give a folder with config.json, the path "
        f"of a .gguf file, or the name of a model that transformers can find."
    )
