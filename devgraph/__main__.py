"""The command line, run by ``python -m devgraph``."""

from __future__ import annotations

import sys

from devgraph.cli.app import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
