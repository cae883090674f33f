"""The installable conformance suite and the pytest plugin.

A backend passes when this passes::

    pytest --pyargs devgraph.testing.conformance --devgraph-backend NAME -n auto

docs/backends.md describes the options and the summary.
"""
