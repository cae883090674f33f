"""Tests that every backend must pass; see ``devgraph.testing``.

A docstring that begins with FAULTS names the rows of docs/faults.md that the test covers.
"""
