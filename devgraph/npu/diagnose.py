"""What this host has for Ascend NPUs, found out without importing torch_npu.

A torch_npu without its runtime breaks even ``import torch``, so the questions come first.
"""

from __future__ import annotations

import ctypes
import os
from importlib.util import find_spec
from pathlib import Path

import attrs

from devgraph.api.registry import AUTOLOAD, AUTOLOAD_WAS_ON, installed_version

NEWEST = "2.14"
"""The newest version of torch that a torch_npu was published for (PyPI, 2026)."""

# The runtime and the collectives: torch_npu cannot be imported without either.
_LIBRARIES = ("libascendcl.so", "libhccl.so")


@attrs.frozen(kw_only=True)
class Diagnosis:
    """What was found; ``problems`` is empty when torch_npu can be imported."""

    torch: str
    torch_npu: str | None
    """Installed version, None if it is not installed."""
    missing_libraries: tuple[str, ...]
    """Libraries of CANN that the loader does not find."""
    toolkit: str | None
    """Where CANN says it is installed (``ASCEND_HOME_PATH``)."""
    devices: int
    """Device files of the kernel driver."""
    autoload: bool
    """Whether ``import torch`` loads torch_npu by itself."""

    @property
    def problems(self) -> tuple[str, ...]:
        """What stands in the way, each with the way to fix it."""
        found = []
        mine = _short(self.torch)
        published = _numbers(mine) <= _numbers(NEWEST)
        if self.torch_npu is None and published:
            found.append(
                f"torch_npu is not installed: pip install torch-npu=={mine}.* (the version that "
                f"belongs to torch {self.torch}), and install CANN"
            )
        elif self.torch_npu is None:
            found.append(
                f"torch_npu is not installed, and none is known for torch {self.torch}: the newest "
                f"is for torch {NEWEST}. pip install torch=={NEWEST}.* torch-npu=={NEWEST}.*, and "
                f"install CANN"
            )
        elif mine != _short(self.torch_npu):
            cure = f"torch-npu=={mine}.* or " if published else ""
            found.append(
                f"torch_npu {self.torch_npu} does not belong to torch {self.torch}: install "
                f"{cure}torch=={_short(self.torch_npu)}.*"
            )
        if self.torch_npu is not None and self.missing_libraries:
            found.append(
                f"{' and '.join(self.missing_libraries)} cannot be loaded: install CANN and run "
                f"'source set_env.sh' of its folder"
                + (f" ({self.toolkit})" if self.toolkit else "")
                + (
                    f"; until then set {AUTOLOAD}=0, because 'import torch' loads torch_npu and "
                    f"fails"
                    if self.autoload
                    else ""
                )
            )
        return tuple(found)

    def __str__(self) -> str:
        state = "; ".join(self.problems) or "torch_npu and CANN are there"
        return (
            f"{state} (torch {self.torch}, torch_npu {self.torch_npu or 'not installed'}, "
            f"CANN {self.toolkit or 'not set up'}, {self.devices} device files, "
            f"{AUTOLOAD}={'1' if self.autoload else '0'})"
        )


def diagnose() -> Diagnosis:
    """Look at packages, libraries, device files and the environment of this host."""
    return Diagnosis(
        torch=installed_version("torch") or "not installed",
        torch_npu=installed_version("torch_npu") if find_spec("torch_npu") else None,
        missing_libraries=tuple(name for name in _LIBRARIES if not _loadable(name)),
        toolkit=os.environ.get("ASCEND_HOME_PATH") or os.environ.get("ASCEND_TOOLKIT_HOME"),
        devices=len(list(Path("/dev").glob("davinci[0-9]*"))),
        autoload=os.environ.get(AUTOLOAD, "1") == "1" or AUTOLOAD_WAS_ON in os.environ,
    )


def _short(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdecimal())


def _loadable(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
