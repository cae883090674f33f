"""Shared parts of the engine integrations: graph memory, captured steps and counters."""
