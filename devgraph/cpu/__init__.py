"""The CPU reference backend: an executable specification that is stricter than devices.

A capture runs the Python code once and records its operations on a tape without executing them. A
replay executes the tape in the same memory. Engines can be written and tested without a device.
"""

from __future__ import annotations

from devgraph.cpu.backend import CpuBackend

__all__ = ["CpuBackend"]
