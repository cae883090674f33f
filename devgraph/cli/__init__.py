"""The command line: one module per command, and ``arguments`` with the options of all commands.

The function ``run(args)`` of each module returns the exit code: 0 for success, 1 for a negative
result (different tokens, a finding, a failed probe). Errors are raised; ``app`` prints them and
returns 2.
"""

from __future__ import annotations
