"""Bridges from models and engines that exist to the runners; each needs its own package."""
