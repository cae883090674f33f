"""Which libamdhip64 is bound, what it must offer, and why the backend is not available.

And HIP's structs and enum values, against the public headers. Their table was read from
``hip/hip_runtime_api.h`` of HIP 5.2.3 (Debian's libamdhip64-dev) and of ROCm/HIP at release 6.3;
they agree on every struct. Where such a header is installed a test compiles against it as well:
``apt-get install libamdhip64-dev``, or name the folder that holds ``hip/`` in
``DEVGRAPH_TEST_HIP_HEADERS``.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable
from ctypes import addressof, c_uint64
from pathlib import Path

import pytest
import torch

import devgraph as dg
from devgraph.api.torchlike.node_calls import RuntimeCallError
from devgraph.rocm import backend as rocm
from devgraph.rocm import runtime as rocm_runtime
from devgraph.rocm.runtime import (
    KernelNodeParams,
    MemcpyParams,
    MemsetParams,
    Runtime,
    Version,
    mapped_library,
)
from tests.sim.hip import Fake, build, unavailable_reason
from tests.sim.hip.build import SOURCES
from tests.support.forked import run_forked

ROOT = Path(__file__).parents[2]
needs_fake = pytest.mark.skipif(
    unavailable_reason() is not None, reason=f"no fake libamdhip64: {unavailable_reason()}"
)


@pytest.mark.parametrize(
    "name",
    ["libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6.3.42131", "libamdhip64-a1b2c3.so"],
)
def test_library_that_torch_mapped_is_found_by_its_path(tmp_path: Path, name: str):
    maps = tmp_path / "maps"
    maps.write_text(
        "7f00-7f01 r-xp 00000000 08:01 11                         /usr/lib/libamd_comgr.so.2\n"
        "7f01-7f02 rw-p 00000000 00:00 0 \n"
        f"7f02-7f03 r-xp 00000000 08:01 12                         /opt/a folder/lib/{name}\n",
        encoding="utf-8",
    )
    assert mapped_library(maps) == f"/opt/a folder/lib/{name}"


@pytest.mark.parametrize("name", ["libamdhip64.so.7.txt", "notlibamdhip64.so", "libamdhip64.json"])
def test_other_files_are_not_taken_for_the_library(tmp_path: Path, name: str):
    maps = tmp_path / "maps"
    maps.write_text(f"7f02-7f03 r-xp 00000000 08:01 12 /opt/{name}\n", encoding="utf-8")
    assert mapped_library(maps) is None
    assert mapped_library(tmp_path / "absent") is None


def test_process_without_the_library_is_told_to_reinstall_torch(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rocm_runtime, "mapped_library", lambda: None)
    with pytest.raises(dg.BackendUnavailableError, match="Reinstall the ROCm build of torch"):
        Runtime.find()


@needs_fake
@pytest.mark.parametrize("what", ["copy", "fill", "wait"])
def test_fault_that_was_ordered_from_the_fake_is_told_by_the_call_that_it_hits(what: str):
    """A call that made others in turn swallowed theirs, and then did nothing."""
    fake = Fake()
    stream, other = fake.stream(), fake.stream()
    source, to = (c_uint64 * 2)(1, 2), (c_uint64 * 2)()
    calls: dict[str, Callable[[], None]] = {
        "copy": lambda: fake.copy(stream, addressof(to), addressof(source), 16),
        "fill": lambda: fake.fill(stream, addressof(to), 0, 16),
        "wait": lambda: fake.wait(stream, other),
    }
    with fake.with_settings(fail_call_in=2):
        calls[what]()
        assert fake.get("fail_call_in") == 1
        with pytest.raises(RuntimeError, match="hipErrorOutOfMemory"):
            calls[what]()
    assert list(to) == ([1, 2] if what == "copy" else [0, 0])


@needs_fake
def test_library_is_bound_from_the_mapping_and_knows_its_version():
    """In a process of its own: one that has the fake mapped keeps it."""
    code = f"""
import ctypes
ctypes.CDLL({str(build())!r})
from devgraph.rocm.runtime import Runtime
found = Runtime.find()
print(found.path, found.version, sorted(found.missing))
"""
    said = run_forked("-c", code)
    assert said.returncode == 0, said.stderr
    assert said.stdout.split() == [str(build().resolve()), "7.2.26015", "[]"]


@needs_fake
def test_failed_call_names_function_code_and_text_and_clears_the_runtimes_error():
    found = Runtime(str(build()))
    with pytest.raises(RuntimeCallError, match=r"hipStreamEndCapture failed \(401: hipErrorIll"):
        found.end_capture(0)
    assert found.function("GetLastError")() == 0


# Reasons for which the backend is not available.


def reason() -> str:
    with pytest.raises(dg.BackendUnavailableError) as caught:
        rocm.RocmBackend()
    return str(caught.value)


@pytest.mark.skipif(bool(torch.version.hip), reason="this is a ROCm build of torch")
def test_other_build_of_torch_is_told_where_the_rocm_build_is():
    said = reason()
    assert "is built without ROCm" in said
    assert "pytorch.org/get-started/locally" in said
    assert "pytorch-triton-rocm on PyPI is an old placeholder" in said


@pytest.fixture
def rocm_build(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A ROCm build of torch that sees no device."""
    monkeypatch.setattr(torch.version, "hip", "7.2.26015")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return monkeypatch


@pytest.mark.parametrize(
    ("exists", "accessible", "expected"),
    [
        (False, False, "/dev/kfd does not exist. Load the amdgpu driver"),
        (True, False, "Add the user to the group render"),
        (True, True, "HIP_VISIBLE_DEVICES or ROCR_VISIBLE_DEVICES hides the GPU"),
    ],
    ids=["no driver", "no access", "no device"],
)
def test_rocm_build_without_a_device_says_what_is_missing(
    rocm_build: pytest.MonkeyPatch, exists: bool, accessible: bool, expected: str
):
    rocm_build.setattr(rocm.os.path, "exists", lambda path: exists)
    rocm_build.setattr(rocm.os, "access", lambda path, mode: accessible)
    said = reason()
    assert "(HIP 7.2.26015) sees no AMD GPU" in said
    assert expected in said


def test_cuda_backend_points_rocm_users_here(rocm_build: pytest.MonkeyPatch):
    from devgraph.cuda.backend import CudaBackend

    with pytest.raises(dg.BackendUnavailableError, match="use backend 'rocm' instead"):
        CudaBackend()


# Structs and values.

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
    "dim3": (rocm_runtime.Dim3, 12, {"x": 0, "y": 4, "z": 8}),
    "hipPos": (rocm_runtime._Position, 24, {"x": 0, "y": 8, "z": 16}),
    "hipPitchedPtr": (
        rocm_runtime._PitchedPointer,
        32,
        {"ptr": 0, "pitch": 8, "xsize": 16, "ysize": 24},
    ),
    "hipExtent": (rocm_runtime._Extent, 24, {"width": 0, "height": 8, "depth": 16}),
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
    "hipGraphInstantiateFlagAutoFreeOnLaunch": Runtime.instantiate_flags,
    "hipErrorECCNotCorrectable": 214,
    "hipErrorIllegalAddress": 700,
    "hipErrorLaunchTimeOut": 702,
    "hipErrorAssert": 710,
    "hipErrorLaunchFailure": 719,
    "hipErrorUnknown": 999,
}

NODE_KINDS = ("Kernel", "Memcpy", "Memset", "Host", "Graph", "Empty")


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
    assert min(version.kinds) == first
    found = [version.kinds[value] for value in range(first, first + len(NODE_KINDS))]
    assert found == [name.lower() for name in NODE_KINDS]


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
    assert named == rocm.RocmBackend.sticky_errors


# Against headers.


def installed_headers() -> Path | None:
    """Return the folder that holds ``hip/hip_runtime_api.h``, or None."""
    named = os.environ.get("DEVGRAPH_TEST_HIP_HEADERS", "")
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
    values = {**VALUES, **{f"hipGraphNodeType{kind}": i for i, kind in enumerate(NODE_KINDS)}}
    said = what_a_compiler_says('"hip.h"', SOURCES, tmp_path, list(values))
    assert said == expected(values)


@needs_compiler
@pytest.mark.skipif(
    installed_headers() is None,
    reason="no hip/hip_runtime_api.h: install libamdhip64-dev or set DEVGRAPH_TEST_HIP_HEADERS",
)
def test_installed_header_has_these_layouts_and_values(tmp_path: Path):
    folder = installed_headers()
    assert folder is not None
    kinds = [f"hipGraphNodeType{kind}" for kind in NODE_KINDS]
    said = what_a_compiler_says(
        "<hip/hip_runtime_api.h>", folder, tmp_path, [*HEADER_VALUES, *kinds, "HIP_VERSION"]
    )
    version = Version.decode(said.pop())
    assert said[: -len(kinds)] == expected(HEADER_VALUES)
    assert said[-len(kinds) :] == [min(version.kinds) + i for i in range(len(kinds))]
