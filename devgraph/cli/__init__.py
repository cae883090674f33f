"""The command line, with one module per command and the options of all commands in ``arguments``.

Each module has a function ``run(args)`` that returns the exit code: 0 for success, 1 for a negative
result (tokens differ, a finding, a failed probe). Errors are exceptions; ``app`` prints them and
returns 2.
"""

from __future__ import annotations
