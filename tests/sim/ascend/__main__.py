"""The command line of devgraph over the simulated driver: ``python -m tests.sim.ascend doctor``."""

from __future__ import annotations

import sys

from tests.sim.ascend import activate

if __name__ == "__main__":
    activate()
    from devgraph.__main__ import main

    sys.exit(main())
