"""The command line: one module a command, each with ``run(args)``; options are in ``arguments``.

``run`` returns the exit code: 0 for success, 1 where the command's own question has the answer no
(tokens differ, a violation was found, a probe failed). Errors are exceptions; ``app`` prints them
and returns 2.
"""

from __future__ import annotations
