"""A simulated Ascend driver under the real, unmodified torch_npu.

``activate()`` builds what is needed, loads it and imports torch_npu; after that ``torch.npu`` works
on a machine without a device. See the README beside this file for what it can and cannot prove.
"""

from __future__ import annotations

import ctypes
import os
import sys

from .build import FLAGS_VARIANT, build, cache_root, unavailable_reason
from .driver import Driver

__all__ = ["Driver", "activate", "build", "cache_root", "is_active", "unavailable_reason"]

# In the order of their dependencies.
_LIBRARIES = (
    "libhccl",
    "libhcomm",
    "libacl_op_compiler",
    "libge_runner",
    "libgraph",
    "libacl_tdt_channel",
)
_LIBRARIES += ("libopapi", "libnnopbase")

_active: Driver | None = None


def is_active() -> bool:
    """Whether the simulated driver is loaded into this process."""
    return _active is not None


def activate(*, flag_events: bool = False) -> Driver:
    """Load the simulated driver and torch_npu into this process and return the driver.

    Args:
        flag_events: behave like a driver whose external events are flags that are reset by a
            task, instead of values in memory. One process has one kind.

    Raises:
        RuntimeError: it cannot be built here, or torch_npu is loaded already over something else.
    """
    global _active
    if _active is not None:
        return _active
    if "torch_npu" in sys.modules:
        raise RuntimeError("torch_npu was imported before the simulated driver was activated")
    folder = build()
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # importing torch must not load torch_npu
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch_npu misses what is not simulated
    # What CANN's set_env.sh does: processes that are started from here find the driver as well.
    os.environ["LD_LIBRARY_PATH"] = str(folder)
    os.environ["ASCEND_HOME_PATH"] = str(folder)
    os.environ["ASCEND_OPP_PATH"] = str(folder / "opp")
    import torch  # noqa: F401  (the kernels link its libraries)

    interpose = folder / "libinterpose.so"
    if interpose.exists():
        ctypes.CDLL(str(interpose), mode=ctypes.RTLD_GLOBAL)
    runtime = (folder / FLAGS_VARIANT if flag_events else folder) / "libascendcl.so"
    library = ctypes.CDLL(str(runtime), mode=ctypes.RTLD_GLOBAL)
    for name in _LIBRARIES:
        ctypes.CDLL(str(folder / f"{name}.so"), mode=ctypes.RTLD_GLOBAL)
    import torch_npu

    _keep_logger(library, f"{os.path.dirname(torch_npu.__file__)}/lib/libtorch_npu.so")
    _active = Driver(library, folder)
    return _active


def _keep_logger(library: ctypes.CDLL, torch_npu: str) -> None:
    """Keep what torch_npu's queue thread logs through alive until the process has ended.

    The thread looks at it once more after it was destroyed, and then one process in twenty prints
    a line. That is true on a device as well; here it would spoil tests of a silent end.
    """
    registry = ctypes.CDLL(torch_npu)
    context = registry._ZN11npu_logging10LogContext11GetInstanceEv
    context.restype = ctypes.c_void_p
    string = "RKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"
    get_logger = registry[f"_ZN11npu_logging10LogContext9getLoggerE{string}"]
    getter = ctypes.cast(get_logger, ctypes.c_void_p)
    library.fakeacl_keep_logger(ctypes.c_void_p(context()), getter, b"torch_npu.dispatch")
