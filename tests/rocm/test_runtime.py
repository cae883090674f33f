"""Which libamdhip64 is bound, what it must offer, and why the backend is not available."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from ctypes import addressof, c_uint64
from pathlib import Path

import pytest
import torch

import devgraph as dg
from devgraph.api.torchlike.node_calls import RuntimeCallError
from devgraph.rocm import backend as rocm
from devgraph.rocm import runtime as rocm_runtime
from devgraph.rocm.runtime import Runtime, mapped_library
from tests.sim.hip import Fake, build, unavailable_reason

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
    said = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
    )
    assert said.stdout.split() == [str(build().resolve()), "7.2.26015", "[]"]


@needs_fake
def test_missing_optional_function_is_noted(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, logger="devgraph.rocm.runtime"):
        found = Runtime(str(build("release52")))
    assert found.missing == {"hipGraphKernelNodeCopyAttributes"}
    assert "has no hipGraphKernelNodeCopyAttributes" in caplog.text


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
        (True, True, "HIP_VISIBLE_DEVICES or ROCR_VISIBLE_DEVICES hides it"),
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
