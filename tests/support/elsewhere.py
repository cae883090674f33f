"""The third-party example's backend over the device at hand instead of its own.

As a pytest plugin (``-p elsewhere``) this module registers it under the name ``elsewhere``.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import devgraph as dg

__all__ = ["ElsewhereBackend"]

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "thirdparty_backend"))
_XpuBackend: Any = importlib.import_module("devgraph_xpu").XpuBackend


class ElsewhereBackend(_XpuBackend):  # type: ignore[misc]
    """``torch.cuda`` with nothing declared that the example does not declare."""

    name = "elsewhere"
    device_type = "cuda"
    graph_class_name = "CUDAGraph"


dg.register("elsewhere", ElsewhereBackend)
