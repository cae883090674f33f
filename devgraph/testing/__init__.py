"""The installable conformance suite and the pytest plugin.

A backend passes when this passes::

    pytest --pyargs devgraph.testing.conformance --devgraph-backend NAME -n auto

See docs/backends.md for the options and for how to read the outcome.
"""
