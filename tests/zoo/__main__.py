"""Write docs/models.md: ``python -m tests.zoo`` (five minutes)."""

from __future__ import annotations

import sys

from tests.zoo.families import families
from tests.zoo.running import Result, meet
from tests.zoo.table import DOCUMENT, table

if __name__ == "__main__":
    results: dict[str, Result] = {}
    for name in families():
        results[name] = meet(name)
        print(f"{len(results)} {name}: {results[name].verdict}", file=sys.stderr)
    DOCUMENT.write_text(table(results), encoding="utf-8")
