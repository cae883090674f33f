"""Names of data types on the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["DTYPES", "dtype_named"]

DTYPES = ("float32", "bfloat16", "float16")


def dtype_named(name: str) -> torch.dtype:
    """Return torch's dtype of one of ``DTYPES``."""
    import torch

    found: torch.dtype = getattr(torch, name)
    return found
