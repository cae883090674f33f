"""Marks: declarations of a model, and their calls inside captures."""
