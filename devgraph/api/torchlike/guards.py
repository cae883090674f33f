"""Random numbers inside a capture, refused where the backend does not replay them."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from devgraph.api.errors import CaptureError
from devgraph.api.marks.marks import is_capturing
from devgraph.api.marks.source import user_line

__all__ = ["RandomGuard"]


def _draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    for index, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":  # attention draws nothing without dropout
            given = args[index] if index < len(args) else kwargs.get("dropout_p", 0.0)
            return bool(given)
    return True


class RandomGuard(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operations that draw random numbers while this thread captures.

    A graph would draw the numbers of capture for ever. Warm-up runs and the eager bodies of breaks
    draw as ever.

    Args:
        why: the reason, and what to do instead; ends the message.
    """

    def __init__(self, why: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._why = why

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if is_capturing() and _draws(func, args, kwargs or {}):
            raise CaptureError(
                f"{func} draws random numbers inside a capture, at {user_line()}, and {self._why}"
            )
        return func(*args, **(kwargs or {}))
