"""Releasable memory, over a driver that exists only here: no device is needed."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from devgraph.api.errors import CapabilityError, ResourceError
from devgraph.cuda.pages import MappedPages, compiled, compiler

GRANULE = 1 << 16
ROOM = 4

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a C compiler")


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder, command = tmp_path_factory.mktemp("pages"), compiler()
    assert command is not None
    driver = folder / "driver.so"
    source = Path(__file__).with_name("driver.c")
    subprocess.run([*command, "-shared", "-fPIC", str(source), "-o", str(driver)], check=True)
    return compiled(command, folder), driver


class Device:
    """The pages of a device of four granules, what torch calls of them, and its driver."""

    def __init__(self, library: Path, driver: Path) -> None:
        self.driver = ctypes.CDLL(str(driver))
        self.driver.driver_room.restype = ctypes.c_size_t
        self.driver.driver_reserved.restype = ctypes.c_size_t
        self.give(ROOM)
        self.pages = MappedPages(library, str(driver))
        calls = ctypes.CDLL(str(library))
        self._allocate, self._free = calls.pages_allocate, calls.pages_free
        kinds = (ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
        self._allocate.argtypes, self._allocate.restype = kinds, ctypes.c_void_p
        self._free.argtypes, self._free.restype = (ctypes.c_void_p, *kinds), None
        self.live: list[int] = []

    def give(self, granules: int) -> None:
        self.driver.driver_give(ctypes.c_size_t(granules))

    @property
    def room(self) -> int:
        return int(self.driver.driver_room())

    def allocate(self, size: int) -> Any:
        address = self._allocate(size, 0, None)
        if address:
            self.live.append(address)
        return address

    def free(self, address: int) -> None:
        self.live.remove(address)
        self._free(address, 0, 0, None)


@pytest.fixture
def device(libraries: tuple[Path, Path]) -> Iterator[Device]:
    device = Device(*libraries)
    yield device
    for address in list(device.live):
        device.free(address)
    assert device.room == ROOM and device.driver.driver_reserved() == 0


def test_memory_returns_at_its_addresses_without_what_it_held(device: Device) -> None:
    first, second = device.allocate(GRANULE - 5), device.allocate(2 * GRANULE)
    assert device.room == 1
    ctypes.memset(first, 1, 9)
    ctypes.memset(second, 2, 9)
    device.driver.driver_keep()  # memory of executables, as the driver does
    for _ in range(2):
        device.pages.release([second])
    assert not device.driver.driver_keeps()
    assert device.room == 3 and ctypes.string_at(first, 9) == b"\1" * 9
    for _ in range(2):
        device.pages.restore([first, second])
    assert device.room == 1 and ctypes.string_at(second, 9) == b"\xee" * 9
    assert ctypes.string_at(first, 9) == b"\1" * 9


def test_segment_goes_while_it_has_no_memory(device: Device) -> None:
    address = device.allocate(GRANULE)
    device.pages.release([address])
    device.free(address)
    with pytest.raises(ResourceError, match="refused, error 500"):
        device.pages.restore([address])


def test_return_without_memory_is_typed_and_loses_nothing(device: Device) -> None:
    """FAULTS 44."""
    addresses = [device.allocate(GRANULE), device.allocate(2 * GRANULE)]
    device.pages.release(addresses)
    device.give(2)
    with pytest.raises(ResourceError, match="out of memory"):
        device.pages.restore(addresses)
    device.pages.release(addresses)
    assert device.room == 2
    device.give(ROOM)
    device.pages.restore(addresses)
    ctypes.memset(addresses[1], 3, 2 * GRANULE)


def test_torch_is_told_in_its_own_way_that_there_is_no_memory(device: Device) -> None:
    assert device.allocate(3 * GRANULE)
    assert device.allocate(2 * GRANULE) is None
    assert device.room == 1 and device.driver.driver_reserved() == 3 * GRANULE


def test_twenty_cycles_leave_the_memory_flat(device: Device) -> None:
    addresses = [device.allocate(GRANULE) for _ in range(2)]
    for _ in range(20):
        device.pages.release(addresses)
        assert device.room == ROOM
        device.pages.restore(addresses)
    assert device.driver.driver_reserved() == 2 * GRANULE


def test_library_is_made_once_and_a_failure_is_typed(
    libraries: tuple[Path, Path], tmp_path: Path
) -> None:
    command, library = compiler(), libraries[0]
    assert command is not None
    before = library.stat().st_mtime_ns
    assert compiled(command, library.parent) == library
    assert library.stat().st_mtime_ns == before
    with pytest.raises(CapabilityError, match="false failed"):
        compiled(["false"], tmp_path)
    with pytest.raises(CapabilityError, match="XDG_CACHE_HOME"):
        compiled(command, library / "no_folder")
    with pytest.raises(CapabilityError, match=r"cannot map memory on this machine \(error 500\)"):
        MappedPages(library, str(tmp_path / "no_driver.so"))


def test_machine_without_a_compiler_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CC", "nothing -m64")
    assert compiler() is None
