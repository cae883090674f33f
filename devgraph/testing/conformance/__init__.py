"""Tests that every backend has to pass; see ``devgraph.testing``."""
