"""The fake libamdhip64 as Python drives it: streams, kernels, copies and faults."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import c_char_p, c_int, c_longlong, c_size_t, c_void_p
from typing import Any

from tests.sim.hip.build import build

__all__ = ["Fake"]

_BODY = ctypes.CFUNCTYPE(None, ctypes.POINTER(c_void_p))

_SETTINGS = """
    version stale refuse_write_at refuse_instantiate fail_call_in borrow quiet reports_copies
    shuffle captures_values
""".split()


class Fake:
    """One loaded fake library; settings and counters are those of ``src/fakehip.cpp``.

    Args:
        variant: see ``build``.
    """

    def __init__(self, variant: str = "fake") -> None:
        self.path = str(build(variant))
        self.library = ctypes.CDLL(self.path)
        self._bodies: list[Any] = []
        self._streams: list[int] = []
        declare: dict[str, tuple[Any, tuple[Any, ...]]] = {
            "fakehip_set": (None, (c_char_p, c_longlong)),
            "fakehip_get": (c_longlong, (c_char_p,)),
            "fakehip_kernel": (c_void_p, (_BODY, ctypes.POINTER(c_size_t), c_size_t)),
            "fakehip_stream": (c_void_p, ()),
            "fakehip_forget_stream": (None, (c_void_p,)),
            "fakehip_launch": (c_int, (c_void_p, c_void_p, ctypes.POINTER(c_void_p), c_int)),
            "fakehip_wait": (c_int, (c_void_p, c_void_p)),
            "fakehip_unsafe": (c_int, (c_void_p,)),
            "fakehip_host_function": (c_int, (c_void_p,)),
            "hipMemcpyAsync": (c_int, (c_void_p, c_void_p, c_size_t, c_int, c_void_p)),
            "hipMemsetAsync": (c_int, (c_void_p, c_int, c_size_t, c_void_p)),
        }
        for name, (result, arguments) in declare.items():
            function = getattr(self.library, name)
            function.restype, function.argtypes = result, arguments

    def set(self, **settings: int) -> None:
        """Change settings."""
        for name, value in settings.items():
            self.library.fakehip_set(name.encode(), value)

    def get(self, name: str) -> int:
        """Return a setting or a counter."""
        value = int(self.library.fakehip_get(name.encode()))
        assert value >= 0 or name in _SETTINGS, f"the fake has no {name!r}"
        return value

    @contextmanager
    def with_settings(self, **settings: int) -> Iterator[None]:
        """Change settings for a block."""
        old = {name: self.get(name) for name in _SETTINGS}
        self.set(**settings)
        try:
            yield
        finally:
            self.set(**old)

    def stream(self) -> int:
        """Return a new stream."""
        self._streams.append(int(self.library.fakehip_stream()))
        return self._streams[-1]

    def close(self) -> None:
        """Free the streams, which nothing may use any more."""
        while self._streams:
            self.library.fakehip_forget_stream(self._streams.pop())

    def kernel(self, body: Callable[..., None], kinds: Sequence[Any]) -> int:
        """Return a kernel that calls ``body`` with arguments of the ctypes types ``kinds``."""

        def run(values: Any) -> None:
            body(*(k.from_address(values[i]).value for i, k in enumerate(kinds)))

        callback = _BODY(run)
        self._bodies.append(callback)
        sizes = (c_size_t * len(kinds))(*(ctypes.sizeof(kind) for kind in kinds))
        return int(self.library.fakehip_kernel(callback, sizes, len(kinds)))

    def launch(self, stream: int, kernel: int, *values: Any, grid: int = 1) -> None:
        """Launch ``kernel`` with ctypes ``values`` on ``stream``."""
        pointers = (c_void_p * max(len(values), 1))(*(ctypes.addressof(v) for v in values))
        self.check(self.library.fakehip_launch(stream, kernel, pointers, grid))

    def copy(self, stream: int, to: int, source: int, size: int, kind: int = 3) -> None:
        """hipMemcpyAsync"""
        self.check(self.library.hipMemcpyAsync(to, source, size, kind, stream))

    def fill(self, stream: int, to: int, value: int, size: int) -> None:
        """hipMemsetAsync"""
        self.check(self.library.hipMemsetAsync(to, value, size, stream))

    def wait(self, waiter: int, other: int) -> None:
        """Make ``waiter`` wait for ``other`` through an event."""
        self.check(self.library.fakehip_wait(waiter, other))

    def host_function(self, stream: int) -> None:
        """Record a host function, a node that cannot be updated."""
        self.check(self.library.fakehip_host_function(stream))

    def unsafe(self, stream: int) -> None:
        """Do what a capture does not allow."""
        self.check(self.library.fakehip_unsafe(stream))

    def check(self, error: int) -> None:
        """Raise as torch does."""
        if error:
            self.library.hipGetErrorName.restype = c_char_p
            name = self.library.hipGetErrorName(error).decode()
            text = {901: "operation failed due to a previous error during capture"}.get(error, name)
            raise RuntimeError(f"HIP error: {text} ({name})")
