"""``devgraph bench`` on every backend of this machine, or on the one that ``--backend`` names.

All options are those of ``devgraph bench``.
"""

from __future__ import annotations

import sys

import devgraph as dg
from devgraph.__main__ import main

if __name__ == "__main__":
    given = sys.argv[1:]
    if any(one.split("=")[0] == "--backend" for one in given):
        sys.exit(main(["bench", *given]))
    names = [info.name for info in dg.backends() if info.available]
    sys.exit(max(main(["bench", "--backend", name, *given]) for name in names))
