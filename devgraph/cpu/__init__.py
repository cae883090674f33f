"""The CPU room: the reference backend, the contract in executable form and stricter than devices.

A capture runs the Python code once, executes nothing and notes the operations on a tape; a replay
runs the tape in the same memory. It needs no device, so that engines can be written and tested
anywhere.
"""

from __future__ import annotations

from devgraph.cpu.backend import CpuBackend

__all__ = ["CpuBackend"]
