"""The autograd modes of a capture, restored wherever its Python code runs again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch

__all__ = ["Modes"]


class Modes(NamedTuple):
    """The modes in force at capture: code that runs again must see the same ones.

    A tuple, because every replay with breaks makes one and compares it.
    """

    grad: bool
    inference: bool

    @staticmethod
    def current() -> Modes:
        """Return the modes of this thread."""
        return Modes(torch.is_grad_enabled(), torch.is_inference_mode_enabled())

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Run the block under these modes."""
        with torch.inference_mode(self.inference), torch.set_grad_enabled(self.grad):
            yield
