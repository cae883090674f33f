"""HIP's structs and enum values as ctypes has them, against the public headers.

The table was read from ``hip/hip_runtime_api.h`` of HIP 5.2.3 (Debian's libamdhip64-dev) and of
ROCm/HIP at release 6.3; they agree on every struct. Where such a header is installed a test
compiles against it as well: ``apt-get install libamdhip64-dev``, or name the folder that holds
``hip/`` in ``DEVGRAPH_HIP_HEADERS``.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from devgraph.rocm import layouts
from devgraph.rocm.backend import RocmBackend
from devgraph.rocm.layouts import KernelNodeParams, MemcpyParams, MemsetParams, Version
from tests.sim.hip.build import SOURCES

# Struct of the header, what stands for it here, size, and the offset of every field.
STRUCTS = {
    "hipKernelNodeParams": (
        KernelNodeParams,
        64,
        {
            "blockDim": 0,
            "extra": 16,
            "func": 24,
            "gridDim": 32,
            "kernelParams": 48,
            "sharedMemBytes": 56,
        },
    ),
    "hipMemsetParams": (
        MemsetParams,
        48,
        {"dst": 0, "elementSize": 8, "height": 16, "pitch": 24, "value": 32, "width": 40},
    ),
    "hipMemcpy3DParms": (
        MemcpyParams,
        160,
        {
            "srcArray": 0,
            "srcPos": 8,
            "srcPtr": 32,
            "dstArray": 64,
            "dstPos": 72,
            "dstPtr": 96,
            "extent": 128,
            "kind": 152,
        },
    ),
    "dim3": (layouts.Dim3, 12, {"x": 0, "y": 4, "z": 8}),
    "hipPos": (layouts._Position, 24, {"x": 0, "y": 8, "z": 16}),
    "hipPitchedPtr": (
        layouts._PitchedPointer,
        32,
        {"ptr": 0, "pitch": 8, "xsize": 16, "ysize": 24},
    ),
    "hipExtent": (layouts._Extent, 24, {"width": 0, "height": 8, "depth": 16}),
}

VALUES = {
    "hipStreamCaptureStatusNone": 0,
    "hipStreamCaptureStatusActive": 1,
    "hipStreamCaptureStatusInvalidated": 2,
    "hipMemcpyHostToHost": 0,
    "hipMemcpyHostToDevice": 1,
    "hipMemcpyDeviceToHost": 2,
    "hipMemcpyDeviceToDevice": 3,
    "hipMemcpyDefault": 4,
}
"""Of the header and of the one that the stand-ins include."""

HEADER_VALUES = {
    **VALUES,
    "hipStreamCaptureModeThreadLocal": 1,
    "hipGraphInstantiateFlagAutoFreeOnLaunch": layouts.INSTANTIATE_AUTO_FREE,
    "hipErrorECCNotCorrectable": 214,
    "hipErrorIllegalAddress": 700,
    "hipErrorLaunchTimeOut": 702,
    "hipErrorAssert": 710,
    "hipErrorLaunchFailure": 719,
    "hipErrorUnknown": 999,
}

KINDS = ("Kernel", "Memcpy", "Memset", "Host", "Graph", "Empty")


@pytest.mark.parametrize("name", STRUCTS)
def test_struct_has_the_layout_of_the_headers(name: str):
    struct, size, offsets = STRUCTS[name]
    assert ctypes.sizeof(struct) == size
    assert {field: getattr(struct, field).offset for field, _ in struct._fields_} == offsets


def test_kernel_parameters_are_not_in_cudas_order():
    """CUDA's struct begins with the function: a copy of its layout would launch garbage."""
    assert KernelNodeParams.func.offset == 24
    assert KernelNodeParams.blockDim.offset < KernelNodeParams.gridDim.offset


@pytest.mark.parametrize(
    ("number", "version", "first"),
    [
        (50221153, Version(5, 2, 21153), 1),
        (50300000, Version(5, 3, 0), 0),
        (60342131, Version(6, 3, 42131), 0),
        (70226015, Version(7, 2, 26015), 0),
    ],
)
def test_version_decides_which_value_a_kind_of_node_has(number: int, version: Version, first: int):
    assert Version.decode(number) == version
    assert version.first_kind == first
    found = [version.kinds[value] for value in range(first, first + len(KINDS))]
    assert found == [name.lower() for name in KINDS]


def test_release_52_has_a_kind_of_its_own_for_flat_copies():
    assert Version(5, 2).kinds[9] == "memcpy"
    assert 0 not in Version(5, 2).kinds
    assert Version(6, 3).kinds[9] == "ext_semas_wait"


def test_unsafe_calls_are_reported_from_release_714_on():
    assert not Version(7, 2).reports_unsafe_calls
    assert not Version(6, 14).reports_unsafe_calls
    assert Version(7, 14).reports_unsafe_calls
    assert Version(8, 0).reports_unsafe_calls


def test_sticky_errors_are_those_of_the_header():
    named = {value for name, value in HEADER_VALUES.items() if name.startswith("hipError")}
    assert named == RocmBackend.sticky_errors


# Against headers.


def installed_headers() -> Path | None:
    """Return the folder that holds ``hip/hip_runtime_api.h``, or None."""
    named = os.environ.get("DEVGRAPH_HIP_HEADERS", "")
    places = [Path(named)] if named else [Path("/opt/rocm/include"), Path("/usr/include")]
    return next((p for p in places if (p / "hip" / "hip_runtime_api.h").is_file()), None)


def what_a_compiler_says(include: str, folder: Path, work: Path, values: list[str]) -> list[int]:
    """Compile a program that prints every size, offset and value; return what it prints."""
    asked = []
    for name, (_, _, offsets) in STRUCTS.items():
        asked += [f"sizeof({name})", *(f"offsetof({name}, {field})" for field in offsets)]
    asked += [f"static_cast<long>({name})" for name in values]
    lines = "\n".join(f'  std::printf("%ld\\n", static_cast<long>({what}));' for what in asked)
    source = work / "layout.cpp"
    source.write_text(
        f"#define __HIP_PLATFORM_AMD__ 1\n#include {include}\n#include <cstddef>\n"
        f"#include <cstdio>\nint main() {{\n{lines}\n}}\n",
        encoding="utf-8",
    )
    program = work / "layout"
    subprocess.run(["g++", "-w", "-I", folder, "-o", program, source], check=True, timeout=300)
    said = subprocess.run([program], capture_output=True, text=True, check=True, timeout=300)
    return [int(line) for line in said.stdout.split()]


def expected(values: dict[str, int]) -> list[int]:
    found: list[int] = []
    for _, size, offsets in STRUCTS.values():
        found += [size, *offsets.values()]
    return found + list(values.values())


needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")


@needs_compiler
def test_stand_ins_are_compiled_with_the_same_layouts(tmp_path: Path):
    values = {**VALUES, **{f"hipGraphNodeType{kind}": i for i, kind in enumerate(KINDS)}}
    said = what_a_compiler_says('"hip.h"', SOURCES, tmp_path, list(values))
    assert said == expected(values)


@needs_compiler
@pytest.mark.skipif(
    installed_headers() is None,
    reason="no hip/hip_runtime_api.h: install libamdhip64-dev or set DEVGRAPH_HIP_HEADERS",
)
def test_installed_header_has_these_layouts_and_values(tmp_path: Path):
    folder = installed_headers()
    assert folder is not None
    kinds = [f"hipGraphNodeType{kind}" for kind in KINDS]
    said = what_a_compiler_says(
        "<hip/hip_runtime_api.h>", folder, tmp_path, [*HEADER_VALUES, *kinds, "HIP_VERSION"]
    )
    version = Version.decode(said.pop())
    assert said[: -len(kinds)] == expected(HEADER_VALUES)
    assert said[-len(kinds) :] == [version.first_kind + i for i in range(len(kinds))]
