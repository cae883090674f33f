"""Releasable memory of pools, implemented by ``pages.c``, which is compiled on first use.

torch calls the functions of ``pages.c`` with its allocator locked. A thread that frees a tensor may
wait for that lock while it holds the GIL, so these functions must not need the GIL.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from devgraph.api.errors import CapabilityError, ResourceError
from devgraph.api.registry import cache_folder

_SOURCE = Path(__file__).with_name("pages.c")

_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY


def compiler() -> list[str] | None:
    """Return the command line of a C compiler, or None if this host has no usable compiler."""
    if sys.platform != "linux":
        return None
    for name in (os.environ.get("CC", ""), "cc", "gcc", "clang"):
        words = shlex.split(name)
        if words and shutil.which(words[0]):
            return words
    return None


def compiled(command: Sequence[str], folder: Path) -> Path:
    """Compile the source into ``folder`` if necessary, and return the path of the library."""
    text = _SOURCE.read_bytes() + repr((command, os.uname().machine)).encode()
    library = folder / f"pages-{hashlib.sha256(text).hexdigest()[:16]}.so"
    if library.exists():
        return library
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as private:
            output = Path(private) / library.name
            options = "-O2 -shared -fPIC -o".split()
            files = [str(output), str(_SOURCE), "-ldl", "-lpthread"]
            process = subprocess.run([*command, *options, *files], capture_output=True, text=True)
            if process.returncode:
                raise CapabilityError(
                    f"releasable memory needs a C compiler, but {command[0]} failed: "
                    f"{process.stderr.strip()}"
                )
            output.replace(library)  # Atomic: other processes never load a partial file.
    except OSError as error:
        raise CapabilityError(
            f"releasable memory needs a library, which could not be compiled in {folder}: "
            f"{error}. Set XDG_CACHE_HOME to a writable folder."
        ) from error
    return library


class MappedPages:
    """The memory segments of all releasable pools of a process; see ``Pages``."""

    def __init__(self, library: Path, driver: str) -> None:
        self._calls = calls = ctypes.CDLL(str(library))
        for name in ("pages_release", "pages_restore"):
            getattr(calls, name).argtypes = (ctypes.POINTER(ctypes.c_uint64), ctypes.c_size_t)
        error = calls.pages_open(driver.encode())
        if error:
            raise CapabilityError(
                f"{driver} cannot map memory on this machine (error {error}); set releasable=False."
            )
        self._library = library

    @functools.cached_property
    def allocator(self) -> Any:
        names = "pages_allocate", "pages_free"
        # Pools do not keep the allocator alive.
        self._plugged = torch.cuda.memory.CUDAPluggableAllocator(str(self._library), *names)
        return self._plugged.allocator()  # type: ignore[no-untyped-call]

    @classmethod
    @functools.cache
    def of_process(cls) -> MappedPages:
        command = compiler()
        assert command is not None
        return cls(compiled(command, cache_folder()), "libcuda.so.1")

    def release(self, addresses: Sequence[int]) -> None:
        self._call("pages_release", addresses)
        self._calls.pages_trim()

    def restore(self, addresses: Sequence[int]) -> None:
        self._call("pages_restore", addresses)

    def _call(self, name: str, addresses: Sequence[int]) -> None:
        array = (ctypes.c_uint64 * len(addresses))(*addresses)
        error = getattr(self._calls, name)(array, len(addresses))
        if error:
            reason = "out of memory" if error == _OUT_OF_MEMORY else "refused"
            raise ResourceError(
                f"the driver could not release or map the memory of graphs ({reason}, error "
                f"{error} of {name}). Free device memory and try again."
            )
