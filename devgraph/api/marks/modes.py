"""The modes of torch at a capture, restored wherever its Python code runs again."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch

Autocast = tuple[tuple[str, torch.dtype], ...]
"""Device type and dtype of each autocast that is on."""


class Modes(NamedTuple):
    """The modes in force at capture: code that runs again must see the same ones.

    A tuple, because every replay with breaks makes one and compares it.
    """

    grad: bool
    inference: bool
    autocast: Autocast

    @staticmethod
    def current() -> Modes:
        """Return the modes of this thread."""
        return Modes(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), current_autocast())

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Run the block under these modes."""
        with (
            torch.inference_mode(self.inference),
            torch.set_grad_enabled(self.grad),
            autocast_of(self.autocast),
        ):
            yield


def autocast_of(then: Autocast) -> AbstractContextManager[None]:
    """Return what runs a block under the autocast ``then``."""
    return contextlib.nullcontext() if then == current_autocast() else _under(dict(then))


@contextlib.contextmanager
def _under(then: dict[str, torch.dtype]) -> Iterator[None]:
    cached = torch.is_autocast_cache_enabled()
    with contextlib.ExitStack() as stack:
        for kind in {**dict(current_autocast()), **then}:
            dtype = then.get(kind)
            on = dtype is not None
            stack.enter_context(torch.autocast(kind, dtype, enabled=on, cache_enabled=cached))
        yield


@contextlib.contextmanager
def autocast_uncached() -> Iterator[None]:
    """Let autocast remember no cast in the block, and forget those that it has.

    A cast that is made in a capture lies in the graph's memory and would be used after it; one
    that was made before would not be part of the graph, which then reads memory that is freed.
    """
    cached = torch.is_autocast_cache_enabled()
    try:
        torch.set_autocast_cache_enabled(False)
        torch.clear_autocast_cache()
        yield
    finally:
        torch.set_autocast_cache_enabled(cached)


def current_autocast() -> Autocast:
    """Return the autocast of this thread."""
    if not torch._C._is_any_autocast_enabled():
        return ()
    return tuple(
        (kind, torch.get_autocast_dtype(kind))
        for kind in _device_types()
        if torch.is_autocast_enabled(kind)
    )


@functools.cache
def _device_types() -> tuple[str, ...]:
    accelerator = torch.accelerator.current_accelerator()
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)
