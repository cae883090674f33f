"""The installable conformance suite and the pytest plugin.

Run the suite on a backend with::

    pytest --pyargs devgraph.testing.conformance --devgraph-backend NAME -n auto

docs/backends.md describes the options and the summary.
"""
