"""Memory of pools that can be given back: ``pages.c``, compiled where it is first needed.

torch calls its functions with the lock of its allocator held. A thread that frees a tensor waits
for that lock with the interpreter's in its hands, so that nothing of Python may run there.
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

_OUT_OF_MEMORY = 2
"""CUDA_ERROR_OUT_OF_MEMORY"""


def compiler() -> list[str] | None:
    """Return the command of a C compiler; None if there is none, or none that serves."""
    if sys.platform != "linux":
        return None
    for name in (os.environ.get("CC", ""), "cc", "gcc", "clang"):
        words = shlex.split(name)
        if words and shutil.which(words[0]):
            return words
    return None


def compiled(command: Sequence[str], folder: Path) -> Path:
    """Return the library that ``command`` makes of the source, made now unless it is in ``folder``.

    Raises:
        CapabilityError: it cannot be made.
    """
    text = _SOURCE.read_bytes() + repr((command, os.uname().machine)).encode()
    library = folder / f"pages-{hashlib.sha256(text).hexdigest()[:16]}.so"
    if library.exists():
        return library
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as private:
            made = Path(private) / library.name
            options = *"-O2 -shared -fPIC -o".split(), str(made), str(_SOURCE), "-ldl", "-lpthread"
            done = subprocess.run([*command, *options], capture_output=True, text=True)
            if done.returncode:
                raise CapabilityError(
                    f"memory that can be given back needs a C compiler, and {command[0]} failed: "
                    f"{done.stderr.strip()}"
                )
            made.replace(library)  # for another process it is there whole, or not at all
    except OSError as error:
        raise CapabilityError(
            f"memory that can be given back needs a library, which could not be made in {folder}: "
            f"{error}. Let XDG_CACHE_HOME name a folder that can be written."
        ) from error
    return library


class MappedPages:
    """The segments of all releasable pools of a process; see ``Pages``.

    Args:
        library: what was compiled.
        driver: the name of the driver's library.
    """

    def __init__(self, library: Path, driver: str) -> None:
        self._calls = calls = ctypes.CDLL(str(library))
        for name in ("pages_release", "pages_restore"):
            getattr(calls, name).argtypes = (ctypes.POINTER(ctypes.c_uint64), ctypes.c_size_t)
        error = calls.pages_open(driver.encode())
        if error:
            raise CapabilityError(f"{driver} maps no memory on this machine (error {error}).")
        self._library = library

    @functools.cached_property
    def allocator(self) -> Any:
        names = "pages_allocate", "pages_free"
        # Pools do not keep it alive; the process does, through ``made``.
        self._plugged = torch.cuda.memory.CUDAPluggableAllocator(str(self._library), *names)
        return self._plugged.allocator()  # type: ignore[no-untyped-call]

    @classmethod
    @functools.cache
    def made(cls) -> MappedPages:
        """Return the only one of the process.

        Raises:
            CapabilityError: the library cannot be made.
        """
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
            why = "out of memory" if error == _OUT_OF_MEMORY else "refused"
            raise ResourceError(
                f"the driver did not map the memory of graphs ({why}, error {error} of {name}). "
                f"Free device memory and try again."
            )
