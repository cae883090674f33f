"""Build the simulated Ascend driver into a cache folder that git ignores.

The result depends on the torch and torch_npu that are installed and on the sources here, so each
combination has a folder of its own and a finished one is never built again. Building needs g++ and
takes about half a minute on two cores; finding out that it cannot be done takes a millisecond.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import logging
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

__all__ = ["build", "cache_root", "unavailable_reason"]

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).with_name("src")

# Libraries that torch_npu links and that need no content of their own here.
EMPTY = ("libacl_op_compiler", "libgraph", "libacl_tdt_channel")

# The variant without value waits behaves like an older driver: external events are flags with a
# reset of their own (see src/value_wait.cpp).
FLAGS_VARIANT = "flags"

_RUNTIME_NAME = re.compile(rb"\b(?:aclrt|aclmdlRI|aclnn)[A-Z][A-Za-z0-9]+\b")


def cache_root() -> Path:
    """Return the folder that holds every build: ``.cache/ascend-sim`` in the repository."""
    return Path(__file__).resolve().parents[3] / ".cache" / "ascend-sim"


def _package(name: str) -> Path | None:
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def unavailable_reason() -> str | None:
    """Return why the simulated driver cannot be used here, or None; imports neither torch."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"the simulated driver needs Linux on x86_64, this is {platform.machine()}"
    if _package("torch") is None:
        return "torch is not installed"
    if _package("torch_npu") is None:
        return "torch_npu is not installed (pip install torch-npu of the same version as torch)"
    if shutil.which("g++") is None:
        return "g++ is not installed"
    torch, torch_npu = (importlib.metadata.version(name) for name in ("torch", "torch_npu"))
    if torch.split("+")[0].rsplit(".", 1)[0] != torch_npu.split("+")[0].rsplit(".", 1)[0]:
        return f"torch {torch} and torch_npu {torch_npu} do not belong together"
    return None


def _key() -> str:
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for source in sorted(SOURCES.rglob("*.*")):
        digest.update(source.name.encode() + source.read_bytes())
    torch, torch_npu = (importlib.metadata.version(name) for name in ("torch", "torch_npu"))
    return f"torch{torch}-npu{torch_npu}-{digest.hexdigest()[:12]}"


def build() -> Path:
    """Return the folder of the built libraries, building them when they are not there yet.

    Raises:
        RuntimeError: they cannot be built; the text is the reason or the compiler's message.
    """
    if reason := unavailable_reason():
        raise RuntimeError(reason)
    target = cache_root() / _key()
    if target.is_dir():
        return target
    cache_root().mkdir(parents=True, exist_ok=True)
    with open(cache_root() / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # test workers start together; one of them builds
        if target.is_dir():
            return target
        partial = target.with_name(f"{target.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        _Builder(partial).run()
        partial.rename(target)
    return target


def _run(command: Sequence[str | Path], **options: object) -> str:
    text = [str(part) for part in command]
    done = subprocess.run(text, capture_output=True, text=True, **options)  # type: ignore[call-overload]
    if done.returncode:
        raise RuntimeError(f"{' '.join(text)} failed:\n{done.stderr[-4000:]}")
    return str(done.stdout + done.stderr)


class _Builder:
    """One build into ``out``; the object files and the precompiled header go away afterwards."""

    def __init__(self, out: Path) -> None:
        torch, npu = _package("torch"), _package("torch_npu")
        assert torch is not None
        assert npu is not None
        self.out, self.torch, self.npu = out, torch, npu
        self.objects = out / "objects"
        self.objects.mkdir()

    def run(self) -> None:
        logger.info("building the simulated driver in %s", self.out)
        self._runtime()
        self._kernels()
        include = [f"-I{self.npu}/include/third_party/hccl/inc", f"-I{self.torch}/include"]
        hccl = self._compile(SOURCES / "hccl" / "hccl.cpp", ["-O1", *include])
        self._shared("libhccl.so", [hccl], ["-lascendcl", "-lrt"])
        self._shared("libhcomm.so", [self._empty()], ["-lhccl"])
        for name in EMPTY:
            self._shared(f"{name}.so", [self._empty()], ["-lascendcl"])
        self._shared("libnnopbase.so", [self._empty()], ["-lopapi", "-lascendcl"])
        self._shared("libge_runner.so", [], [])  # replaced below, once the missing names are known
        self._stubs()
        if (self.torch / "lib" / "libtorch_cuda.so").exists():
            self._interpose()
        (self.out / "missing.txt").write_text("\n".join(self._missing()) + "\n")
        for part in ("runtime", "compiler", "opp"):  # torch_npu looks whether CANN has them
            (self.out / part).mkdir()
        shutil.rmtree(self.objects)

    def _compile(self, source: Path, flags: Iterable[str]) -> Path:
        target = self.objects / (source.stem + ".o")
        common = ["g++", "-std=c++20", "-fPIC", "-Wall", "-pthread", f"-I{self.npu}/include"]
        _run([*common, *flags, "-c", source, "-o", target])
        return target

    def _shared(self, name: str, objects: Iterable[Path], libraries: Iterable[str]) -> None:
        out = self.out / name
        command: list[str | Path] = ["g++", "-shared", "-o", out, f"-Wl,-soname,{out.name}"]
        command += [*objects, "-Wl,--no-as-needed", f"-L{self.out}", f"-L{self.torch}/lib"]
        _run([*command, *libraries, "-Wl,--allow-shlib-undefined"])

    def _runtime(self) -> None:
        sources = sorted(path for path in SOURCES.glob("*.cpp") if path.stem != "interpose")
        with ThreadPoolExecutor(2) as pool:
            objects = list(pool.map(lambda path: self._compile(path, ["-O1"]), sources))
        self._shared("libascendcl.so", objects, [])
        (self.out / FLAGS_VARIANT).mkdir()
        without = [path for path in objects if path.stem != "value_wait"]
        self._shared(f"{FLAGS_VARIANT}/libascendcl.so", without, [])

    def _kernels(self) -> None:
        includes = [f"-I{self.torch}/include", f"-I{self.torch}/include/torch/csrc/api/include"]
        # torch's headers take longer than the kernels: compile them once.
        header = self.objects / "kernel.h"
        header.write_text(f'#include "{SOURCES}/kernels/kernel.h"\n')
        flags = ["-O0", "-w", *includes]
        gcc = ["g++", "-std=c++20", "-fPIC", "-Wall", "-pthread", f"-I{self.npu}/include"]
        _run([*gcc, *flags, "-x", "c++-header", header, "-o", f"{header}.gch"])
        flags += ["-include", str(header)]
        sources = sorted((SOURCES / "kernels").glob("*.cpp"))
        with ThreadPoolExecutor(2) as pool:
            objects = list(pool.map(lambda path: self._compile(path, flags), sources))
        self._shared("libopapi.so", objects, ["-lc10", "-ltorch_cpu", "-lascendcl"])

    def _empty(self) -> Path:
        source = self.objects / "empty.c"
        source.write_text("")
        target = self.objects / "empty.o"
        _run(["gcc", "-fPIC", "-x", "c", "-c", source, "-o", target])
        return target

    def _undefined(self) -> list[str]:
        """Return the names that torch_npu links and nobody defines, Python's and C++'s aside."""
        names = set()
        environment = {**os.environ, "LD_LIBRARY_PATH": f"{self.out}:{self.torch}/lib"}
        extension = next(self.npu.glob("_C*.so"))
        lib = self.npu / "lib"
        for library in (lib / "libtorch_npu.so", lib / "libtensorpipe.so", extension):
            text = subprocess.run(
                ["ldd", "-r", str(library)], capture_output=True, text=True, env=environment
            )
            found = re.findall(r"undefined symbol: (\w+)", text.stdout + text.stderr)
            names.update(name for name in found if not re.match(r"_?Py|_Z", name))
        return sorted(names)

    def _stubs(self) -> None:
        lines = ["void fakeacl_report_line(const char*);"]
        for name in self._undefined():
            text = f"stub: {name} was called; it does nothing and returns 0"
            report = f'if (!seen++) fakeacl_report_line("{text}");'
            lines.append(f"long {name}() {{ static int seen; {report} return 0; }}")
        source = self.objects / "stubs.c"
        source.write_text("\n".join(lines) + "\n")
        target = self.objects / "stubs.o"
        _run(["gcc", "-w", "-fno-builtin", "-fPIC", "-c", source, "-o", target])
        self._shared("libge_runner.so", [target], ["-lascendcl"])

    def _interpose(self) -> None:
        target = self._compile(SOURCES / "interpose.cpp", ["-O1"])
        self._shared("libinterpose.so", [target], ["-lc10"])

    def _missing(self) -> list[str]:
        """Return the driver functions that torch_npu names and the simulation does not have."""
        named = set(_RUNTIME_NAME.findall((self.npu / "lib" / "libtorch_npu.so").read_bytes()))
        symbols = "".join(
            _run(["nm", "-D", "--defined-only", library]) for library in self.out.glob("*.so")
        )
        defined = set(re.findall(r" [TWVBD] (\w+)", symbols))
        names = {name.decode().removesuffix("GetWorkspaceSize") for name in named}
        return sorted(name for name in names if name not in defined)
