"""Compile the stand-ins for libamdhip64 into a cache folder that git ignores."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

__all__ = ["PREBUILT", "build", "cache_root", "unavailable_reason"]

SOURCES = Path(__file__).with_name("src")

_VARIANTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "fake": ("fakehip.cpp", ()),
    "release52": ("fakehip.cpp", ("-DFAKEHIP_RELEASE_52",)),
    "ancient": ("fakehip.cpp", ("-DFAKEHIP_ANCIENT",)),
    "shim": ("shim.cpp", ("-ldl",)),
}

PREBUILT = "DEVGRAPH_TEST_HIP_SHIM"
"""Names a shim that was built elsewhere, for machines with a GPU and no compiler."""


def cache_root() -> Path:
    """Return the folder that holds every build: ``.cache/hip-sim`` in the repository."""
    return Path(__file__).resolve().parents[3] / ".cache" / "hip-sim"


def unavailable_reason() -> str | None:
    """Return why nothing can be built here, or None."""
    if sys.platform != "linux":
        return f"libraries in use are read from /proc, which {sys.platform} does not have"
    if shutil.which("g++") is None:
        return "g++ is not installed"
    return None


def build(variant: str = "fake") -> Path:
    """Return the path of a built ``libamdhip64.so``, building it when it is not there yet.

    Args:
        variant: "fake"; "release52" without what release 5.2 lacks; "ancient" without what
            devgraph needs; "shim" over the CUDA driver.

    Raises:
        RuntimeError: it cannot be built; the text is the reason or the compiler's message.
    """
    if variant == "shim" and (prebuilt := os.environ.get(PREBUILT)):
        return Path(prebuilt).resolve()
    if reason := unavailable_reason():
        raise RuntimeError(reason)
    source, options = _VARIANTS[variant]
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    folder = cache_root() / f"{variant}-{digest.hexdigest()[:12]}"
    target = folder / "libamdhip64.so"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # test workers start together; one of them builds
        if not target.exists():
            _compile(SOURCES / source, target, options)
    return target


def _compile(source: Path, target: Path, options: tuple[str, ...]) -> None:
    partial = target.with_suffix(".partial")
    command = ["g++", "-std=c++17", "-O1", "-g", "-fPIC", "-shared", "-Wall", "-Wextra"]
    command += ["-fvisibility=hidden", "-o", str(partial), str(source), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
    partial.rename(target)
