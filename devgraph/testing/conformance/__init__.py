"""Tests that every backend must pass; see ``devgraph.testing``."""
